"""Each part has on the device the numbers that it has on the CPU, and waits no more often than waits.txt says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gpu_rehearsal.parts import PARTS, differing, rehearse
from tests.gpu_rehearsal.table import NO_REASON, lines_of, read

pytestmark = pytest.mark.timeout(300)
ONCE_PER_TENSOR = ("snapshot", "offload", "onload", "load weights", "received", "checked", "whole weights")
"""What may go on tensor by tensor; everything else waits as often whatever the number of layers."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_part_computes_the_same_and_waits_as_often_as_said(name: str, tmp_path: Path) -> None:
    results = rehearse(name, tmp_path)
    for rank, result in enumerate(results):
        assert result.wanted and differing(result) == [], f"on rank {rank}"
    found = {line.key: line.counted for line in lines_of(results)}
    of_part = {section for result in results for sections in result.counted.values() for section in sections}
    said = {line.key: line.counted for line in read() if line.during in of_part}
    assert found == said, "python -m tests.gpu_rehearsal rewrites waits.txt; each new line needs its reason"


STAND_IN = "a stand-in for Transformer Engine"
"""Layers of Megatron-Core that GPUs do not have."""


def test_every_wait_has_its_reason_and_no_step_waits_for_each_layer() -> None:
    lines = read()
    assert {line.during.split(":")[0].split()[0] for line in lines} <= {name.split()[0] for name in PARTS}
    assert [line for line in lines if line.reason in (NO_REASON, "")] == []
    growing = [line for line in lines if line.per_layer and not line.during.endswith(ONCE_PER_TENSOR)]
    assert [line for line in growing if not line.reason.startswith(STAND_IN)] == []


@pytest.mark.slow
def test_deliberate_faults_are_found() -> None:
    """In a process of their own: what other tests import and set decides how torch dispatches."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu_rehearsal/faults.py"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
