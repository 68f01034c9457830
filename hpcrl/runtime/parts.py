"""What a pipeline calls: trainer, reference, weights, rollouts. Each call is a few commands in one total order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.algorithms.making import make_algorithm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.control import messages
from hpcrl.control.controller import Controller
from hpcrl.metrics.stats import Stat, Stats, merge, scalar
from hpcrl.rollout.loop import Harvest, Sizes
from hpcrl.runtime.batches import BatchHandle, assign_rows, lay_out, moves
from hpcrl.runtime.transfers import hand_overs, token_transfers
from hpcrl.trajectory import Origin, fields_of


def answers_stats(answers: Iterable[messages.Done]) -> Stats:
    """The statistics of all ranks together."""
    return merge({name: Stat(*values) for name, values in answer.stats.items()} for answer in answers)


def timed(name: str, start: float) -> Stats:
    """Seconds since time.perf_counter() was `start`, as a statistic."""
    return {name: scalar(time.perf_counter() - start)}


class Trainer:
    """The trainer ranks: the policy that learns."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        self._controller, self._config = controller, config
        self._algorithm = make_algorithm(config)  # what the trainer ranks make of the same configuration
        self.ranks = layout.ranks["trainer"]

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Fill a token field with the policy's log-probs; skipped where the algorithm does not read it."""
        if into not in self._algorithm.reads:
            return {}
        return _logprobs(self._controller, self._config, "trainer", batch, batch.rows, into)

    def advantages(self, batch: BatchHandle) -> Stats:
        """Fill advantages and returns, and weigh the samples where the credit does."""
        answers = self._controller.call({rank: messages.Advantages(batch.id) for rank in self.ranks})
        batch.weights = {sample: weight for answer in answers.values() for sample, weight in answer.weights}
        return answers_stats(answers.values())

    def update(self, batch: BatchHandle) -> Stats:
        """All optimizer steps of a batch: the objective's epochs x the batch's mini-batches."""
        start, started = time.perf_counter(), []
        for _ in range(self._algorithm.objective.num_epochs):
            for mini_batch in batch.mini_batches:
                plan = batch.plan(batch.rows, mini_batch, self._config.trainer.max_tokens_per_micro_batch)
                tokens, sequences = batch.norms(mini_batch)
                # All are queued ahead: no rank waits for the controller between two.
                steps = {rank: messages.TrainStep(batch.id, plan[rank], tokens, sequences) for rank in self.ranks}
                started.append(self._controller.start(steps))
        parts = [answers_stats(self._controller.finish(step).values()) for step in started]
        return merge([*parts, timed("time/step_train", start)])

    def load_rows(
        self, step: int, rows: Sequence[int], sizes: Sequence[Sizes], keep_together: Mapping[int, int] | None = None
    ) -> BatchHandle:
        """A batch of one mini-batch from rows of the training data, balanced over the ranks. Rows with the same number
        in keep_together (preference pairs) are in one micro-batch."""
        by_row, together = dict(zip(rows, sizes, strict=True)), keep_together or {}
        mini_batches = [sorted(by_row)]
        shares = assign_rows(by_row, mini_batches, self.ranks, keep_together=together)
        handle = BatchHandle(step, step, by_row, mini_batches, shares, keep_together=together)
        self._controller.call({rank: messages.LoadRows(handle.id, handle.rows[rank]) for rank in self.ranks})
        return handle

    def drop(self, batch: BatchHandle) -> None:
        """Free the batch everywhere."""
        _drop(self._controller, batch)

    def write_rollouts(self, batch: BatchHandle, folder: Path, facts: dict[str, Any]) -> Callable[[], object]:
        """Let every trainer rank write its rows; returns what waits until they have."""
        write = messages.WriteRollouts(batch.id, str(folder), facts)
        return partial(self._controller.finish, self._controller.start(dict.fromkeys(self.ranks, write)))

    def export(self, folder: Path) -> None:
        """Write the policy in HF layout."""
        self._controller.call({rank: messages.Export(str(folder)) for rank in self.ranks})


class Reference:
    """The reference ranks: the frozen initial policy. Does nothing where the algorithm has no use for it."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        self._controller, self._config = controller, config
        self.ranks, self._trainer_ranks = layout.ranks["reference"], layout.ranks["trainer"]

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Fill a token field with the reference's log-probs."""
        if not self.ranks:
            return {}
        if self.ranks == self._trainer_ranks:
            return _logprobs(self._controller, self._config, "reference", batch, batch.rows, into)
        stats = _logprobs(self._controller, self._config, "reference", batch, batch.reference_rows, into)
        homes = {sample: rank for rank, samples in batch.reference_rows.items() for sample in samples}
        between = moves(homes, batch.rows, batch.sizes)
        for part in token_transfers(batch.id, Fabric.NAME, into, between, {*self.ranks, *self._trainer_ranks}):
            self._controller.call(part)
        return stats


