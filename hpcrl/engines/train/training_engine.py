"""The protocol of training engines. All ranks of the engine's default process group make the same calls in the same
order. The ranks of a data-parallel rank (hpcrl.spec.division) get equal batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective
from hpcrl.checkpoint.writer import Files
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.spec.weight_layout import TensorShards


class TrainEngine(Protocol):
    """The protocol of training engines, tested by tests/contracts/test_train_engine.py."""

    optimizer_step: int  # steps taken so far
    computes: frozenset[str]  # the optional fields of Outputs that it computes

    def logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """float32 [T] on the host, like the batch: log-softmax(logits / temperature) at tokens of loss_mask in the rows
        of micro_batches, 0 elsewhere. Ranks that hold no outputs may return None.

        The vocabulary projection is never computed for other tokens (prompts, tool results), not even for an objective.
        Collective over the engine's ranks. No gradients.
        """

    def train_step(
        self,
        batch: Batch,
        micro_batches: MicroBatches,
        objective: Objective,
        norms: Norms,
    ) -> Stats:
        """Forward and backward pass of all micro-batches, clipping, and one optimizer and scheduler step. Collective.

        The mini-batch consists of the rows in micro_batches, each once; `norms` are the mini-batch's over all ranks.
        Returns the rows' loss stats and, only on the first data-parallel rank, actor/grad_norm and actor/lr. Only stats
        of ranks that hold outputs are read. If the gradient norm is not finite, the update is skipped and counted in
        actor/skipped_update.
        """

    def named_weights(
        self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), without: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the full weights in a fixed order, under the names of transformers' state_dict(), a tied
        weight once. With trainer.lora, only the adapters' weights (hpcrl.spec.lora), or, with adapters of experts, all
        weights of a model without adapters, in which they are merged.

        Collective: every rank must exhaust it. A rank yields its share of the parameters according to the division; all
        shares together have each name once. Weights in `dtypes` are converted before they are sent between ranks;
        weights in `without` are left out, which is given only if some tensors are frozen (TensorShards.frozen).
        """

    def weight_layout(self) -> list[TensorShards]:
        """The tensors of all shares in a fixed order, and which ranks of the engine own which shards. Equal on all
        ranks and at all times."""

    def local_shards(self) -> Iterator[Tensor]:
        """This rank's shards in layout order, without tensors of which it owns no shard; they may be the parameters
        themselves. Every rank must exhaust it, because it may be collective."""

    def offload(self, weights: bool = True) -> None:
        """Move gradients, optimizer state and (unless weights=False) parameters to host memory; idempotent. onload()
        must be called before log-probs, a step, named_weights() or local_shards() needs offloaded tensors."""

    def onload(self) -> None:
        """Move offloaded tensors back to the device; idempotent."""

    def snapshot(self, copy: bool = True) -> Files:
        """Copy this rank's part of a checkpoint (parameters, optimizer, scheduler, random state) to host memory.
        Returns the files that this rank must write, which are valid until the next call. With copy=False, they may
        refer to the state itself, and are valid until it changes. Collective."""

    def load(self, folder: Path) -> list[str]:
        """Restore the state from all ranks' files; returns warnings, such as that another number of ranks does not
        restore random state. Collective."""

    def export_hf(self, folder: Path) -> None:
        """Write config, safetensors with index, tokenizer and generation config. Collective; rank 0 writes."""

    def config_summary(self) -> dict[str, Any]:
        """Facts for the log: parameters, dtype, packing, ranks."""


