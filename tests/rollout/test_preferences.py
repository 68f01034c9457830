"""Pairs of responses by reward: which are chosen, what ties do, and where the samples of a pair are placed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import load
from hpcrl.controller.batches import PAIRS, BatchHandle, lay_out, pairs_of
from hpcrl.messaging.messages import Done, TakePairs
from hpcrl.pipelines.online_dpo import online_dpo
from hpcrl.rollout.batch import batch_from_samples, group_ids
from hpcrl.rollout.preferences import Preference, preferences
from hpcrl.rollout.types import FinishReason, Sample, Sizes, make_sample_id
from hpcrl.workers.trainer import EngineRole


def ids(uid: int, count: int) -> list[int]:
    return [make_sample_id(uid, 0, member) for member in range(count)]


def test_the_best_and_the_worst_of_a_prompt_are_a_pair_and_equal_rewards_are_none() -> None:
    (a, b, c, d), (e, f), (g, h) = ids(1, 4), ids(2, 2), ids(3, 2)
    rewards = {h: -1.0, d: 0.5, b: 1.0, a: 0.25, c: 1.0, e: 1.0, f: 1.0, g: -2.0}
    assert preferences(rewards, 1) == [Preference(b, a, 0.75), Preference(h, g, 1.0)]  # b before c, equally good
    assert preferences(rewards, 2) == [Preference(b, a, 0.75), Preference(c, d, 0.5), Preference(h, g, 1.0)]
    assert preferences(rewards, 0) == [] and preferences({a: 3.0}, 1) == []


def test_a_response_is_in_one_pair_at_most_and_pairs_come_while_rewards_differ() -> None:
    rng = random.Random(0)
    for _ in range(300):
        samples = ids(7, rng.randint(1, 9))
        rewards = {sample: float(rng.randint(0, 3)) for sample in samples}
        found = preferences(rewards, most := rng.randint(1, 5))
        used = [sample for pair in found for sample in pair[:2]]
        assert len(used) == len(set(used)) and all(pair.margin > 0 for pair in found)
        ranked = sorted(rewards.values())
        differing = sum(ranked[-1 - n] > ranked[n] for n in range(len(ranked) // 2))
        assert len(found) == min(most, differing)


def laid_out(num_groups: int = 6, per_group: int = 2) -> tuple[BatchHandle, dict[int, float]]:
    """Groups of 5 responses on two trainer ranks, with the reference on a rank of its own."""
    words = ["pipeline=online_dpo", f"dpo.pairs_per_group={per_group}", "layout=disaggregated"]
    words += ["layout.trainer.num_ranks=2", "layout.reference.colocate_with=null", "layout.reference.num_ranks=1"]
    config, rng = load([*words, "rollout.group_size=5", "cluster.device=cpu"]), random.Random(1)
    samples = [sample for uid in range(num_groups) for sample in ids(uid, 5)]
    rewards = {sample: rng.random() for sample in samples}
    sizes = {sample: Sizes(rng.randint(8, 40), rng.randint(1, 8)) for sample in samples}
    chosen = preferences(rewards, config.pairs_per_group)
    return lay_out(config, RoleLayout.from_config(config), 4, sizes, chosen), rewards


def test_the_samples_of_a_pair_are_adjacent_on_one_rank_of_each_role() -> None:
    batch, rewards = laid_out()
    assert sorted(sample for rows in batch.rows.values() for sample in rows) == sorted(rewards)
    pairs = pairs_of(batch)
    assert pairs.id == PAIRS and pairs.step == 4 and len(pairs.sizes) == 2 * len(batch.preferences) == 24
    assert set(pairs.rows_by_role) == {"reference"} and len(pairs.rows) == 2
    for rows in (pairs.rows, pairs.rows_by_role["reference"]):
        assert sum(map(len, rows.values())) == 24
        for own in rows.values():
            assert list(zip(own[::2], own[1::2], strict=True)) == [p[:2] for p in batch.preferences if p.better in own]
    tokens = [sum(pairs.sizes[sample].total for sample in own) for own in pairs.rows.values()]
    assert max(tokens) < 1.3 * min(tokens)
    for most in (1, 60, 10_000):
        plan = pairs.plan(pairs.rows, pairs.samples, most)
        assert len({len(micro) for micro in plan.values()}) == 1
        for micro in (part for parts in plan.values() for part in parts):
            assert micro[::2] == [row - 1 for row in micro[1::2]] and all(row % 2 == 0 for row in micro[::2])


def test_a_rank_takes_pairs_in_the_form_of_rows_of_pairs() -> None:
    samples = ids(3, 3)
    rollouts = batch_from_samples(
        [
            Sample(
                sample, FinishReason.STOP, token_ids=torch.tensor([5, 6, 7 + n]).int().numpy(),
                loss_mask=torch.tensor([False, False, True]).numpy(), gen_logprobs=torch.zeros(3).numpy(),
                versions=torch.zeros(3).int().numpy(), turn_ids=torch.tensor([-1, -1, 0]).int().numpy(),
            )
            for n, sample in enumerate(samples)
        ],
        [3, 3, 3],
    )  # fmt: skip
    worker = SimpleNamespace(batches={4: rollouts})
    role: Any = SimpleNamespace(_worker=worker)
    assert EngineRole._take_pairs(role, TakePairs(PAIRS, 4, [2, 0]), 9) == Done(9)
    taken = worker.batches[PAIRS].check()
    assert taken.token_ids.tolist() == [5, 6, 9, 5, 6, 7] and taken.chosen.tolist() == [True, False]
    assert taken.sample_ids.tolist() == [samples[2], samples[0]] and taken.group_ids.tolist() == [3, 3]
    assert worker.batches[4] is rollouts and rollouts.chosen is None
    assert torch.equal(group_ids(taken.sample_ids), taken.group_ids)


class Told:
    """Stands for a run of one step: writes down what the pipeline calls."""

    def __init__(self, batch: BatchHandle):
        self.calls: list[str] = []
        self.logged: dict[str, float] = {}
        self.first_step, self.config = 1, None
        self.rollouts = self.trainer = self.reference = self.checkpoint = self
        self.stats: dict[str, Any] = {}
        self._batch = batch

    def steps(self) -> list[int]:
        return [2]

    def next(self, step: int) -> BatchHandle:
        return self._batch

    def take_pairs(self, batch: BatchHandle) -> BatchHandle:
        self.calls.append("take_pairs")
        return pairs_of(batch)

    def update(self, batch: BatchHandle) -> dict[str, Any]:
        self.calls.append(f"update {batch.id} {batch.coefficients}")
        return {}

    def log(self, step: int, *stats: Any) -> None:
        for each in stats:
            self.logged |= {name: value.total / max(value.count, 1) for name, value in each.items()}

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **more: Any) -> dict[str, Any]:
            self.calls.append(name)
            return {}

        return call


@pytest.mark.parametrize("has_pairs", [True, False])
def test_a_step_without_pairs_takes_no_update_and_is_counted(has_pairs: bool) -> None:
    batch, _ = laid_out(num_groups=3, per_group=1)
    if not has_pairs:
        batch.preferences = []
    run: Any = Told(batch)
    online_dpo(run)
    common = ["store", "drop", "update_weights", "evaluate", "maybe_save"]
    assert run.calls[:2] == ["update_weights", "advantages"] and run.calls[-5:] == common
    if has_pairs:
        tokens = float(sum(batch.sizes[pair.better].model for pair in batch.preferences))
        update = f"update {PAIRS} {{'_chosen_tokens': {tokens}}}"
        assert run.calls[2:-5] == ["take_pairs", "logprobs", update, "drop"]
    else:
        assert run.calls[2:-5] == []
    counts = run.logged["pairs/count"], run.logged["pairs/groups_without"]
    assert counts == ((3, 0) if has_pairs else (0, 3)) and (run.logged["pairs/reward_margin"] > 0) is has_pairs
