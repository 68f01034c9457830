"""Turns of FSDP2 and Megatron-Core with a generator; DeepSpeed's are in test_deepspeed.py.

On a CPU nothing has to move: here the state moves to other memory, and what was left behind is overwritten, so that a
tensor that still used it would make the results NaN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.engines.train import moving
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.megatron.spec import MegatronConfig
from tests.engines.moving import Left
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("world_of_one")]

CPU = torch.device("cpu")
LENGTHS = (9, 12, 5, 14)
PLAN = [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder("qwen2", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    left = Left()
    monkeypatch.setattr(moving, "moved", left.moved)
    # Megatron's buffers go to pinned memory by themselves, and give theirs back.
    monkeypatch.setattr(Tensor, "cpu", Tensor.clone)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    return left


def step(engine: FSDP2Engine | MegatronEngine) -> None:
    batch = make_batch(LENGTHS)
    engine.train_step(batch, PLAN, Weighted(0.7, entropy=True), norms_of(batch))


def same(one: FSDP2Engine | MegatronEngine, other: FSDP2Engine | MegatronEngine) -> None:
    """Weights as generators get them, and log-probs."""
    wanted = dict(other.named_weights())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in one.named_weights())
    batch = make_batch(LENGTHS)
    got, want = (engine.logprobs(batch, PLAN, 0.7) for engine in (one, other))
    assert got is not None and want is not None and got.any() and torch.equal(got, want)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"], ids=["plain", "sharded"])
def test_turns_of_fsdp2_change_nothing(param_dtype: str, folder: Path, left: Left) -> None:
    config = TrainerConfig(lr=1e-2, param_dtype=param_dtype, logits_chunk_tokens=8)
    stays, moves = (FSDP2Engine(config, folder, dtype=torch.float32, total_steps=9) for _ in range(2))
    assert moves.sharded == (param_dtype == "bfloat16")
    for _ in range(2):
        step(stays)
        step(moves)
        moves._move(CPU, weights=False)
        optimizer = left.overwrite()
        assert dict(moves.named_weights()).keys() == dict(stays.named_weights()).keys()
        moves._move(CPU, weights=True)
        assert left.overwrite() >= optimizer + 4 * moves.num_parameters
        assert optimizer >= 8 * moves.num_parameters
        assert moves.weight_layout() == stays.weight_layout(), "groups are made while the trainer is away"
        states = [engine.optimizer.state.values() for engine in (moves, stays)]  # type: ignore[union-attr]
        for mine, others in zip(*states, strict=True):  # what a checkpoint takes
            assert all(torch.equal(mine[key], others[key]) for key in others)
        moves._move(CPU, weights=True)  # back
        assert left.overwrite() >= 12 * moves.num_parameters
        same(moves, stays)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "whole"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_turns_of_megatron_change_nothing(param_dtype: str, distributed: bool, folder: Path, left: Left) -> None:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

    config = TrainerConfig(engine="megatron", lr=1e-2, param_dtype=param_dtype, logits_chunk_tokens=8)
    own = MegatronConfig(distributed_optimizer=distributed)
    stays, moves = (MegatronEngine(config, folder, own=own, total_steps=9) for _ in range(2))
    assert moves.optimizer is not None and stays.optimizer is not None
    masters = 4 * moves.optimizer.has_masters
    for _ in range(2):
        step(stays)
        step(moves)
        moves._to_host(weights=False)
        assert left.overwrite() >= (8 + masters) * moves.num_parameters
        assert not any(buffer.grad_data.untyped_storage().nbytes() for buffer in moves._buffers())
        wanted = dict(stays.named_weights())
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in moves.named_weights())
        moves._to_host(weights=True)
        left.overwrite()
        if distributed:
            assert not any(parameter.untyped_storage().nbytes() for parameter in moves.weights.parameters.values())
        _same_state(moves, stays)
        assert moves.weight_layout() == stays.weight_layout()
        moves._to_device()
        assert left.overwrite() >= (8 + masters) * moves.num_parameters
        same(moves, stays)


def _same_state(engine: MegatronEngine, other: MegatronEngine) -> None:
    """What a checkpoint takes, while the state is away."""
    from hpcrl.engines.train.megatron import checkpoint

    files: list[dict[str, Any]] = [dict(each.snapshot(copy=False)) for each in (engine, other)]
    assert files[0].keys() == files[1].keys()
    of_engines = [
        {piece.key: piece.values.clone() for piece in checkpoint.pieces(each.chunks, each.optimizer)}  # type: ignore[arg-type]
        for each in (engine, other)
    ]
    assert of_engines[0].keys() == of_engines[1].keys()
    assert all(torch.equal(values, of_engines[1][key]) for key, values in of_engines[0].items())


def test_a_tensor_that_is_left_behind_shows(folder: Path, left: Left) -> None:
    """Negative control: a parameter whose memory is overwritten."""
    config = TrainerConfig(lr=1e-2, logits_chunk_tokens=8)
    engine = FSDP2Engine(config, folder, dtype=torch.float32, total_steps=9)
    left.moved(engine.shards[0], CPU)
    assert left.overwrite() == engine.shards[0].numel() * 4
    batch = make_batch(LENGTHS)
    assert engine.logprobs(batch, PLAN, 0.7).isnan().any()
