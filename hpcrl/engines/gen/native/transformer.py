"""The native generator's forward pass: prefill of prompts and decoding of one token per slot, in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.engines.gen.native.kv import KVCache
from hpcrl.engines.gen.native.weights import Dense, Experts, FusedWeights, Layer


class Transformer:
    """Forward passes over `weights` that read and write a KVCache."""

    def __init__(self, architecture: Architecture, weights: FusedWeights, rotations: Tensor):
        self._arch, self._weights, self._rotations = architecture, weights, rotations
        self._scale = architecture.head_dim**-0.5

    def prefill(self, ids: Tensor, cache: KVCache, slots: Tensor, source: Tensor) -> None:
        """Write the keys and values of N prompts, right-padded to P tokens, into the cache.

        ids: int64 [N, P]. slots, source: int64 [M]; slot slots[j] receives those of prompt source[j], so that siblings
        share one forward. Values past a prompt's end are garbage that decoding overwrites before reading.
        """
        a = self._arch
        count, length = ids.shape
        rotations = self._rotations[:length].repeat(count, 1)[:, None]
        x = self._weights.embedding[ids.flatten()]
        for i, layer in enumerate(self._weights.layers):
            heads = self._qkv(layer, x, rotations).view(count, length, a.num_qkv_heads, a.head_dim)
            q, k, v = heads.transpose(1, 2).split((a.num_heads, a.num_kv_heads, a.num_kv_heads), dim=1)
            cache.write(i, slots, torch.stack((k[source], v[source])))
            if i + 1 < a.num_layers:  # causal, padding on the right: no prompt sees its padding
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = self._block(layer, x, attended.transpose(1, 2).flatten(0, 1).flatten(1))

    def decode(self, ids: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """Logits float32 [R, vocab] after feeding token ids[i] at positions[i] of slot i, for the first R slots.

        ids, positions: int64 [R]; `length` is more than every position. The tokens' keys and values are stored.
        """
        a, rows = self._arch, len(ids)
        group = a.num_heads // a.num_kv_heads
        rotations = self._rotations[positions][:, None]
        x = self._weights.embedding[ids]
        unseen = torch.arange(length, device=ids.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=x.dtype, device=x.device).masked_fill_(unseen, -math.inf)
        mask = mask[:, None, None].expand(-1, a.num_kv_heads, group, -1).reshape(-1, group, length)
        for i, layer in enumerate(self._weights.layers):
            heads = self._qkv(layer, x, rotations)
            cache.append(i, positions, heads[:, a.num_heads :].unflatten(1, (2, a.num_kv_heads)))
            k, v = cache.live(i, rows, length)
            # The q heads that share a kv head are rows of one matrix, so keys and values are never repeated.
            q = heads[:, : a.num_heads].reshape(-1, group, a.head_dim)
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self._scale)
            attended = torch.bmm(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
            x = self._block(layer, x, attended.view(rows, -1))
        return self._weights.logits(self._norm(x, self._weights.norm))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self._arch.norm_eps)

    def _qkv(self, layer: Layer, x: Tensor, rotations: Tensor) -> Tensor:
        """Heads [T, heads + 2 kv_heads, head_dim] of x [T, H]; q and k normalised and rotated."""
        a, normed = self._arch, self._norm(x, layer.attention_norm)
        fused = normed @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        heads = fused.view(-1, a.num_qkv_heads, a.head_dim)
        qk = heads[:, : a.num_qk_heads]
        if layer.qk_norm is not None:
            qk.copy_(self._norm(qk, None).mul_(layer.qk_norm))
        pairs = qk.float()  # the same tensor in fp32
        torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(rotations)
        if pairs is not qk:
            qk.copy_(pairs)
        return heads

    def _block(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a block after attention; x [T, H] is overwritten."""
        x.addmm_(attended, layer.out)
        if layer.out_bias is not None:
            x.add_(layer.out_bias)
        normed = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, Dense):
            return x.addmm_(_gated(normed @ layer.mlp.gate_up), layer.mlp.down)
        return x.add_(self._mixture(layer.mlp, normed))

    def _mixture(self, experts: Experts, x: Tensor) -> Tensor:
        """Weighted sum [T, H] of each token's chosen experts. The host learns nothing of the choices, so it need not
        wait for the device."""
        top, router = self._arch.experts_per_token, experts.router
        shares, chosen = (x @ router).softmax(-1, dtype=torch.float32).topk(top)
        if self._arch.normalize_experts:
            shares = shares / shares.sum(-1, keepdim=True)
        sorted_choices, order = chosen.flatten().sort(stable=True)
        every = torch.arange(self._arch.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_choices, every, right=True, out_int32=True)
        results = F.grouped_mm(x[order // top], experts.gate_up, offs=ends)
        results = F.grouped_mm(_gated(results), experts.down, offs=ends)
        by_token = results[order.argsort()].unflatten(0, (-1, top))
        return torch.bmm(shares[:, None].to(x.dtype), by_token)[:, 0]


def _gated(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
