"""A real Slurm for each test module, and the overrides of a run that trains in seconds."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import digit_data, digit_model  # noqa: F401 - fixtures


def load_one_machine() -> ModuleType:
    """env/slurm/one_machine.py, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location("one_machine", ROOT / "env" / "slurm" / "one_machine.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["one_machine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def one_machine() -> ModuleType:
    """The module with Cluster and Nodes."""
    if shutil.which("slurmctld") is None and not Path("/usr/sbin/slurmctld").exists():
        pytest.skip("no slurmctld; apt-get install slurm-wlm slurm-client")
    return load_one_machine()


@pytest.fixture(scope="module")
def cluster(one_machine: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running Cluster of 4 nodes with 4 cores each; its partitions are low, high and solo."""
    with one_machine.Cluster(tmp_path_factory.mktemp("slurm"), [one_machine.Nodes("n", 4)]) as running:
        yield running


WORDS = """
layout=single deterministic=true cluster.time=00:30:00 save_every=2 eval_every=0
rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=3 data.max_prompt_tokens=32 rollout.filter_std=false
rollout.save_rollouts=false algorithm.num_mini_batches=1 reward.default.name=exact_match trainer.lr=1e-3
timeouts.grace_s=3
"""


@pytest.fixture
def tiny(digit_model: Path, digit_data: Path) -> list[str]:  # noqa: F811 - fixtures
    """Overrides of the smallest run: one rank, first step 4 s after submission, 15 ms a step, without max_steps."""
    return [f"model.path={digit_model}", f"data.train={digit_data}", *WORDS.split()]
