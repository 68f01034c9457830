"""Turns of FSDP2 and Megatron-Core with a generator; DeepSpeed's are in test_deepspeed.py. And the memory they use.

On a CPU nothing has to move: here the state moves to other memory, and the old memory is overwritten, so a tensor that
still used it would make the results NaN."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from hpcrl.checkpoint.writer import SharedFile
from hpcrl.config import TrainerConfig
from hpcrl.engines.train import offloading
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.megatron.spec import MegatronConfig
from tests.engines.moving import Left
from tests.engines.worlds import VOCAB, Weighted, make_batch, make_model_folder, norms_of, run_ranks

if TYPE_CHECKING:
    from hpcrl.engines.train.megatron.engine import MegatronEngine

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("world_of_one", "console")]

LENGTHS = (9, 12, 5, 14)
PLAN = [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder("qwen2", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    left = Left(monkeypatch)
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
def test_offloading_fsdp2_changes_nothing(param_dtype: str, folder: Path, left: Left) -> None:
    config = TrainerConfig(lr=1e-2, param_dtype=param_dtype, logits_chunk_tokens=8)
    stays, moves = (FSDP2Engine(config, folder, dtype=torch.float32, total_steps=9) for _ in range(2))
    assert moves.sharded == (param_dtype == "bfloat16")
    for _ in range(2):
        step(stays)
        step(moves)
        moves._move(moves._host.to_host, weights=False)
        optimizer = left.overwrite()
        assert dict(moves.named_weights()).keys() == dict(stays.named_weights()).keys()
        moves._move(moves._host.to_host, weights=True)
        assert left.overwrite() >= 4 * moves.num_parameters, "the optimizer is there already"
        assert optimizer >= 8 * moves.num_parameters
        assert moves.weight_layout() == stays.weight_layout(), "groups are made while the trainer is away"
        states = [engine.optimizer.state.values() for engine in (moves, stays)]  # type: ignore[union-attr]
        for mine, others in zip(*states, strict=True):  # what a checkpoint takes
            assert all(torch.equal(mine[key], others[key]) for key in others)
        moves._move(moves._host.to_device, weights=True)
        assert left.overwrite() >= 12 * moves.num_parameters
        same(moves, stays)


def _uneven(folder: Path) -> list[bool]:
    """Two turns of a rank with padded shards: whether log-probs equal those of an engine that never moves."""
    with pytest.MonkeyPatch.context() as patch:
        left, batch, same = Left(patch), make_batch(LENGTHS), []
        config = TrainerConfig(lr=1e-2, logits_chunk_tokens=8)
        stays, moves = (FSDP2Engine(config, folder, dtype=torch.float32, total_steps=9) for _ in range(2))
        for _ in range(2):
            for engine in (stays, moves):
                engine.train_step(batch, PLAN, Weighted(0.7, entropy=True), norms_of(batch))
            moves._move(moves._host.to_host, weights=True)
            assert left.overwrite()
            moves._move(moves._host.to_device, weights=True)
            assert left.overwrite()
            same.append(torch.equal(moves.logprobs(batch, PLAN, 0.7), stays.logprobs(batch, PLAN, 0.7)))
    return same


@pytest.mark.slow
def test_offloading_two_ranks_with_uneven_shards_changes_nothing(tmp_path: Path) -> None:
    folder = make_model_folder("qwen2", tmp_path / "model", vocab_size=VOCAB + 1)
    assert VOCAB % 2 == 0 and run_ranks(2, _uneven, folder) == [[True, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "whole"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_offloading_megatron_changes_nothing(param_dtype: str, distributed: bool, folder: Path, left: Left) -> None:
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
    """The state for a checkpoint, taken while the engine is offloaded."""
    from hpcrl.engines.train.megatron import checkpoint

    files: list[dict[str, Any]] = [dict(each.snapshot(copy=False)) for each in (engine, other)]
    assert files[0].keys() == files[1].keys()
    of_engines = [
        {piece.key: piece.values.clone() for piece in checkpoint.pieces(each.chunks, each.optimizer)}  # type: ignore[arg-type]
        for each in (engine, other)
    ]
    assert of_engines[0].keys() == of_engines[1].keys()
    assert all(torch.equal(values, of_engines[1][key]) for key, values in of_engines[0].items())


def test_a_tensor_that_was_not_moved_is_detected(folder: Path, left: Left) -> None:
    """Negative control: a parameter whose memory is overwritten."""
    config = TrainerConfig(lr=1e-2, logits_chunk_tokens=8)
    engine = FSDP2Engine(config, folder, dtype=torch.float32, total_steps=9)
    left.note(engine.shards[0])
    assert left.overwrite() == engine.shards[0].numel() * 4
    batch = make_batch(LENGTHS)
    assert engine.logprobs(batch, PLAN, 0.7).isnan().any()


# ---- the memory


def memory_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_host_memory_is_reused_by_every_offload() -> None:
    host = offloading.HostMemory(torch.device("cpu"))
    state = {"weights": torch.randn(3, 5), "counter": torch.tensor(1), "none": torch.empty(0, 4)}
    first = host.to_host(state)
    assert all(torch.equal(first[name], state[name]) for name in state)
    assert memory_of(first)["weights"] != memory_of(state)["weights"]
    assert host.to_host(first) == first, "it is there already"
    back = host.to_device(first)
    assert all(torch.equal(back[name], state[name]) for name in state)
    back["weights"] += 1
    second = host.to_host(back)
    assert memory_of(second)["weights"] == memory_of(first)["weights"]
    assert torch.equal(second["weights"], state["weights"] + 1)
    host.to_device(second)
    grown = host.to_host({"weights": torch.ones(7)})
    assert torch.equal(grown["weights"], torch.ones(7)), "as after a resume with other sizes"


def test_only_state_that_was_on_the_device_or_is_new_moves_there() -> None:
    host = offloading.HostMemory(torch.device("meta"))
    counter, made = torch.tensor(1.0), torch.ones(2)
    assert host.to_host({"counter": counter})["counter"] is counter
    assert not host._is_away("counter", counter) and host._is_away("made", made)


class Code:
    """Like torch's cudaError, which is truthy for every value."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code

    def __str__(self) -> str:
        return f"cudaError {self._code}"


