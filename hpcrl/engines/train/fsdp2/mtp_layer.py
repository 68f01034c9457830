"""Training a model's multi-token prediction layers (model.mtp=train; arXiv 2412.19437, section 2.2).

Layer k predicts token t + 1 + k from the state of token t after layer k - 1, and the embedding of token t + k:
head(norm(layer(eh_proj([enorm(embedding), hnorm(state)])))). The state after a layer is what its norm gives, which is
also what vLLM gives to the next layer; layer 0 stands for the policy and its last norm. The policy's states, embedding
and head have no gradients of this loss, so the policy's gradients are the same without the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hpcrl.engines import varlen
from hpcrl.engines.hf_folder import mtp_files, read_mtp
from hpcrl.engines.train.fsdp2.model_kind import quiet
from hpcrl.engines.train.fsdp2.packed_attention import PACKED_ATTENTION, PackedLayout
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.metrics.stats import Stats, stat
from hpcrl.models.mtp import name_in_files, num_joins, num_trained, shared_with_model, trained_names
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.rollout.device_copies import to_device

FIRST = "model.layers.0."
"""Beginning of the names of a layer in a model with no other layer."""
ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""What makes the only layer of a model one with attention and experts, as MTP layers are."""


class MTPInputs(NamedTuple):
    """What a layer computes in a micro-batch: K pairs of a state and a token, as packed rows.

    Attributes:
        states: int64 [K], indices of the states among those of the forward pass, or of the layer before.
        token_ids: int64 [K], the tokens; positions: int64 [K], their positions.
        before: int64 [M], the pairs after which the tokens `targets`, int64 [M], are predicted.
        weights: float32 [M], the targets' weights in the loss.
    """

    states: Tensor
    token_ids: Tensor
    positions: Tensor
    layout: PackedLayout
    before: Tensor
    targets: Tensor
    weights: Tensor


