"""make gpu-first at sizes for a CPU: a working step after a failing and a hanging one, and the report."""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcrl.config import load
from hpcrl.system.clock import AwakeClock
from hpcrl.system.exit_codes import ExitCode
from tests.bench.gpu.common import Row
from tests.bench.gpu_first.__main__ import main, run_all
from tests.bench.gpu_first.figures import figure_of
from tests.bench.gpu_first.steps import STEPS, Command, Setting, Step
from tests.bench.gpu_first.waits import WARNING, compare, warned
from tests.children import runs
from tests.conftest import ROOT
from tests.gpu_rehearsal.ledger import Ledger

TINY = Setting("cpu", True, 0)
FAILS = """
from tests.bench.gpu.common import Row
from hpcrl.algorithms.interface import model_tokens
Row("before", "it fails", 3.0, "s", 2.0, "bad").say()
model_tokens(None)
"""
HANGS = """
import subprocess, sys, time
def started():
    child = subprocess.Popen([sys.executable, "-c", "import time\\ndef sleeping(): time.sleep(600)\\nsleeping()"],
        start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(600)
started()
"""


def program(text: str) -> dict[str, Command]:
    return {"only": lambda setting, folder, left_s: [sys.executable, "-c", text]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_step_is_reported_whatever_happened_to_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {
        "fails": Step("a traceback", 60, program(FAILS)),
        "hangs": Step("stacks", 8, program(HANGS)),
        "lacks": Step("nothing", 60, {}, modules=("no_such_module",)),
        "too long": Step("nothing", 10000, {}),
        "deterministic": STEPS["deterministic"],
    }
    assert run_all(list(steps), TINY, tmp_path, 500.0, steps) == 1
    found = {outcome["name"]: outcome for outcome in json.loads((tmp_path / "report.json").read_text())["steps"]}
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "fails": "failed",
        "hangs": "hung",
        "lacks": "not run",
        "too long": "not run",
        "deterministic": "ok",
    }
    fails, hangs = found["fails"], found["hangs"]
    assert fails["error"] == "AttributeError: 'NoneType' object has no attribute 'loss_mask'"
    (traceback,) = fails["stacks"]
    assert "in model_tokens" in traceback and "AttributeError" in traceback
    assert [line.split(":")[0] for line in fails["table"]] == ["nonzero in algorithms/interface.py"]
    assert fails["figures"][0]["what"] == "only before: it fails"
    assert (fails["figures"][0]["expected"], fails["figures"][0]["within"]) == ("limit 2", False)
    assert hangs["error"].startswith("no end after 8 s") and hangs["seconds"] < 20
    assert all(any(f"in {name}\n" in stack for stack in hangs["stacks"]) for name in ("started", "sleeping"))
    log = Path(hangs["log"]).read_text()
    assert not runs(int(log.rpartition("\nchild ")[2].split()[0]))
    assert found["lacks"]["error"] == "no_such_module is not installed"
    assert "(--minutes)" in found["too long"]["error"]

    figures = {figure["what"]: figure for figure in found["deterministic"]["figures"]}
    same, norm = figures["metrics that differ"], figures["gradient norm"]
    assert (same["value"], same["expected"], same["within"]) == (0, "at most 0", True)
    assert (norm["expected"], norm["within"]) == ("at least 1e-09", True) and norm["value"] > 0.01
    assert figures["peak in training"]["value"] > 0.1, "GiB of the rank that trains"

    page = (tmp_path / "report.txt").read_text()
    assert page in capsys.readouterr().out
    assert page.startswith("hpcrl's first half hour on cpu, tiny: 1 of 5 steps ok\n")
    assert "== hangs hung: no end after 8 s" in page and "in started" in page
    assert "waits.txt: nonzero in algorithms/interface.py:model_tokens: once a micro-batch" in page
    assert max(map(len, page.splitlines())) < 200 and page.count("\n") < 100

    again = {"fails": Step("nothing", 60, program("")), "hangs": steps["hangs"]}
    assert run_all(["fails"], TINY, tmp_path, 500.0, again) == 0
    found = {outcome["name"]: outcome for outcome in json.loads((tmp_path / "report.json").read_text())["steps"]}
    assert found["hangs"] == hangs and found["fails"]["status"] == "ok", "the others stay"


