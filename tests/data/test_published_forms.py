"""Rows in the forms in which other projects publish and write them, through the reader that a run uses."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig
from hpcrl.data import check_answers, read_splits
from hpcrl.data.rows import RowSet

PUBLISHED = Path(__file__).parent / "published"
WRITTEN = [
    "pandas.parquet",
    "polars.parquet",
    "polars.jsonl",
    "datasets.parquet",
    "datasets.jsonl",
    "saved",
    "rows.json",
]
USER = [{"role": "user", "content": "2+2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def only_row(path: str, **config: Any) -> Any:
    return RowSet(DataConfig(train=path, **config), "train", seed=0).row(0)


def problems_of(path: str, **config: Any) -> list[str]:
    return read_splits(DataConfig(train=path, **config), seed=0)[1]


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_read_back_equal_the_rows_written(name: str):
    """Arrow keeps every key of every struct: each tool gets the other tools' parameters, and each call the arguments of
    the others, as null."""
    expected = json.loads((PUBLISHED / "rows.json").read_text())
    rows = RowSet(DataConfig(train=str(PUBLISHED / name)), "train", seed=0)
    assert len(rows) == len(expected)
    for index, row in enumerate(expected):
        found = rows.row(index)
        assert (found.messages, found.tools, found.answer) == (row["messages"], row["tools"], row["answer"])


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # huggingface.co/docs/trl/dataset_formats
    "TRL prompt-only": ({"prompt": "2+2?"}, {}, {"messages": USER}),
    "TRL conversational prompt-only": ({"prompt": USER}, {}, {"messages": USER}),
    "TRL prompt-completion": ({"prompt": "2+2?", "completion": " 4"}, {}, {"messages": USER, "turn": " 4"}),
    "TRL conversational prompt-completion": (
        {"prompt": USER, "completion": [{"role": "assistant", "content": "4"}]},
        {},
        {"messages": USER, "turn": "4", "answer": "4"},
    ),
    "TRL messages with tools as JSON text": (
        {"messages": [*USER, {"role": "assistant", "content": "4"}], "tools": json.dumps([TOOL])},
        {},
        {"messages": USER, "turn": "4", "tools": [TOOL]},
    ),
    "TRL variables of the template": (
        {"prompt": USER, "chat_template_kwargs": {"enable_thinking": False}},
        {},
        {"messages": USER, "variables": {"enable_thinking": False}},
    ),
    # github.com/volcengine/verl, verl/utils/dataset/README.md
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": USER,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0},
        },
        {},
        {"messages": USER, "answer": "4", "domain": "openai/gsm8k"},
    ),
    # github.com/OpenRLHF/OpenRLHF, README: --data.input_key, --data.label_key
    "OpenRLHF with a label": (
        {"input": "2+2?", "label": "4"},
        {"prompt_key": "input"},
        {"messages": USER, "answer": "4"},
    ),
    "OpenRLHF with messages": (
        {"context_messages": USER, "answer": "4"},
        {"prompt_key": "context_messages"},
        {"messages": USER, "answer": "4"},
    ),
    # github.com/alibaba/ROLL, docs: configuration of RLVR data
    "ROLL": (
        {
            "id": "0",
            "source": "gsm8k",
            "difficulty": 0,
            "prompt": "2+2?",
            "messages": json.dumps(USER),
            "ground_truth": "4",
            "case_type": "",
            "test_case_function": "",
            "test_cases": "",
            "tag": "math_rule",
        },
        {"prompt_key": "messages"},
        {"messages": USER, "answer": "4", "domain": "math_rule"},
    ),
    # huggingface.co/datasets/allenai/RLVR-GSM-MATH-IF-Mixed-Constraints; open-instruct's verifiers by `dataset`
    "open-instruct": (
        {"messages": USER, "ground_truth": "4", "dataset": "gsm8k"},
        {"domain_key": "dataset"},
        {"messages": USER, "answer": "4", "domain": "gsm8k"},
    ),
    "open-instruct with lists": (
        {"messages": USER, "ground_truth": ["4"], "dataset": ["gsm8k"]},
        {"domain_key": "dataset"},
        {"messages": USER, "answer": ["4"], "domain": "gsm8k"},
    ),
    # github.com/tatsu-lab/stanford_alpaca; axolotl's type alpaca
    "Alpaca": (
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        {},
        {"messages": [{"role": "user", "content": "Add.\n2+2"}], "turn": "4", "answer": "4"},
    ),
    "Alpaca without input": ({"instruction": "2+2?", "input": "", "output": "4"}, {}, {"messages": USER, "turn": "4"}),
    # github.com/hiyouga/LLaMA-Factory, data/README.md
    "Alpaca with system and history": (
        {"instruction": "2+2?", "output": "4", "system": "S", "history": [["a", "b"]]},
        {},
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                *USER,
            ]
        },
    ),
    # axolotl's chat_template with field_messages=conversations; LLaMA-Factory's sharegpt
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {},
        {"messages": USER, "turn": "4"},
    ),
    "ShareGPT with tools": (
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "It is 4."},
            ],
            "system": "S",
            "tools": json.dumps([TOOL]),
        },
        {},
        {
            "messages": [
                {"role": "system", "content": "S"},
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [call({"a": 2, "b": 2})]},
                {"role": "tool", "content": "4"},
            ],
            "turn": "It is 4.",
            "tools": [TOOL],
        },
    ),
    # huggingface.co/datasets/NousResearch/hermes-function-calling-v1
    "Hermes": (
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": '<tool_call>\n{"name": "add"}\n</tool_call>'},
                {"from": "tool", "value": "4"},
            ],
            "tools": json.dumps([TOOL]),
            "category": "sums",
        },
        {"domain_key": "category"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                *USER,
                {"role": "assistant", "content": '<tool_call>\n{"name": "add"}\n</tool_call>'},
                {"role": "tool", "content": "4"},
            ],
            "domain": "sums",
        },
    ),
    "conversations with roles": ({"conversations": USER, "answer": "4"}, {}, {"messages": USER, "answer": "4"}),
    # platform.openai.com/docs/guides/fine-tuning
    "OpenAI fine-tuning": (
        {
            "messages": [
                {"role": "developer", "content": "S"},
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **call('{"a": 2, "b": null}')}]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
                {"role": "assistant", "content": "4", "weight": 1},
            ],
            "tools": [TOOL],
            "parallel_tool_calls": True,
        },
        {},
        {
            "messages": [
                {"role": "system", "content": "S"},
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **call({"a": 2, "b": None})}]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
            ],
            "turn": "4",
        },
    ),
    "OpenAI's function_call": (
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
                {"role": "function", "name": "add", "content": "4"},
            ]
        },
        {},
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [call({"a": 2})]},
                {"role": "tool", "name": "add", "content": "4"},
            ]
        },
    ),
    # the parts of a chat completion; joined by lines as vLLM does
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {},
        {"messages": [{"role": "user", "content": "a\nb"}]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_is_read(write_jsonl: Callable[..., str], form: str):
    row, config, expected = FORMS[form]
    found = only_row(write_jsonl("rows.jsonl", row), **config)
    for name, value in expected.items():
        got = getattr(found, name)
        assert (got["content"] if name == "turn" else got) == value, name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "TRL language modelling": ({"text": "The sky is blue."}, ":1: no prompt: looked for prompt, messages, "),
    "TRL implicit prompt": ({"chosen": USER, "rejected": USER}, "(data.prompt_key); the row has chosen, rejected"),
    "TRL images": (
        {"prompt": USER, "images": ["a.png"]},
        "a.png cannot be read: No such file or directory",
    ),
    "verl images": (
        {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [{"bytes": "x"}]},
        ":1: images[0] must be a file's path, a data URL, or bytes of a parquet or Arrow file",
    ),
    "audio": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        ":1: messages[0].content[0] must be a part with text or an image, not one of type 'input_audio'",
    ),
    "a speaker": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        ":1: conversations[0].from must be one of human",
    ),
    "a call without a name": (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "x"}]},
        ":1: messages[1].tool_calls[0].function needs a name",
    ),
    "arguments cut off": (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [call('{"a": ')]}, {"role": "tool", "content": "x"}]},
        ":1: messages[1].tool_calls[0].function.arguments must be an object or the JSON text of one, not",
    ),
    "tools as prose": ({"prompt": USER, "tools": "a calculator"}, ":1: tools must be a list of objects"),
    "history": ({"instruction": "a", "output": "b", "history": ["a"]}, ":1: history must be a list of"),
    "an argument of the tokenizer": (
        {"prompt": USER, "chat_template_kwargs": {"tokenize": True}},
        ":1: chat_template_kwargs.tokenize is not a template variable",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_an_unknown_form_is_refused_in_one_line(write_jsonl: Callable[..., str], form: str):
    row, message = REFUSED[form]
    (problem,) = problems_of(path := write_jsonl("rows.jsonl", row))
    assert problem.startswith(path) and message in problem and "\n" not in problem


def test_nulls_with_a_meaning_are_kept(write_jsonl: Callable[..., str]):
    """Also next to nulls for absent keys, if a row was not exported from Arrow."""
    unit = {"type": ["string", "null"], "enum": ["C", None], "default": None}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"unit": unit, "default": None}}},
    }
    turn = {"role": "assistant", "content": "", "tool_calls": [call({"unit": None, "at": {"zone": None}}, "f")]}
    row = {"messages": [*USER, turn, {"role": "tool", "content": "x"}], "tools": [tool]}
    found = only_row(write_jsonl("rows.jsonl", row))
    assert found.messages[1] == turn
    assert found.tools[0]["function"]["parameters"] == {"properties": {"unit": unit}}


def test_a_null_within_arguments_as_text_is_kept_in_parquet(tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    calls = [call('{"unit": null}', "f"), call('{"city": "Oslo"}', "g")]
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "x"}]
    parquet.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    found = only_row(str(tmp_path / "rows.parquet")).messages[1]["tool_calls"]
    assert [made["function"]["arguments"] for made in found] == [{"unit": None}, {"city": "Oslo"}]


def test_a_missing_number_does_not_count_as_an_answer():
    """pandas writes it as NaN."""
    rows = RowSet(DataConfig(train=str(PUBLISHED / "missing.parquet")), "train", seed=0)
    assert [rows.row(n).answer for n in range(3)] == [7.0, None, 4.0]
    assert rows.unanswered == {"default": (1, f"{PUBLISHED}/missing.parquet:row 1")}
    (problem,) = check_answers({"train": rows})
    assert problem.startswith(f"{PUBLISHED}/missing.parquet:row 0: no answer to learn from")


@pytest.mark.parametrize("answer", [float("inf"), float("-inf")])
def test_an_infinite_answer_is_refused(tmp_path: Path, answer: float):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["a", "b"], "answer": [1.0, answer]}), path)
    assert problems_of(str(path)) == [f"{path}:row 1: the answer answer is {answer}; leave it null if unknown"]
    parquet.write_table(pa.table({"prompt": ["a"], "answer": [[1.0, float("nan")]]}), path)
    assert problems_of(str(path)) == [f"{path}:row 0: the answer answer is nan; leave it null if unknown"]


def test_a_folder_of_shards_and_a_pattern_are_read(tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    for split, count in (("train", 3), ("test", 1)):
        for n in range(count):
            table = pa.table({"prompt": [f"{split}{n}a", f"{split}{n}b"]})
            parquet.write_table(table, tmp_path / f"{split}-{n:05}-of-{count:05}.parquet")
    (tmp_path / "README.md").write_text("---\n")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (problem,) = problems_of(str(tmp_path))
    patterns = f"{tmp_path}/test-*.parquet or {tmp_path}/train-*.parquet"
    assert problem == f"data.train: {tmp_path}: holds several data sets; give one, {patterns}"
    rows = RowSet(DataConfig(train=f"{tmp_path}/train-*.parquet"), "train", seed=0)
    assert [rows.row(n).messages[0]["content"] for n in (0, 3, 5)] == ["train0a", "train1b", "train2b"]
    assert rows.where(3) == f"{tmp_path}/train-00001-of-00003.parquet:row 1"
    (before,) = rows.fingerprint().values()
    (tmp_path / "test-00000-of-00001.parquet").unlink()
    rows = RowSet(DataConfig(train=str(tmp_path)), "train", seed=0)
    assert len(rows) == 6 and [*rows.fingerprint().values()] == [before], "the same rows, however they are named"
    parquet.write_table(pa.table({"prompt": ["x", "y"]}), tmp_path / "train-00002-of-00003.parquet")
    assert [*RowSet(DataConfig(train=str(tmp_path)), "train", seed=0).fingerprint().values()] != [before]
    assert problems_of(f"{tmp_path}/nothing-*.parquet") == [f"data.train: {tmp_path}/nothing-*.parquet: no such file"]


def test_splits_saved_together_are_named():
    path = PUBLISHED / "splits"
    assert problems_of(str(path)) == [
        f"data.train: {path}: holds the splits train, test; give one, {path}/train or {path}/test"
    ]
    assert len(RowSet(DataConfig(train=f"{path}/train"), "train", seed=0)) == 2


def test_a_hub_data_set_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_jsonl):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--someone--sums"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "main").mkdir(parents=True)
    for split in ("train", "test"):
        (snapshot / "main" / f"{split}.jsonl").write_text(f'{{"prompt": "{split}"}}\n')
    for given in ("someone/sums/main/test.jsonl", "someone/sums/main/t[e]*.jsonl"):
        assert only_row(given).messages[0]["content"] == "test"
    several = "someone/sums/main/test.jsonl or someone/sums/main/train.jsonl"
    assert problems_of("someone/sums") == [f"data.train: someone/sums: holds several data sets; give one, {several}"]
    assert problems_of("someone/sums/validation.jsonl") == [
        f"data.train: someone/sums/validation.jsonl: no such file; the cached data set has {several}"
    ]
    assert problems_of("someone/else") == ["data.train: someone/else: no such file"]


def test_other_text_formats_are_read(tmp_path: Path):
    import pyarrow as pa

    (tmp_path / "rows.csv").write_text('\ufeffquestion,answer,level\n"2+2?",4,\n"a\nb","x, y",2\n')
    (tmp_path / "rows.tsv").write_text("question\tanswer\n2+2?\t4\na\tb\tc\n")
    rows = RowSet(DataConfig(train=f"{tmp_path}/rows.csv"), "train", seed=0)
    assert [(row.messages[0]["content"], row.answer) for row in map(rows.row, range(2))] == [
        ("2+2?", "4"),
        ("a\nb", "x, y"),
    ]
    assert rows.row(0).extra == {"answer": "4", "level": None} and rows.where(1) == f"{tmp_path}/rows.csv:3"
    assert problems_of(f"{tmp_path}/rows.tsv") == [
        f"{tmp_path}/rows.tsv:3: 3 values, but the first line names 2 columns"
    ]
    line = json.dumps({"prompt": "2+2?", "answer": "4"}) + "\n"
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    with pa.CompressedOutputStream(str(tmp_path / "rows.jsonl.zst"), "zstd") as stream:
        stream.write(line.encode())
    (tmp_path / "rows.json").write_text(f"[\n {line},\n {line}]\n")
    for name in ("rows.jsonl.gz", "rows.jsonl.zst", "rows.json"):
        assert only_row(f"{tmp_path}/{name}").messages == USER
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(line.encode())[:-5])
    (problem,) = problems_of(f"{tmp_path}/cut.jsonl.gz")
    assert problem.startswith(f"data.train: {tmp_path}/cut.jsonl.gz: cannot be unpacked")
    (tmp_path / "wrong.json").write_text(f"[{line}, 3]")
    assert problems_of(f"{tmp_path}/wrong.json") == [f"{tmp_path}/wrong.json:row 1: 3 is not an object"]


@pytest.mark.soak
def test_more_than_2_gib_of_nested_text_in_a_row_group_is_read():
    """280 rows of 8 MiB, which a dictionary makes a file of 2 kB; Arrow decodes no 256 of them in one piece."""
    from hpcrl.data.files import ArrowTable

    rows = ArrowTable(PUBLISHED / "over_2_gib.parquet")
    last = rows.row(279)
    assert len(rows) == 280 and last["answer"] == "279" and len(last["prompt"][0]["content"]) == 8 << 20


def test_a_row_group_of_many_pieces_is_read_in_order(tmp_path: Path):
    """Arrow cannot decode 2 GiB of nested text in one piece."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(1000)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = RowSet(DataConfig(train=f"{tmp_path}/rows.parquet"), "train", seed=0)
    assert [found.row(n).messages[0]["content"] for n in range(0, 1000, 37)] == [str(n) for n in range(0, 1000, 37)]