class Join(nn.Module):
    """The norms and the projection before a layer, and the norm after it."""

    def __init__(self, hidden_size: int, eps: float, like: nn.Module, dtype: torch.dtype):
        """`like` is a norm of the kind that the layer has."""
        super().__init__()
        kind: Any = type(like)
        self.enorm, self.hnorm, self.norm = (kind(hidden_size, eps=eps).to(dtype) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """[K, h]: a layer's input, from states and embeddings [K, h]."""
        joined: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
        return joined


class MTPLayers(nn.Module):
    """The layers, with transformers' decoder layer of the family. Some families have one Join for all layers."""

    def __init__(self, ones: Sequence[PreTrainedModel], num_joins: int):
        """Each of `ones` is a model whose only layer becomes one of these."""
        super().__init__()
        text: Any = ones[0].config
        self.layers = nn.ModuleList(one.get_decoder().layers[0] for one in ones)
        like: Any = self.layers[0].input_layernorm
        self.joins = nn.ModuleList(
            Join(text.hidden_size, text.rms_norm_eps, like, like.weight.dtype) for _ in range(num_joins)
        )
        for layer in self.layers:
            attention: Any = layer.self_attn
            attention.config._attn_implementation = PACKED_ATTENTION
        self.eval()

    def forward(
        self,
        number: int,
        states: Tensor,
        embedded: Tensor,
        rotation: tuple[Tensor, Tensor],
        layout: PackedLayout,
    ) -> Tensor:
        """[K, h]: the states before the head after layer `number`, from 0, from states and embeddings [K, h] of packed
        rows, and the rotation of their positions."""
        join: Any = self.joins[min(number, len(self.joins) - 1)]
        mixed = join(states, embedded)
        hidden = self.layers[number](
            mixed[None], position_embeddings=rotation, attention_mask=None, packed_layout=layout
        )
        normed: Tensor = join.norm(hidden)[0]
        return normed


def _one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model with one layer, and almost no vocabulary."""
    one = copy.deepcopy(config)
    for name, value in ({"vocab_size": 8, "pad_token_id": None} | ONE_LAYER).items():
        if getattr(one, name, None) is not None:
            setattr(one, name, value)
    return one


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        one: PreTrainedModel = AutoModelForCausalLM.from_config(_one_layer(config), dtype=dtype)
    return one


def empty_layers(config: PreTrainedConfig, content: Mapping[str, Any], dtype: torch.dtype) -> MTPLayers:
    """The layers of this config's model, on the meta device. `content` is its config.json."""
    with torch.device("meta"):
        ones = [_empty_model(config, dtype) for _ in range(num_trained(content))]
        return MTPLayers(ones, num_joins(content))


def read_layers(path: Path, config: PreTrainedConfig, content: Mapping[str, Any], dtype: torch.dtype) -> MTPLayers:
    """The layers with the weights of a model's folder, on the CPU. ValueError names a missing or mismatched tensor."""
    begins = trained_names(content)
    tensors = dict(read_mtp(path))
    ones = [_read_layer(path, config, begins[f"layers.{n}."], tensors, dtype) for n in range(num_trained(content))]
    layers = MTPLayers(ones, num_joins(content))
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.startswith("layers."):
                continue
            found = tensors.get(in_file := name_in_files(begins, name))
            if found is None or found.shape != parameter.shape:
                raise _unusable(path, in_file)
            parameter.copy_(found)
    return layers


def _read_layer(
    path: Path, config: PreTrainedConfig, begin: str, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The model whose only layer has the tensors with this beginning."""
    of_layer = {FIRST + n.removeprefix(begin): t for n, t in tensors.items() if n.startswith(begin)}
    kind: Any = type(_empty_model(config, dtype))
    with quiet():
        one, info = kind.from_pretrained(
            None,
            config=_one_layer(config),
            state_dict=of_layer,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    wrong = [entry[0] for entry in info["mismatched_keys"]] + list(info["missing_keys"])
    if lacking := sorted(name for name in wrong if name.startswith(FIRST)):
        raise _unusable(path, begin + lacking[0].removeprefix(FIRST))
    model: PreTrainedModel = one
    return model


def _unusable(path: Path, name: str) -> ValueError:
    return ValueError(f"model.mtp=train: {path}: {name} of the MTP layer is missing, or has another shape")


def tensors_in_files(
    origin: Path,
    config: PreTrainedConfig,
    content: Mapping[str, Any],
    of_layers: Mapping[str, Tensor],
    of_model: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The tensors of MTP layers in the files of `origin`, with these values of the layers, by their state_dict()'s
    names, and of the model, of whose embedding and head files may have copies. Experts are stacked or separate as in
    these files. `content` is the model's config.json."""
    begins, held = trained_names(content), mtp_files(origin)
    one = _empty_model(config, next(iter(of_layers.values())).dtype)
    found: dict[str, Tensor] = {}
    for number in range(num_trained(content)):
        own = f"layers.{number}."
        inside = {FIRST + n.removeprefix(own): t for n, t in of_layers.items() if n.startswith(own)}
        as_held = {n: t for n, t in inside.items() if begins[own] + n.removeprefix(FIRST) in held}
        others = {n: t for n, t in inside.items() if n not in as_held}
        for name, tensor in (as_held | revert_weight_conversion(one, others)).items():
            found[begins[own] + name.removeprefix(FIRST)] = tensor.contiguous()
    for name, tensor in of_layers.items():
        if name.startswith("joins."):
            found[name_in_files(begins, name)] = tensor
    for name in held:
        if shared := shared_with_model(name):
            found[name] = of_model.get(shared, of_model["model.embed_tokens.weight"]).clone()
    return found


class MTPTraining:
    """The layers' loss: the mean, over layers, of the cross-entropy of tokens of the loss mask with enough predecessors
    in their row, with the rows' weights, times a coefficient. Shared prefixes are computed once."""

    def __init__(self, coefficient: float, num_layers: int, attention: varlen.Choice, device: torch.device):
        self._coefficient, self._num_layers = coefficient, num_layers
        self._attention, self._device = attention, device

    def inputs(self, batch: Batch, layout: PackedLayout | None, limits: list[int] | None) -> tuple[MTPInputs, ...]:
        """Each layer's, of a micro-batch on the host, whose forward pass has this layout. `limits` are the most tokens
        of each segment that may be shared; None: all."""
        found: list[MTPInputs] = []
        states = batch.token_ids.long() if batch.num_tokens else torch.zeros(1, dtype=torch.int64)
        for number in range(1, self._num_layers + 1):
            inputs, states = self._of_layer(number, batch, states, None if number > 1 else layout, limits)
            found.append(inputs)
        return tuple(found)

    def _of_layer(
        self, number: int, batch: Batch, before: Tensor, layout: PackedLayout | None, limits: list[int] | None
    ) -> tuple[MTPInputs, Tensor]:
        """(inputs, int64 [T] places of the states after the layer, by token). `before` are those of the states before
        it or, for the first layer, the tokens; tokens near the end of their segment have no state, and any number."""
        ids = batch.token_ids.long() if batch.num_tokens else torch.zeros(1, dtype=torch.int64)
        sizes, of_token = (batch.segment_lengths - number).clamp(min=0), batch.segment_indices
        pairs = (of_token < sizes[batch.segment_ids]).nonzero()[:, 0]
        following = pairs + number
        most = sizes if limits is None else torch.minimum(sizes, torch.tensor(limits))
        lengths, capped = sizes[sizes > 0].tolist(), most[sizes > 0].tolist()
        if not lengths:  # one pair without a target, so every parameter is in the graph
            pairs = following = torch.zeros(1, dtype=torch.int64)
            lengths, capped = [1], [1]
        shared = share_prefixes(before[pairs] << 32 | ids[following], lengths, capped)
        own = PackedLayout(lengths, self._device, shared, self._attention)
        after = torch.zeros(len(ids), dtype=torch.int64)
        after[pairs] = shared.places
        targets = batch.loss_mask.nonzero()[:, 0]
        targets = targets[of_token[targets] > number]
        if len(targets):
            pair_before = after[targets - number - 1]
            weights = batch.weights[batch.row_ids[targets]]
        else:
            targets = pair_before = torch.zeros(1, dtype=torch.int64)
            weights = torch.zeros(1)
        kept, tokens = pairs[shared.kept], following[shared.kept]
        positions = batch.position_ids if batch.num_tokens else torch.zeros(1, dtype=torch.int64)
        states = kept if number == 1 else before[kept]
        moved = (states, ids[tokens], positions[tokens], pair_before, ids[targets], weights)
        states, tokens, positions, pair_before, targets, weights = (to_device(t, self._device) for t in moved)
        if layout is not None:
            states = layout.places[states]
        return MTPInputs(states, tokens, positions, own, pair_before, targets, weights), after

    def loss(self, logprobs: Tensor, hits: Tensor, further: Sequence[MTPInputs], norms: Norms) -> tuple[Tensor, Stats]:
        """(scalar, statistics) of a micro-batch, from log-probs of all layers' targets, and whether each is the most
        probable token."""
        sizes = [len(inputs.targets) for inputs in further]
        weights = torch.cat([inputs.weights for inputs in further])
        loss = -(logprobs * weights).sum() * (self._coefficient / (len(further) * max(norms.tokens, 1.0)))
        stats: Stats = {}
        split = zip(logprobs.split(sizes), hits.split(sizes), weights.split(sizes), strict=True)
        for number, (of_layer, correct, weight) in enumerate(split, 1):
            end = f"_{number}" if number > 1 else ""
            stats[f"actor/mtp_loss{end}"] = stat(-of_layer, weight > 0)
            stats[f"actor/mtp_accuracy{end}"] = stat(correct.float(), weight > 0)
        return loss, stats