@pytest.mark.slow
def test_a_later_start_loses_no_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another number of GPUs, too little time, a Ctrl-C, or another device."""

    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    def statuses() -> list[str]:
        return [outcome["status"] for outcome in json.loads((tmp_path / "report.json").read_text())["steps"]]

    good = {name: Step("nothing", 60, program("")) for name in ("one", "two")}
    assert run_all(["one", "two"], TINY, tmp_path, 500.0, good) == 0
    assert run_all(["two"], replace(TINY, num_gpus=2), tmp_path, 1.0, good) == 2
    assert "1 of 1  two: nothing (up to 60 s)  1 s left\n    not run 1 s left (--minutes)" in capsys.readouterr().out
    steps = {**good, "three": Step("nothing", 60, {"": interrupted}), "four": good["one"]}
    assert run_all(["three", "four"], TINY, tmp_path, 500.0, steps) == 130
    assert run_all(["one"], TINY, tmp_path, 500.0, {**steps, "one": steps["three"]}) == 130
    assert statuses() == ["ok", "ok", "interrupted"]
    with pytest.raises(ValueError, match=r"has the report of --device cpu --tiny"):
        run_all(["one"], Setting("cuda", False, 1), tmp_path, 500.0, steps)
    assert len(statuses()) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "versions", "--from", "engines"], "--only versions and --from engines leave no step"),
        (["--minutes", "0"], "--minutes: 0: more than 0 is needed"),
        (["--report", "FILE"], "--report: .*File exists.*; name another folder"),
    ],
)
def test_an_invalid_start_is_refused_in_one_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        main(["--device", "cpu", "--tiny", *(str(tmp_path / "file") if word == "FILE" else word for word in words)])
    assert end.value.code == ExitCode.BAD_INPUT and re.search(f"gpu-first: error: .*{told}", capsys.readouterr().err)


def test_figures_are_judged_by_bounds_shares_of_limits_or_their_own_verdict() -> None:
    def judged(row: Row, step: str = "run", tiny: bool = False) -> tuple[str, bool | None]:
        figure = figure_of(row, step, "", tiny)
        return figure.expected, figure.within

    assert judged(Row("", "steps", 4)) == ("4", True) and judged(Row("", "steps", 3)) == ("4", False)
    assert judged(Row("", "steps", 3), "deterministic") == ("", None)
    product = Row("training", "rate, of a product's", 200.0, "TFLOP/s", 800.0)
    assert judged(product) == ("at least 240, at most 800", False)
    assert judged(product, tiny=True) == ("limit 800", None)
    assert judged(Row("training", "first offload", 2.0)) == ("at least 1", True)
    assert judged(Row("training", "offload", 2.0)) == ("at least 10", False)
    assert judged(Row("lost peer", "dies", verdict="bad")) == ("", False)
    assert judged(Row("decode vllm", verdict="not installed", note="vllm")) == ("", None)


def test_each_cuda_warning_is_recorded_with_the_hpcrl_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python warnings, which torch uses too: real CUDA warnings need a GPU."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> float:
        warnings.warn(f"{WARNING} (Triggered internally at CUDAFunctions.cpp)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 0.0

    ledger = Ledger()
    with warned(ledger):
        clock = AwakeClock(60.0, waits)
        with ledger.section("fsdp2: step"):
            clock.now()
            clock.now()
    assert modes == ["warn", "default"]
    assert ledger.sections == {"fsdp2: step": {("system/clock.py:AwakeClock.now", WARNING): 2}}
    new, absent = compare({"fsdp2: step": {"system/clock.py:AwakeClock.now", "algorithms/interface.py:model_tokens"}})
    assert (new.value, new.note) == (1, "fsdp2: step: system/clock.py:AwakeClock.now")
    assert absent.value == 2 and "LossSums.stats" in absent.note and "FSDP2Engine._update" in absent.note


def test_without_a_gpu_the_alternative_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == ExitCode.BAD_INPUT
    assert "--device cpu --tiny" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run", "deterministic"])
def test_runs_on_a_gpu_are_valid_and_have_published_model_sizes(name: str, tmp_path: Path) -> None:
    commands = [command(Setting("cuda", False, 1), tmp_path, 60.0) for command in STEPS[name].commands.values()]
    configs = [load(words[3:]) for words in commands if "hpcrl.launch" in words]
    assert len(configs) == 2 and all(config.check_weights and config.save_every == 1 for config in configs)
    published = json.loads((ROOT / "conf/model/Qwen/Qwen2.5-0.5B-Instruct/config.json").read_text())
    names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size"}
    names |= {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
    }
    names |= {"tie_word_embeddings": "tie_word_embeddings"}
    for own, theirs in names.items():
        assert getattr(configs[0].model.tiny, own) == published[theirs], own


def test_all_steps_on_one_gpu_take_half_an_hour() -> None:
    assert sum(step.limit_s for step in STEPS.values() if step.num_gpus == 1) <= 1900
