"""The experts that vLLM's routers choose, for the field `routes`, read from vLLM's own capture buffer.

vLLM's `enable_return_routed_experts` is not used, because it needs vLLM's second model runner and returns nothing for
aborted requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from hpcrl.engines.expert_routes import RouteShape


class RouteRecorder:
    """Records the experts that were chosen in the last forward pass."""

    def __init__(self, shape: RouteShape):
        self._shape, self._field = shape, shape.field
        self._runner: Any = None
        self._chosen = torch.empty(0)  # int32 [tokens of a forward, all layers, experts per token]
        self._layers: list[int] = []  # the layers with experts

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Context in which the engine to record is created. ValueError if vLLM cannot capture its routers' choices."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        initialize = GPUModelRunner.initialize_kv_cache

        def initialize_kv_cache(runner: Any, *args: Any, **kwargs: Any) -> None:
            initialize(runner, *args, **kwargs)
            self._bind(runner)  # now the model is loaded, and no CUDA graph is captured yet

        with mock.patch.object(GPUModelRunner, "initialize_kv_cache", initialize_kv_cache):
            yield

    def _bind(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        model = runner.get_model()
        capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        try:
            bind_routed_experts_capturer(model, capturer)
        except ValueError as error:
            remedy = "Use false, generator.vllm.options={moe_backend: triton} or generator.engine=native"
            raise ValueError(f"trainer.router_replay: {error} {remedy}") from error
        self._runner, self._chosen = runner, capturer.device_buffer
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        found = (len(self._layers), capturer.shape_per_token[1])
        if found != (self._shape.num_layers, self._shape.experts_per_token):
            raise ValueError(
                f"trainer.router_replay: vLLM has {found[0]} layers with {found[1]} experts per token, config.json has "
                f"{self._shape.num_layers} with {self._shape.experts_per_token}; use false or generator.engine=native"
            )

    def last(self, num_requests: int) -> np.ndarray:
        """[num_requests, width]: for each request of the last forward pass, the experts of its last token, from whose
        logits the next token is drawn."""
        rows = self._runner.query_start_loc.gpu[1 : num_requests + 1] - 1
        chosen = self._chosen[rows][:, self._layers].to(getattr(torch, self._field.travels_as))
        return chosen.cpu().numpy().reshape(self._field.shape(num_requests))
