"""Unsharded parameters and gradients of an FSDP2 rank at the moments of a micro-batch.

FSDP2 gathers a layer into a buffer and copies it; it gathers the next layer while one computes its backward pass. It
copies a layer's gradients in fp32 into a buffer, which it keeps until the next layer's gradients are complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hpcrl.config import Config
from hpcrl.engines.train.fsdp2.spec import FSDP2Config, is_unsharded
from hpcrl.models.shape import MTP_PREFIX, ModelShape, Parameter, Unit
from hpcrl.planner.activations import FP32
from hpcrl.planner.adapters import trained, with_adapters
from hpcrl.planner.memory_parts import BYTES, Part, has_gpus, samples_of_an_update
from hpcrl.planner.moments import Moment

SMALL_MODEL_BYTES = 4 << 30
"""As in engines/train/fsdp2/engine.py."""


def stays_gathered(shape: ModelShape, compute: int, num_trained: int) -> bool:
    """Whether a model with this many trained numbers stays gathered during a command."""
    return shape.num_parameters * compute + FP32 * num_trained <= SMALL_MODEL_BYTES


@dataclass(frozen=True)
class GatheredState:
    """How a rank holds parameters and gradients in an optimizer step.

    Args:
        whole, learnt: All parameters, and the trained ones, of one tensor-parallel rank.
        num_bytes: Bytes of a number in the compute dtype.
        num_shards: Ranks that share the parameters.
        num_expert_shards: Ranks that share the parameters of experts.
        unsharded: Whether the parameters are plain tensors.
        by_layer: Whether layers are gathered one by one.
        sums: Whether gradients are summed over several micro-batches before they are reduced.
        gloo: Whether collectives run on gloo, which copies their inputs or results.
    """

    whole: ModelShape
    learnt: ModelShape
    num_bytes: int
    num_shards: int
    num_expert_shards: int
    unsharded: bool
    by_layer: bool
    sums: bool
    gloo: bool

    @classmethod
    def of(cls, config: Config, policy: ModelShape, shape: ModelShape, num_ranks: int) -> GatheredState:
        """The state of a rank with this shape's parameters, which may be the policy's and those of MTP layers. The
        policy's size decides whether layers are gathered one by one."""
        own, compute = config.trainer.section(FSDP2Config), BYTES[config.trainer.param_dtype]
        learnt, whole, unsharded = trained(config, shape), with_adapters(config, shape), is_unsharded(config, num_ranks)
        num_trained = trained(config, policy).num_parameters
        rows = -(-samples_of_an_update(config) * own.ranks_of_a_row // num_ranks)
        return cls(
            whole,
            learnt,
            compute,
            1 if unsharded else own.num_shards(num_ranks),
            1 if unsharded else own.num_expert_shards(num_ranks),
            unsharded,
            by_layer=not unsharded and not stays_gathered(with_adapters(config, policy), compute, num_trained),
            sums=rows * config.max_row_tokens > config.trainer.max_tokens_per_micro_batch,
            gloo=num_ranks > 1 and not has_gpus(config, ("trainer",)),
        )

    def shards_of(self, parameter: Parameter) -> int:
        """Ranks that share a parameter, or the part of it that a rank has."""
        return self.num_expert_shards if parameter.split == "expert" else self.num_shards

    @property
    def _outside(self) -> int:
        """Trained numbers outside layers and blocks."""
        return self.learnt.unit_sizes[None]

    @cached_property
    def _head(self) -> int:
        """Trained numbers of the head, whose gradient is complete before the layers'."""
        of_head = (p.size for p in self.learnt.parameters if self.learnt.tied and p.split == "vocabulary")
        return sum(p.size for p in self.learnt.parameters if p.name.startswith("lm_head.")) or sum(of_head)

    @cached_property
    def _joins(self) -> int:
        """Trained numbers before and after MTP layers, whose gradients are complete first."""
        return sum(p.size for p in self.learnt.parameters if p.name.startswith(MTP_PREFIX) and p.layer is None)

    def _is_mtp(self, unit: Unit) -> bool:
        return unit[0] == "layer" and unit[1] >= self.whole.num_layers

    def _finished_outside(self, unit: Unit) -> int:
        """Trained numbers outside the layers whose gradients are complete in a unit's backward pass."""
        if self._is_mtp(unit):
            return self._joins
        return self._outside if unit[0] == "block" else self._head + self._joins

    @cached_property
    def _units(self) -> list[Unit]:
        """Layers and blocks in the order of the backward pass."""
        units = [unit for unit in self.whole.unit_sizes if unit is not None]
        return sorted(units, key=lambda unit: (unit[0] == "block", -unit[1]))

    def _size(self, unit: Unit | None, trained_only: bool = False) -> int:
        shape = self.learnt if trained_only else self.whole
        return 0 if unit is None else shape.unit_sizes.get(unit, 0)

    @cached_property
    def _largest(self) -> dict[Unit | None, int]:
        """Numbers of the largest trained parameter of each unit."""
        found: dict[Unit | None, int] = {}
        for parameter in self.learnt.parameters:
            found[parameter.unit] = max(parameter.size, found.get(parameter.unit, 0))
        return found

    def parts_at(self, moment: Moment) -> dict[str, int]:
        """Bytes of gathered weights and gradients at a moment. Sharded gradients of previous micro-batches are not
        counted."""
        if self.by_layer:
            return {"gathered weights": self._weights(moment), "gathered gradients": self._reducing(moment)}
        gradients = {"gathered gradients": self._unreduced(moment)}
        if self.unsharded:
            return {"gradients": self._unreduced(moment)}
        return {"gathered weights": self.whole.num_parameters * self.num_bytes} | gradients

    def _next(self, unit: Unit | None) -> Unit | None:
        """The unit whose backward pass follows."""
        units = self._units
        following = units if unit is None else units[units.index(unit) + 1 :]
        return following[0] if following else None

    def _previous(self, unit: Unit) -> Unit | None:
        units = self._units
        return units[units.index(unit) - 1] if unit != units[0] else None

    def _weights(self, moment: Moment) -> int:
        """Bytes outside the layers, of the computing layer, and of the buffer for the next one."""
        following = self._size(self._next(moment.unit)) if moment.at != "embedding" else 0
        gathered = self.whole.unit_sizes[None] + following * (self.num_shards > 1)
        if moment.at == "forward":
            gathered += following  # the last layer
        elif moment.at == "backward":
            gathered += self._size(moment.unit)
        return gathered * self.num_bytes

    def _reducing(self, moment: Moment) -> int:
        """Bytes of gradients by layer: outside the layers until the end; of the layer; and of the buffer in which they,
        or the previous layer's, are reduced."""
        if moment.at == "embedding":
            return self._outside * self.num_bytes + self._size(self._units[-1], True) * FP32
        if (unit := moment.unit) is None:
            return self._joins * self.num_bytes * (moment.at == "backward")
        waiting = self._finished_outside(unit) * self.num_bytes
        own = self._size(unit, True)
        if moment.at == "backward":  # before the layer has gradients, gloo has a copy of the next layer's weights
            most = max(self._existing(moment), self._size(self._next(unit)) * self.gloo)
            return waiting + self._size(self._previous(unit), True) * FP32 + most * self.num_bytes
        if moment.at == "reduced":
            return waiting + own * FP32
        return waiting + own * FP32 + max(own * self.num_bytes, self._reduced(own))

    def _reduced(self, numbers: int) -> int:
        """Bytes beside the buffer while it is reduced: the result, and copies by gloo, or by FSDP2 on a single rank. In
        the result, all parameters count as those of experts, which have the fewest shards."""
        copies = self.gloo or self.num_expert_shards == 1
        return -(-numbers // self.num_expert_shards) * FP32 + numbers * FP32 * copies

    @cached_property
    def _before(self) -> dict[Unit, int]:
        """Trained numbers of the units before each one in the backward pass."""
        sizes = accumulate((self._size(unit, True) for unit in self._units), initial=0)
        return dict(zip(self._units, sizes, strict=False))

    def _is_measured(self, moment: Moment) -> bool:
        """Whether the moment's shares are those of this rank: all of the unit's parameters are trained."""
        return moment.adding is not None and self._size(moment.unit) == self._size(moment.unit, True)

    def _adding(self, moment: Moment) -> int:
        """Numbers of a unit's gradients that are computed, and not complete."""
        if moment.adding is None or not self._is_measured(moment):
            return self._largest.get(moment.unit, 0)
        return math.ceil(moment.adding * self._size(moment.unit))

    def _existing(self, moment: Moment) -> int:
        """Numbers of all of a unit's gradients that exist."""
        if not self._is_measured(moment):
            return self._size(moment.unit, True)
        return math.ceil(moment.complete * self._size(moment.unit)) + self._adding(moment)

    def _unreduced(self, moment: Moment) -> int:
        """Bytes of all gradients if none is reduced: sums of previous micro-batches, and the gradients of this one,
        which in fp32 are added to the sums one by one."""
        if self.sums and (self.num_bytes == FP32 or self.unsharded):
            adding = 0
            if moment.unit is not None:
                adding = self._adding(moment)
                adding += self._head * self.learnt.tied  # added together with the embedding's
            elif moment.at == "embedding":
                adding = self._largest.get(None, 0)
            return self.learnt.num_parameters * FP32 + adding * self.num_bytes
        sums = self.learnt.num_parameters * FP32 * self.sums
        if moment.at == "embedding":
            return sums + self.learnt.num_parameters * self.num_bytes
        if (unit := moment.unit) is not None:
            finished = self._before[unit] + self._existing(moment) + self._finished_outside(unit)
        elif moment.at == "backward":  # of the policy's head and norm
            finished = sum(self._size(each, True) for each in self._units if self._is_mtp(each)) + self._joins
        else:
            return sums
        return sums + finished * self.num_bytes

    def reduction(self, shards: int) -> list[Part]:
        """Parts after the last backward pass. `shards` are the bytes of sharded gradients in the same memory."""
        numbers = self._outside if self.by_layer else self.learnt.num_parameters
        if self.unsharded or not numbers:
            return []
        unreduced = numbers * (FP32 if self.sums and not self.by_layer else self.num_bytes)
        before = 0 if self.by_layer else shards  # these are the reduction's result
        beside = max(unreduced - before, self._reduced(numbers) - before)
        return [
            Part("trainer", "gathered gradients", numbers * FP32, ("update",)),
            Part("trainer", "reduction", max(0, beside), ("update",)),
        ]
