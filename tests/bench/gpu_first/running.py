"""A step in processes of its own: its figures, how it ended, and the stack if it failed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.node.caches import cache_folders
from tests.bench.gpu.__main__ import FAILURES, NO_END
from tests.bench.gpu.common import Row, rows_in
from tests.bench.gpu.ending import STACKS, end_all
from tests.bench.gpu_first.figures import Figure, figure_of
from tests.bench.gpu_first.stacks import stacks_in, table_lines
from tests.bench.gpu_first.steps import Setting, Step

ROOT = Path(__file__).parents[3]
LARGE = ("checkpoints", "hf", "model", "rollouts")
"""Folders of a run that are deleted once all commands of the step have ended."""
CHECKED = '{"bench": "gpu"'
"""The beginning of gpu-check's line of JSON."""


@dataclass
class Outcome:
    """status: ok, failed, hung, interrupted or not run; error: why. table: lines of waits.txt about the stacks."""

    name: str
    status: str = "ok"
    seconds: float = 0.0
    error: str = ""
    log: str = ""
    figures: list[Figure] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    table: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, words: dict[str, Any]) -> Outcome:
        """From dataclasses.asdict()."""
        return cls(**{**words, "figures": [Figure(**figure) for figure in words["figures"]]})


def missing(step: Step, setting: Setting) -> str:
    """The step's missing requirements; empty if it can run."""
    if setting.device == "cuda" and setting.num_gpus < step.num_gpus:
        return f"needs {step.num_gpus} GPUs, {setting.num_gpus} found"
    return ", ".join(f"{name} is not installed" for name in step.modules if importlib.util.find_spec(name) is None)


def run_step(name: str, step: Step, setting: Setting, report: Path, limit_s: float) -> Outcome:
    """Run the step's commands in turn, also after a failure, until limit_s is used up. Their files: report/NAME."""
    folder, started = report / name.replace(" ", "_"), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = Outcome(name, log=str(folder / "log.txt"))
    with tempfile.TemporaryDirectory(prefix="hpcrl-first-") as scratch:
        caches = cache_folders({"TMPDIR": scratch} if step.fresh_caches else os.environ)
        environ = {**os.environ, **caches, **STACKS}
        for label, command in step.commands.items():
            began = time.monotonic()
            if (left_s := limit_s - (began - started)) <= 0:
                break
            rows = _rows_of(outcome, command(setting, folder, left_s), environ, left_s)
            rows += [Row("", "seconds", time.monotonic() - began, "s")] if label else []
            outcome.figures += [figure_of(row, name, label, setting.tiny) for row in rows]
    for path in (path for large in LARGE for path in folder.glob(f"*/{large}")):
        shutil.rmtree(path)
    outcome.seconds = time.monotonic() - started
    own = [figure for figure in outcome.figures if not figure.what.startswith("device: ")] or outcome.figures
    if outcome.status == "ok" and own and all(figure.value is None and figure.within is None for figure in own):
        outcome.status, outcome.error = "not run", "; ".join(figure.note for figure in own)
    return outcome


def _rows_of(outcome: Outcome, words: list[str], environ: dict[str, str], limit_s: float) -> list[Row]:
    """Run a command and return the rows that it printed. The outcome gets the first failure, or the first hang."""
    log, began, hangs, code = Path(outcome.log), time.time(), False, 0
    with log.open("ab") as file:
        start = file.tell()
        file.write(f"$ {shlex.join(words)}\n".encode())
        file.flush()
        pipes: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        child = subprocess.Popen(words, cwd=ROOT, env=environ, start_new_session=True, **pipes)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            hangs = True
        finally:
            end_all(child)
    said = log.read_bytes()[start:].decode(errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    checked = [Row(**row) for line in lines if line.startswith(CHECKED) for row in json.loads(line)["rows"]]
    if (code or hangs) and outcome.status != "hung":
        failed = "; ".join(f"{row.part}: {row.note or row.what}" for row in checked if row.verdict in FAILURES)
        error = f"{NO_END} {limit_s:.0f} s: {shlex.join(words[1:4])[:80]}" if hangs else failed or lines[-1]
        hangs = hangs or NO_END in failed
        logs = [path for path in sorted(log.parent.rglob("rank_*.log")) if path.stat().st_mtime >= began]
        texts = {path.name: path.read_text(errors="replace") for path in logs[::-1]}  # rank 0 waits for the others
        if outcome.status == "ok" or hangs:
            outcome.status, outcome.error = "hung" if hangs else "failed", " ".join(error.split())[:300]
            outcome.stacks = stacks_in({**texts, log.name: said}, hangs)
            outcome.table = table_lines(outcome.stacks)
    return [*rows_in(said), *checked]