class LocalWeights(Protocol):
    """An engine whose only rank has every parameter as one plain tensor, which a generator in the same process can read
    and even share. Other engines lack these methods or are `sharded`."""

    sharded: bool

    def local_weights(self) -> dict[str, Tensor]:
        """The parameters themselves under the names of named_weights(). They must not be changed."""

    def move_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of the named parameters, also of frozen ones, into these tensors, which then are the
        parameters. Tensors of another dtype than their parameter are left out."""


@runtime_checkable
class ComputesEntropies(Protocol):
    """An engine that can compute entropies without a loss, as all of hpcrl's engines do."""

    def entropies(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """Entropies of softmax(logits / temperature) in nats, float32 [T]; otherwise as TrainEngine.logprobs()."""


class TrainsAdapters(Protocol):
    """A training engine with adapters for frozen weights (trainer.lora); the frozen weights are the reference
    policy."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context in which the model computes with only the frozen weights, and its routers choose the experts."""

    def reference_logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """TrainEngine.logprobs() with only the frozen weights. Collective over the engine's ranks."""


@runtime_checkable
class ValueEngine(Protocol):
    """A critic: a training engine whose model gives each token a value instead of log-probs. named_weights() and
    logprobs() are not called."""

    def values(self, batch: Batch, micro_batches: MicroBatches) -> Tensor | None:
        """float32 [T], or [T, heads] of a model with several heads, on the host, like the batch: at tokens of loss_mask
        in the rows of micro_batches, the value of the state before the token; 0 elsewhere. Ranks that hold no outputs
        may return None. Collective over the engine's ranks. No gradients."""


@runtime_checkable
class Teaches(Protocol):
    """An engine that tells what a divergence (hpcrl.spec.divergence) over several words needs of a teacher. Both
    methods are collective over the engine's ranks, and compute the tokens of loss_mask in the rows of micro_batches;
    all other values are 0. Results are on the host, like the batch. Ranks that hold no outputs may return None. No
    gradients."""

    def top_k(
        self, batch: Batch, micro_batches: MicroBatches, k: int, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """(int32 [T, k], float32 [T, k]): before each token, the k most probable tokens, descending, and their
        log-softmax(logits / temperature). ValueError if the vocabulary has fewer."""

    def final_states(self, batch: Batch, micro_batches: MicroBatches) -> Tensor | None:
        """float32 [T, D]: the state before each token to which the output head
        (hpcrl.engines.train.teacher_head) is applied."""


def assemble_rows(batch: Batch, micro_batches: MicroBatches, values: Iterable[Tensor], like: Tensor) -> Tensor:
    """[T, ...] on the host: each micro-batch's values for the tokens of its rows, 0 for rows in none of them.
    `like` [n, ...] has the dtype and the width."""
    lengths = batch.lengths.tolist()
    pieces = [like.new_zeros(length, *like.shape[1:]) for length in lengths]
    for rows, computed in zip(micro_batches, values, strict=False):
        for row, piece in zip(rows, torch.split(computed, [lengths[row] for row in rows]), strict=True):
            pieces[row] = piece
    return torch.cat(pieces) if pieces else like[:0]


def check_micro_batches(micro_batches: MicroBatches, num_rows: int) -> list[int]:
    """The rows of the micro-batches in order. ValueError if a row is repeated or not below num_rows."""
    rows = sorted(row for micro_batch in micro_batches for row in micro_batch)
    if len(set(rows)) < len(rows) or (rows and not 0 <= rows[0] <= rows[-1] < num_rows):
        raise ValueError(f"micro-batches must hold rows below {num_rows}, each once, got {rows[:8]}...")
    return rows


def check_objective(engine: TrainEngine, objective: Objective) -> None:
    """ValueError if the objective needs an output that the engine does not compute."""
    if "old_entropies" in objective.reads and not isinstance(engine, ComputesEntropies):
        name = engine.config_summary()["engine"]
        raise ValueError(
            f"the objective {type(objective).__name__} needs entropies before the step (algorithm.entropy_share), "
            f"which the training engine {name} does not compute separately from a loss"
        )
    lacking = sorted((objective.outputs | objective.logged) - engine.computes)
    if lacking:
        raise ValueError(
            f"the objective {type(objective).__name__} needs {', '.join(lacking)} of every token, which the training "
            f"engine {engine.config_summary()['engine']} does not compute; it has {', '.join(sorted(engine.computes))}"
        )


def check_segments(engine: TrainEngine, by_steps: bool) -> None:
    """ValueError if rows consist of several sequences (episodes by steps) and the engine treats a row as one."""
    about = engine.config_summary()
    if by_steps and not about.get("packing", True):
        raise ValueError(
            f"env: episodes by steps need a trainer that packs sequences, and {about['engine']} does not pack this "
            f"{about['architecture']} model; use episode=trajectory, or a model that can be packed and "
            f"trainer.{about['engine']}.packing=auto"
        )
