"""Bad input as a user meets it: every problem is one line, exit code 2, no traceback, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hpcrl.launch.__main__ import main
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start

GOOD = b'{"prompt": "1+1", "answer": "2"}\n'
BASE = ("rollout.max_new_tokens=3", "data.max_prompt_tokens=32", "reward.default.name=exact_match", "run_dir=run")


def refused(capsys: pytest.CaptureFixture[str], at: Path, *words: str) -> list[str]:
    """The lines of a refusal by the launch; the folder must be unchanged."""
    before = sorted(at.rglob("*"))
    code = main([*BASE, *words])
    out, err = capsys.readouterr()
    assert (code, out) == (ExitCode.BAD_INPUT, ""), (out, err)
    assert sorted(at.rglob("*")) == before
    return err.splitlines()


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


DATA: dict[str, tuple[bytes, list[str]]] = {
    "not utf-8": (GOOD + b'{"prompt": "\xff", "answer": "2"}\n', ["rows.jsonl:2: not JSON"]),
    "utf-16": (GOOD.decode().encode("utf-16"), ["rows.jsonl:1: not JSON", "rows.jsonl:2: not JSON"]),
    "only empty lines": (b"\n  \n\r\n", ["rows.jsonl"]),
    "an array": (GOOD + b'[{"prompt": "a", "answer": "b"}]', ["rows.jsonl:2: an array; write one object per line"]),
    "an array that ends early": (b'[{"prompt": "a", "answer": "b"},', ["rows.jsonl:1: an array; write one object per"]),
    "nesting without end": (
        GOOD + b'{"prompt": "a", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        ["rows.jsonl:2: not JSON: maximum recursion depth"],
    ),
    "half a character": (b'{"prompt": "\\ud800", "answer": "2"}', ["rows.jsonl:1: not JSON"]),
    "no numbers": (b'{"prompt": "a", "answer": NaN}', ["rows.jsonl:1: not JSON"]),
    "wrong types": (
        b'{"prompt": 5, "answer": "2"}\n{"prompt": ["a"], "answer": "2"}\n{"prompt": "", "answer": ""}\n'
        b'{"prompt": "a", "answer": "b", "tag": 5}\n',
        [
            "rows.jsonl:1: prompt must be text or a list of messages, not int",
            "rows.jsonl:2: prompt[0] must be an object with role and content",
            "rows.jsonl:3: prompt is empty",
            "rows.jsonl:4: tag must be text",
        ],
    ),
}


@pytest.mark.parametrize(("content", "expected"), DATA.values(), ids=DATA)
def test_unreadable_rows_are_named(
    content: bytes, expected: list[str], at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (at / "rows.jsonl").write_bytes(content)
    lines = refused(capsys, at, "data.train=rows.jsonl")
    assert len(lines) == len(expected), lines
    assert all(line.startswith(part) or part in line for line, part in zip(lines, expected, strict=True)), lines


@pytest.mark.parametrize("row", [b'{"prompt": "1+1"}', b'{"prompt": "1+1", "answer": ""}'])
@pytest.mark.parametrize("dry_run", ["false", "true"])
def test_rows_without_an_answer_are_refused_by_the_supervised_pipeline(
    row: bytes, dry_run: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (at / "rows.jsonl").write_bytes(GOOD * 250 + row + b"\n" + GOOD * 149)
    words = ("+experiment=demo_sft", "layout=single", "data.val=null", "eval_every=0", "sft.stop_score=null")
    before = sorted(at.rglob("*"))
    code = main([*words, "data.train=rows.jsonl", "max_steps=10", "run_dir=run", f"dry_run={dry_run}"])
    out, err = capsys.readouterr()
    assert (code, out) == (ExitCode.BAD_INPUT, ""), (out, err)
    (line,) = err.splitlines()
    assert line.startswith("rows.jsonl:251: ") and line.endswith("; 1 of 400 rows of data.train are so"), line
    assert sorted(at.rglob("*")) == before


def test_harmless_oddities_of_a_file_are_accepted(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte order mark, empty lines, Windows line ends, no newline at the end, a line of 2 MB."""
    long = b'{"prompt": "' + b"x" * 2_000_000 + b'", "answer": "2"}\r\n'
    (at / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n\n" + long + GOOD.strip())
    assert main([*BASE, "data.train=rows.jsonl", "dry_run=true"]) == ExitCode.DONE
    assert not (at / "run").exists()


def test_unreadable_files_are_named(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at / "folder.jsonl").mkdir()
    (at / "loop.jsonl").symlink_to("loop.jsonl")
    (at / "dangling.jsonl").symlink_to("nowhere")
    os.mkfifo(at / "pipe.jsonl")
    (at / "cut.parquet").write_bytes(b"PAR1" + bytes(100))
    (at / "rows.csv").write_bytes(b"prompt,answer\n")
    (at / "rows.xlsx").write_bytes(b"PK")
    expected = {
        "folder.jsonl": "a folder without files of rows",
        "loop.jsonl": "no such file",
        "dangling.jsonl": "no such file",
        "pipe.jsonl": "not a regular file",
        "cut.parquet": "not a readable parquet file",
        "rows.csv": "holds no rows",
        "rows.xlsx": "unknown format '.xlsx'",
    }
    lines = refused(capsys, at, f"data.train=[{','.join(expected)}]")
    assert len(lines) == len(expected), lines
    for line, (name, part) in zip(lines, expected.items(), strict=True):
        assert name in line and part in line


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def instead_of_weights(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name) and None


def names_of_mistral(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    embedding = {"tok_embeddings.weight": weights["model.embed_tokens.weight"]}
    save_file(embedding, folder / "consolidated.safetensors", metadata={"format": "pt"})


def few_rows(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["z"] = 5000
    path.write_text(json.dumps(content))


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def quantised(method: str) -> Callable[[Path], None]:
    return change_config(quantization_config={"quant_method": method})


HEADER = b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}'
MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "config is a list": (write("config.json", b"[]"), "config.json is not a JSON object"),
    "config is binary": (write("config.json", b"\xff\xfe\0"), "config.json cannot be read"),
    "text for a number": (change_config(hidden_size="64"), "is '64', a whole number above 0 is needed"),
    "too many layers": (change_config(num_hidden_layers=10**6), "is 1000000, at most 1000 is supported"),
    "nested without end": (write("config.json", b"[" * 10**6), "config.json cannot be read"),
    "no heads": (change_config(num_attention_heads=0), "num_attention_heads in config.json is 0"),
    "null layers": (change_config(num_hidden_layers=None), "num_hidden_layers in config.json is not set"),
    "odd positions": (change_config(max_position_embeddings="x"), "max_position_embeddings in config.json is 'x'"),
    "odd type": (change_config(model_type=["qwen2"]), "config.json has no model_type"),
    "a family of others": (change_config(model_type="gpt_neox"), "the native generator supports"),
    "odd index": (write("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'), "has no weight_map"),
    "header is a list": (write("model.safetensors", struct.pack("<Q", 2) + b"[]"), "model.safetensors is damaged"),
    "code of its own": (
        change_config(model_type="mynet", auto_map={"AutoModelForCausalLM": "modeling_mynet.MyNet"}),
        "the code that the folder brings along (auto_map) is never run",
    ),
    "only Meta's files": (instead_of_weights("consolidated.00.pth"), "(consolidated.00.pth has Meta's layout: use"),
    "only a gguf": (instead_of_weights("model-q4.gguf"), "(model-q4.gguf is for llama.cpp, mostly quantised: use"),
    "only pickled": (instead_of_weights("pytorch_model.bin"), "(pytorch_model.bin is pickled: save the model again"),
    "Mistral's names": (
        names_of_mistral,
        "the names of another library (tok_embeddings.weight); give the folder in HF",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer in model (tokenizer.json)"),
    "a larger tokenizer": (few_rows, "the token 'z' with the id 5000, but vocab_size in config.json is"),
    "a short file": (shorten, "model.safetensors is damaged: it has"),
    "a missing shard": (
        write("model.safetensors.index.json", b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "model-00001-of-00002.safetensors is missing, but model.safetensors.index.json names it; copy or download it",
    ),
    "quantised with fp8": (quantised("fp8"), "make bfloat16 of them: "),
    "quantised with gptq": (quantised("gptq"), "use the model with 16-bit weights from which it was made"),
    "odd shape": (
        write("model.safetensors", struct.pack("<Q", len(HEADER)) + HEADER + bytes(4)),
        "model.safetensors is damaged",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "expected"), MODELS.values(), ids=MODELS)
def test_a_damaged_model_folder_is_refused_in_one_line(
    damage: Callable[[Path], None], expected: str, at: Path, digit_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(digit_model, at / "model")
    damage(at / "model")
    lines = refused(capsys, at, "model.path=model")
    assert all(line.startswith("model.path: ") for line in lines)
    of_trainer = [line for line in lines if "the native generator" not in line or "the native" in expected]
    assert len(of_trainer) == 1 and expected in of_trainer[0], lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe\0", "config.yaml cannot be read"),
        (b"a: [", "config.yaml cannot be read"),
        (b"- 1", "config.yaml contains no configuration"),
        (b'!!python/object/apply:os.mkdir ["made"]', "config.yaml cannot be read"),
    ],
)
def test_a_run_folder_full_of_garbage_is_refused_in_one_line(
    content: bytes, expected: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (at / "run").mkdir()
    (at / "run" / "config.yaml").write_bytes(content)
    (line,) = refused(capsys, at)
    assert expected in line


def test_values_out_of_bounds_are_refused(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, expected in {
        "seed=99999999999999999999": "seed: expected less than",
        f"run_dir={'x' * 300}": "File name too long",
        "layout.trainer.num_ranks=0": "at least 1",
        "seed=${nope}": "seed: ",
        "max_steps=nan": "finite number",
    }.items():
        lines = refused(capsys, at, word)
        assert any(expected in line for line in lines), (word, lines)


def nan_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name].clone().fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


SEEN_LATER: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "weights that are not numbers": (nan_weights, [], "model.path .*log-probs are not finite"),
    "a torn tokenizer": (write("tokenizer.json", b'{"version": "1.0"'), [], "config and tokenizer of .* be loaded"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "words", "expected"), SEEN_LATER.values(), ids=SEEN_LATER)
def test_problems_that_only_a_rank_finds_are_one_line_too(
    damage: Callable[[Path], None],
    words: list[str],
    expected: str,
    tmp_path: Path,
    digit_model: Path,
    digit_data: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(digit_model, model)
    damage(model)
    base = [word for word in BASE if not word.startswith("run_dir")]
    start = Start(
        tmp_path / "run",
        [*base, f"model.path={model}", f"data.train={digit_data}", "layout=single", *words],
        {"PYTHONPATH": str(ROOT)},
    )
    assert start.wait() == ExitCode.BAD_INPUT, start.text
    (line,) = start.errors.read_text().splitlines()
    assert line.startswith("hpcrl: ") and re.search(expected, line), line
    assert start.processes() == []
