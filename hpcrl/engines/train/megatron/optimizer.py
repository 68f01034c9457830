"""Megatron's gradient buffers and optimizer as hpcrl's engines need them: gradients are only summed, each step has a
learning rate, and gradients that are not finite cause no update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.megatron.spec import MegatronConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def finalize(chunks: Sequence[Any], num_tokens: Any = None, **options: Any) -> None:
    """Sum the gradients over ranks without dividing them by a number of tokens, since losses are already divided."""
    finalize_model_grads(list(chunks), None, **options)


def distribute(chunks: Sequence[torch.nn.Module], config: TransformerConfig, megatron: MegatronConfig) -> list[Any]:
    """Wrap the chunks with buffers for fp32 gradients, which are summed over data-parallel ranks."""
    config.finalize_model_grads_func = finalize
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=megatron.overlap_gradients,
        overlap_param_gather=megatron.overlap_parameters,
        use_distributed_optimizer=megatron.distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    if megatron.overlap_gradients:  # the schedules do not count the last micro-batch's backward pass
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


class Optimizer:
    """AdamW with fp32 moments and master weights, and weight decay on matrices only."""

    def __init__(self, chunks: Sequence[Any], trainer: TrainerConfig, megatron: MegatronConfig, dtype: torch.dtype):
        config = OptimizerConfig(
            optimizer="adam",
            lr=trainer.lr,
            min_lr=0.0,
            weight_decay=trainer.weight_decay,
            adam_beta1=trainer.betas[0],
            adam_beta2=trainer.betas[1],
            adam_eps=trainer.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=megatron.distributed_optimizer,
            overlap_param_gather=megatron.overlap_parameters,
            clip_grad=0.0,
        )
        self.has_masters = dtype != torch.float32
        self.is_distributed = megatron.distributed_optimizer
        self.max_norm = trainer.max_grad_norm
        self.chain: Any = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
        for group in self.chain.param_groups:  # Megatron's own scheduler would set the decay: 0 for norms and biases
            group["weight_decay"] = trainer.weight_decay * group["wd_mult"]

    def state_of(self, parameter: Tensor) -> tuple[int, dict[str, Tensor]]:
        """(first number, state) for the consecutive numbers of a parameter that this rank updates: flat moments and, if
        the parameter is not fp32, a flat master copy. Empty if the rank updates none."""
        for optimizer in self.chain.chained_optimizers:
            inner = optimizer.optimizer
            if isinstance(optimizer, DistributedOptimizer):
                if parameter not in optimizer.model_param_group_index_map:
                    continue
                group, place = optimizer.model_param_group_index_map[parameter]
                main = inner.param_groups[group]["params"][place]
                first = optimizer._get_model_param_range_map(parameter)["param"].start
            elif inner is not None:
                main, first = getattr(parameter, "main_param", parameter), 0
                if not any(main is other for group in inner.param_groups for other in group["params"]):
                    continue
            else:
                continue
            state = _moments(inner, main)
            return first, {"fp32_param": main.detach().view(-1), **state} if self.has_masters else state
        return 0, {}

    def set_step(self, step: int) -> None:
        """Set the number of steps taken so far."""
        for optimizer in self.chain.chained_optimizers:
            for group in optimizer.param_groups:
                if "step" in group:
                    group["step"] = step
                for parameter in group["params"]:
                    _moments(optimizer.optimizer, parameter)
                    if "step" in (state := optimizer.optimizer.state[parameter]):
                        state["step"].fill_(step)

    def move(self, move: Callable[[dict[Any, Tensor]], dict[Any, Tensor]]) -> None:
        """Move moments and master copies of weights with `move`, a method of HostMemory."""
        groups = [
            (each.optimizer.state, group) for each in self.chain.chained_optimizers for group in each.param_groups
        ]
        mains = [(states[main], main) for states, group in groups for main in group["params"]]
        tensors: dict[Any, Tensor] = {}
        for state, main in mains:
            tensors |= {(id(main), key): value for key, value in state.items() if isinstance(value, Tensor)}
            if self.has_masters:
                tensors[id(main)] = main.data
        moved = move(tensors)
        for state, main in mains:
            state |= {key: moved[id(main), key] for key in state if (id(main), key) in moved}
            if self.has_masters:
                main.data = moved[id(main)]

    def step(self, rate: float) -> float:
        """Clip the gradients of all ranks and update the weights; nothing if their norm is not finite. Returns the
        norm. Collective over the engine's ranks."""
        self.chain.prepare_grads()
        norm = float(self.chain.get_grad_norm())
        if math.isfinite(norm):
            self._clip(norm)
            for group in self.chain.param_groups:
                group["lr"] = rate
            self.chain.step_with_ready_grads()
        self.chain.zero_grad()  # otherwise the next backward pass would add to the buffers twice
        return norm

    def _clip(self, norm: float) -> None:
        for optimizer in self.chain.chained_optimizers if norm > self.max_norm else ():
            if parameters := optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self.max_norm, norm)


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's moments, flat; zeros before the first step, in which the optimizer would create them."""
    state = optimizer.state[parameter]
    if not state:
        if isinstance(optimizer, torch.optim.AdamW):
            state["step"] = torch.tensor(0.0)
        state |= {key: torch.zeros_like(parameter, dtype=torch.float32) for key in MOMENTS}
    return {key: state[key].view(-1) for key in MOMENTS}
