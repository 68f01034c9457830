"""The native generator's weights: HF tensors are copied directly into fused matrices.

Every HF name has a destination, which is a view of a fused matrix. So a weight update is one copy per tensor and needs
no second set of weights. Matrices are stored [in, out], which is faster for a few rows on a CPU. The rotated dimensions
of q and k heads are interleaved, so the rotary embedding is one complex multiplication. Attention scores do not change,
because q and k have the same permutation.

If weights are shared with a trainer, matrices are stored [out, in] and heads are not interleaved, so almost every
destination is a contiguous tensor in the trainer's own layout.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.config import LoRAConfig
from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.engines.gen.native.recurrent import Delta
from hpcrl.models.mtp import OWN_NAME
from hpcrl.models.shape import Latent
from hpcrl.models.tower import part_of
from hpcrl.spec.lora import A, B, is_adapter, matches

ALL = slice(None)
ADAPTED = ("qkv", "query", "both", "out", "gate_up", "down", "shared_gate")
"""Keys of Layer.adapters."""
TOWER = "model.visual."
"""The beginning of the names of a vision tower's tensors in transformers' models."""


@dataclass(slots=True)
class Dense:
    """A gated MLP."""

    gate_up: Tensor  # [H, 2 I]
    down: Tensor  # [I, H]


@dataclass(slots=True)
class Experts:
    """A mixture of gated MLPs."""

    router: Tensor  # [H, E]
    router_bias: Tensor | None  # [E]
    correction: Tensor | None  # float32 [E], affects only the choice
    gate_up: Tensor  # [E, H, 2 I]
    gate_up_bias: Tensor | None  # [E, 2 I]
    down: Tensor  # [E, I, H]
    down_bias: Tensor | None  # [E, H]
    shared: Dense | None  # the shared experts
    shared_gate: Tensor | None  # [H, 1]


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter for some columns of a matrix product, to which it adds scale * x @ first.t() @ second.t()."""

    columns: slice
    first: Tensor  # [rank, in]
    second: Tensor  # [out, rank], rows in column order
    scale: float


@dataclass(slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434) in its absorbed form. A token's keys and values of all heads are
    products with one vector, the latent. So a query times a head's key matrix is a query for latents, and the matrix of
    values follows the sum of latents."""

    query_norm: Tensor | None  # [query_rank]
    query: Tensor | None  # [query_rank, heads (nope + rope)]; None: queries have one matrix
    norm: Tensor  # [rank]
    both: Tensor  # [heads, nope + value, rank]: a head's key matrix, then its value matrix


@dataclass(slots=True)
class Layer:
    """One block, with attention or a gated delta rule. For attention, `qkv` has the gates of q heads, if any, then q
    heads, then k, then v; for a delta rule, the parts of DeltaSizes.projected, and `out` has its values as inputs."""

    attention_norm: Tensor | None  # [H]
    attention_post_norm: Tensor | None  # [H]
    qkv: Tensor  # [H, (gates + heads + 2 kv_heads) D], [H, projected], or [H, query_rank (all queries) + rank + rope]
    qkv_bias: Tensor | None  # [(gates + heads + 2 kv_heads) D], latent as above
    columns: Tensor | None  # int64, the order of qkv's columns, if its matrix has the trainer's layout
    qk_norm: Tensor | None  # [heads + kv_heads, D]
    sinks: Tensor | None  # [heads]
    delta: Delta | None
    latent: LatentAttention | None
    out: Tensor  # [heads D, H], D the width of a value
    out_bias: Tensor | None  # [H]
    mlp_norm: Tensor | None  # [H]
    mlp_post_norm: Tensor | None  # [H]
    mlp: Dense | Experts
    adapters: dict[str, list[LowRank]]
    """By matrix (ADAPTED). With experts, gate_up and down are the shared experts'."""


@dataclass(frozen=True, slots=True)
class _Target:
    view: Tensor  # the destination; a tensor of `shape` is broadcast to it
    shape: tuple[int, ...]
    order: Tensor | None = None  # int64 [rows], the row of the HF tensor for each row of the view
    parts: tuple[str, ...] = ()  # the required names that this tensor provides; if empty, its own name
    add: float = 0.0


