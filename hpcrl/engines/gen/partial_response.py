"""A request's response so far, for engines that return a few tokens at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpcrl.engines.gen.generation_engine import Output, Request
from hpcrl.rollout.types import FinishReason


@dataclass(slots=True)
class PartialResponse:
    """A request that has not ended, and its tokens so far."""

    request: Request
    order: int  # the order of add(), and of outputs that finish together
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)  # log-probs after truncation, if the request truncates
    versions: list[int] = field(default_factory=list)

    def output(self, reason: FinishReason, columns: Mapping[str, np.ndarray] | None = None) -> Output:
        """The request's output if it ended now."""
        truncates = self.request.params.truncates
        return Output(
            id=self.request.id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            gen_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            gen_logprobs_behaviour=np.array(self.behaviour, dtype=np.float32) if truncates else None,
            columns=dict(columns or {}),
        )
