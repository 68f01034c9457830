"""Proof of rule 1: Megatron-Core owns the trainers' default group inside a world that also has other roles."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# find_spec rather than importorskip: collecting must not pay for importing Megatron-Core
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(360),
    pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed (extra: megatron)"),
]

PROGRAM = Path(__file__).with_name("megatron_world.py")
DEADLINE_S = 300.0  # the program gives up before
GRADIENT_TOLERANCE = 1e-5  # of each parameter's largest gradient, fp32
LOSS_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the four ranks and the reference wrote into."""
    folder = tmp_path_factory.mktemp("world")
    # The world keeps a receive open from before the peers' first message, which waits for them if pairs connect late.
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "0"}
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(folder)], env=environ, start_new_session=True)
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return folder


def join_shards(shards: list[Tensor], dim: int | None, stride: int) -> Tensor:
    """The whole parameter: shards of a gated layer hold `stride` pieces (gate, up), each split over the ranks."""
    if dim is None:
        assert all(torch.equal(shards[0], shard) for shard in shards)
        return shards[0]
    pieces = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([rank[piece] for piece in range(stride) for rank in pieces], dim)


def joined(reports: list[dict[str, Any]], field: str) -> dict[str, Tensor]:
    return {
        name: join_shards([r[field][name][0] if field == "gradients" else r[field][name] for r in reports], dim, stride)
        for name, (_, dim, stride) in reports[0]["gradients"].items()
    }


def disagreements(trainers: list[dict[str, Any]], reference: dict[str, Any]) -> list[str]:
    found = [
        name
        for name, gradient in joined(trainers, "gradients").items()
        if (gradient - (expected := reference["gradients"][name][0])).abs().max()
        > GRADIENT_TOLERANCE * expected.abs().max()
    ]
    found += [
        key
        for key in ("loss", "loss_after", "grad_norm")
        if abs(trainers[0][key] / reference[key] - 1) > LOSS_TOLERANCE
    ]
    return found


def test_megatron_steps_on_its_own_default_group(world: Path) -> None:
    trainers = [torch.load(world / f"trainer_{i}.pt") for i in (0, 1)]
    reference = torch.load(world / "reference.pt")
    assert trainers[0]["weights"]["output_layer.weight"].shape == (32, 32)  # half of the vocabulary: TP2 is on
    for name, weight in joined(trainers, "weights").items():
        assert torch.equal(weight, reference["weights"][name]), name
    assert disagreements(trainers, reference) == []
    assert reference["loss_after"] < reference["loss"]


def test_a_perturbed_weight_is_noticed(world: Path) -> None:
    trainers = [torch.load(world / f"trainer_{i}.pt") for i in (0, 1)]
    found = disagreements(trainers, torch.load(world / "perturbed.pt"))
    assert {"loss", "loss_after", "grad_norm", "output_layer.weight"} <= set(found)


def test_groups_and_queues_between_roles_work_before_and_after_the_step(world: Path) -> None:
    answers = json.loads((world / "answers.json").read_text())
    by = {(a["rank"], a["did"]): a for a in answers}
    assert [by[rank, "build"]["default_group_size"] for rank in (1, 2)] == [2, 2]
    tokens_sum = by[3, "receive_batch"]["sum"]
    assert tokens_sum > 0
    assert by[1, "publish"]["verdict"] == tokens_sum  # posted before the step, sent after it
    weight = by[0, "publish"]["weight"]
    assert weight == by[3, "publish"]["weight"]
    assert any(w != 1.0 for w in weight)  # its value changed in the step
    assert by[1, "step"]["loss"] == by[2, "step"]["loss"]
