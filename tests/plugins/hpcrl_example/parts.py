"""The parts themselves, imported on the ranks that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hpcrl_example.specs import CurriculumConfig, LeaveOneOut, NoisyConfig, VowelOptions
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.interface import RewardTable
from hpcrl.config import Config, RewardConfig
from hpcrl.engines.gen.generation_engine import ReplicaRanks
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.engine import make as make_native
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.engine import make as make_fsdp2
from hpcrl.metrics.stats import Stats, stat
from hpcrl.models.shape import ModelShape
from hpcrl.planner.memory_parts import Part
from hpcrl.rewards.reward import Reward, RewardItem, Score
from hpcrl.spec.options import read_options

if TYPE_CHECKING:
    from hpcrl.controller.context import Run
    from hpcrl.workers.role import Rank


class LeaveOneOutAdvantage(ReturnsAdvantage[LeaveOneOut]):
    """See LeaveOneOut."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage."""
        _, groups, counts = torch.unique(table.group_ids, return_inverse=True, return_counts=True)
        sums = torch.zeros(len(counts)).index_add(0, groups, table.rewards)
        others = (sums[groups] - table.rewards) / (counts[groups] - 1)
        return table.rewards - (1 - self.config.shrink) * others


class VowelReward(Reward):
    """See VowelOptions."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(VowelOptions, config.options)

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """See Reward."""
        counts = [sum(letter in "aeiou0123456789" for letter in item.response) for item in items]
        return [Score(share := min(1.0, count / self.options.most), share) for count in counts]


class EchoEnv:
    """One more turn, which echoes the response."""

    def __init__(self) -> None:
        self._turn = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """See Env."""
        return "say something", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See Env."""
        self._turn += 1
        return f"you said {action[:8]}", 0.5 * (len(action) % 2), self._turn == 2, False, {}


def make_noisy(config: Config, model_path: Path, total_steps: int, trainable: bool) -> FSDP2Engine:
    """The engine of trainer.engine=noisy."""
    lr = config.trainer.lr * config.trainer.section(NoisyConfig).factor
    trainer = config.trainer.model_copy(update={"lr": lr})
    return make_fsdp2(config.model_copy(update={"trainer": trainer}), model_path, total_steps, trainable)


def make_counting(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> NativeEngine:
    """The engine of generator.engine=counting."""
    return make_native(config, model_path, tokenizer, replica)


def witness_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """The plan of the role witness."""
    return [Part("witness", "weights", shape.num_parameters * 4)]


class WitnessRole:
    """The model with which the run began."""

    busy = False

    def __init__(self, worker: Rank):
        self._worker = worker
        self._model = AutoModelForCausalLM.from_pretrained(worker.model_path)

    @torch.no_grad()
    def answer(self, question: str, values: dict[str, Any]) -> Stats:
        """See Answers. likelihood: of the tokens that the model wrote in a batch on this rank."""
        assert question == "likelihood"
        batch, parts = self._worker.batches[values["batch"]], []
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            ids = batch.token_ids[start:end].long()
            log_p = self._model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            parts.append(log_p.gather(1, ids[1:, None])[:, 0][batch.loss_mask[start + 1 : end]])
        return {"witness/logprob": stat(torch.cat(parts))} if parts else {}

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        """See Role."""
        return {}

    def poll(self) -> bool:
        """See Role."""
        return False

    def close(self) -> None:
        """See Role."""


def curriculum(run: Run) -> None:
    """The pipeline of pipeline=curriculum."""
    enough = run.config.section(CurriculumConfig).enough
    run.update_weights(run.first_step)
    for step in run.steps():
        batch = run.rollouts.next(step)
        old = run.trainer.logprobs(batch, into="old_logprobs")
        credit = run.trainer.advantages(batch)
        seen = run.ask("witness", "likelihood", batch=batch.id)
        stats = [run.rollouts.stats, old, credit, seen, run.trainer.update(batch)]
        run.rollouts.store(batch, run.trainer)
        run.trainer.drop(batch)
        run.log(step, *stats, run.update_weights(step))
        run.checkpoint.maybe_save(step)
        if (run.last_logged.get("critic/score/mean") or 0.0) > enough:
            run.end_at(step, f"the mean score is above curriculum.enough={enough:g}")
            return
