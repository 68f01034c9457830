"""The command `hpcrl data` and the survey of rows behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands.show_data import main
from hpcrl.config import DataConfig, TinyModel
from hpcrl.data.rows import Row
from hpcrl.data.survey import MAX_REFUSED, survey

PUBLISHED = Path(__file__).parent / "published"
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(row: Row) -> int:
    return len(row.messages[-1]["content"].split())


def test_counts_lengths_and_repetitions_by_hand(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        {"prompt": "one two", "answer": "1", "tag": "a"},
        {"prompt": "One  TWO", "answer": "", "tag": "b"},
        {"prompt": "one two three", "answer": None, "tag": "b"},
        {"text": "no prompt"},
        {"prompt": "one two", "answer": "3", "tag": "a"},
    )
    found = survey(DataConfig(train=path), "train", 0, words)
    assert (found.num_rows, dict(found.domains), found.unanswered) == (5, {"a": 2, "b": 2}, 2)
    assert sorted(found.lengths) == [2, 2, 2, 3]
    assert found.longest == f"{path}:3"
    assert found.quantiles(0, 0.5, 0.75, 1) == [2, 2, 2, 3]
    assert found.repeated == (2, (f"{path}:2", f"{path}:1"))
    assert found.num_refused == 1
    assert found.refused[0].startswith(f"{path}:4: no prompt")
    assert found.first is not None
    assert found.first[0] == f"{path}:1"


def test_all_refused_rows_are_counted_and_some_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *["{\n" for _ in range(MAX_REFUSED + 7)], {"prompt": "x"})
    found = survey(DataConfig(train=path), "train", 0)
    assert (found.num_refused, len(found.refused), found.domains.total()) == (MAX_REFUSED + 7, MAX_REFUSED, 1)
    assert found.quantiles(0.5) == []


def test_a_prompt_of_both_splits_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(tmp_path / "train.jsonl", {"prompt": "a"}, {"prompt": "b"})
    val = write(tmp_path / "val.jsonl", {"prompt": "c"}, {"prompt": " B "})
    assert main([train, "--val", val, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["overlap"], told["first_overlap"]) == (1, [f"{val}:2", f"{train}:2"])
    assert main([train, "--val", val]) == 0
    assert f"1 of 2 prompts with data.train, first {val}:2 (as {train}:2)" in capsys.readouterr().out


def test_validation_rows_alone_are_shown_without_the_default_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    val = write(tmp_path / "val.jsonl", {"question": "2 + 2", "answer": "so 4\n#### 4"})
    benchmark = tmp_path / "my.yaml"
    benchmark.write_text(f"data: {{train: null, val: [{{path: 'benchmark:gsm8k', options: {{file: {val}}}}}]}}\n")
    for arguments in (["--val", val], ["--config", str(benchmark), "data.prompt_key=text"]):
        assert main([*arguments, "--json"]) == 0
        assert list(json.loads(capsys.readouterr().out)) == ["data.val"]


def test_lengths_are_tokens_of_the_rendered_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    from hpcrl.engines.tiny import make_tiny_model

    folder, prompts = tmp_path / "model", ["short", "a longer prompt <|im_end|>"]
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16), folder)
    path = write(tmp_path / "rows.jsonl", *[{"prompt": prompt, "answer": "y"} for prompt in prompts])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompts[0]}], add_generation_prompt=True, return_dict=False
    )
    limit = f"data.max_prompt_tokens={len(asked)}"
    assert main([path, f"model.path={folder}", limit]) == 0
    out = capsys.readouterr().out
    assert f"prompts     min {len(asked)}, " in out
    assert f"; 1 above {limit}, which are dropped" in out
    assert (
        f"its {len(asked)} tokens\n  "
        + " ".join(f"{number}:{json.dumps(tokenizer.decode([number]))}" for number in asked)
        in out
    )
    assert "<|im_start|>user\n  short<|im_end|>\n" in out


def test_control_characters_of_a_row_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "rows.jsonl", {"prompt": "\x1b[31mred\u202e"})]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31mred\u202e" in out
    assert "\x1b" not in out


def test_rows_that_others_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["datasets.parquet", "pandas.parquet", "polars.parquet", "rows.json"]
    assert main([str(PUBLISHED / name) for name in files]) == 0
    out = capsys.readouterr().out
    assert all(f"{PUBLISHED / name}  " in out for name in files)
    assert "refused     none" in out


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs shared/data/gsm8k")
def test_gsm8k(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GSM8K / "train.jsonl"), "--val", str(GSM8K / "test.jsonl"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    train, val = told["data.train"], told["data.val"]
    assert (train["domains"], val["domains"]) == ({"default": 7473}, {"default": 1319})
    assert (told["overlap"], train["num_refused"], train["unanswered"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no file: name one"),
        (["absent.jsonl"], "absent.jsonl: no such file"),
        (["rows.jsonl", "data.prompt=question"], "data.prompt: Extra inputs are not permitted"),
        (["rows.jsonl", "model.path=absent"], "model.path: absent is no folder"),
        (["+experiment=absent"], "absent"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", {"prompt": "x"})
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert text in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_refused_rows_give_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "x"}, "nonsense\n")
    assert main([path]) == 1
    assert f"refused     1 row\n    {path}:2: not JSON" in capsys.readouterr().out


def test_torch_is_not_imported(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "x"})
    code = "import sys; from hpcrl.commands.show_data import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("False\n")


PAIRS = [
    {"prompt": "a", "chosen": "12345", "rejected": "1"},
    {"prompt": "a", "chosen": "123", "rejected": "12"},
    {"prompt": " A ", "chosen": "123", "rejected": "12"},
    {"prompt": "b", "chosen": "1", "rejected": "1"},
    {"prompt": "b", "chosen": "1", "rejected": "2", "score_chosen": 3, "score_rejected": 3},
    {"prompt": "b", "chosen": "1", "rejected": ""},
]


def test_pairs_are_known_by_their_columns_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "pairs.jsonl", *PAIRS)
    assert main([path, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["data.train"]
    assert (told["num_refused"], told["useless"], told["num_equal"]) == (3, {"equal": 1, "tied": 1, "empty": 1}, 1)
    assert {name: (of["min"], of["max"]) for name, of in told["parts"].items()} == {
        "chosen": (3, 5), "rejected": (1, 2), "whole": (4, 6)
    }  # fmt: skip
    assert main([path, "data.unusable_rows=drop"]) == 0
    out = capsys.readouterr().out
    assert "refused     3 rows (left out: data.unusable_rows=drop); of the pairs 1 equal, 1 tied, 1 empty" in out
    assert f"repeated    1 of 3 rows equal an earlier one, first {path}:3 (as {path}:2)" in out


def test_labelled_rows_and_a_named_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hpcrl.engines.tiny import make_tiny_model

    folder = tmp_path / "model"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16), folder)
    rows = [{"prompt": "a", "completion": "b" * n, "label": n > 2} for n in (1, 2, 3)]
    path = write(tmp_path / "rows.jsonl", *rows, {"prompt": "a", "completion": "b", "label": "yes"})
    assert main([path, f"model.path={folder}", "data.max_sequence_tokens=4"]) == 1
    out = capsys.readouterr().out
    assert "good        min 4, " in out and "bad         min 2, " in out, "with the end token"
    assert " tokens; 3 above data.max_sequence_tokens=4, data.overlong_sequences=drop" in out
    assert f"{path}:4: label must be true or false" in out
    assert main([path, "pipeline=sft", "--json"]) == 0, "its rows are answers, which have no label"
    assert main([path, "pipeline=tests.e2e.simpo:SPEC", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["data.train"]["num_refused"] == 4


def test_a_pipelines_own_rows_are_surveyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the launch would refuse, in data.val, too, if the pipeline validates on such rows."""
    scored = {"prompt": "a", "completion": "b", "score": 1.5}
    steps = {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}
    several = {"prompt": "a", "completion": "b", "helpfulness": 4, "verbosity": 1}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    of_model = ["pipeline=reward_model"]
    for row, broken, words, told in (
        (pair, {"rejected": "b"}, ["pipeline=dpo", "dpo.loss=ipo"], "chosen and rejected are equal"),
        (scored, {"score": None}, [*of_model, "rm.rows=scores"], "no score"),
        (steps, {"labels": [True]}, [*of_model, "rm.rows=steps"], "2 steps in completions, but 1 labels"),
        (
            several,
            {"verbosity": None},
            [*of_model, "rm.rows=scores", "rm.heads=[helpfulness,verbosity]"],
            "no verbosity",
        ),
    ):
        path = write(tmp_path / "rows.jsonl", row, row | broken)
        assert main([path, *words]) == 1
        assert f"{path}:2: {told}" in capsys.readouterr().out
        if words[0] == of_model[0]:
            good = write(tmp_path / "good.jsonl", row)
            assert main([good, "--val", path, *words, "--json"]) == 1
            found = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert [found[f"data.{split}"]["num_refused"] for split in ("train", "val")] == [0, 1]
    assert main([path, *of_model, "rm.rows=stairs"]) == 2
    assert capsys.readouterr().err.startswith("hpcrl data: rm.rows: Input should be 'pairs', 'scores' or 'steps'")


def test_a_wrong_key_of_the_pipeline_is_told_with_its_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    assert main(["pipeline=reward_model", "rm.heads=0", f"data.train={path}"]) == 2
    told = "rm.heads: expected a list of names or a number from 1 to 9999, got 0"
    assert capsys.readouterr().err == f"hpcrl data: {told}\n"
