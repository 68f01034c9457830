"""Images of a row: which are read, from where, and which make the row unusable."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hpcrl.config import Config, DataConfig
from hpcrl.config.rollout import RolloutConfig
from hpcrl.controller.generation import training_sampling
from hpcrl.data import PromptSource, read_splits
from hpcrl.data.media import MAX_MEDIA_BYTES, read_images
from hpcrl.data.messages import IMAGE_MARK
from hpcrl.data.rows import Row, RowSet
from hpcrl.launch.data_summary import check_media
from hpcrl.rollout.admission import PAYLOAD_BYTES, admissions
from hpcrl.rollout.types import Prompt, PromptOutcome, make_sample_id
from hpcrl.spec.media import IMAGE, Medium

PNG, JPEG = b"\x89PNG\r\n\x1a\nabc", b"\xff\xd8\xff\xe0\0\x10"
GIF = b"GIF89a, all of it ASCII"


def drawn(path: Any, tokenizer: Any, count: int = 1) -> list[Prompt]:
    source = PromptSource(DataConfig(train=str(path), shuffle=False), "train", tokenizer, 0, batch_size=1)
    return [source.next() for _ in range(count)]


def only_row(path: Any) -> Row:
    return RowSet(DataConfig(train=str(path)), "train", seed=0).row(0)


def images(*contents: bytes) -> tuple[Medium, ...]:
    return tuple(Medium(IMAGE, content) for content in contents)


def test_relative_paths_begin_in_the_folder_of_the_rows(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    path = write_jsonl(
        "rows.jsonl",
        {"prompt": "a", "images": ["inner/a.png", str(tmp_path / "b.jpg")], "level": 2},
        {"prompt": "b", "images": [{"bytes": None, "path": "b.jpg"}, {"path": "inner/a.png"}]},
        {"prompt": "c", "image": "inner/a.png"},
        {"prompt": "d", "image": "python:3.12", "images": []},
    )
    first, second, third, last = drawn(path, tokenizer, 4)
    assert first.media == images(PNG, JPEG) and first.extra == {"level": 2}
    assert second.media == images(JPEG, PNG) and third.media == images(PNG)
    assert last.media == () and last.extra == {"image": "python:3.12", "images": []}


@pytest.mark.parametrize("shards", [1, 2])
def test_parquet_files_may_contain_image_bytes(tmp_path: Path, tokenizer: Any, shards: int) -> None:
    rows = [
        {"prompt": "a", "images": [{"bytes": PNG, "path": "gone.png"}, {"bytes": GIF, "path": None}], "image": None},
        {"prompt": "b", "images": None, "image": {"bytes": JPEG, "path": None}},
        {"prompt": "c", "images": [{"bytes": None, "path": "here.png"}], "image": None},
    ]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/here.png").write_bytes(PNG)
    for shard in range(shards):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"shards/train-{shard}.parquet")
    found = drawn(tmp_path / "shards", tokenizer, 3 * shards)
    assert [prompt.media for prompt in found] == [images(PNG, GIF), images(JPEG), images(PNG)] * shards
    assert all("images" not in prompt.extra for prompt in found if prompt.row % 3 != 1)


def test_columns_of_bytes_need_no_paths(tmp_path: Path, tokenizer: Any) -> None:
    table = pa.table({"prompt": [b"a"], "images": pa.array([[PNG, JPEG]], pa.list_(pa.binary())), "image": [b"x:3"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    (prompt,) = drawn(tmp_path / "train.parquet", tokenizer)
    assert prompt.media == images(PNG, JPEG) and prompt.extra == {"image": "x:3"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["gone.png"], "images[0]: {folder}/gone.png cannot be read: No such file or directory"),
        (["a.png", "."], "images[1]: {folder} cannot be read: Is a directory"),
        (
            ["a.png", {"bytes": "text"}],
            "images[1] must be a file's path, a data URL, or bytes of a parquet or Arrow file",
        ),
        ([3], "images[0] must be a file's path"),
        (["https://example.org/a.png"], "images[0]: 'https://example.org/a.png' would have to be downloaded; store"),
        (["data:image/png;base64,!!"], "images[0]: 'data:image/png;base64,!!'... is not an image in base64: "),
        (["pointer.png"], "images[0]: the content begins like none of png, jpg, "),
        (["large.png", "a.png"], "images[0]: 16.0 MiB of images would be sent with the prompt, at most 16 are"),
    ],
)
def test_an_image_that_cannot_be_read_is_a_bad_row(tmp_path: Path, write_jsonl: Any, given: Any, line: str) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "large.png").write_bytes(PNG + bytes(MAX_MEDIA_BYTES - 2 * len(PNG) + 1))
    path = write_jsonl("rows.jsonl", {"prompt": "a", "images": ["large.png"]}, {"prompt": "b", "images": given})
    (problem,) = read_splits(DataConfig(train=path), 0)[1]
    assert problem.startswith(f"{path}:2: {line.format(folder=tmp_path)}")


def test_images_stand_in_messages_where_published_forms_put_them(tmp_path: Path, write_jsonl: Any) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(PNG + name.encode())
    url = f"data:image/png;base64,{base64.b64encode(PNG + b'b').decode()}"
    text = {"type": "text", "text": "what?"}
    forms: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": "<image>what?", "images": ["a.png"]}, "Mwhat?", "a"),  # verl's geo3k, ROLL
        ({"prompt": "what?", "images": ["a.png", "b.png"]}, "MMwhat?", "ab"),  # TRL
        ({"problem": "what?", "image": "a.png"}, "Mwhat?", "a"),  # GEOQA
        ({"prompt": "left <image>, right <image>", "images": ["b.png", "a.png"]}, "left M, right M", "ba"),
        (  # OpenAI
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]},
            "Mwhat?",
            "b",
        ),
        (  # OpenAI's Responses
            {"prompt": [{"role": "user", "content": [text, {"type": "input_image", "image_url": url}]}]},
            "what?M",
            "b",
        ),
        (  # Qwen
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "image", "image": "file://" + str(tmp_path / "c.png")}, text]}
                ]
            },
            "Mwhat?",
            "c",
        ),
        (  # transformers
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "path": "c.png"}, text, {"type": "image", "url": "a.png"}],
                    }
                ]
            },
            "Mwhat?M",
            "ca",
        ),
        (  # TRL with parts: the images are in the column
            {
                "prompt": [{"role": "user", "content": [text, {"type": "image"}, text, {"type": "image"}]}],
                "images": ["a.png", "b.png"],
            },
            "what?Mwhat?M",
            "ab",
        ),
        (  # ShareGPT
            {"conversations": [{"from": "human", "value": "<image>\nwhat?"}], "images": ["c.png"]},
            "M\nwhat?",
            "c",
        ),
        ({"prompt": [{"role": "user", "content": "what?", "images": ["a.png", "c.png"]}]}, "MMwhat?", "ac"),
        ({"prompt": f"what{IMAGE_MARK}? <image>"}, "what? <image>", ""),  # no image: a text
    ]
    for row, content, names in forms:
        found = only_row(write_jsonl("rows.jsonl", row))
        assert found.messages[-1]["content"].replace(IMAGE_MARK, "M") == content, row
        assert [medium.content for medium in read_images(found.images)] == [PNG + name.encode() for name in names], row


def test_images_of_several_turns_keep_their_order(tmp_path: Path, write_jsonl: Any) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(PNG + name.encode())
    user = {"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": "and <image>?"}]}
    row = {
        "messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a <image>"}, user],
        "images": ["a.png", "c.png"],
    }
    found = only_row(write_jsonl("rows.jsonl", row))
    assert [message["content"].replace(IMAGE_MARK, "M") for message in found.messages] == [
        "Mwhat?",
        "a <image>",
        "Mand M?",
    ]
    assert b"".join(medium.content[-1:] for medium in read_images(found.images)) == b"abc"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<image><image>?", "images": ["a.png"]}, ":1: 1 images for 2 <image> in the messages"),
        ({"prompt": "<image>?", "images": ["a.png", "a.png"]}, ":1: 2 images for 1 <image> in the messages"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]},
            ":1: 0 images for 1 image parts without content",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png", "a.png"]},
            ":1: 2 images for 1 image parts without content",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}], "images": ["a.png"]}]},
            ":1: prompt[0] has images in its content and in images, whose order is unknown",
        ),
        (
            {"prompt": [{"role": "user", "content": "<image>?", "image": ["a.png", "a.png"]}]},
            ":1: prompt[0]: 1 <image> marks",
        ),
        (
            {"prompt": "?", "response": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]},
            ":1: response[0].content[0]: only a prompt may have images",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
            ":1: prompt[0].content[0] must be a part with text or an image, not one of type 'video'",
        ),
    ],
)
def test_images_without_a_place_are_refused(
    tmp_path: Path, write_jsonl: Any, row: dict[str, Any], problem: str
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = write_jsonl("rows.jsonl", row)
    (line,) = read_splits(DataConfig(train=path), 0)[1]
    assert line.startswith(f"{path}{problem}")


def test_an_image_missing_when_drawn_drops_only_its_row(tmp_path: Path, tokenizer: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(PNG)
    lines = [json.dumps({"prompt": name, "images": [f"{name}.png"]}) for name in "ab"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    config = DataConfig(train=str(tmp_path / "rows.jsonl"), shuffle=False)
    source = PromptSource(config, "train", tokenizer, 0, batch_size=1)
    again = source.prompt(source.next().uid)
    assert again.media == images(PNG), "drawn again as after a resume"
    (tmp_path / "a.png").unlink()
    assert source.next().row == 1 and source.next().row == 1
    (dropped,) = source.take_dropped()
    assert dropped.outcome is PromptOutcome.FAILED and "a.png cannot be read: No such file" in dropped.reason
    with pytest.raises(ValueError, match=r"rows.jsonl:1: images\[0\]: .*a.png cannot be read"):
        source.prompt(again.uid)


def test_the_cursor_contains_no_media(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    source = PromptSource(
        DataConfig(train=write_jsonl("rows.jsonl", {"prompt": "a", "images": ["a.png"]})), "train", tokenizer, 0, 1
    )
    source.next()
    assert "PNG" not in json.dumps(source.state_dict())


def test_group_members_share_the_media_of_a_message() -> None:
    prompts = {uid: Prompt(uid, "d", 0, uid, (1, 2), "p", media=images(PNG + bytes(PAYLOAD_BYTES))) for uid in (1, 2)}
    samples = [make_sample_id(uid, 0, member) for uid in prompts for member in range(3)]
    sent = list(admissions(samples, prompts, training_sampling(Config()), seed=0))
    assert [[payload.uid for payload in message.prompts] for message in sent] == [[1], [2]]
    assert [len(message.samples) for message in sent] == [3, 3]
    assert all(payload.media == prompts[payload.uid].media for message in sent for payload in message.prompts)
    assert PNG.decode("latin1") not in sent[0].prompts[0].meta.decode()


def test_an_engine_without_media_and_a_supervised_pipeline_refuse_images(tmp_path: Path, write_jsonl: Any) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = write_jsonl("rows.jsonl", {"prompt": "a"}, {"prompt": "a", "answer": "b", "images": ["a.png"]})
    rows, problems = read_splits(DataConfig(train=path, val=path), 0)
    assert not problems
    both = list(check_media(Config(eval_every=1, data=DataConfig(train=path, val=path)), rows))
    rest = "leave such rows out (1 of 2 rows of data.{})"
    assert both == [
        f"{path}:2: the row has images, which the native generator does not take; {rest.format(split)}"
        for split in ("train", "val")
    ]
    supervised = list(check_media(Config(pipeline="sft", data=DataConfig(train=path)), {"train": rows["train"]}))
    assert supervised == [
        f"{path}:2: the row has images, and pipeline=sft learns from text only; {rest.format('train')}"
    ]
    assert list(check_media(Config(debug="fake", rollout=RolloutConfig()), {"train": rows["train"]})) == []
