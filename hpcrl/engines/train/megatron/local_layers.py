"""Layers for machines without Transformer Engine: attention over packed sequences, and the norm.

Context parallelism splits each sequence into 2 n chunks for n ranks. Rank r has the chunks r and 2 n - 1 - r, so all
ranks compute equally many scores (arXiv 2310.01889, and Transformer Engine's layout "thd").
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from hpcrl.engines.blocked_attention import masked_attention
from hpcrl.engines.varlen import Spans, sequence_by_sequence


class RMSNorm(nn.Module):
    """RMSNorm as in transformers; with layernorm_zero_centered_gamma, times weight + 1 in float32. An attribute of its
    weight makes Megatron sum gradients if tokens are split over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self._centred = eps, config.layernorm_zero_centered_gamma

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self._centred:
            return (wide * (1.0 + self.weight.float())).to(states.dtype)
        return self.weight * wide.to(states.dtype)


class BiasedRowParallelLinear(RowParallelLinear):
    """Returns its output as a copy, because Megatron's experts add the bias to the output in place, which autograd
    refuses for the output of a custom function."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output without bias, bias)."""
        output, bias = super().forward(input_)
        return output.clone(), bias


class PackedAttention(nn.Module):
    """Causal attention of [T, heads, D], sequence by sequence. All context-parallel ranks' keys are gathered.

    With softmax_type "learnable", each head has an attention sink: a score, `softmax_offset`, which takes part in every
    softmax and has no value. It has the name that Megatron's own attention gives it.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ):
        super().__init__()
        assert config.kv_channels is not None
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            assert config.window_size is not None
            self.window = config.window_size[0] + 1
        self.group: Any = parallel_state.get_context_parallel_group()
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Called by Megatron: heads are split over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        """[T / ranks, heads x D]. Sequences begin at packed_seq_params.cu_seqlens_q, counted over all ranks' tokens."""
        starts = packed_seq_params.cu_seqlens_q
        if self.group.size() == 1:
            longest = packed_seq_params.max_seqlen_q
            spans = Spans(starts, longest, starts, longest, self.scale, self.window, sinks=self.softmax_offset)
            return sequence_by_sequence(query, key, value, spans).flatten(1)
        ranks, rank = self.group.size(), dist.get_rank(self.group)
        widths = (key.shape[-1], value.shape[-1])
        # [rank, token, head, key and value]; the backward pass sums all ranks' gradients of their queries.
        both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.group)
        both = both.unflatten(0, (ranks, -1))
        results = []
        for first, end in pairwise((starts // ranks).tolist()):
            half = (end - first) // 2
            early, late = both[:, first : first + half], both[:, first + half : end].flip(0)
            k, v = torch.cat([early, late]).flatten(0, 1).split(widths, -1)
            for chunk, at in ((rank, first), (2 * ranks - 1 - rank, first + half)):
                reach = (chunk + 1) * half
                results.append(self._chunk(query[at : at + half], k[:reach], v[:reach]))
        return torch.cat(results).flatten(1)

    def _chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a sequence's last queries to all keys up to them."""
        offset = len(key) - len(query)
        visible = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(offset)
        if self.window is not None:
            visible = visible.triu(offset + 1 - self.window)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return masked_attention(q, k, v, visible[None, None], self.scale, sinks=self.softmax_offset)[0].transpose(0, 1)
