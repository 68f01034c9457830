"""Images of a row: which are read, from where, and which make the row unusable."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hpcrl.config import Config, DataConfig, ModelConfig, TinyModel, parse
from hpcrl.controller.generation import training_sampling
from hpcrl.data import PromptSource, read_splits
from hpcrl.data.image_tokens import bound_vision
from hpcrl.data.media import COLUMN_MARK, HEAD_BYTES, MAX_FILE_BYTES, read_images
from hpcrl.data.messages import IMAGE_MARK
from hpcrl.data.rows import Row, RowSet
from hpcrl.launch.data_summary import check_media
from hpcrl.models.families import SEEING
from hpcrl.rollout.admission import PAYLOAD_BYTES, admissions
from hpcrl.rollout.types import Prompt, PromptOutcome, make_sample_id
from hpcrl.spec.media import IMAGE, MAX_PIXEL_BYTES, Medium
from tests.vlm import PAD, png, seeing_tokenizer

FIRST, SECOND, THIRD = (png(grey) for grey in (10, 20, 30))
GREYS = {FIRST: 10, SECOND: 20, THIRD: 30}
VISION = bound_vision(seeing_tokenizer())


@pytest.fixture
def tokenizer() -> Any:
    return seeing_tokenizer()


def drawn(path: Any, tokenizer: Any, count: int = 1) -> list[Prompt]:
    source = PromptSource(DataConfig(train=str(path), shuffle=False), "train", tokenizer, 0, batch_size=1)
    return [source.next() for _ in range(count)]


def only_row(path: Any) -> Row:
    return RowSet(DataConfig(train=str(path)), "train", seed=0).row(0)


def greys(media: Sequence[Medium]) -> list[int]:
    """The grey of each image, all of whose pixels are alike."""
    assert all(medium.pixels.min() == medium.pixels.max() for medium in media)
    return [int(medium.pixels[0, 0, 0]) for medium in media]


def test_relative_paths_begin_in_the_folder_of_the_rows(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.png").write_bytes(FIRST)
    (tmp_path / "b.jpg").write_bytes(SECOND)
    path = write_jsonl(
        "rows.jsonl",
        {"prompt": "a", "images": ["inner/a.png", str(tmp_path / "b.jpg")], "level": 2},
        {"prompt": "b", "images": [{"bytes": None, "path": "b.jpg"}, {"path": "inner/a.png"}]},
        {"prompt": "c", "image": "inner/a.png"},
        {"prompt": "d", "image": "python:3.12", "images": []},
    )
    first, second, third, last = drawn(path, tokenizer, 4)
    assert greys(first.media) == [10, 20]
    files = [str(tmp_path / "inner/a.png"), str(tmp_path / "b.jpg")]
    assert first.extra == {"level": 2, "images": files}, "rewards and environments may read the files"
    assert greys(second.media) == [20, 10] and greys(third.media) == [10]
    assert last.media == () and last.extra == {"image": "python:3.12", "images": []}


@pytest.mark.parametrize("shards", [1, 2])
def test_parquet_files_may_contain_image_bytes(tmp_path: Path, tokenizer: Any, shards: int) -> None:
    rows = [
        {
            "prompt": "a",
            "images": [{"bytes": FIRST, "path": "gone.png"}, {"bytes": THIRD, "path": None}],
            "image": None,
        },
        {"prompt": "b", "images": None, "image": {"bytes": SECOND, "path": None}},
        {"prompt": "c", "images": [{"bytes": None, "path": "here.png"}], "image": None},
    ]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/here.png").write_bytes(FIRST)
    for shard in range(shards):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"shards/train-{shard}.parquet")
    found = drawn(tmp_path / "shards", tokenizer, 3 * shards)
    assert [greys(prompt.media) for prompt in found] == [[10, 30], [20], [10]] * shards
    assert "images" not in found[0].extra and found[2].extra["images"] == [str(tmp_path / "shards/here.png")]


def test_columns_of_bytes_need_no_paths(tmp_path: Path, tokenizer: Any) -> None:
    table = pa.table(
        {"prompt": [b"a"], "images": pa.array([[FIRST, SECOND]], pa.list_(pa.binary())), "image": [b"x:3"]}
    )
    parquet.write_table(table, tmp_path / "train.parquet")
    (prompt,) = drawn(tmp_path / "train.parquet", tokenizer)
    assert greys(prompt.media) == [10, 20] and prompt.extra == {"image": "x:3"}


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
        (["a\0.png"], "images[0]: '{folder}/a\\x00.png' is no file's path: embedded null byte"),
        (["~no_such_user/a.png"], "images[0]: '~no_such_user/a.png' is no file's path: Could not determine home"),
        (["pointer.png"], "images[0]: the content begins like none of png, jpg, "),
        (["large.png", "a.png"], "images[0]: the row's image files have 64.0 MiB, the limit is 64; scale them down"),
    ],
)
def test_an_image_that_cannot_be_read_is_a_bad_row(tmp_path: Path, write_jsonl: Any, given: Any, line: str) -> None:
    (tmp_path / "a.png").write_bytes(FIRST)
    (tmp_path / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "large.png").write_bytes(FIRST + bytes(MAX_FILE_BYTES - 2 * len(FIRST) + 1))
    path = write_jsonl("rows.jsonl", {"prompt": "a", "images": ["large.png"]}, {"prompt": "b", "images": given})
    (problem,) = read_splits(DataConfig(train=path), 0)[1]
    assert problem.startswith(f"{path}:2: {line.format(folder=tmp_path)}")


def test_images_stand_in_messages_where_published_forms_put_them(tmp_path: Path, write_jsonl: Any) -> None:
    shown = {"a": 10, "b": 20, "c": 30}
    for name, grey in shown.items():
        (tmp_path / f"{name}.png").write_bytes(png(grey))
    url = f"data:image/png;base64,{base64.b64encode(SECOND).decode()}"
    text = {"type": "text", "text": "what?"}
    forms: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": "<image>what?", "images": ["a.png"]}, "Mwhat?", "a"),  # verl's geo3k, ROLL
        ({"prompt": "what?", "images": ["a.png", "b.png"]}, "MMwhat?", "ab"),  # TRL
        ({"problem": "what?", "image": "a.png"}, "Mwhat?", "a"),  # GEOQA
        ({"problem": f"wh{COLUMN_MARK}at?", "image": url}, "Mwhat?", "b"),
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
        assert greys(read_images(found.images, VISION)) == [shown[name] for name in names], row


def test_images_of_several_turns_keep_their_order(tmp_path: Path, write_jsonl: Any) -> None:
    for name, content in zip("abc", GREYS, strict=True):
        (tmp_path / f"{name}.png").write_bytes(content)
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
    assert greys(read_images(found.images, VISION)) == [10, 20, 30]


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
    (tmp_path / "a.png").write_bytes(FIRST)
    path = write_jsonl("rows.jsonl", row)
    (line,) = read_splits(DataConfig(train=path), 0)[1]
    assert line.startswith(f"{path}{problem}")


def test_an_image_missing_when_drawn_drops_only_its_row(tmp_path: Path, tokenizer: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(FIRST)
    lines = [json.dumps({"prompt": name, "images": [f"{name}.png"]}) for name in "ab"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    config = DataConfig(train=str(tmp_path / "rows.jsonl"), shuffle=False)
    source = PromptSource(config, "train", tokenizer, 0, batch_size=1)
    again = source.prompt(source.next().uid)
    assert greys(again.media) == [10], "drawn again as after a resume"
    (tmp_path / "a.png").unlink()
    assert source.next().row == 1 and source.next().row == 1
    (dropped,) = source.take_dropped()
    assert dropped.outcome is PromptOutcome.FAILED and "a.png cannot be read: No such file" in dropped.reason
    with pytest.raises(ValueError, match=r"rows.jsonl:1: images\[0\]: .*a.png cannot be read"):
        source.prompt(again.uid)


def test_changed_image_files_are_refused_at_a_resume(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    """As changed rows are, also if a file's size is the same. A new copy of equal files continues the run."""
    (tmp_path / "a.png").write_bytes(FIRST)
    (tmp_path / "large.bmp").write_bytes(b"BM" + bytes(2 * HEAD_BYTES))
    url = "data:image/png;base64," + base64.b64encode(SECOND).decode()
    rows = [{"prompt": "a", "images": ["a.png", url]}, {"prompt": "b"}, {"prompt": "c", "image": "large.bmp"}]
    config = DataConfig(train=[write_jsonl("text.jsonl", {"prompt": "d"}), write_jsonl("rows.jsonl", *rows)])

    def source() -> PromptSource:
        return PromptSource(config, "train", tokenizer, 0, batch_size=1)

    state = json.loads(json.dumps(source().state_dict()))
    assert [key for key in state["data"] if key.startswith("image")] == [f"image files of 1 {config.train[1]}"]
    os.utime(tmp_path / "a.png", (0, 0))
    source().load_state_dict(state)
    assert len(THIRD) == len(FIRST)
    changes = {"a.png": THIRD, "large.bmp": b"BM" + bytes(2 * HEAD_BYTES + 1)}
    for name, content in changes.items():
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"data.train: image files of 1 .*rows\.jsonl differs from the checkpoint"):
            source().load_state_dict(state)
        (tmp_path / name).write_bytes(before)
    older = {**state, "data": {key: value for key, value in state["data"].items() if not key.startswith("image")}}
    source().load_state_dict(older)
    with pytest.raises(ValueError, match=r"seed differs from the checkpoint \(it was absent, it is 0\)"):
        source().load_state_dict({**older, "data": {k: v for k, v in older["data"].items() if k != "seed"}})
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"rows.jsonl:1: images\[0\]: .*a.png cannot be read: No such file"):
        source()


