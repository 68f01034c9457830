"""The native generator's forward pass: prefill of prompts and decoding of one token per slot, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.engines.attention import causal_attention
from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.engines.gen.native.kv import KVCache
from hpcrl.engines.gen.native.weights import Dense, Experts, FusedWeights, Layer


class Transformer:
    """Forward passes over `weights` that read and write a KVCache."""

    def __init__(self, architecture: Architecture, weights: FusedWeights, rotations: Sequence[Tensor]):
        """rotations: of Architecture.rotations, for as many positions as a sequence may have."""
        self._arch, self._weights, self._rotations = architecture, weights, rotations
        positions = len(rotations[0])
        self._windows = [None if w is None or w >= positions else w for w in architecture.windows]
        self._gate = _gelu_gated if architecture.family.gemma else _silu_gated
        self.routes: list[Tensor] | None = None  # if set, gets the chosen experts [T, k] of each layer that has some

    def prefill(self, ids: Tensor, cache: KVCache, slots: Tensor, source: Tensor) -> None:
        """Write the keys and values of N prompts, right-padded to P tokens, into the cache.

        ids: int64 [N, P]. slots, source: int64 [M]; slot slots[j] receives those of prompt source[j], so that siblings
        share one forward. Values past a prompt's end are garbage that decoding overwrites before reading.
        """
        a = self._arch
        count, length = ids.shape
        rotations = [r[:length].repeat(count, 1)[:, None] for r in self._rotations]
        x = self._embedded(ids.flatten())
        for i, layer in enumerate(self._weights.layers):
            heads = self._qkv(layer, x, rotations[a.rope_of_layer[i]]).view(count, length, -1, a.head_dim)
            q, k, v = heads.transpose(1, 2).split((a.num_heads, a.num_kv_heads, a.num_kv_heads), dim=1)
            cache.write(i, slots, torch.stack((k[source], v[source])))
            if i + 1 < a.num_layers:  # padding on the right: no prompt sees its padding
                attended = causal_attention(
                    q, k, v, scale=a.attention_scale, window=self._windows[i], softcap=a.attention_softcap
                )
                x = self._block(layer, x, attended.transpose(1, 2).flatten(0, 1).flatten(1))

    def decode(self, ids: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """Logits float32 [R, vocab] after feeding token ids[i] at positions[i] of slot i, for the first R slots.

        ids, positions: int64 [R]; `length` is more than every position. The tokens' keys and values are stored.
        """
        a, rows = self._arch, len(ids)
        group = a.num_heads // a.num_kv_heads
        rotations = [r[positions][:, None] for r in self._rotations]
        x = self._embedded(ids)
        masks = {window: self._mask(positions, length, window, x.dtype) for window in set(self._windows)}
        for i, layer in enumerate(self._weights.layers):
            heads = self._qkv(layer, x, rotations[a.rope_of_layer[i]])
            cache.append(i, positions, heads[:, a.num_heads :].unflatten(1, (2, a.num_kv_heads)))
            k, v = cache.live(i, rows, length)
            # The q heads that share a kv head are rows of one matrix, so keys and values are never repeated.
            q = heads[:, : a.num_heads].reshape(-1, group, a.head_dim)
            scores = self._scores(q, k, masks[self._windows[i]])
            attended = torch.bmm(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
            x = self._block(layer, x, attended.view(rows, -1))
        return self._logits(x)

    def _mask(self, positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[R * kv_heads, q heads of each, length]: 0 where the query at its row's position attends, else -inf."""
        a, keys = self._arch, torch.arange(length, device=positions.device)
        unseen = keys > positions[:, None]
        if window is not None:
            unseen |= keys <= positions[:, None] - window
        mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -math.inf)
        group = a.num_heads // a.num_kv_heads
        return mask[:, None, None].expand(-1, a.num_kv_heads, group, -1).reshape(-1, group, length)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        a = self._arch
        if a.attention_softcap is None:
            return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=a.attention_scale)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(a.attention_scale / a.attention_softcap)
        return scores.tanh_().mul_(a.attention_softcap).add_(mask)

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self._weights.embedding[ids]
        if self._arch.embedding_scale == 1.0:
            return x
        return x.mul_(torch.tensor(self._arch.embedding_scale, dtype=x.dtype).item())  # a number of the model's type

    def _logits(self, x: Tensor) -> Tensor:
        logits, cap = self._weights.logits(self._norm(x, self._weights.norm)), self._arch.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or weight.dtype == x.dtype:
            return F.rms_norm(x, x.shape[-1:], weight, self._arch.norm_eps)
        return F.rms_norm(x.float(), x.shape[-1:], weight, self._arch.norm_eps).to(x.dtype)

    def _qkv(self, layer: Layer, x: Tensor, rotations: Tensor) -> Tensor:
        """Heads [T, heads + 2 kv_heads, head_dim] of x [T, H]; q and k normalised and rotated."""
        a, normed = self._arch, self._norm(x, layer.attention_norm)
        fused = normed @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        heads = fused.view(-1, a.num_qkv_heads, a.head_dim)
        qk = heads[:, : a.num_qk_heads]
        if layer.qk_norm is not None:
            qk.copy_(self._norm(qk.to(layer.qk_norm.dtype), None).mul_(layer.qk_norm))
        if self._weights.shared:  # the partners of a rotation are half of the rotated dimensions apart
            halves = qk[..., : a.num_rotated].unflatten(-1, (2, -1)).transpose(-1, -2)
            turned = torch.view_as_complex(halves.float().contiguous()).mul(rotations[..., : a.num_rotated // 2])
            halves.copy_(torch.view_as_real(turned))
            return heads
        pairs = qk.float()  # the same tensor in fp32
        torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(rotations)
        if pairs is not qk:
            qk.copy_(pairs)
        return heads

    def _block(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a block after attention; x [T, H] is overwritten."""
        if layer.attention_post_norm is None:
            x.addmm_(attended, layer.out)
            if layer.out_bias is not None:
                x.add_(layer.out_bias)
        else:
            x.add_(self._norm(F.linear(attended, layer.out.t(), layer.out_bias), layer.attention_post_norm))
        normed = self._norm(x, layer.mlp_norm)
        if not isinstance(layer.mlp, Dense):
            return x.add_(self._mixture(layer.mlp, normed))
        inner = self._gate(normed @ layer.mlp.gate_up)
        if layer.mlp_post_norm is None:
            return x.addmm_(inner, layer.mlp.down)
        return x.add_(self._norm(inner @ layer.mlp.down, layer.mlp_post_norm))

    def _mixture(self, experts: Experts, x: Tensor) -> Tensor:
        """Weighted sum [T, H] of each token's chosen experts. The host learns nothing of the choices, so it need not
        wait for the device."""
        top, router = self._arch.experts_per_token, experts.router
        shares, chosen = (x @ router).softmax(-1, dtype=torch.float32).topk(top)
        if self.routes is not None:
            self.routes.append(chosen)
        if self._arch.normalize_experts:
            shares = shares / shares.sum(-1, keepdim=True)
        sorted_choices, order = chosen.flatten().sort(stable=True)
        every = torch.arange(self._arch.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_choices, every, right=True, out_int32=True)
        results = F.grouped_mm(x[order // top], experts.gate_up, offs=ends)
        results = F.grouped_mm(_silu_gated(results), experts.down, offs=ends)
        by_token = results[order.argsort()].unflatten(0, (-1, top))
        return torch.bmm(shares[:, None].to(x.dtype), by_token)[:, 0]


def _silu_gated(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gelu_gated(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