class Driver:
    """Replaces CUDA's runtime: registers up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.registered, self.waits = most, 0, 0

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        assert pointer % mmap.PAGESIZE == 0
        if self.registered + num_bytes > self.most:
            return Code(2)
        self.registered += num_bytes
        return Code(0)


@pytest.mark.parametrize("most", [1 << 20, 4])
def test_host_memory_is_registered_and_synchronised_once(
    most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, waits = Driver(most), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    offloading._say_refused.cache_clear()
    host = offloading.HostMemory(torch.device("cpu"))
    state = {str(n): torch.full((n,), float(n)) for n in range(1, 4)}
    for turn in range(1, 3):
        away = host.to_host(state)
        assert len(waits) == 2 * turn - 1 and all(torch.equal(away[name], state[name]) for name in state)
        state = host.to_device(away)
    assert driver.registered == (4 * 6 if most > 4 else 4)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (most == 4)
    assert all(line.startswith("hpcrl: CUDA cannot register host memory (cudaError 2; ulimit -l is ") for line in said)


def test_a_snapshot_is_registered_and_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FSDP2Engine(TrainerConfig(lr=1e-2, logits_chunk_tokens=8), folder, dtype=torch.float32, total_steps=9)
    step(engine)
    calls: list[str] = []
    driver = Driver(1 << 30)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    copies = [engine.snapshot()["__0_0.distcp"] for _ in range(2)]
    assert copies[0] is copies[1] and calls == ["wait", "wait"]
    assert isinstance(copies[0], SharedFile) and driver.registered == len(copies[0].buffer)
