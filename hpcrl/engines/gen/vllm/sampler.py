"""Sample in vLLM as in the native engine: a response depends on its seed and its logits, not on other rows.

vLLM's own sampler draws from one torch generator per request, one request after the other, and a partly prefilled
prompt advances the generator. Moreover, it returns only the log-probs after truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcrl.engines.gen.generation_engine import SamplingParams
from hpcrl.engines.gen.sampling import GOLDEN, SamplingPlan, sample, uniforms
from hpcrl.engines.gen.vllm.routes import RouteRecorder


@dataclass(frozen=True, slots=True)
class Drawing:
    """A request's sampling state: its parameters, its stream's origin, and its number of drawn tokens."""

    params: SamplingParams
    origin: np.uint64
    drawn: int


class Sampler:
    """Replaces the sampler of vLLM's model runner.

    Args:
        rows: Returns the sampling states of the requests with these ids.
        recorder: Has the experts that were chosen in the forward pass.
    """

    def __init__(
        self, runner: Any, rows: Callable[[Sequence[int]], list[Drawing]], recorder: RouteRecorder | None = None
    ):
        self._runner, self._rows, self._recorder = runner, rows, recorder
        self._plan: SamplingPlan | None = None
        self._ids: list[int] = []  # the plan's request ids
        self._logprobs = np.empty((2, 0), np.float32)
        self._routes: np.ndarray | None = None
        runner.sampler.forward = self._forward

    def drawn(self, request: int) -> tuple[float, float, bytes]:
        """For the token that the request has drawn in the last step: log-softmax(logits / T), the log-prob after
        truncation, and the experts of the token before (empty without a recorder)."""
        row = self._ids.index(request)
        logprob, behaviour = self._logprobs[:, row]
        return float(logprob), float(behaviour), b"" if self._routes is None else self._routes[row].tobytes()

    def _forward(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        # vLLM appends a random suffix to the request id.
        ids = [int(name.partition("-")[0]) for name in self._runner.input_batch.req_ids]
        rows = self._rows(ids)
        if self._plan is None or ids != self._ids:
            self._plan, self._ids = _plan([row.params for row in rows], logits), ids
        drawn = np.array([row.drawn for row in rows], dtype=np.uint64)
        uniform = uniforms(np.array([row.origin for row in rows]) + drawn * GOLDEN, 0)
        tokens, *logprobs = sample(logits.float(), self._plan, torch.from_numpy(uniform).to(logits.device))
        self._logprobs = torch.stack(logprobs).cpu().numpy()
        if self._recorder is not None:
            self._routes = self._recorder.last(len(ids))
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=None)


def _plan(params: Sequence[SamplingParams], logits: torch.Tensor) -> SamplingPlan:
    return SamplingPlan.build(
        temperature=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params]),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        num_live=len(params),
        vocab_size=logits.shape[-1],
        device=logits.device,
    )
