"""The native generator's forward pass: prefill of prompts and decoding of one token per slot, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.engines.gen.native.kv import KVCache
from hpcrl.engines.gen.native.paged_attention import DecodeAttention, PrefillAttention
from hpcrl.engines.gen.native.recurrent import PrefillRows, RecurrentStates
from hpcrl.engines.gen.native.weights import Dense, Experts, FusedWeights, LatentAttention, Layer, LowRank

LayerAdapters = Mapping[str, Sequence[LowRank]]
"""Layer.adapters."""


LATENT_EPS = 1e-6
"""Of latent attention's norms in transformers, whatever rms_norm_eps is."""


class ImageFeatures(NamedTuple):
    """What a vision tower computed for some tokens: places int64 [k], features [k, H]."""

    places: Tensor
    features: Tensor


class Transformer:
    """Forward passes over `weights` that read and write a KVCache, and the states of recurrent layers."""

    def __init__(
        self,
        architecture: Architecture,
        weights: FusedWeights,
        rotations: Sequence[Tensor],
        states: RecurrentStates | None = None,
        separate_rows: bool = False,
    ):
        """`rotations` come from Architecture.rotations(), for the maximum sequence length. `states` may only be None if
        no layer is recurrent. With `separate_rows`, a row's bits in decoding do not depend on the other rows' tokens,
        only on the number of rows; then all experts compute all rows."""
        self._separate_rows = separate_rows
        self._arch, self._weights, self._rotations, self._states = architecture, weights, rotations, states
        self._cached_at = architecture.cached_at
        positions = len(rotations[0])
        self._windows = [None if w is None or w >= positions else w for w in architecture.windows]
        reordered = not weights.shared and architecture.latent is None  # by FusedWeights
        self._pairs_of_halves = not architecture.decoder.adjacent_pairs and not reordered
        self._gate = _gelu_gated if architecture.decoder.gemma else _silu_gated
        self._expert_gate = self._clamped if architecture.decoder.biased_experts else _silu_gated
        self.routes: list[Tensor] | None = None  # if a list, each layer with experts appends its choices [T, k]

    def prefill(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | None,
        adding: PrefillAttention,
        images: ImageFeatures | None = None,
        rows: PrefillRows | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor | None:
        """Write the keys and values of T tokens, from several rows, into the cache, if there is one, and update the
        states of recurrent layers, for which `rows` is given. ids are int64 [T], positions int64
        [T] or, for a model that takes images, [T, 3]; `images` are the features of some of the tokens.

        Returns the hidden states [k, H] after the last block of the tokens `wanted`, int64 [k]; None without it."""
        a = self._arch
        rotations = [self._rotation(r, positions) for r in self._rotations]
        x = self._embedded(ids)
        if images is not None:
            x[images.places] = images.features.to(x.dtype)
        for i, layer in enumerate(self._weights.layers):
            at, projected = self._cached_at[i], self._projected(layer, x)
            if layer.delta is not None:
                assert self._states is not None and rows is not None
                mixed = self._states.prefill(at, layer.delta, projected, rows, a.norm_eps)
            else:
                heads, gates = self._heads(layer, projected, rotations[a.rope_of_layer[i]])
                new = heads[:, a.num_heads :].unflatten(1, (-1, a.num_kv_heads))
                if cache is not None:
                    cache.write(at, adding.places, adding.slots, new)
                if wanted is None and i + 1 == a.num_layers:
                    return None
                kv = None if cache is None else cache.layers[at]
                mixed = adding.attend(heads, kv, a, self._windows[i], layer.sinks)
                mixed = mixed if gates is None else mixed.mul_(gates)
            if wanted is not None and i + 1 == a.num_layers:
                x, mixed = x[wanted], mixed[wanted]
            x = self._block(layer, x, mixed)
        return None if wanted is None else x

    def _rotation(self, rotations: Tensor, positions: Tensor) -> Tensor:
        """complex64 [T, 1, pairs]."""
        if positions.dim() == 1:
            return rotations[positions][:, None]
        of_axis = positions[:, torch.tensor(self._arch.axis_of_pair, device=positions.device)]
        return rotations.gather(0, of_axis)[:, None]

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        num_live: int,
        cache: KVCache,
        decoding: DecodeAttention,
        rotary: Tensor | None = None,
    ) -> Tensor:
        """Logits float32 [R, vocab] after token ids[i] at positions[i] of row i (int64 [R] each). Keys and values are
        stored only for the first num_live rows. `rotary` are the positions by which heads are rotated, if others."""
        a = self._arch
        rotations = [r[positions if rotary is None else rotary][:, None] for r in self._rotations]
        x = self._embedded(ids)
        masks = {w: decoding.mask(positions, cache.block_tokens, x.dtype, w) for w in set(self._windows)}
        live = positions[:num_live]
        places = decoding.places[:num_live].gather(1, live[:, None] // cache.block_tokens)[:, 0]
        slots = live % cache.block_tokens
        for i, layer in enumerate(self._weights.layers):
            at, projected = self._cached_at[i], self._projected(layer, x)
            if layer.delta is not None:
                assert self._states is not None
                mixed = self._states.decode(at, layer.delta, projected, a.norm_eps)
            else:
                heads, gates = self._heads(layer, projected, rotations[a.rope_of_layer[i]])
                cache.write(at, places, slots, heads[:num_live, a.num_heads :].unflatten(1, (-1, a.num_kv_heads)))
                mask = masks[self._windows[i]]
                mixed = decoding.attend(heads[:, : a.num_heads], cache.layers[at], mask, a, layer.sinks)
                mixed = mixed if gates is None else mixed.mul_(gates)
            x = self._block(layer, x, mixed, self._separate_rows)
        return self.logits(x)

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self._weights.embedding[ids]
        if self._arch.embedding_scale == 1.0:
            return x
        return x.mul_(torch.tensor(self._arch.embedding_scale, dtype=x.dtype).item())  # rounded to the model's dtype

    def logits(self, x: Tensor) -> Tensor:
        """float32 [R, vocab] of hidden states [R, H] after the last block."""
        logits, cap = self._weights.logits(self._norm(x, self._weights.norm)), self._arch.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or weight.dtype == x.dtype:
            return F.rms_norm(x, x.shape[-1:], weight, self._arch.norm_eps)
        return F.rms_norm(x.float(), x.shape[-1:], weight, self._arch.norm_eps).to(x.dtype)

    def _projected(self, layer: Layer, x: Tensor) -> Tensor:
        """The product with Layer.qkv of x [T, H]."""
        normed = x if layer.attention_norm is None else self._norm(x, layer.attention_norm)
        fused = normed @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        _adapt(fused, normed, layer.adapters["qkv"])
        return fused if layer.columns is None else fused.index_select(1, layer.columns)

    def _heads(self, layer: Layer, projected: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of _projected(): heads [T, heads + 2 (or 1) kv_heads, head_dim], where q and k are normalised and rotated,
        and the factors [T, heads * head_dim] of the attention's output, None without gates."""
        a = self._arch
        if layer.latent is not None:
            return self._latent_heads(layer.latent, projected, rotations, layer.adapters), None
        gates, heads = projected.view(-1, a.num_gates + a.num_qkv_heads, a.head_dim).split(
            (a.num_gates, a.num_qkv_heads), 1
        )
        qk = heads[:, : a.num_qk_heads]
        if layer.qk_norm is not None and not a.decoder.qk_norm_last:
            self._norm_heads(qk, layer.qk_norm)
        self._rotate(qk, rotations)
        if layer.qk_norm is not None and a.decoder.qk_norm_last:
            self._norm_heads(qk, layer.qk_norm)
        return heads, gates.flatten(1).sigmoid() if a.num_gates else None

    def _latent_heads(
        self, matrices: LatentAttention, fused: Tensor, rotations: Tensor, adapters: LayerAdapters
    ) -> Tensor:
        """[T, heads + 1, rank + rope]: each head's query for latents, then the latent, of Layer.qkv's product."""
        a, latent = self._arch, self._arch.latent
        assert latent is not None
        q, compressed, rotary_key = fused.split((fused.shape[1] - a.head_dim, latent.rank, latent.rope), dim=1)
        if matrices.query is not None:
            narrow = F.rms_norm(q, q.shape[-1:], matrices.query_norm, LATENT_EPS)
            q = _adapt(narrow @ matrices.query, narrow, adapters["query"])
        q = q.unflatten(1, (a.num_heads, -1))
        rotary = torch.cat((q[..., latent.nope :], rotary_key[:, None]), dim=1)
        self._rotate(rotary, rotations)
        heads = fused.new_empty(len(fused), a.num_heads + 1, a.head_dim)
        heads[..., latent.rank :] = rotary
        heads[:, -1, : latent.rank] = F.rms_norm(compressed, (latent.rank,), matrices.norm, LATENT_EPS)
        queries = q[..., : latent.nope].transpose(0, 1)
        found = torch.bmm(queries, matrices.both[:, : latent.nope])
        for adapter in adapters["both"]:
            second = adapter.second.unflatten(0, (a.num_heads, -1))[:, : latent.nope]
            found += adapter.scale * (torch.bmm(queries, second) @ adapter.first)
        heads[:, :-1, : latent.rank] = found.transpose(0, 1)
        return heads

    def _latent_values(self, matrices: LatentAttention, attended: Tensor, adapters: LayerAdapters) -> Tensor:
        """Each head's values [T, heads * value] of its sum of latents, [T, heads * rank]."""
        a, latent = self._arch, self._arch.latent
        assert latent is not None
        sums = attended.unflatten(1, (a.num_heads, latent.rank)).transpose(0, 1)
        values = torch.bmm(sums, matrices.both[:, latent.nope :].transpose(1, 2))
        for adapter in adapters["both"]:
            second = adapter.second.unflatten(0, (a.num_heads, -1))[:, latent.nope :]
            values += adapter.scale * torch.bmm(sums @ adapter.first.t(), second.transpose(1, 2))
        return values.transpose(0, 1).flatten(1)

    def _norm_heads(self, qk: Tensor, weight: Tensor) -> None:
        """Normalise heads [T, heads + kv_heads, head_dim] in place."""
        a = self._arch
        if not a.decoder.qk_norm_joint:
            qk.copy_(self._norm(qk.to(weight.dtype), None).mul_(weight))
            return
        split = (a.num_heads, a.num_kv_heads)
        for heads, factors in zip(qk.split(split, 1), weight.split(split), strict=True):
            heads.copy_(self._norm(heads.flatten(1), factors.flatten()).view_as(heads))

    def _rotate(self, qk: Tensor, rotations: Tensor) -> None:
        """Rotate heads [T, heads + kv_heads, head_dim], or latent attention's rotary parts of heads, in place."""
        if self._pairs_of_halves:
            rotated = self._arch.num_rotated
            halves = qk[..., :rotated].unflatten(-1, (2, -1)).transpose(-1, -2)
            turned = torch.view_as_complex(halves.float().contiguous()).mul(rotations[..., : rotated // 2])
            halves.copy_(torch.view_as_real(turned))
            return
        pairs = qk.float()  # the same tensor in fp32
        torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(rotations)
        if pairs is not qk:
            qk.copy_(pairs)

    def _block(self, layer: Layer, x: Tensor, attended: Tensor, separate_rows: bool = False) -> Tensor:
        """The part of a block after attention; x [T, H] is overwritten."""
        if layer.latent is not None:
            attended = self._latent_values(layer.latent, attended, layer.adapters)
        if layer.attention_post_norm is None:
            _adapt(x.addmm_(attended, layer.out), attended, layer.adapters["out"])
            if layer.out_bias is not None:
                x.add_(layer.out_bias)
        else:
            result = _adapt(F.linear(attended, layer.out.t(), layer.out_bias), attended, layer.adapters["out"])
            x.add_(self._norm(result, layer.attention_post_norm))
        normed = x if layer.mlp_norm is None else self._norm(x, layer.mlp_norm)
        if not isinstance(layer.mlp, Dense):
            return x.add_(self._mixture(layer.mlp, normed, layer.adapters, separate_rows))
        inner = self._inner(layer.mlp, normed, layer.adapters)
        if layer.mlp_post_norm is None:
            return _adapt(x.addmm_(inner, layer.mlp.down), inner, layer.adapters["down"])
        return x.add_(self._norm(_adapt(inner @ layer.mlp.down, inner, layer.adapters["down"]), layer.mlp_post_norm))

    def _inner(self, mlp: Dense, x: Tensor, adapters: LayerAdapters) -> Tensor:
        return self._gate(_adapt(x @ mlp.gate_up, x, adapters["gate_up"]))

    def _mixture(self, experts: Experts, x: Tensor, adapters: LayerAdapters, separate_rows: bool = False) -> Tensor:
        """Weighted sum [T, H] of the outputs of each token's chosen experts, and of the shared experts. The host does
        not wait for the choices."""
        shares, chosen = self._choose(experts, x)
        if self.routes is not None:
            self.routes.append(chosen)
        outputs = (self._of_all_experts if separate_rows else self._of_chosen_experts)(experts, x, chosen)
        total = torch.bmm(shares[:, None].to(x.dtype), outputs)[:, 0]
        if experts.shared is None:
            return total
        inner = self._inner(experts.shared, x, adapters)
        shared = _adapt(inner @ experts.shared.down, inner, adapters["down"])
        if experts.shared_gate is not None:
            shared *= _adapt(x @ experts.shared_gate, x, adapters["shared_gate"]).sigmoid()
        return total.add_(shared)

    def _of_chosen_experts(self, experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
        """The outputs [T, k, H] of the experts `chosen`, int64 [T, k]. Each expert computes its tokens together."""
        sorted_choices, order = chosen.flatten().sort(stable=True)
        every = torch.arange(self._arch.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_choices, every, right=True, out_int32=True)
        results = F.grouped_mm(x[order // chosen.shape[1]], experts.gate_up, offs=ends)
        if experts.gate_up_bias is not None:
            results += experts.gate_up_bias[sorted_choices]
        results = F.grouped_mm(self._expert_gate(results), experts.down, offs=ends)
        if experts.down_bias is not None:
            results += experts.down_bias[sorted_choices]
        return results[order.argsort()].unflatten(0, chosen.shape)

    def _of_all_experts(self, experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
        """The same, but every expert computes all tokens, so products have equal sizes whatever the others choose."""
        results = torch.matmul(x, experts.gate_up)
        if experts.gate_up_bias is not None:
            results += experts.gate_up_bias[:, None]
        results = torch.bmm(self._expert_gate(results), experts.down)
        if experts.down_bias is not None:
            results += experts.down_bias[:, None]
        return results[chosen, torch.arange(len(x), device=x.device)[:, None]]

    def _choose(self, experts: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, as [T, k] both: float32 weights, then int64 experts."""
        router, top = self._arch.router, self._arch.experts_per_token
        logits = x.float() @ experts.router.float() if router.float32 else x @ experts.router
        if experts.router_bias is not None:
            logits = logits + experts.router_bias
        scores = logits.float().sigmoid() if router.sigmoid else logits.softmax(-1, dtype=torch.float32)
        ranks = scores if experts.correction is None else scores + experts.correction
        if router.groups > 1:
            grouped = ranks.unflatten(-1, (router.groups, -1))
            best = grouped.topk(router.best).values.sum(-1).topk(router.chosen_groups).indices
            others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            ranks = grouped.masked_fill(others[..., None], -torch.inf).flatten(1)
        chosen = ranks.topk(top).indices
        shares = scores.gather(1, chosen)
        if router.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return (shares if router.scale == 1.0 else shares * router.scale), chosen

    def _clamped(self, fused: Tensor) -> Tensor:
        """A gated MLP's inner values from alternating columns of gate and up."""
        limit, gain = self._arch.clamp
        gate, up = fused[..., ::2].clamp(max=limit), fused[..., 1::2].clamp(-limit, limit)
        return torch.sigmoid(gate * gain).mul_(gate).mul_(up + 1)


def _adapt(product: Tensor, x: Tensor, adapters: Sequence[LowRank]) -> Tensor:
    """Add the adapters' product with x in place to `product`, which is x times a matrix; returns `product`."""
    for adapter in adapters:
        product[:, adapter.columns].addmm_(x @ adapter.first.t(), adapter.second.t(), alpha=adapter.scale)
    return product


def _silu_gated(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gelu_gated(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
