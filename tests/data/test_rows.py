"""How rows are read in every format, and how unreadable rows are reported."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config import Config, DataConfig, DataSource
from hpcrl.controller.generation import training_sampling
from hpcrl.data import PromptSource, check_shares, read_splits
from hpcrl.data.rows import MAX_ROW_BYTES, RowSet, domain_shares
from hpcrl.data.tasks import GeneratedTask
from hpcrl.messaging.queues import MAX_MESSAGE_BYTES
from hpcrl.rollout.admission import admissions
from hpcrl.rollout.types import PromptOutcome, make_sample_id

USER = [{"role": "user", "content": "2+2?"}]


def only_row(path: str, **config: Any):
    return RowSet(DataConfig(train=path, **config), "train", seed=0).row(0)


def problems_of(config: DataConfig) -> list[str]:
    return read_splits(config, seed=0)[1]


@pytest.mark.parametrize("key", ["prompt", "question", "problem"])
def test_plain_prompts(write_jsonl, key: str):
    row = only_row(write_jsonl("a.jsonl", {key: "2+2?", "answer": "4", "level": 3}))
    assert (row.messages, row.answer, row.turn["content"], row.domain) == (USER, "4", "4", "default")
    assert row.extra == {"answer": "4", "level": 3}


@pytest.mark.parametrize("key", ["answer", "ground_truth", "label", "solution"])
def test_answer_keys(write_jsonl, key: str):
    assert only_row(write_jsonl("a.jsonl", {"prompt": "2+2?", key: 4})).answer == 4


def test_configured_keys_take_precedence(write_jsonl):
    path = write_jsonl(
        "a.jsonl", {"prompt": "no", "answer": "no", "ask": "2+2?", "gold": "4", "kind": "sum", "tag": "no"}
    )
    row = only_row(path, prompt_key="ask", answer_key="gold", domain_key="kind", system_prompt="Be brief.")
    assert row.messages == [{"role": "system", "content": "Be brief."}, *USER]
    assert (row.answer, row.domain) == ("4", "sum")


def test_messages_with_a_written_answer_and_tools(write_jsonl):
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "4"}]
    row = only_row(write_jsonl("a.jsonl", {"messages": messages, "tools": tools}), system_prompt="ignored")
    assert row.messages == messages[:2] and row.turn["content"] == row.answer == "4" and row.tools == tools


def test_verl_parquet(tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {
            "data_source": f"openai/gsm8k{n % 2}",
            "prompt": USER,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"split": "train", "index": n},
            "day": datetime.date(2024, 1, 2),
        }
        for n in range(3)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    found = RowSet(DataConfig(train=str(path)), "train", seed=0)
    assert found.domain_names == ["openai/gsm8k0", "openai/gsm8k1"] and found.domains.tolist() == [0, 1, 0]
    row = found.row(2)
    assert (row.messages, row.answer, row.domain) == (USER, "2", "openai/gsm8k0")
    assert row.extra["extra_info"] == {"split": "train", "index": 2} and row.extra["day"] == "2024-01-02"
    assert found.where(2) == f"{path}:row 2"
    json.dumps(row.extra)


def test_sources_follow_each_other_and_a_tag_covers_a_source(write_jsonl):
    a = write_jsonl("a.jsonl", {"prompt": "p0", "tag": "x"}, {"prompt": "p1"})
    b = write_jsonl("b.jsonl", {"prompt": "p2", "tag": "x"})
    found = RowSet(DataConfig(train=[a, DataSource(path=b, domain="y"), "task:add"]), "train", seed=0)
    assert [found.row(n).messages[0]["content"] for n in range(3)] == ["p0", "p1", "p2"]
    assert [found.row(n).domain for n in range(4)] == ["x", "default", "y", "add"]
    assert found.domain_names == ["x", "default", "y", "add"]


def test_empty_lines_and_byte_order_mark_keep_the_line_numbers(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \r\n{"prompt": "b"}\r\n{"prompt": 3}')
    assert problems_of(DataConfig(train=str(path))) == [f"{path}:5: prompt must be text or a list of messages, not int"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 1}", "not JSON"),
        ('"text"', '"text" is not an object'),
        ({"ask": "a", "gold": "b"}, "no prompt: looked for prompt, messages, conversations, question, "),
        ({"ask": "a", "gold": "b"}, "the row has ask, gold"),
        ({"prompt": "  "}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": {}}, "prompt must be text or a list of messages"),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role must be one of system, user"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages has no user turn to answer"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content is empty"),
        ({"prompt": "a", "answer": "x" * (16 << 20)}, ": 16.0 MiB of answer and other columns would go with"),
        ({"messages": [*USER, {"role": "assistant", "content": "x" * (16 << 20)}]}, "(the largest: the answer); store"),
        ({"prompt": "a", "answer": "x", "tests": ["x" * (16 << 20)]}, "(the largest: tests); store the path of a file"),
        ({"prompt": "a", "tag": 3}, "tag must be text, not '3'"),
        ({"prompt": "a", "tools": "x"}, "tools must be a list of objects"),
        ({"prompt": "a", "env_seed": "7"}, "column env_seed: '7' is not a whole number from 0 to 2147483647"),
        ({"prompt": "a", "env_seed": -1}, "column env_seed: -1 is not a whole number"),
        ({"prompt": "a", "env_seed": True}, "column env_seed: True is not a whole number"),
        (
            {"messages": [{**USER[0], "images": ["nowhere.png"]}]},
            ":2: messages[0].images[0]: ",
        ),
        (
            {"prompt": [*USER, {"role": "user", "content": [{"type": "text"}, {"type": "image", "image": "a.png"}]}]},
            ":2: prompt[1].content[0] must be a part with text or an image, not one of type 'text'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            ":2: prompt[0].content[0]: 'data:'... is not an image in base64: it has no ;base64,",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(write_jsonl, line: Any, message: str):
    path = write_jsonl("a.jsonl", {"prompt": "good"}, line, {"prompt": "good"})
    (problem,) = problems_of(DataConfig(train=path))
    assert problem.startswith(f"{path}:2: ") and message in problem and "\n" not in problem


def test_empty_image_columns_give_no_images(write_jsonl):
    """Parquet gives every row all columns, and a container's image is a text."""
    row = {"messages": [{**USER[0], "images": None}], "images": [], "image": "docker.io/library/python:3.12"}
    assert only_row(write_jsonl("a.jsonl", row)).extra == {"images": [], "image": "docker.io/library/python:3.12"}


