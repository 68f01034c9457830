"""`pipeline: convert`: a checkpoint of a run becomes a model, even with kills and signals."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.launch.__main__ import main
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.conftest import ROOT
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL_FILES = "convert.shard_gb=2e-6"
"""Every tensor has a file of its own."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run after one step; its initial model is in its folder `model`."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    words = ["pipeline=sft", "layout=single", "max_steps=1", "eval_every=0", "sft.batch_size=2", "trainer.lr=1e-2"]
    start = Start(run_dir, [*words, "data.train=task:sort_digits"])
    assert start.wait() == 0, start.text
    return run_dir


@pytest.fixture
def slow_disk(tmp_path: Path) -> Mapping[str, str]:
    """Environment in which a conversion takes seconds until the file `pace` contains 0."""
    (tmp_path / "pace").write_text("0.3")
    path = f"{ROOT / 'tests' / 'slow_disk'}{os.pathsep}{ROOT}"
    return {"PYTHONPATH": path, "HPCRL_TEST_PACE": str(tmp_path / "pace")}


def convert(run_dir: Path, *words: str, environ: Mapping[str, str] | None = None) -> Start:
    return Start(run_dir, ["+experiment=convert", *words], environ)


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)("digit 17", return_tensors="pt").input_ids
    with torch.no_grad():
        return model(tokens).logits


def written(run_dir: Path) -> dict[str, int]:
    """Weight file -> inode, for complete files."""
    folder = run_dir / "hf" if (run_dir / "hf").exists() else run_dir / ".hf.converting"
    return {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}


def test_a_checkpoint_of_a_run_is_converted_and_loaded(trained: Path, tmp_path: Path) -> None:
    start = convert(tmp_path / "converted", f"convert.source={trained}", "convert.verify=true")
    assert start.wait() == 0, start.text
    line = f"{trained}/checkpoints/step_000001 -> {tmp_path}/converted/hf: 26 tensors, 0.00048 GB, read back and equal"
    assert line in start.text
    assert torch.equal(logits(tmp_path / "converted" / "hf"), logits(trained / "hf"))
    assert not torch.equal(logits(trained / "hf"), logits(trained / "model")), "the run has changed the model"
    again = convert(tmp_path / "converted", f"convert.source={trained}", "convert.verify=true")
    assert again.wait() == 0 and f"\nfinished: {line}; choose another run_name or resume=fresh\n" in again.text


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.soak), signal.SIGTERM])
def test_a_killed_or_signalled_conversion_resumes(
    number: signal.Signals, trained: Path, tmp_path: Path, slow_disk: Mapping[str, str]
) -> None:
    run_dir, words = tmp_path / "run", (f"convert.source={trained}", SMALL_FILES)
    start = convert(run_dir, *words, environ=slow_disk)
    start.wait_until(lambda: len(written(run_dir)) >= 2)
    if number == signal.SIGKILL:
        start.kill()
    else:
        start.process.send_signal(number)
        assert start.wait() == ExitCode.TERMINATED, start.text
        assert f"hpcrl: stopped by {number.name}; the next attempt continues from here\n" in start.text
    done = written(run_dir)
    assert 2 <= len(done) < 26 and not (run_dir / "hf").exists()
    (tmp_path / "pace").write_text("0")
    assert (again := convert(run_dir, *words, environ=slow_disk)).wait() == 0, again.text
    assert written(run_dir).items() >= done.items(), "whole files are not written again"
    assert torch.equal(logits(run_dir / "hf"), logits(trained / "hf"))


def test_a_kill_between_the_last_file_and_the_final_record_is_recovered(trained: Path, tmp_path: Path) -> None:
    run_dir, words = tmp_path / "run", (f"convert.source={trained}",)
    assert (start := convert(run_dir, *words)).wait() == 0, start.text
    before = written(run_dir)
    (run_dir / "finished.json").unlink()
    assert (start := convert(run_dir, *words)).wait() == 0, start.text
    assert written(run_dir) == before and (run_dir / "finished.json").exists()
    # Other files under this name do not count as the result.
    (run_dir / "finished.json").unlink()
    (run_dir / "hf" / "model.safetensors").write_bytes(b"other")
    assert (start := convert(run_dir, *words)).wait() == ExitCode.BAD_INPUT
    assert f"convert.target {run_dir}/hf exists, and nothing is overwritten" in start.text
    assert (run_dir / "hf" / "model.safetensors").read_bytes() == b"other"


def test_damage_visible_only_in_hashes_is_reported_in_one_line(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    shard = max((tmp_path / "copy" / "checkpoints").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    start = convert(tmp_path / "run", f"convert.source={tmp_path}/copy/checkpoints/step_000001")
    assert start.wait() == ExitCode.BAD_INPUT
    (line,) = [line for line in start.errors.read_text().splitlines() if line.startswith("hpcrl: ")]
    assert "convert.source" in line and f"{shard.name} is not what was committed" in line
    assert not (tmp_path / "run" / "hf").exists()


def test_bad_input_is_one_line_and_nothing_starts(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "unsaved" / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    cases = {
        "convert.source=nowhere": "convert.source nowhere is not a folder",
        f"convert.source={tmp_path}/unsaved": f"convert.source {tmp_path}/unsaved: this run has no checkpoint yet",
        f"convert.source={tmp_path}/old": f"convert.source {tmp_path}/old is not a checkpoint: no .metadata in it",
        f"convert.source={trained} convert.target={tmp_path}/old": f"convert.target: {tmp_path}/old exists, and",
        f"convert.source={trained} convert.model={tmp_path}": f"{tmp_path}/config.json cannot be read",
        f"convert.source={trained} convert.dtype=int8": "convert.dtype: expected",
        f"convert.source={trained} trainer.lr=1": "trainer.lr: not read here, the convert pipeline neither trains nor",
        "convert.source=null": "convert.source: set it to the run folder or the checkpoint to convert",
    }
    for words, text in cases.items():
        done = in_process.run(main, "+experiment=convert", f"run_dir={tmp_path}/run", *words.split(), at=tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == ExitCode.BAD_INPUT and line.startswith(text), line
    assert not (tmp_path / "run").exists()
