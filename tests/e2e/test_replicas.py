"""A run continues without generator replicas that die or hang at any time, and loses no prompt."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS, check_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS, COMMAND_S = 16, 14.0
APART = f"""
layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=4 layout.reward.colocate_with=trainer
layout.reward.num_ranks=null layout.reference.colocate_with=trainer layout.reference.num_ranks=null
timeouts.command_s={COMMAND_S} max_steps={NUM_STEPS} generator.max_num_seqs=2
""".split()
"""Rank 1 trains, 2 to 5 generate."""


@pytest.mark.parametrize(
    ("more", "dies"),
    [
        pytest.param(
            ["rollout.max_staleness=0"],
            "2:TransferRollouts:4:SIGKILL 3:UpdateWeights:6:SIGKILL 4:DecodeChunk:40:SIGSTOP",
            marks=pytest.mark.soak,
        ),
        (["rollout.max_staleness=1"], "2:TransferRollouts:4:SIGSTOP 3:UpdateWeights:6:SIGKILL 4:SavePending:4:SIGKILL"),
        (
            ["env=scripted", "layout.env.num_ranks=1"],
            "2:TransferRollouts:3:SIGKILL 3:DecodeChunk:20:SIGKILL 4:DecodeChunk:60:SIGKILL",
        ),
    ],
    ids=["sync", "async", "environments"],
)
def test_a_run_survives_the_loss_of_replicas_one_after_another(
    tmp_path: Path, digit_model: Path, digit_data: Path, more: list[str], dies: str
) -> None:
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    words = [*inputs, *WORDS, *APART, *more, "save_every=2"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/e2e/dies", "HPCRL_TEST_DIES": dies}
    start = Start(tmp_path / "run", words, environment)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    lost = re.findall(r"rank (\d) \(generator\).* is lost: .*; the run continues without it", start.text)
    assert sorted(lost) == ["2", "3", "4"], start.text
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    check_accounts(tmp_path / "run")


@pytest.mark.parametrize(("least", "command"), [(2, "TransferRollouts"), (1, "BuildGroup")])
def test_losing_a_required_replica_ends_the_run(
    tmp_path: Path, digit_model: Path, digit_data: Path, least: int, command: str
) -> None:
    """A minimum number must remain; while groups are created all are required."""
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    more = ["layout.generator.num_ranks=2", f"rollout.min_replicas={least}"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/e2e/dies", "HPCRL_TEST_DIES": f"2:{command}:1:SIGKILL"}
    start = Start(tmp_path / "run", [*inputs, *WORDS, *APART, *more], environment)
    assert start.wait() == ExitCode.RANK_KILLED, start.text
    lines = start.errors.read_text().splitlines()
    killed = rf"hpcrl: rank 2 \(generator\) .* was killed by {signal.SIGKILL.name} in {command}"
    assert len(lines) == 1 and re.match(killed, lines[0]), start.text