def test_an_answer_stored_as_a_column_counts_once(write_jsonl):
    answer = "x" * (9 << 20)
    path = write_jsonl(
        "a.jsonl", {"prompt": "a", "answer": answer}, {"prompt": "a", "reward_model": {"ground_truth": answer}}
    )
    assert problems_of(DataConfig(train=path)) == []


@pytest.mark.slow
def test_a_row_at_the_size_limit_fits_into_messages_between_ranks(tokenizer, write_jsonl):
    """Also where every character has three bytes, with a prompt and a response of a quarter of a MiB each."""
    answer = "数" * (MAX_ROW_BYTES // 3 - 100)
    path = write_jsonl("a.jsonl", json.dumps({"prompt": "p" * (1 << 18), "answer": answer}, ensure_ascii=False))
    assert problems_of(DataConfig(train=path)) == []
    prompt = PromptSource(DataConfig(train=path, max_prompt_tokens=1 << 20), "train", tokenizer, 0, 1).next()
    (admit,) = admissions([make_sample_id(0, 0, 0)], {0: prompt}, training_sampling(Config()), seed=0)
    assert len(msgspec.msgpack.encode(admit)) + (1 << 18) < MAX_MESSAGE_BYTES


def test_an_unusable_row_found_at_run_time_drops_only_itself(tokenizer, monkeypatch):
    """Rows of generated sources are not checked before the start."""
    make = GeneratedTask.row
    monkeypatch.setattr(
        GeneratedTask, "row", lambda self, i: make(self, i) | ({"tests": "x" * MAX_ROW_BYTES} if i == 1 else {})
    )
    source = PromptSource(DataConfig(train="task:add", shuffle=False), "train", tokenizer, seed=0, batch_size=2)
    assert [source.next().row for _ in range(3)] == [0, 2, 3]
    (lost,) = source.take_dropped()
    assert (lost.row, lost.outcome, lost.domain) == (1, PromptOutcome.FAILED, "add")
    assert lost.reason.startswith("task:add[1]: 16.0 MiB of answer")


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08\0", b"PK\x03\x04", b"PAR1"])
def test_a_file_that_is_not_text_is_named_with_its_format(tmp_path: Path, magic: bytes):
    (tmp_path / "rows.jsonl").write_bytes(magic + bytes(100))
    (problem,) = problems_of(DataConfig(train=f"{tmp_path}/rows.jsonl"))
    kind = {b"\x1f": "gzip", b"P": "zip"}.get(magic[:1], "") if magic != b"PAR1" else "parquet"
    assert problem.startswith(f"data.train: {tmp_path}/rows.jsonl: this is a {kind} file, not lines of text; ")


def test_bytes_in_parquet_are_decoded_as_text_or_refused(tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {"prompt": b"2+2?", "answer": b"vier", "info": {"hints": ["größer".encode()]}},
        {"prompt": b"a", "answer": b"b", "info": {"hints": [b"\x89PNG"]}},
    ]
    for count in (1, 2):
        parquet.write_table(pa.Table.from_pylist(rows[:count]), tmp_path / f"{count}.parquet")
    row = only_row(f"{tmp_path}/1.parquet")
    assert (row.messages, row.answer, row.extra["info"]) == (USER, "vier", {"hints": ["größer"]})
    assert problems_of(DataConfig(train=f"{tmp_path}/2.parquet")) == [
        f"{tmp_path}/2.parquet:row 1: info.hints holds bytes that are not UTF-8; leave the column out, or store text"
    ]


def test_a_configured_answer_key_must_exist(write_jsonl):
    path = write_jsonl("a.jsonl", {"prompt": "a", "x": 1})
    (problem,) = problems_of(DataConfig(train=path, answer_key="gold"))
    assert problem == f"{path}:1: no gold (data.answer_key); the row has prompt, x"


def test_the_list_of_problems_is_capped_and_says_so(write_jsonl):
    path = write_jsonl("a.jsonl", *["broken"] * 50)
    problems = problems_of(DataConfig(train=path))
    assert len(problems) == 11 and problems[9].startswith(f"{path}:10: ")
    assert problems[-1] == "data.train: and 40 more rows with problems"
    problems = problems_of(DataConfig(train=[f"/nowhere/{n}.jsonl" for n in range(13)]))
    assert len(problems) == 11 and problems[-1] == "data.train: and 3 more sources with problems"


def test_all_unreadable_sources_are_named(tmp_path: Path, write_jsonl):
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    empty, array = write_jsonl("empty.jsonl", "", "  "), write_jsonl("array.json", '[{"prompt": "a"}]')
    train = [
        f"{tmp_path}/missing.jsonl",
        str(tmp_path),
        empty,
        f"{tmp_path}/x.parquet",
        "task:nope",
        __file__,
        "x" * 300,
    ]
    sized = DataSource(path=array, size=3)
    problems = problems_of(DataConfig(train=[*train, sized], val=array))
    expected = [
        "missing.jsonl: no such file",
        ": holds several data sets; give one, ",
        "empty.jsonl: holds no rows",
        "x.parquet: not a readable parquet file",
        "task:nope: there is no task 'nope'; built in are add, program, repeat, shapes, sort_digits",
        "unknown format '.py'",
        "xxx: File name too long",
        "size is for generated sources",
    ]
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem


def test_good_data_has_no_problems_and_needs_no_torch(write_jsonl):
    path = write_jsonl("a.jsonl", {"prompt": "a", "answer": "b"})
    code = (
        "import sys; from hpcrl.data import read_splits; from hpcrl.config import DataConfig\n"
        f"assert read_splits(DataConfig(train=[{path!r}, 'task:add'], val={path!r}), 0)[1] == []\n"
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("probs", "batch", "counts"),
    [
        ({"a": 0.3, "b": 0.7}, 10, {"a": 3, "b": 7}),
        ({"a": 0.29, "b": 0.71}, 100, {"a": 29, "b": 71}),  # int(.29 * 100) is 28 in binary
        ({"b": 0.55, "a": 0.45}, 10, {"b": 5, "a": 5}),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 64, {"a": 21, "b": 21, "c": 22}),
    ],
)
def test_domain_shares(probs: dict, batch: int, counts: dict):
    shares = domain_shares(sorted(probs), probs, batch)
    assert shares == counts and list(shares) == list(probs)


def test_impossible_domain_shares_are_refused(write_jsonl):
    path = write_jsonl("a.jsonl", {"prompt": "a", "tag": "x"}, {"prompt": "b", "tag": "y"})
    with pytest.raises(ValueError, match=r"must name the domains x, y; 'z' differs"):
        domain_shares(["x", "y"], {"x": 0.5, "y": 0.2, "z": 0.3}, 10)
    config = DataConfig(train=path, domain_interleave_probs={"x": 0.01, "y": 0.99})
    rows, problems = read_splits(config, 0)
    assert problems == []
    assert check_shares(config, rows, 64) == [
        "data.domain_interleave_probs.x=0.01 of rollout.num_prompts=64 gives no prompt"
    ]
    assert check_shares(config, rows, 128) == []
