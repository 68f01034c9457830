"""Every split of every training engine matches plain transformers in one process: log-probs, gradients and their norm.
Splits of the same number of ranks share their processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import Config
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.spec.division import Division
from hpcrl.spec.tables import TRAIN_ENGINES
from tests.checkpoint.writing import write_files
from tests.contracts.splits import Split
from tests.contracts.test_train_engine import FACTORIES, check_weights
from tests.engines.worlds import (
    Weighted,
    by_steps,
    make_batch,
    norms_of,
    run_ranks,
    transformers_results,
    worst_difference,
)

TEMPERATURE = 0.7
LENGTHS = (9, 21, 4, 14, 5, 17)
GIANT = (61, 5, 4, 6)
MODULES = {name: import_module(f"tests.contracts.train.{name}") for name in FACTORIES}
SPLITS: dict[str, dict[str, Split]] = {
    name: module.SPLITS for name, module in MODULES.items() if hasattr(module, "SPLITS")
}
CASES = sorted({(name, split.num_ranks) for name, splits in SPLITS.items() for split in splits.values()})

Case = tuple[str, Batch, list[list[int]]]
"""A name, the whole batch, and the rows of each data-parallel rank."""


def cases(num_groups: int) -> Iterator[Case]:
    """Batches that are packed, that have one giant row, and that leave data-parallel ranks without rows; the last one
    of episodes by steps, whose rows are several sequences each."""
    for name, lengths in (("packed", LENGTHS), ("giant", GIANT)):
        batch = make_batch(lengths)
        yield name, batch, [list(range(group, len(lengths), num_groups)) for group in range(num_groups)]
    yield "steps", by_steps(make_batch(LENGTHS), (1, 3, 2)), [[0, 1, 2]] + [[]] * (num_groups - 1)


def split_rows(num_rows: int) -> MicroBatches:
    """Three micro-batches, equally many on all ranks; the last ones are empty if there are few rows."""
    return [list(range(num_rows))[:1], list(range(num_rows))[1:], []]


class Run:
    """One split on the ranks of the default group."""

    def __init__(self, engine_name: str, split: Split, model: Path):
        self.name, self.model = engine_name, model
        self.spec, self.config = TRAIN_ENGINES[engine_name], split.config(engine_name, model)
        self.rank = dist.get_rank()
        self._wanted: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        self.division: Division = self.spec.division(self.config, split.num_ranks)
        self.group = next(i for i, group in enumerate(self.division.groups) if self.rank in group)

    def make(self, config: Config | None = None) -> TrainEngine:
        return self.spec.load()(config or self.config, self.model, 8, True)

    def wanted(self, name: str, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """What transformers computes for a case's batch."""
        if name not in self._wanted:
            self._wanted[name] = transformers_results(self.model, whole, TEMPERATURE)
        return self._wanted[name]

    def gradients(self, engine: TrainEngine, batch: Batch, norms: Norms) -> dict[str, Tensor]:
        """The gradients of all shares, under HF names."""
        objective = Weighted(TEMPERATURE, entropy=True)
        plan = split_rows(batch.num_sequences)
        mine = MODULES[self.name].gradients(engine, batch, plan, objective, norms)
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        found: dict[str, Tensor] = {}
        for share in self.division.weights:
            for rank in share:
                same = shares[rank].keys() == shares[share[0]].keys()
                assert same and all(torch.equal(shares[rank][n], shares[share[0]][n]) for n in shares[rank])
            assert not found.keys() & shares[share[0]].keys(), "a parameter belongs to one share"
            found |= shares[share[0]]
        return found

    def check_case(self, engine: TrainEngine, case: Case) -> None:
        name, whole, rows = case
        batch = whole.select(rows[self.group])
        logprobs, gradients = self.wanted(name, whole)
        wanted = torch.cat(
            [logprobs.split(whole.lengths.tolist())[row] for row in rows[self.group]] or [logprobs.new_zeros(0)]
        )
        got = engine.logprobs(batch, split_rows(batch.num_sequences), TEMPERATURE)
        if self.rank in self.division.outputs:
            assert got is not None and got.dtype == torch.float32, name
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5, msg=lambda text: f"{name}: {text}")
        difference = worst_difference(self.gradients(engine, batch, norms_of(whole)), gradients)
        assert difference < 1e-5, f"{name}: gradients differ by {difference:.2g}"

    def check_control(self, engine: TrainEngine) -> None:
        """Two swapped tokens are noticed."""
        name, whole, rows = next(cases(len(self.division.groups)))
        _, gradients = self.wanted(name, whole)
        whole.token_ids[[3, 4]] = whole.token_ids[[4, 3]]
        batch = whole.select(rows[self.group])
        assert worst_difference(self.gradients(engine, batch, norms_of(whole)), gradients) > 1e-3

    def check_masked(self, engine: TrainEngine) -> None:
        """A batch in which nothing is to be learned."""
        _, whole, rows = next(cases(len(self.division.groups)))
        whole.loss_mask[:] = False
        batch = whole.select(rows[self.group])
        got = engine.logprobs(batch, split_rows(batch.num_sequences), TEMPERATURE)
        assert self.rank not in self.division.outputs or (got is not None and not got.any())
        assert not any(g.any() for g in self.gradients(engine, batch, Norms(1.0, 1.0)).values())

    def check_update(self, engine: TrainEngine, gradients: dict[str, Tensor]) -> None:
        """The first step equals torch's AdamW, with weight decay only on matrices."""
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, {name: tensor.clone() for name, tensor in engine.named_weights()})
        got = {name: tensor for share in shares for name, tensor in share.items()}
        wanted = dict(AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).named_parameters())
        for name, parameter in wanted.items():
            parameter.grad = gradients[name]
        trainer = self.config.trainer
        decayed = {name for name, p in wanted.items() if p.dim() > 1 and not name.endswith("bias")}
        groups = [{"params": [p for name, p in wanted.items() if (name in decayed) == matrices],
                   "weight_decay": trainer.weight_decay * matrices} for matrices in (True, False)]  # fmt: skip
        torch.optim.AdamW(groups, lr=trainer.lr, betas=trainer.betas, eps=trainer.eps).step()
        assert wanted.keys() <= got.keys()
        far = {name: float((got[name] - parameter.detach()).abs().max()) for name, parameter in wanted.items()}
        worst = max(far, key=far.__getitem__)
        assert far[worst] < 1e-6, f"{worst} differs from AdamW's by {far[worst]:.2g}"

    def check_step(self, engine: TrainEngine, folder: Path) -> None:
        """The norm of the gradients; and an engine that loads a checkpoint takes the same step, bit for bit."""
        name, whole, rows = next(cases(len(self.division.groups)))
        batch, norms = whole.select(rows[self.group]), norms_of(whole)
        plan, objective = split_rows(batch.num_sequences), Weighted(TEMPERATURE, entropy=True)
        _, gradients = self.wanted(name, whole)
        wanted = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        stats = engine.train_step(batch, plan, objective, norms)
        if self.rank == self.division.outputs[0]:
            assert stats["actor/grad_norm"].total == pytest.approx(wanted, rel=1e-5)
        check_weights(engine)
        self.check_update(engine, gradients)
        folder.mkdir(exist_ok=True)
        write_files(folder, engine.snapshot())
        dist.barrier()
        engine.train_step(batch, plan, objective, norms)
        other = self.make()
        assert other.load(folder) == []
        other.train_step(batch, plan, objective, norms)
        continued = dict(engine.named_weights())
        assert all(torch.equal(continued[name], tensor) for name, tensor in other.named_weights())


def check_splits(engine_name: str, splits: dict[str, Split], scratch: Path) -> None:
    """Every rank of the default group runs it."""
    for name, split in splits.items():
        try:
            run = Run(engine_name, split, scratch / name)
            engine = run.make()
            for case in cases(len(run.division.groups)):
                run.check_case(engine, case)
            run.check_control(engine)
            run.check_masked(engine)
            run.check_step(engine, scratch / f"{name}.state")
        except Exception as error:
            raise AssertionError(f"{engine_name}, {name}: {type(error).__name__}: {error}") from error


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "num_ranks"),
    [pytest.param(*case, marks=[pytest.mark.soak] if case[1] > 4 else []) for case in CASES],
)
def test_splits_equal_transformers(engine: str, num_ranks: int, tmp_path: Path) -> None:
    splits = {name: split for name, split in SPLITS[engine].items() if split.num_ranks == num_ranks}
    for name, split in splits.items():
        split.make_model(tmp_path / name)
    run_ranks(num_ranks, check_splits, engine, splits, tmp_path)
