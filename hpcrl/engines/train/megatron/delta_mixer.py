"""The gated delta rule (arXiv 2412.06464) over packed sequences, on CPUs and GPUs.

Megatron-Core's own layer needs flash-linear-attention and refuses packed sequences. As in FSDP2's recurrent mixers,
sequences are gathered into padded blocks [rows, length], in which every row starts without a state. The recurrence is
transformers': flash-linear-attention's if that is installed, otherwise torch's operations.

Tensor parallelism splits key heads, each with its value heads: rows of the projection and of the convolution, and
columns of the output's matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout, pad, unpad
from hpcrl.models.delta import DeltaSizes

LAYOUTS = 8
"""Layouts that are kept for later layers, backward passes and stages."""


@dataclass
class Sequences(PackedSeqParams):
    """All ranks' sequences, for attention, and their lengths on the host, for recurrent layers."""

    lengths: tuple[int, ...] = ()


@functools.lru_cache(maxsize=LAYOUTS)
def _layout(lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
    return PackedLayout(lengths, device)


class _Weight(nn.Module):
    """A parameter of a shape. A module of its own, so its name is that of transformers' convolution or norm."""

    def __init__(self, config: TransformerConfig, shape: Sequence[int]):
        super().__init__()
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.zeros(*shape, **kind))  # type: ignore[arg-type]

    def forward(self) -> Tensor:
        """The parameter: Megatron's data parallelism waits before a module's forward pass for the module's own
        parameters."""
        return self.weight


class DeltaMixer(MegatronModule):
    """Replaces attention in a layer.

    Args:
        sizes: Of all ranks' heads.
    """

    def __init__(self, config: TransformerConfig, sizes: DeltaSizes, **_: Any):
        super().__init__(config)
        group = parallel_state.get_tensor_model_parallel_group()
        self._sizes, heads = sizes, sizes.key_heads // group.size()
        linear: dict[str, Any] = {"config": config, "bias": False, "tp_group": group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, sizes.projected, init_method=config.init_method, gather_output=False, **linear
        )
        self.conv1d = _Weight(config, (sizes.convolved // group.size(), 1, sizes.kernel))
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.dt_bias = nn.Parameter(torch.zeros(heads * sizes.group, **kind))  # type: ignore[arg-type]
        self.A_log = nn.Parameter(torch.zeros(heads * sizes.group, **kind))  # type: ignore[arg-type]
        self.norm = _Weight(config, (sizes.value_dim,))
        self.out_proj = RowParallelLinear(
            sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Sequences, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """([t, 1, hidden], None) of hidden states of this shape. With sequence parallelism, t is this rank's part of
        the tokens. Collective over tensor-parallel ranks."""
        projected = self.in_proj(hidden_states)[0][:, 0]
        mixed = self._mixed(projected, _layout(packed_seq_params.lengths, projected.device))
        output: tuple[Tensor, Tensor | None] = self.out_proj(mixed[:, None])
        return output

    def _mixed(self, projected: Tensor, layout: PackedLayout) -> Tensor:
        """[T, values] of the projection [T, projected] of all tokens; both of this rank's heads."""
        sizes, shown = self._sizes, layout.padded.keys
        queries, keys, values, gates, factors, _ = sizes.of_key_head
        of_heads = projected.unflatten(1, (-1, sum(sizes.of_key_head)))
        convolved, gate, beta, decay = of_heads.split([queries + keys + values, gates, factors, factors], -1)
        strength = -self.A_log.float().exp() * F.softplus(decay.flatten(1).float() + self.dt_bias)
        padded = [pad(x, shown) for x in (convolved.flatten(1), strength, beta.flatten(1).sigmoid())]
        lengths = [block.rows * block.length for block in layout.padded.blocks]
        results = []
        for block, *parts in zip(layout.padded.blocks, *(x.split(lengths) for x in padded), strict=True):
            results.append(self._rows(*(part.unflatten(0, (block.rows, block.length)) for part in parts)).flatten(0, 1))
        attended = unpad(torch.cat(results), shown)
        return self._gated(attended, gate.reshape(attended.shape)).flatten(1)

    def _rows(self, convolved: Tensor, strength: Tensor, beta: Tensor) -> Tensor:
        """[rows, length, heads, value_dim] of inputs [rows, length, ...]."""
        sizes = self._sizes
        weight = self.conv1d()[:, 0]
        convolved = causal_conv1d_fn(convolved.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)
        query, key, value = convolved.unflatten(2, (-1, sum(sizes.of_key_head[:3]))).split(sizes.of_key_head[:3], -1)
        query, key = (x.repeat_interleave(sizes.group, 2) if sizes.group > 1 else x for x in (query, key))
        value = value.reshape(*value.shape[:2], -1, sizes.value_dim)
        attended: Tensor = torch_chunk_gated_delta_rule(
            query, key, value, g=strength, beta=beta, use_qk_l2norm_in_kernel=True
        )[0]
        return attended

    def _gated(self, attended: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head's output, times its gate. Tensor-parallel ranks sum the gradient of the norm."""
        weight = copy_to_tensor_model_parallel_region(self.norm())
        wide = attended.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return (weight * wide.to(attended.dtype) * F.silu(gate.float())).to(attended.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> Any:
        """Called by Megatron: heads are split over tensor-parallel ranks."""
        group, copies = parallel_state.get_tensor_model_parallel_group(), (metadata or {})["dp_cp_group"]
        own: dict[str, Tensor] = {"dt_bias": self.dt_bias, "A_log": self.A_log}
        own |= {"conv1d.weight": self.conv1d.weight, "norm.weight": self.norm.weight}
        split = dict.fromkeys(("dt_bias", "A_log", "conv1d.weight"), 0)
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, split, sharded_offsets, tp_group=group, dp_cp_group=copies
        )
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        return found
