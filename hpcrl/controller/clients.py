"""The objects that a pipeline calls: roles, trainer, weights, rollout transfer. A call sends a few commands, in one
order for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpcrl.algorithms.factory import make_algorithm
from hpcrl.cluster.layout import ENGINE_ROLES, FROZEN_ROLES, RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle, assign_rows, lay_out, moves, pairs_of
from hpcrl.controller.transfers import rollout_transfers, token_transfers
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stat, Stats, merge, scalar
from hpcrl.rollout.loop import CollectedRollouts
from hpcrl.rollout.preferences import preferences
from hpcrl.rollout.types import Sizes
from hpcrl.spec.division import Division
from hpcrl.spec.tables import ROLES
from hpcrl.spec.trajectory import generated_fields


def answers_stats(answers: Iterable[messages.Done]) -> Stats:
    """Merged statistics of all ranks."""
    return merge({name: Stat(*values) for name, values in answer.stats.items()} for answer in answers)


def timed(name: str, start: float) -> Stats:
    """Seconds since time.perf_counter() was `start`, as a statistic."""
    return {name: scalar(time.perf_counter() - start)}


class Roles:
    """The ranks of every role, including roles of installed packages."""

    def __init__(self, controller: Controller, layout: RoleLayout):
        self._controller, self._layout = controller, layout

    def ask(self, role: str, question: str, values: dict[str, Any]) -> Stats:
        """Merged answers of all ranks of a role that answers questions (hpcrl.workers.role.Answers)."""
        ask = messages.Ask(role, question, values)
        return answers_stats(self._controller.call(dict.fromkeys(self._layout.ranks[role], ask)).values())

    def load(self) -> Stats:
        """Load statistics of the ranks that serve requests, since the last call."""
        serving = [role for role, spec in ROLES.items() if spec.serves and self._layout.ranks.get(role)]
        return merge([self.ask(role, "load", {}) for role in serving])


class Trainer:
    """The trainer ranks, with the policy in training."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        self._controller, self._layout, self._config = controller, layout, config
        self._algorithm = make_algorithm(config)  # equal to the trainer ranks' algorithm
        self._division = layout.division("trainer")
        self.ranks = layout.ranks["trainer"]
        self._advantage_stats: Stats = {}

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Fill a token field with the policy's log-probs; skipped if the algorithm does not read it."""
        if into not in self._algorithm.reads:
            return {}
        return fill_logprobs(self._controller, self._config, "trainer", self._division, batch, batch.rows, into)

    def entropies(self, batch: BatchHandle) -> Stats:
        """Fill old_entropies with the policy's entropies; skipped if the algorithm does not read them."""
        return self.logprobs(batch, into="old_entropies")

    def advantages(self, batch: BatchHandle) -> Stats:
        """Fill advantages and returns, and the samples' weights if the advantage estimator sets them. Without an
        algorithm only return the statistics of rewards and lengths."""
        fill = messages.Advantages(batch.id, self._algorithm.coefficients, batch.domains)
        answers = self._controller.call(dict.fromkeys(self.ranks, fill))
        batch.weights = {sample: weight for answer in answers.values() for sample, weight in answer.weights}
        self._advantage_stats = answers_stats(answers.values())
        return self._advantage_stats

    def update(self, batch: BatchHandle) -> Stats:
        """Take a batch's optimizer steps: one per epoch and mini-batch, except for fully masked mini-batches, and none
        while only the critic is trained (critic.warmup_steps). Then the algorithm adapts its coefficients."""
        start, coefficients = time.perf_counter(), self._algorithm.coefficients | batch.coefficients
        stats = {name: scalar(value) for name, value in coefficients.items() if not name.startswith("_")}
        if batch.step > self._config.policy_waits:
            make, epochs = partial(messages.TrainStep, coefficients=coefficients), self._algorithm.objective.num_epochs
            own, num_empty = updates(self._controller, self._config, "trainer", self._division, batch, epochs, make)
            empty = {"actor/empty_updates": scalar(num_empty)} if num_empty else {}
            stats |= merge([own, empty, timed("time/step_train", start)])
        self._algorithm.take(self._algorithm.adapt(merge([self._advantage_stats, stats])))
        return stats

    def loss_stats(self, batch: BatchHandle) -> Stats:
        """The statistics of a batch's loss with the present weights, without a step. The fields that the loss reads
        must be filled."""
        plan = batch.plan(batch.rows, batch.samples, self._config.trainer.max_tokens_per_micro_batch)
        given = *batch.norms(batch.samples), self._algorithm.coefficients | batch.coefficients
        commands = {rank: messages.LossStats(batch.id, plan[rank], *given) for rank in batch.rows}
        return answers_stats(self._controller.call(self._division.replicate(commands)).values())

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's adaptive coefficients; JSON-able."""
        return {"algorithm": dict(self._algorithm.coefficients)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; checkpoints of earlier versions have none."""
        self._algorithm.take(state.get("algorithm", {}))

    def load_rows(
        self,
        step: int,
        sequences: Sequence[int],
        sizes: Sequence[Sizes],
        keep_together: Mapping[int, int] | None = None,
        batch: int | None = None,
        split: Literal["train", "val"] = "train",
        answers: Mapping[int, int] | None = None,
    ) -> BatchHandle:
        """Load sequences of the data as a batch of one mini-batch, balanced over the data-parallel ranks of trainer and
        frozen models.

        Args:
            keep_together: Sequences with equal numbers are on one rank, in one micro-batch.
            batch: Id of the batch; None: the step.
            answers: Sequence -> the sequence whose answer it ends with, cut to its size.
        """
        by_sequence, together = dict(zip(sequences, sizes, strict=True)), keep_together or {}
        mini_batches = [sorted(by_sequence)]
        shares = assign_rows(by_sequence, mini_batches, self._division.leaders, keep_together=together)
        number = step if batch is None else batch
        handle = BatchHandle(number, step, by_sequence, mini_batches, shares, keep_together=together)
        divisions = [self._division]
        for role in FROZEN_ROLES:
            if (other := self._layout.division(role)).ranks not in ((), self.ranks):
                handle.rows_by_role[role] = assign_rows(
                    by_sequence, mini_batches, other.leaders, keep_together=together
                )
                divisions.append(other)
        most = max((size.total for size in sizes), default=0)
        loads = {
            rank: messages.LoadRows(handle.id, given, split, [answers[n] for n in given] if answers else [], most)
            for rank, given in handle.all_rows.items()
        }
        self._controller.call(
            {rank: load for division in divisions for rank, load in division.replicate(loads).items()}
        )
        return handle

    def take_pairs(self, batch: BatchHandle) -> BatchHandle:
        """The batch's pairs as a batch of their own, in the form of rows of pairs (PipelineSpec.rows), on the ranks of
        trainer and reference."""
        pairs = pairs_of(batch)
        row = {rank: {sample: i for i, sample in enumerate(samples)} for rank, samples in batch.all_rows.items()}
        takes = {
            rank: messages.TakePairs(pairs.id, batch.id, [row[rank][sample] for sample in samples])
            for rank, samples in pairs.all_rows.items()
        }
        divisions = [self._division, *(self._layout.division(role) for role in pairs.rows_by_role)]
        self._controller.call(
            {rank: take for division in divisions for rank, take in division.replicate(takes).items()}
        )
        return pairs

    def drop(self, batch: BatchHandle) -> None:
        """Free the batch on all ranks."""
        _drop(self._controller, self._layout, batch)

    def write_rollouts(self, batch: BatchHandle, folder: Path, facts: dict[str, Any]) -> Callable[[], object]:
        """Make every data-parallel rank write its rows; return a function that waits until all have."""
        write = messages.WriteRollouts(batch.id, str(folder), facts)
        return partial(self._controller.finish, self._controller.start(dict.fromkeys(self._division.leaders, write)))

    def export(self, folder: Path) -> None:
        """Write the policy in HF layout."""
        self._controller.call({rank: messages.Export(str(folder)) for rank in self.ranks})


class Weights:
    """Publishes the trainers' weights to the generator replicas."""

    def __init__(self, controller: Controller, layout: RoleLayout):
        self._controller, self._layout = controller, layout
        self._trainers, self._replicas = layout.ranks["trainer"], layout.replicas

    def build_groups(self) -> None:
        """Build one group per replica with all trainers, unless the trainers' own collectives suffice."""
        if self._layout.generates_on_trainers:
            return
        for number, replica in enumerate(self._replicas):
            ranks = sorted({*self._trainers, *replica})
            build = messages.BuildGroup(f"weights/{number}", ranks, replica=number)
            self._controller.call(dict.fromkeys(ranks, build))

    def update_weights(self, version: int) -> Stats:
        """Load the trainers' weights into every living replica as this version, except replicas lost meanwhile."""
        living = [i for i, ranks in enumerate(self._replicas) if self._controller.lost.isdisjoint(ranks)]
        if not living:
            return {}
        start = time.perf_counter()
        pull = messages.UpdateWeights(version, living)
        ranks = sorted({*self._trainers, *(rank for number in living for rank in self._replicas[number])})
        answers = self._controller.call(dict.fromkeys(ranks, pull)).values()
        lose_unreached(self._controller, answers)
        return merge([answers_stats(answers), timed("time/step_update_weights", start)])


class RolloutTransfer:
    """The group in which replicas and the roles with a training engine exchange samples."""

    NAME = "rollout"

    def __init__(self, controller: Controller, layout: RoleLayout):
        self._controller, self._layout = controller, layout
        self._divisions = {"trainer": layout.division("trainer")}
        for role in ENGINE_ROLES[1:]:
            ranks = layout.division(role).ranks
            if all(division.ranks != ranks for division in self._divisions.values()):
                self._divisions[role] = layout.division(role)
        leaders = {rank for division in self._divisions.values() for rank in division.leaders}
        self._ranks = sorted({*layout.ranks["generator"], *leaders})
        self._epoch = 0

    def build(self) -> None:
        """Make the group from the remaining ranks."""
        ranks = [rank for rank in self._ranks if rank not in self._controller.lost]
        build = messages.BuildGroup(self.NAME, ranks, epoch=self._epoch)
        self._controller.call(dict.fromkeys(ranks, build))
        self._epoch += 1

    def transfer_rollouts(
        self, config: Config, step: int, collected: CollectedRollouts, truncated: bool, decoupled: Mapping[int, float]
    ) -> BatchHandle | None:
        """Move collected samples from their replicas to the ranks that train on them. Returns None if a replica that
        held some of the samples was lost; then no rank keeps the batch.

        Args:
            truncated: Include behaviour log-probs.
            decoupled: Sample -> its decoupled reward, if the algorithm reads it.
        """
        groups, sizes = collected.groups, collected.sizes
        homes = {sample.id: sample.replica for group in groups for sample in group.samples}
        if not self._controller.lost.isdisjoint(homes.values()):
            return None
        judged = {sample.id: sample.reward for group in groups for sample in group.samples if not sample.failed}
        handle = lay_out(config, self._layout, step, sizes, preferences(judged, config.pairs_per_group))
        wanted, some_failed = handle.all_rows, any(sample.failed for group in groups for sample in group.samples)
        scored = {
            sample.id: {
                "rewards": sample.reward,
                "scores": sample.score,
                "turn_rewards": sample.turn_rewards,
                "token_rewards": sample.token_rewards,
                **({} if group.baseline is None else {"baselines": group.baseline}),
                **({"decoupled_rewards": decoupled[sample.id]} if decoupled else {}),
                **({"failed": sample.failed} if some_failed else {}),
            }
            for group in groups
            for sample in group.samples
        }
        fields = [field.name for field in generated_fields(truncated, config.by_steps)]
        between = moves(homes, wanted, sizes, readers=handle.rows if config.rollout.save_rollouts else ())
        answers: list[messages.Done] = []
        for part in rollout_transfers(handle.id, self.NAME, between, wanted.keys(), scored, fields):
            answers += self._controller.call(part).values()
            if lose_unreached(self._controller, answers):
                _drop(self._controller, self._layout, handle)
                self.build()
                return None
        _broadcast(self._controller, self._divisions, handle.id)
        return handle


def lose_unreached(controller: Controller, answers: Iterable[messages.Done]) -> bool:
    """Continue without ranks that other ranks could not reach; return whether there are any."""
    unreached = {rank for answer in answers for rank in answer.unreached}
    controller.drop_ranks(sorted(unreached), "other ranks could not reach it")
    return bool(unreached)


def _drop(controller: Controller, layout: RoleLayout, batch: BatchHandle) -> None:
    for rank in sorted({rank for role in ENGINE_ROLES for rank in layout.division(role).ranks}):
        controller.send(rank, messages.DropBatch(batch.id))


def _broadcast(controller: Controller, divisions: Mapping[str, Division], batch: int, field: str = "") -> None:
    """Make the leaders of data-parallel ranks broadcast their rows to the other ranks."""
    for role, division in divisions.items():
        if division.is_split:
            controller.call(dict.fromkeys(division.ranks, messages.BroadcastBatch(batch, role, field)))


def updates(
    controller: Controller,
    config: Config,
    role: str,
    division: Division,
    batch: BatchHandle,
    num_epochs: int,
    make: Callable[[int, list[list[int]], float, float], messages.TrainStep | messages.TrainCritic],
) -> tuple[Stats, int]:
    """Run the optimizer steps of `num_epochs` passes over all mini-batches, on the trainer's or the critic's ranks.
    Returns (statistics, number of mini-batches skipped because masks leave them no tokens).

    Args:
        make: Builds a rank's command from the batch, its micro-batches, and the numbers of tokens and sequences.
    """
    started, num_empty = [], 0
    for _ in range(num_epochs):
        for mini_batch in batch.mini_batches:
            plan = batch.plan(batch.rows_of(role), mini_batch, config.trainer.max_tokens_per_micro_batch)
            tokens, sequences = batch.norms(mini_batch)
            if not tokens:
                num_empty += 1
                continue
            # All steps are queued ahead, so no rank waits for the controller between two steps.
            steps = {rank: make(batch.id, plan[rank], tokens, sequences) for rank in plan}
            started.append(controller.start(division.replicate(steps)))
    return merge([answers_stats(controller.finish(step).values()) for step in started]), num_empty


def send_tokens(
    controller: Controller,
    batch: BatchHandle,
    field: str,
    source: tuple[str, Division],
    dest: tuple[str, Division],
    width: int = 0,
) -> None:
    """Send a token field from one role's ranks to another role's ranks; the roles have different ranks. `width` as in
    SendTokens."""
    (giver, given), (taker, taken) = source, dest
    homes = {sample: rank for rank, samples in batch.rows_of(giver).items() for sample in samples}
    between, leaders = moves(homes, batch.rows_of(taker), batch.sizes), {*given.leaders, *taken.leaders}
    for part in token_transfers(batch.id, RolloutTransfer.NAME, field, between, leaders, taker, width):
        controller.call(part)
    _broadcast(controller, {taker: taken}, batch.id, field)


def fill_logprobs(
    controller: Controller,
    config: Config,
    role: str,
    division: Division,
    batch: BatchHandle,
    rows: dict[int, list[int]],
    into: str,
) -> Stats:
    start = time.perf_counter()
    plan = batch.plan(rows, batch.samples, config.trainer.max_tokens_per_micro_batch)
    commands = {rank: messages.Logprobs(batch.id, role, into, plan[rank]) for rank in rows}
    answers = controller.call(division.replicate(commands))
    return merge([answers_stats(answers.values()), timed(f"time/{into.replace('logprobs', 'log_probs')}", start)])
