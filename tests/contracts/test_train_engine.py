"""The contract of training engines, on one rank and on two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.engines.train.training_engine import ComputesEntropies, TrainEngine, check_objective
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.spec.tables import TRAIN_ENGINES
from tests.checkpoint.writing import write_files
from tests.contracts import factories
from tests.engines.worlds import make_batch, make_model_folder, norms_of, process_group, run_ranks

pytestmark = pytest.mark.numerics

LENGTHS = (9, 12, 5, 14, 6, 8)


FACTORIES, MISSING = factories("train", TRAIN_ENGINES)


def test_every_engine_has_a_contract_factory() -> None:
    assert not MISSING, "; ".join(MISSING)


class Likelihood(Objective):
    """Mean log-prob; records which of its outputs had gradients."""

    def __init__(self, temperature: float = 1.0, outputs: Collection[str] = (), logged: Collection[str] = ()):
        self.temperature, self.outputs, self.logged = temperature, frozenset(outputs), frozenset(logged)
        self.seen: set[tuple[bool, bool | None]] = set()

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        entropy = outputs.entropy
        self.seen.add((outputs.logprobs.requires_grad, None if entropy is None else entropy.requires_grad))
        loss = -outputs.logprobs.sum() / norms.tokens
        if "entropy" in self.outputs:
            loss = loss - 0.0 * entropy.sum()
        return loss, {"actor/logprob": stat(outputs.logprobs, batch.loss_mask)}


class Broken(Objective):
    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        return outputs.logprobs.sum() * math.inf, {}


class Critical(Objective):
    outputs = frozenset({"values"})
    logged = frozenset({"entropy"})

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        raise AssertionError("refused before")


def check_weights(engine: TrainEngine) -> None:
    """The ranks' shards together are the weights, which are also available in another dtype."""
    share, layout = dict(engine.named_weights()), engine.weight_layout()
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, layout)
    assert all(other == layout for other in layouts)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    named: dict[str, Tensor] = {name: tensor for of_rank in shares for name, tensor in of_rank.items()}
    assert len({held.name for held in layout}) == len(layout)
    assert {held.name: held.shape for held in layout} == {name: tuple(t.shape) for name, t in named.items()}
    mine = [(held.name, part) for held in layout if (part := held.part_of(dist.get_rank())) is not None]
    parts = [(name, part, tensor.clone()) for (name, part), tensor in zip(mine, engine.local_shards(), strict=True)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    for held in layout:
        whole, boxes = torch.full(held.shape, math.nan, dtype=getattr(torch, held.dtype)), []
        for name, part, tensor in (item for of_rank in gathered for item in of_rank):
            if name == held.name:
                whole[tuple(slice(*bounds) for bounds in part)] = tensor
                boxes.append(part)
        assert sorted(set(boxes)) == sorted(box for box, _ in held.parts), held.name
        assert torch.equal(whole, named[held.name]), held.name
    first, *others = share
    with torch.inference_mode():  # with the generators' sampling temperature
        converted = dict(engine.named_weights({name: torch.bfloat16 for name in others}))
    assert torch.equal(converted[first], named[first])
    assert all(torch.equal(converted[name], named[name].bfloat16()) for name in others)


def check_damage(engine: TrainEngine, folder: Path) -> None:
    """Each file of a checkpoint damaged or missing in turn is one clear line on every rank."""
    last = f"random_rank{dist.get_world_size() - 1}.pt"
    for name in (last, "trainer.json", ".metadata", *sorted(path.name for path in folder.glob("*.distcp"))):
        content = (folder / name).read_bytes()
        for damaged in (content[: len(content) // 2], None):
            dist.barrier()
            if dist.get_rank() == 0:
                (folder / name).unlink() if damaged is None else (folder / name).write_bytes(damaged)
            dist.barrier()
            with pytest.raises(ValueError, match=f"^checkpoint {re.escape(str(folder))}[^\n]*$") as error:
                engine.load(folder)
            assert len(str(error.value)) < 600
            dist.barrier()
            if dist.get_rank() == 0:
                (folder / name).write_bytes(content)
    dist.barrier()


def check_contract(make: Callable[[Path], TrainEngine], model: Path, scratch: Path) -> None:
    """The contract, as assertions; every rank of the default group runs it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = make_batch(LENGTHS)
    batch, norms = whole.select(list(range(rank, len(LENGTHS), size))), norms_of(whole)
    plan = [[0, 1], list(range(2, batch.num_sequences)), []]
    engine = make(model)
    assert (engine.data_parallel_rank, engine.data_parallel_size, engine.optimizer_step) == (rank, size, 0)
    assert engine.config_summary()["num_ranks"] == size

    before = engine.logprobs(batch, plan, 1.0)
    assert before.shape == (batch.num_tokens,) and before.dtype == torch.float32 and not before.requires_grad
    assert bool((before[batch.loss_mask] < 0).all()) and not before[~batch.loss_mask].any()
    one_by_one = [[row] for row in range(batch.num_sequences)]
    torch.testing.assert_close(engine.logprobs(batch, one_by_one, 1.0), before, rtol=0, atol=1e-5)
    assert not engine.logprobs(batch, [[0], []], 1.0).split(batch.lengths.tolist())[1].any()
    assert (engine.logprobs(batch, plan, 3.0) - before).abs().max() > 0.1
    assert isinstance(engine, ComputesEntropies) == ("entropy" in engine.computes)
    if isinstance(engine, ComputesEntropies):
        entropies = engine.entropies(batch, plan, 1.0)
        assert entropies.dtype == torch.float32 and not entropies.requires_grad
        assert bool((entropies[batch.loss_mask] > 0).all()) and not entropies[~batch.loss_mask].any()
        assert (engine.entropies(batch, plan, 0.5) < entropies)[batch.loss_mask].all()
    engine.offload(weights=False)
    engine.offload()
    engine.offload()
    engine.onload()
    engine.onload()
    assert torch.equal(engine.logprobs(batch, plan, 1.0), before)

    check_objective(engine, Likelihood(outputs=engine.computes))
    name = engine.config_summary()["engine"]
    with pytest.raises(ValueError, match=f"Critical needs values of .* engine {name} does not compute"):
        check_objective(engine, Critical())
    stats = engine.train_step(batch, plan, Likelihood(), norms)
    assert stats["actor/logprob"].count == int(batch.loss_mask.sum())
    assert stats["actor/logprob"].total == pytest.approx(before.sum().item(), rel=1e-4)
    assert ("actor/grad_norm" in stats) == ("actor/lr" in stats) == (rank == 0)
    if rank == 0:
        assert stats["actor/lr"].total > 0 and stats["actor/grad_norm"].total > 0
    assert engine.optimizer_step == 1
    after = engine.logprobs(batch, plan, 1.0)
    assert after.sum() > before.sum()

    folder = scratch / "state"
    folder.mkdir(exist_ok=True)
    mine = [entry.path for entry in write_files(folder, engine.snapshot())]
    (scratch / "in_place").mkdir(exist_ok=True)
    write_files(scratch / "in_place", engine.snapshot(copy=False))
    assert all((folder / name).read_bytes() == (scratch / "in_place" / name).read_bytes() for name in mine)
    dist.barrier()
    written: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(written, mine)
    assert sorted(name for names in written for name in names) == sorted(path.name for path in folder.iterdir())
    check_weights(engine)
    saved = dict(engine.named_weights())
    engine.train_step(batch, plan, Likelihood(), norms)
    continued = dict(engine.named_weights())
    assert list(saved) == list(continued) and len(saved) > 0
    assert any(not torch.equal(saved[name], continued[name]) for name in saved)
    other = make(model)
    if (folder / ".metadata").is_file():  # an engine without a model has files of its own
        check_damage(other, folder)
    assert other.load(folder) == []
    assert other.optimizer_step == 1
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.named_weights())
    other.train_step(batch, plan, Likelihood(), norms)
    assert all(torch.equal(continued[name], tensor) for name, tensor in other.named_weights())

    stats = other.train_step(batch, plan, Broken(), norms)
    assert other.optimizer_step == 2
    assert all(torch.equal(continued[name], tensor) for name, tensor in other.named_weights())
    assert stats.keys() == ({"actor/lr", "actor/skipped_update"} if rank == 0 else set())
    stats = other.train_step(batch, plan, Likelihood(), norms)
    assert other.optimizer_step == 3
    if rank == 0:
        assert stats["actor/skipped_update"].total == 0

    for asked, seen in (({}, None), ({"logged": ["entropy"]}, False), ({"outputs": ["entropy"]}, True)):
        objective = Likelihood(3.0, **asked)
        expected = other.logprobs(batch, plan, 3.0).sum().item()
        stats = other.train_step(batch, plan, objective, norms)
        assert stats["actor/logprob"].total == pytest.approx(expected, rel=1e-4)  # at the objective's temperature
        assert objective.seen == {(True, seen)}

    other.export_hf(scratch / "hf")
    assert (scratch / "hf" / "config.json").is_file() and list((scratch / "hf").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_contract_on_one_rank(name: str, tmp_path: Path) -> None:
    make_model_folder("qwen2", tmp_path / "model")
    with process_group(0, 1, str(tmp_path / "world")):
        check_contract(FACTORIES[name], tmp_path / "model", tmp_path)


def _check_all(model: Path, scratch: Path) -> None:
    for name, make in FACTORIES.items():
        (scratch / name).mkdir(exist_ok=True)
        check_contract(make, model, scratch / name)


@pytest.mark.slow
def test_contract_on_two_ranks(tmp_path: Path) -> None:
    make_model_folder("qwen2", tmp_path / "model")
    run_ranks(2, _check_all, tmp_path / "model", tmp_path)
