"""The critic on DeepSpeed ZeRO: FSDP2's critic defines the model and the values; DeepSpeed shards the state."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.config import Config
from hpcrl.engines.train.deepspeed.engine import ZeroEngine
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2.critic import FSDP2Critic, FSDP2Scorer, PackedCritic, labels_of, scores_sequences
from hpcrl.engines.train.fsdp2.engine import arguments, spread
from hpcrl.engines.train.fsdp2.model_kind import HEAD
from hpcrl.rollout.batch import Batch


def make(config: Config, model_path: Path, total_steps: int) -> ZeroCritic:
    """The critic's engine; `config` as for FSDP2's. Collective over the default group."""
    own = config.trainer.section(DeepSpeedConfig)
    given = arguments(config, total_steps)
    if scores_sequences(config):
        return ZeroScorer(config.trainer, model_path, zero=own, labels=labels_of(config), **given)
    return ZeroCritic(config.trainer, model_path, zero=own, **given)


class ZeroPackedCritic(PackedCritic):
    """All forward passes in one method, as in ZeroCausalLM. The head has the other weights' dtype, and computes in its
    input's dtype, float32."""

    def __init__(self, *given: Any, **keys: Any):
        super().__init__(*given, **keys)
        head = cast(nn.Linear, self.hf.get_submodule(HEAD))
        head.forward = functools.partial(_in_type_of_input, head)  # type: ignore[method-assign]

    def forward(self, *given: Any) -> Any:
        """The number of arguments selects own_logprobs of a sequence, values of a batch, or (for the probe)
        PackedCausalLM.forward."""
        if len(given) == 1:
            return super().own_logprobs(*given)
        return super().values(*given) if len(given) == 5 else super().forward(*given)

    def own_logprobs(self, token_ids: Tensor) -> Tensor:
        logprobs: Tensor = self(token_ids)
        return logprobs


def _in_type_of_input(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.to(x.dtype)
    return F.linear(x, linear.weight.to(x.dtype), bias)


class ZeroCritic(ZeroEngine, FSDP2Critic):
    """TrainEngine and ValueEngine (hpcrl.engines.train.training_engine) on the default process group.

    The optimizer keeps the head in float32, like all weights. The head starts at zero unless the folder has one.
    """

    model_class = ZeroPackedCritic

    def _values(self, batch: Batch) -> Tensor:
        inputs, places = self._inputs(batch)
        return spread(self.model(*inputs), places, batch)


class ZeroScorer(ZeroCritic, FSDP2Scorer):
    """The critic's engine for a reward model, see FSDP2Scorer."""
