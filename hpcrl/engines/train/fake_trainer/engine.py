"""A training engine whose model is a table of next-token logits by last token, for tests and debug=fake."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.checkpoint.writer import Files
from hpcrl.config import Config, TrainerConfig
from hpcrl.engines.train.fake_trainer.spec import SPEC
from hpcrl.engines.train.schedule import learning_rate, update_stats
from hpcrl.metrics.stats import Stats, merge
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.spec.weight_layout import TensorShards

VOCABULARY = 64
"""Number of rows of the table; with a real vocabulary, the table would not fit in memory."""


def make(config: Config, model_path: Path, total_steps: int, trainable: bool) -> FakeTrainEngine:
    """The engine of debug=fake, the same for a frozen and a trained model."""
    return FakeTrainEngine(
        config.trainer,
        vocab_size=VOCABULARY,
        total_steps=total_steps,
        logprobs_s=config.fake.logprobs_s,
        train_s=config.fake.train_s,
    )


def make_critic(config: Config, model_path: Path, total_steps: int) -> FakeCritic:
    """The critic of debug=fake."""
    times = config.fake
    return FakeCritic(
        config.trainer,
        vocab_size=VOCABULARY,
        total_steps=total_steps,
        logprobs_s=times.logprobs_s,
        train_s=times.train_s,
    )


class FakeTrainEngine:
    """TrainEngine with the parameter `transitions` [V, V], replicated on every rank and updated by plain SGD. Token ids
    are taken modulo V. logprobs() and train_step() sleep logprobs_s and train_s seconds."""

    computes = SPEC.computes

    def __init__(
        self,
        config: TrainerConfig,
        *,
        vocab_size: int,
        total_steps: int,
        seed: int = 0,
        logprobs_s: float = 0.0,
        train_s: float = 0.0,
    ):
        self.config, self.total_steps, self.optimizer_step = config, total_steps, 0
        self._logprobs_s, self._train_s = logprobs_s, train_s
        self.data_parallel_rank, self.data_parallel_size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(seed)
        self.transitions = torch.randn(vocab_size, vocab_size, generator=generator).requires_grad_()

    def _forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), float32 [T], 0 outside loss_mask."""
        token_ids = batch.token_ids % len(self.transitions)
        log_p = (self.transitions[token_ids.roll(1)] / temperature).log_softmax(-1)
        logprobs = log_p.gather(1, token_ids[:, None])[:, 0]
        return logprobs * batch.loss_mask, -(log_p.exp() * log_p).sum(-1) * batch.loss_mask

    def _outputs(self, batch: Batch, objective: Objective) -> Outputs:
        logprobs, entropies = self._forward(batch, objective.temperature)
        if "entropy" in objective.outputs:
            return Outputs(logprobs, entropies)
        return Outputs(logprobs, entropies.detach() if "entropy" in objective.logged else None)

    @torch.no_grad()
    def logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor:
        """See TrainEngine."""
        time.sleep(self._logprobs_s)
        return self._forward(batch, temperature)[0] * _chosen(batch, micro_batches)

    @torch.no_grad()
    def entropies(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor:
        """See ComputesEntropies."""
        return self._forward(batch, temperature)[1] * _chosen(batch, micro_batches)

    def train_step(
        self,
        batch: Batch,
        micro_batches: MicroBatches,
        objective: Objective,
        norms: Norms,
    ) -> Stats:
        """See TrainEngine."""
        gradient, collected = torch.zeros_like(self.transitions), []
        time.sleep(self._train_s)
        for rows in micro_batches:
            if rows:
                micro_batch = batch.select(rows)
                loss, stats = objective.loss(self._outputs(micro_batch, objective), micro_batch, norms)
                gradient += torch.autograd.grad(loss, self.transitions)[0]
                collected.append(stats)
        dist.all_reduce(gradient)
        grad_norm, rate = gradient.norm(), learning_rate(self.config, self.optimizer_step, self.total_steps)
        finite = bool(torch.isfinite(grad_norm))
        if finite:
            with torch.no_grad():
                self.transitions -= rate * gradient * (self.config.max_grad_norm / grad_norm).clamp(max=1.0)
            self.optimizer_step += 1
        if self.data_parallel_rank == 0:
            collected.append(update_stats(rate, grad_norm.item()))
        return merge(collected)

    def named_weights(
        self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), without: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        if "transitions" not in without:
            yield "transitions", self.transitions.detach().to(dtypes.get("transitions", torch.float32), copy=True)

    def weight_layout(self) -> list[TensorShards]:
        """See TrainEngine."""
        return [
            TensorShards.unsharded("transitions", "float32", self.transitions.shape, range(self.data_parallel_size))
        ]

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine."""
        yield self.transitions.detach()

    def offload(self, weights: bool = True) -> None:
        """See TrainEngine. Does nothing, since the parameter is on the host."""

    def onload(self) -> None:
        """See TrainEngine."""

    def snapshot(self, copy: bool = True) -> Files:
        """See TrainEngine. All ranks have the same state, which rank 0 writes; there is no random state."""
        buffer = io.BytesIO()
        torch.save({"transitions": self.transitions.detach(), "step": self.optimizer_step}, buffer)
        return {"fake.pt": buffer.getvalue()} if self.data_parallel_rank == 0 else {}

    def load(self, folder: Path) -> list[str]:
        """See TrainEngine."""
        state = torch.load(folder / "fake.pt", weights_only=True)
        with torch.no_grad():
            self.transitions.copy_(state["transitions"])
        self.optimizer_step = state["step"]
        return []

    def export_hf(self, folder: Path) -> None:
        """See TrainEngine. No library can load the exported files."""
        if self.data_parallel_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            config = {"model_type": "hpcrl_fake", "vocab_size": self.transitions.shape[0]}
            (folder / "config.json").write_text(json.dumps(config) + "\n")
            save_file({"transitions": self.transitions.detach().contiguous()}, folder / "model.safetensors")
        dist.barrier()

    def config_summary(self) -> dict[str, Any]:
        """See TrainEngine."""
        return {"engine": "fake", "num_parameters": self.transitions.numel(), "num_ranks": self.data_parallel_size}


class FakeCritic(FakeTrainEngine):
    """ValueEngine: a token's value is the mean of the previous token's row. values() sleeps logprobs_s."""

    computes = frozenset({"values"})

    def _values(self, batch: Batch) -> Tensor:
        return self.transitions[batch.token_ids.roll(1) % len(self.transitions)].mean(-1) * batch.loss_mask

    def _outputs(self, batch: Batch, objective: Objective) -> Outputs:
        values = self._values(batch)
        return Outputs(torch.zeros_like(values), values=values)

    @torch.no_grad()
    def values(self, batch: Batch, micro_batches: MicroBatches) -> Tensor:
        """See ValueEngine."""
        time.sleep(self._logprobs_s)
        return self._values(batch) * _chosen(batch, micro_batches)


def _chosen(batch: Batch, micro_batches: MicroBatches) -> Tensor:
    """bool [T]: whether a token's row is in the micro-batches."""
    rows = torch.zeros(batch.num_sequences, dtype=torch.bool)
    rows[[row for micro_batch in micro_batches for row in micro_batch]] = True
    return rows[batch.row_ids]
