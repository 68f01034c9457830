"""A signal before any rank can handle it stops the run like a later one, and is not a crash."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands.status import RunFolder, last_error
from hpcrl.node.preflight import CANARY, read_judgement
from hpcrl.run_folder import OUTCOME, world_folder
from hpcrl.system.exit_codes import ExitCode
from tests.slurm.jobs import Run, wait_until
from tests.slurm.test_preflight import make_run, srun

pytestmark = pytest.mark.slow

HOLD = """
import os, pathlib, sys, time
folder = pathlib.Path(__file__).parent
who = "ranks" if "HPCRL_FORKS" in os.environ else os.environ.get("SLURMD_NODENAME")
hold = folder / "hold"
if "hpcrl.run" in sys.orig_argv and hold.exists() and hold.read_text() == who:
    (folder / "held").write_text(who)
    while hold.exists(): time.sleep(.05)
"""
"""A sitecustomize: the process that the file `hold` names, an agent or what forks ranks, stays before its imports."""


@pytest.mark.parametrize(("name", "code"), [("USR1", ExitCode.REQUEUE), ("TERM", ExitCode.TERMINATED)])
def test_agents_in_the_preflight_end_by_a_signal(cluster: Any, tmp_path: Path, name: str, code: ExitCode) -> None:
    """Two agents wait for the third, which has not started its agent and is ended by the signal."""
    run = make_run(tmp_path / "run", start_s=60)
    signals = f"(until ls {run}/world/attempt_0001/preflight/*/{CANARY} 2>/dev/null; do sleep 0.1; done; sleep 1; "
    signals += f"scancel --signal={name} $SLURM_JOB_ID) >/dev/null 2>&1 & sleep 50"
    began = time.monotonic()
    srun(cluster, str(run), f"[ $SLURMD_NODENAME = n3 ] && {{ {signals}; }}", "run")
    assert time.monotonic() - began < 45, "start_s is 60, the third sleeps 50"
    assert json.loads((world_folder(run, 1) / OUTCOME).read_text()) == {"code": code}
    judged = read_judgement(world_folder(run, 1))
    assert judged is not None and judged.code == code
    assert judged.message == f"ended by SIG{name} before the ranks were started"
    assert last_error(RunFolder(run)) == ""
    assert not list((run / "logs").rglob("rank_*.log")), "a rank was started"


@pytest.mark.timeout(300)
def test_a_job_resumes_after_signals_during_its_start(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """First a starting agent gets a signal, then the first node's starting ranks."""
    (tmp_path / "sitecustomize.py").write_text(HOLD)
    words = [word for word in tiny if not word.startswith("layout")] + ["max_steps=4", "cluster.max_restarts=0"]
    words += ["layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=1"]
    words += ["cluster.components={first: {roles: [controller, trainer, generator]}, rest: {roles: [reward]}}"]
    words += [f"cluster.prologue='export PYTHONPATH={tmp_path}'", "timeouts.start_s=100"]
    run = Run(cluster, tmp_path, *words, pace=0, hold="n2")
    for number, who, said in ((1, "n2", "the ranks were started"), (2, "ranks", "a step boundary")):
        meeting = world_folder(run.dir, number) / "preflight"
        wait_until(partial(_is_held, tmp_path, who, meeting), lambda: run.log)
        run.tell(hold="ranks" if number == 1 else "nobody")
        cluster.run("scancel", "--signal=USR1", str(run.job))
        began = time.monotonic()
        run.wait_said(f"attempt {number} ended (requeue)")
        assert time.monotonic() - began < 60, "start_s is 100: a node waited for what cannot come"
        assert f"agent INFO ended by SIGUSR1 before {said}" in run.log
        run.wait_restart(number)
    log = run.wait_end()
    assert "crash" not in log and run.restarts == 2


def _is_held(folder: Path, who: str, meeting: Path) -> bool:
    """Whether this process is held, while the first node's agent waits or has waited for the others."""
    held = folder / "held"
    return held.exists() and held.read_text() == who and bool(list(meeting.glob(f"*/{CANARY}")))