class FusedWeights:
    """Fused weights, which are loaded under HF names. Uninitialised until load() succeeds.

    Args:
        float32_head: The vocabulary projection sums products of `dtype` numbers in float32 and returns float32.
        shared: Use a layout whose parts can be a trainer's parameters.
        lora: load() gets adapters, and all other weights come from `base`.
        tower: The vision tower of a model that takes images, on the device, whose parameters are also loaded.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        float32_head: bool = False,
        shared: bool = False,
        lora: LoRAConfig | None = None,
        base: Iterable[tuple[str, Tensor]] = (),
        tower: nn.Module | None = None,
    ):
        self._arch, self._dtype, self._device, self._lora = architecture, dtype, device, lora
        self._float32_head, self.shared = float32_head and dtype != torch.float32, shared
        self._targets: dict[str, _Target] = {}
        first, count = architecture.num_layers, architecture.further_layers
        self._further = tuple(f"{architecture.decoder_prefix}layers.{i}." for i in range(first, first + count))
        rotated = architecture.num_rotated
        self._interleaved = torch.arange(architecture.head_dim, device=device)
        self._interleaved[:rotated] = torch.arange(rotated, device=device).view(2, rotated // 2).t().flatten()
        vocab = (architecture.vocab_size, architecture.hidden_size)
        self.embedding = self._empty(*vocab)
        prefix = architecture.decoder_prefix
        self._target(f"{prefix}embed_tokens.weight", self.embedding)
        self.head = self.embedding if architecture.tied else self._empty(*vocab)
        # A trainer may send a tied matrix under either name, or under both.
        self._target("lm_head.weight", self.head, parts=(f"{prefix}embed_tokens.weight",) if architecture.tied else ())
        # Only CUDA multiplies bfloat16 with a float32 result. Elsewhere, a float32 copy avoids a conversion per token.
        copied = self._float32_head and device.type != "cuda"
        self._converted_head = torch.empty(vocab, device=device) if copied else None
        self.norm = self._norm(f"{prefix}norm.weight")
        self.layers = [self._layer(i) for i in range(architecture.num_layers)]
        self.tower = tower
        for name, parameter in tower.named_parameters() if tower is not None else ():
            self._target(f"{TOWER}{name}", parameter.data)
        if lora is not None and tower is not None:
            self._adapt_tower(lora, tower)
        parts = {part for name, target in self._targets.items() for part in target.parts or (name,)}
        self._required = parts if lora is None else {name for name in parts if is_adapter(name)}
        if lora is not None:
            self._copy(base, parts - self._required)

    def parameters(self) -> dict[str, Tensor]:
        """By HF name, the destinations that hold exactly this name's tensor in its HF layout."""
        exact = ((name, target) for name, target in self._targets.items() if target.order is None and not target.add)
        return {
            name: target.view
            for name, target in exact
            if tuple(target.view.shape) == target.shape and target.view.is_contiguous()
        }

    def check(self, named: Iterable[tuple[str, Tensor]], kept: Collection[str] = ()) -> None:
        """ValueError on an unknown or missing name or a wrong shape; names in `kept` may be missing. An iterator is not
        checked here but in load(), since its tensors may not outlive the iteration."""
        if isinstance(named, Collection):
            found = {part for name, tensor in named for part in self._accept(name, tensor)[1]}
            _require(self._required.difference(kept), found)

    def load(self, named: Iterable[tuple[str, Tensor]], kept: Collection[str] = ()) -> None:
        """Copy every tensor to its destination. ValueError at the first unknown or missing name or wrong shape; names
        in `kept` may be missing."""
        self._copy(named, self._required.difference(kept))

    def has_new_tower(self, kept: Collection[str]) -> bool:
        """Whether load() with these kept names changes the vision tower."""
        return any(name.startswith(TOWER) for name in self._required.difference(kept))

    def _copy(self, named: Iterable[tuple[str, Tensor]], required: set[str]) -> None:
        loaded: set[str] = set()
        for name, tensor in named:
            target, parts = self._accept(name, tensor)
            loaded.update(parts)
            if target is None or tensor.is_set_to(target.view):  # already in place, as a trainer's parameter
                continue
            target.view.copy_(tensor if target.order is None else tensor.to(self._device)[target.order])
            if target.add:
                target.view.add_(target.add)
        _require(required, loaded)
        if self._converted_head is not None:
            self._converted_head.copy_(self.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab] of hidden states [R, H]."""
        if self._converted_head is not None:
            return F.linear(hidden.float(), self._converted_head)
        if self._float32_head:
            return torch.mm(hidden, self.head.t(), out_dtype=torch.float32)
        return F.linear(hidden, self.head).float()

    def loaded(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that were loaded under these names, read back from the fused matrices. Tensors that are stored as
        a sum with a constant are left out, since the sum does not preserve their bits."""
        for name in names:
            target = self._targets.get(name)
            if target is None or target.add:
                continue
            tensor = target.view
            if tensor.shape != target.shape:  # one copy per head; if a copy differs from the first, return it
                tensor = tensor[(tensor != tensor[0]).any(dim=-1).long().argmax()]
            yield name, tensor if target.order is None else tensor[target.order.argsort()]

    def _accept(self, name: str, tensor: Tensor) -> tuple[_Target | None, tuple[str, ...]]:
        """The destination of the tensor and the required names that it provides."""
        # Old Llama checkpoints have frequencies, which are derived from the config here.
        if name.endswith("rotary_emb.inv_freq") or name.startswith(self._further) or OWN_NAME.search(name):
            return None, ()
        target = self._targets.get(name if self.tower is None else _in_memory(name))
        if target is None:
            raise ValueError(f"weight {name!r} is not part of this model (known are e.g. {list(self._targets)[:3]})")
        if tuple(tensor.shape) != target.shape:
            raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, the model has {list(target.shape)}")
        return target, target.parts or (name if self.tower is None else _in_memory(name),)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _matrix(self, *shape: int) -> Tensor:
        """An uninitialised matrix [..., in, out]."""
        *batch, size_in, size_out = shape
        return self._empty(*batch, size_out, size_in).transpose(-1, -2) if self.shared else self._empty(*shape)

    def _named(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A new tensor that is the target `name`."""
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self._target(name, tensor)
        return tensor

    def _target(
        self,
        name: str,
        view: Tensor,
        *,
        shape: tuple[int, ...] | None = None,
        order: Tensor | None = None,
        parts: tuple[str, ...] = (),
        add: float = 0.0,
    ) -> None:
        self._targets[name] = _Target(view, shape or tuple(view.shape), order, parts, add)

    def _rotary_order(self, num_heads: int, rotary_heads: int) -> Tensor | None:
        """The order of rows if the rotated dimensions of the first heads are interleaved."""
        if self.shared or self._arch.decoder.adjacent_pairs or not rotary_heads:
            return None
        rows = torch.arange(num_heads * self._arch.head_dim, device=self._device).view(num_heads, -1)
        rows[:rotary_heads] = rows[:rotary_heads, self._interleaved]
        return rows.flatten()

    def _linear(
        self, name: str, matrix: Tensor, columns: slice = ALL, order: Tensor | None = None, *, adapters: list[LowRank]
    ) -> None:
        """Add the target `name`.weight, which is some columns of a matrix [in, out], and the targets of its adapter if
        it has one."""
        part = matrix[:, columns].t()
        self._target(f"{name}.weight", part, order=order)
        lora = self._lora
        if lora is None or "decoder" not in lora.parts or not matches(name, lora.target_modules):
            return
        rows, inputs = part.shape
        rank = lora.rank_of(name)
        found = LowRank(columns, self._empty(rank, inputs), self._empty(rows, rank), lora.scale_of(name))
        self._target(name + A, found.first)
        self._target(name + B, found.second, order=order)
        adapters.append(found)

    def _adapt_tower(self, lora: LoRAConfig, tower: nn.Module) -> None:
        """Add adapters to the linear layers of the tower's parts, and their targets."""
        for name, module in tower.named_modules(prefix=TOWER.rstrip(".")):
            if isinstance(module, nn.Linear) and part_of(name) in lora.parts and matches(name, lora.target_modules):
                rank = lora.rank_of(name)
                first, second = self._empty(rank, module.in_features), self._empty(module.out_features, rank)
                self._target(name + A, first)
                self._target(name + B, second)
                module.register_forward_hook(functools.partial(_add_low_rank, first, second, lora.scale_of(name)))

    def _norm(self, name: str, *shape: int) -> Tensor:
        """[H] or `shape`: the factors of a norm, in float32 if they are weight + 1."""
        add = self._arch.decoder.norm_offset
        weight = torch.empty(
            shape or (self._arch.hidden_size,), dtype=torch.float32 if add else self._dtype, device=self._device
        )
        if not shape:
            self._target(name, weight, add=add)
        return weight

    def _layer(self, index: int) -> Layer:
        a, prefix = self._arch, f"{self._arch.decoder_prefix}layers.{index}."
        gemma = a.decoder.gemma
        before, behind = not a.decoder.norms_after, a.decoder.norms_after or gemma
        after = prefix + "post_attention_layernorm.weight"  # after attention only if `behind`
        adapters: dict[str, list[LowRank]] = {key: [] for key in ADAPTED}
        make = self._delta if a.recurrent[index] else self._attention if a.latent is None else self._latent
        return make(
            prefix,
            attention_norm=self._norm(prefix + "input_layernorm.weight") if before else None,
            attention_post_norm=self._norm(after) if behind else None,
            mlp_norm=self._norm(prefix + "pre_feedforward_layernorm.weight" if gemma else after) if before else None,
            mlp_post_norm=self._norm(prefix + "post_feedforward_layernorm.weight") if behind else None,
            mlp=self._experts(prefix, adapters)
            if index in a.expert_layers
            else self._dense(prefix + "mlp.", a.intermediate_size, adapters),
            adapters=adapters,
        )

    def _attention(self, layer: str, **others: Any) -> Layer:
        """A layer with attention, of which `others` are the parts around it."""
        a, prefix = self._arch, layer + "self_attn."
        width = (a.num_gates + a.num_qkv_heads) * a.head_dim
        made = Layer(
            qkv=self._matrix(a.hidden_size, width),
            qkv_bias=self._empty(width) if a.qkv_bias else None,
            columns=None,
            qk_norm=self._qk_norm(prefix) if a.decoder.qk_norm else None,
            sinks=self._named(prefix + "sinks", a.num_heads) if a.decoder.sinks else None,
            delta=None,
            latent=None,
            out=self._matrix(a.num_heads * a.head_dim, a.hidden_size),
            out_bias=self._empty(a.hidden_size) if a.out_bias else None,
            **others,
        )
        adapters = made.adapters
        self._output(prefix, made)
        if a.decoder.joined:
            order = self._rotary_order(a.num_qkv_heads, a.num_qk_heads)
            self._linear(prefix + "qkv_proj", made.qkv, order=order, adapters=adapters["qkv"])
            return made
        first = 0
        for which, heads in (("q", a.num_gates + a.num_heads), ("k", a.num_kv_heads), ("v", a.num_kv_heads)):
            columns = slice(first, first := first + heads * a.head_dim)
            order = self._rotary_order(heads, heads * (which != "v"))
            if which == "q" and a.num_gates:
                order = self._behind_gates(order)
                if self.shared:
                    rest = torch.arange(len(order), width, device=self._device)
                    made.columns, order = torch.cat((order, rest)), None
            self._linear(f"{prefix}{which}_proj", made.qkv, columns, order, adapters=adapters["qkv"])
            if made.qkv_bias is not None:
                self._target(f"{prefix}{which}_proj.bias", made.qkv_bias[columns], order=order)
        return made

    def _behind_gates(self, order: Tensor | None) -> Tensor:
        """The order of q_proj's rows if each head's gate is behind its query there, and all gates come first here.
        `order` is the order of a head's dimensions, repeated for queries and gates."""
        heads, size = self._arch.num_heads, self._arch.head_dim
        rows = torch.arange(2 * heads * size, device=self._device).view(heads, 2, size)
        inside = torch.arange(size, device=self._device) if order is None else order[:size]
        return torch.cat((rows[:, 1].flatten(), rows[:, 0][:, inside].flatten()))

    def _latent(self, layer: str, **others: Any) -> Layer:
        """A layer with latent attention, of which `others` are the parts around it."""
        a, latent, prefix = self._arch, self._arch.latent, layer + "self_attn."
        assert latent is not None
        queries = latent.query_rank or a.num_heads * (latent.nope + latent.rope)
        width = queries + latent.rank + latent.rope
        made = Layer(
            qkv=self._matrix(a.hidden_size, width),
            qkv_bias=self._empty(width) if a.qkv_bias else None,
            columns=None,
            qk_norm=None,
            sinks=None,
            delta=None,
            latent=self._latent_matrices(prefix, latent, others["adapters"]),
            out=self._matrix(a.num_heads * latent.value, a.hidden_size),
            out_bias=self._empty(a.hidden_size) if a.out_bias else None,
            **others,
        )
        self._output(prefix, made)
        name = "q_proj" if latent.query_rank is None else "q_a_proj"
        for which, columns in ((name, slice(queries)), ("kv_a_proj_with_mqa", slice(queries, None))):
            self._linear(prefix + which, made.qkv, columns, adapters=made.adapters["qkv"])
            if made.qkv_bias is not None and which != "q_proj":
                self._target(f"{prefix}{which}.bias", made.qkv_bias[columns])
        if made.qkv_bias is not None and latent.query_rank is None:
            made.qkv_bias[:queries] = 0.0  # q_proj has none
        return made

    def _latent_matrices(self, prefix: str, latent: Latent, adapters: dict[str, list[LowRank]]) -> LatentAttention:
        a, narrow = self._arch, latent.query_rank
        found = LatentAttention(
            query_norm=self._named(prefix + "q_a_layernorm.weight", narrow) if narrow else None,
            query=self._matrix(narrow, a.num_heads * (latent.nope + latent.rope)) if narrow else None,
            norm=self._named(prefix + "kv_a_layernorm.weight", latent.rank),
            both=self._empty(a.num_heads, latent.nope + latent.value, latent.rank),
        )
        if found.query is not None:
            self._linear(prefix + "q_b_proj", found.query, adapters=adapters["query"])
        self._linear(prefix + "kv_b_proj", found.both.flatten(0, 1).t(), adapters=adapters["both"])
        return found

    def _delta(self, layer: str, **others: Any) -> Layer:
        """A layer with a gated delta rule, of which `others` are the parts around it."""
        a, sizes, prefix = self._arch, self._arch.delta, layer + "linear_attn."
        assert sizes is not None
        delta = Delta(
            convolution=self._empty(sizes.convolved, sizes.kernel),
            log_decay=self._named(prefix + "A_log", sizes.num_heads),
            decay_bias=self._named(prefix + "dt_bias", sizes.num_heads),
            norm=self._named(prefix + "norm.weight", sizes.value_dim),
        )
        self._target(prefix + "conv1d.weight", delta.convolution[:, None])
        made = Layer(
            qkv=self._matrix(a.hidden_size, sizes.projected),
            qkv_bias=None,
            columns=None,
            qk_norm=None,
            sinks=None,
            delta=delta,
            latent=None,
            out=self._matrix(sizes.values, a.hidden_size),
            out_bias=None,
            **others,
        )
        self._linear(prefix + "out_proj", made.out, adapters=made.adapters["out"])
        orders: dict[str, Tensor | None]
        if a.decoder.separate_delta:
            widths = {"qkv": sizes.convolved, "z": sizes.values, "b": sizes.num_heads, "a": sizes.num_heads}
            orders = dict.fromkeys(widths)
        else:
            widths = {"qkvz": sizes.convolved + sizes.values, "ba": 2 * sizes.num_heads}
            joint = [torch.tensor(order, device=self._device) for order in sizes.joint_order()]
            orders = dict(zip(widths, joint, strict=True))
            if self.shared:
                made.columns, orders = torch.cat((joint[0], joint[1] + widths["qkvz"])), dict.fromkeys(widths)
        first = 0
        for which, width in widths.items():
            columns = slice(first, first := first + width)
            name = f"{prefix}in_proj_{which}"
            self._linear(name, made.qkv, columns, orders[which], adapters=made.adapters["qkv"])
        return made

    def _output(self, prefix: str, layer: Layer) -> None:
        """Targets of an attention's output projection."""
        self._linear(prefix + "o_proj", layer.out, adapters=layer.adapters["out"])
        if layer.out_bias is not None:
            self._target(prefix + "o_proj.bias", layer.out_bias)

    def _qk_norm(self, prefix: str) -> Tensor:
        """[heads + kv_heads, D]: the q norm for each q head, then the k norm."""
        a, decoder = self._arch, self._arch.decoder
        norm, add = self._norm("", a.num_qk_heads, a.head_dim), decoder.norm_offset
        for which, heads in zip(decoder.qk_norm_names, (norm[: a.num_heads], norm[a.num_heads :]), strict=True):
            name = f"{prefix}{which}.weight"
            if decoder.qk_norm_joint:
                order = self._rotary_order(len(heads), len(heads))
                self._target(name, heads.flatten(), order=order, add=add)
            else:
                self._target(name, heads, shape=(a.head_dim,), order=self._rotary_order(1, 1), add=add)
        return norm

    def _dense(self, prefix: str, size: int, adapters: dict[str, list[LowRank]]) -> Dense:
        hidden = self._arch.hidden_size
        mlp = Dense(gate_up=self._matrix(hidden, 2 * size), down=self._matrix(size, hidden))
        if self._arch.decoder.joined:
            self._linear(prefix + "gate_up_proj", mlp.gate_up, adapters=adapters["gate_up"])
        else:
            self._linear(prefix + "gate_proj", mlp.gate_up, slice(size), adapters=adapters["gate_up"])
            self._linear(prefix + "up_proj", mlp.gate_up, slice(size, None), adapters=adapters["gate_up"])
        self._linear(prefix + "down_proj", mlp.down, adapters=adapters["down"])
        return mlp

    def _experts(self, layer: str, adapters: dict[str, list[LowRank]]) -> Experts:
        """Add targets for both layouts: one tensor for all experts (transformers in memory), one per expert (files)."""
        a, decoder, at = self._arch, self._arch.decoder, layer + "mlp."
        hidden, size, count, router = a.hidden_size, a.expert_size, a.num_experts, f"{at}{decoder.router_name}."
        biased, first, last = decoder.biased_experts, at + "experts.gate_up_proj", at + "experts.down_proj"
        correction = at + decoder.correction_name
        mlp = Experts(
            router=self._matrix(hidden, count),
            router_bias=self._named(router + "bias", count) if biased else None,
            correction=torch.empty(count, device=self._device) if a.router.corrected else None,
            gate_up=self._named(first, count, hidden, 2 * size) if biased else self._matrix(count, hidden, 2 * size),
            gate_up_bias=self._named(first + "_bias", count, 2 * size) if biased else None,
            down=self._named(last, count, size, hidden) if biased else self._matrix(count, size, hidden),
            down_bias=self._named(last + "_bias", count, hidden) if biased else None,
            shared=self._dense(f"{at}{decoder.shared_name}.", a.shared_size, adapters) if a.shared_size else None,
            shared_gate=self._matrix(hidden, 1) if decoder.shared_gate else None,
        )
        self._target(router + "weight", mlp.router.t())
        if mlp.correction is not None:
            self._target(correction, mlp.correction.view(a.correction_shape))
        if mlp.shared_gate is not None:
            self._linear(f"{at}{decoder.shared_name}_gate", mlp.shared_gate, adapters=adapters["shared_gate"])
        if biased:  # equal in files and in memory
            return mlp
        files = decoder.files
        in_files = layer + files.at
        if files.at != "mlp.":
            self._target(in_files + "gate.weight", mlp.router.t(), parts=(router + "weight",))
        if mlp.correction is not None and files.correction:
            bias = mlp.correction.view(a.correction_shape)
            self._target(in_files + files.correction, bias, parts=(correction,))
        gate_up, down = mlp.gate_up.transpose(1, 2), mlp.down.transpose(1, 2)
        one: dict[str, list[str]] = {}
        for which, rows in (
            (files.gate, gate_up[:, :size]),
            (files.up, gate_up[:, size:]),
            (files.down, down),
        ):
            one[which] = [f"{in_files}experts.{e}.{which}.weight" for e in range(count)]
            for name, matrix in zip(one[which], rows, strict=True):
                self._target(name, matrix)
        self._target(first, gate_up, parts=(*one[files.gate], *one[files.up]))
        self._target(last, down, parts=tuple(one[files.down]))
        return mlp


def _add_low_rank(
    first: Tensor, second: Tensor, scale: float, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """A linear layer's output with its adapter's added."""
    return output + scale * F.linear(F.linear(inputs[0], first), second)


def _in_memory(name: str) -> str:
    """The name in transformers' model of a tensor in the files of Qwen2-VL and Qwen2.5-VL."""
    if name.startswith("visual."):
        return f"model.{name}"
    own = ("model.embed_tokens.", "model.layers.", "model.norm.")
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith(own) else name


def _require(required: set[str], loaded: set[str]) -> None:
    if missing := sorted(required - loaded):
        raise ValueError(f"{len(missing)} of {len(required)} weights are missing, e.g. {missing[:3]}")