class Weights:
    """From the trainers to the generator replicas: staged once, pulled by one replica after another."""

    def __init__(self, controller: Controller, layout: RoleLayout):
        self._controller = controller
        self._trainers, self._replicas = layout.ranks["trainer"], layout.replicas
        self._sources = [
            next((rank for rank in replica if rank in self._trainers), self._trainers[i % len(self._trainers)])
            for i, replica in enumerate(self._replicas)
        ]

    def build_groups(self) -> None:
        """One group per replica that shares no rank with its source."""
        for i, (source, replica) in enumerate(zip(self._sources, self._replicas, strict=True)):
            if replica != (source,):
                ranks = sorted({source, *replica})
                build = messages.BuildGroup(_weights_group(i), ranks, weights=True)
                self._controller.call(dict.fromkeys(ranks, build))

    def publish(self, version: int) -> Stats:
        """Load the trainers' weights into every living replica under this version; one that is lost meanwhile goes
        without."""
        waiting = [
            (i, (source, replica))
            for i, (source, replica) in enumerate(zip(self._sources, self._replicas, strict=True))
            if self._controller.lost.isdisjoint(replica)
        ]
        if not waiting:
            return {}
        start = time.perf_counter()
        stage = messages.Stage(version, [source for _, (source, _) in waiting])
        started = [self._controller.start(dict.fromkeys(self._trainers, stage))]
        while waiting:
            wave: dict[int, messages.Pull] = {}
            later = []
            for i, (source, replica) in waiting:
                ranks = {source, *replica}
                if ranks & wave.keys():
                    later.append((i, (source, replica)))
                else:
                    wave |= dict.fromkeys(ranks, messages.Pull(version, source, list(replica), _weights_group(i)))
            started.append(self._controller.start(wave))
            waiting = later
        answers = [answer for commands in started for answer in self._controller.finish(commands).values()]
        lose_unreached(self._controller, answers)
        return timed("time/step_model_update", start)


class Fabric:
    """The group in which replicas, trainers and references exchange samples."""

    NAME = "rollout"

    def __init__(self, controller: Controller, layout: RoleLayout):
        self._controller, self._layout = controller, layout
        ranks = layout.ranks
        self._ranks = sorted({*ranks["generator"], *ranks["trainer"], *ranks["reference"]})
        self._epoch = 0

    def build(self) -> None:
        """Make it of the ranks that are left."""
        ranks = [rank for rank in self._ranks if rank not in self._controller.lost]
        build = messages.BuildGroup(self.NAME, ranks, epoch=self._epoch)
        self._controller.call(dict.fromkeys(ranks, build))
        self._epoch += 1

    def hand_over(self, config: Config, step: int, harvest: Harvest, truncated: bool) -> BatchHandle | None:
        """Move the harvested samples from the replicas that hold them to the ranks that train on them; `truncated`:
        with their behaviour log-probs. None, with all as it was, where a replica was lost that held some of them."""
        groups, sizes = harvest.groups, harvest.sizes
        done = {sample.id: sample for group in groups for sample in group.samples}
        homes = {sample.id: sample.replica for sample in done.values()}
        if not self._controller.lost.isdisjoint(homes.values()):
            return None
        handle = lay_out(config, self._layout, step, sizes)
        wanted = handle.rows | handle.reference_rows
        scored = {
            sample.id: {"rewards": sample.reward, "scores": sample.score, "turn_rewards": sample.turn_rewards}
            for sample in done.values()
        }
        fields = [field.name for field in fields_of(Origin.GENERATOR) if truncated or not field.optional]
        between = moves(homes, wanted, sizes, readers=handle.rows if config.rollout.save_rollouts else ())
        answers: list[messages.Done] = []
        for part in hand_overs(handle.id, self.NAME, between, wanted.keys(), scored, fields):
            answers += self._controller.call(part).values()
            if lose_unreached(self._controller, answers):
                _drop(self._controller, handle)
                self.build()
                return None
        return handle


def lose_unreached(controller: Controller, answers: Iterable[messages.Done]) -> bool:
    """Go on without the ranks that others did not reach; whether there are any."""
    unreached = {rank for answer in answers for rank in answer.unreached}
    controller.lose(sorted(unreached), "others could not reach it")
    return bool(unreached)


def _drop(controller: Controller, batch: BatchHandle) -> None:
    for rank in sorted({*batch.rows, *batch.reference_rows}):
        controller.send(rank, messages.DropBatch(batch.id))


def _logprobs(
    controller: Controller, config: Config, role: str, batch: BatchHandle, rows: dict[int, list[int]], into: str
) -> Stats:
    start = time.perf_counter()
    plan = batch.plan(rows, batch.samples, config.trainer.max_tokens_per_micro_batch)
    controller.call({rank: messages.Logprobs(batch.id, role, into, plan[rank]) for rank in sorted(rows)})
    return timed(f"time/{into.replace('logprobs', 'log_probs')}", start)


def _weights_group(replica: int) -> str:
    return f"weights/{replica}"