def test_the_cursor_contains_no_media(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    (tmp_path / "a.png").write_bytes(FIRST)
    source = PromptSource(
        DataConfig(train=write_jsonl("rows.jsonl", {"prompt": "a", "images": ["a.png"]})), "train", tokenizer, 0, 1
    )
    source.next()
    assert "PNG" not in json.dumps(source.state_dict())


def test_group_members_share_the_media_of_a_message() -> None:
    medium = Medium(IMAGE, bytes(3 * 1000 * (PAYLOAD_BYTES // 3000 + 1)), 1000, PAYLOAD_BYTES // 3000 + 1, 0, 1)
    prompts = {uid: Prompt(uid, "d", 0, uid, (1, 2), "p", media=(medium,)) for uid in (1, 2)}
    samples = [make_sample_id(uid, 0, member) for uid in prompts for member in range(3)]
    sent = list(admissions(samples, prompts, training_sampling(Config()), seed=0))
    assert [[payload.uid for payload in message.prompts] for message in sent] == [[1], [2]]
    assert [len(message.samples) for message in sent] == [3, 3]
    assert all(payload.media == prompts[payload.uid].media for message in sent for payload in message.prompts)
    assert len(sent[0].prompts[0].meta) < 1000


def test_the_pixels_of_a_row_have_a_limit(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    side = 28 * 8
    (tmp_path / "a.png").write_bytes(png(1, side, side))
    count = MAX_PIXEL_BYTES // (3 * side * side) + 1
    path = write_jsonl("rows.jsonl", {"prompt": "a", "images": ["a.png"] * count})
    source = PromptSource(DataConfig(train=path, max_prompt_tokens=1 << 20), "train", tokenizer, 0, batch_size=1)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: images\[167\]: the row's images have more than 24 MiB of pix"):
        source.next()


def test_an_image_longer_than_the_prompt_may_be_is_dropped_or_refused(tmp_path: Path, write_jsonl: Any) -> None:
    """Of 16 tokens. A truncation cuts text at the start, and leaves the image out or in."""
    (tmp_path / "a.png").write_bytes(png(1, 28 * 4, 28 * 4))
    path = write_jsonl("rows.jsonl", {"prompt": "first words <image>, last words", "images": ["a.png"]})

    def first(**keys: Any) -> Prompt:
        config = DataConfig(train=path, shuffle=False, **keys)
        return PromptSource(config, "train", seeing_tokenizer(), 0, batch_size=1).next()

    whole = first(max_prompt_tokens=200)
    assert whole.media[0].length == 16 and len(whole.token_ids) > 50
    limit = len(whole.token_ids) - 5
    cut = first(max_prompt_tokens=limit, overlong_prompts="truncate")
    (image,) = cut.media
    assert cut.token_ids[image.start : image.start + 16] == (PAD,) * 16 and cut.token_ids.count(PAD) == 16
    assert len(cut.token_ids) == limit and "words <|vision_start|><|image_pad|><|vision_end|>, last" in cut.text
    assert "first words" not in cut.text
    shorter = first(max_prompt_tokens=limit - 10, overlong_prompts="truncate")
    assert shorter.token_ids.count(PAD) == 16 and "user\n<|vision_start|><|image_pad|>" in shorter.text
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: the prompt has {limit + 5} tokens, but data.max_prompt_"):
        first(max_prompt_tokens=limit, overlong_prompts="error")
    with pytest.raises(ValueError):
        first(max_prompt_tokens=16, overlong_prompts="truncate")


def test_what_takes_no_images_is_named_before_the_start(tmp_path: Path, write_jsonl: Any) -> None:
    (tmp_path / "a.png").write_bytes(FIRST)
    path = write_jsonl("rows.jsonl", {"prompt": "a"}, {"prompt": "a", "answer": "b", "images": ["a.png"]})
    rows, problems = read_splits(DataConfig(train=path, val=path), 0)
    assert not problems
    both = list(check_media(Config(eval_every=1, data=DataConfig(train=path, val=path)), rows, None))
    rest = "leave such rows out (1 of 2 rows of data.{})"
    assert both == [
        f"{path}:2: the row has images, which model.tiny.architecture=qwen2 does not take; "
        f"use a model with model_type {', '.join(SEEING)}, or {rest.format(split)}"
        for split in ("train", "val")
    ]
    seeing = ModelConfig(tiny=TinyModel(architecture="qwen2_5_vl"))
    for pipeline in ("rlvr", "sft"):
        assert not list(check_media(Config(pipeline=pipeline, model=seeing), rows, VISION))
    megatron = Config.model_validate({"model": seeing, "trainer": {"engine": "megatron"}})
    assert list(check_media(megatron, {"train": rows["train"]}, VISION)) == [
        f"{path}:2: the row has images, which the megatron trainer does not take; "
        f"use trainer.engine=fsdp2 or deepspeed, or {rest.format('train')}"
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"trainer": {"engine": "deepspeed"}}, []),
        (
            {"trainer": {"engine": "megatron"}},
            ["the megatron trainer does not take; use trainer.engine=fsdp2 or deepspeed, or "],
        ),
        (
            {"algorithm": {"advantage_estimator": "gae"}, "critic": {"engine": "megatron"}},
            ["the megatron critic does not take; use critic.engine=fsdp2 or deepspeed, or "],
        ),
        (
            {"algorithm": {"kl_loss_coef": 0.1}, "reference": {"path": "TEXT"}},
            ["reference.path TEXT does not take; "],
        ),
        (
            {"algorithm": {"advantage_estimator": "gae"}, "critic": {"path": "TEXT"}},
            ["critic.path TEXT does not take; "],
        ),
    ],
)
def test_every_model_that_gets_the_rows_must_take_images(
    keys: dict[str, Any], expected: list[str], tmp_path: Path, write_jsonl: Any
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "a.png").write_bytes(FIRST)
    path = write_jsonl("rows.jsonl", {"prompt": "a", "images": ["a.png"]})
    rows, problems = read_splits(DataConfig(train=path), 0)
    assert not problems
    config = parse({"algorithm": keys.get("algorithm", {}), "model": {"tiny": {"architecture": "qwen2_5_vl"}}})
    for name, values in (item for item in keys.items() if item[0] != "algorithm"):
        given = {key: str(tmp_path) if value == "TEXT" else value for key, value in values.items()}
        config = config.model_copy(update={name: getattr(config, name).model_copy(update=given)})
    lines = [line.replace(str(tmp_path), "TEXT") for line in check_media(config, rows, VISION)]
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith(f"TEXT/rows.jsonl:1: the row has images, which {text}leave such rows out (1 of 1 ")
