"""Training a model's multi-token prediction layer (model.mtp=train; arXiv 2412.19437, section 2.2).

From the state h of token t, after the model's last norm, and the embedding of token t + 1, the layer predicts token
t + 2: head(norm(layer(eh_proj([enorm(embedding), hnorm(h)])))). States, embedding and head are those of the policy,
without gradients, so the policy's gradients are the same without the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
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
from hpcrl.models.mtp import shared_with_model, trained_names
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
    """What the layer computes in a micro-batch: K pairs of a state and the next token, as packed rows.

    Attributes:
        states: int64 [K], indices of the states among those of the forward pass.
        token_ids: int64 [K], the next tokens; positions: int64 [K], their positions.
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


class MTPLayer(nn.Module):
    """The layer, with transformers' decoder layer of the family."""

    def __init__(self, one: PreTrainedModel):
        """`one` is a model whose only layer becomes this one's."""
        super().__init__()
        text: Any = one.config
        self.layer: Any = one.get_decoder().layers[0]
        kind, dtype = type(self.layer.input_layernorm), self.layer.input_layernorm.weight.dtype
        norms = [kind(text.hidden_size, eps=text.rms_norm_eps).to(dtype) for _ in range(3)]
        self.enorm, self.hnorm, self.norm = norms
        self.eh_proj = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False, dtype=dtype)
        self.layer.self_attn.config._attn_implementation = PACKED_ATTENTION
        self.eval()

    def forward(
        self, states: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor], layout: PackedLayout
    ) -> Tensor:
        """[K, h]: the states before the head, from states and embeddings [K, h] of packed rows, and the rotation of
        their positions."""
        mixed = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
        hidden = self.layer(mixed[None], position_embeddings=rotation, attention_mask=None, packed_layout=layout)
        normed: Tensor = self.norm(hidden)[0]
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


def empty_layer(config: PreTrainedConfig, dtype: torch.dtype) -> MTPLayer:
    """The layer of this config's model, on the meta device."""
    with torch.device("meta"):
        return MTPLayer(_empty_model(config, dtype))


def read_layer(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> MTPLayer:
    """The layer with the weights of a model's folder, on the CPU. ValueError names a missing or mismatched tensor."""
    begins = trained_names(config.to_dict())
    tensors = dict(read_mtp(path))
    of_layer = {
        FIRST + n.removeprefix(begins["layer."]): t for n, t in tensors.items() if n.startswith(begins["layer."])
    }
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
        name = begins["layer."] + lacking[0].removeprefix(FIRST)
        raise ValueError(f"model.mtp=train: {path}: {name} of the MTP layer is missing, or has another shape")
    layer = MTPLayer(one)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("layer."):
                continue
            beginning, _, rest = name.partition(".")
            found = tensors.get(in_file := f"{begins[f'{beginning}.']}{rest}")
            if found is None or found.shape != parameter.shape:
                raise ValueError(
                    f"model.mtp=train: {path}: {in_file} of the MTP layer is missing, or has another shape"
                )
            parameter.copy_(found)
    return layer


def tensors_in_files(
    origin: Path, config: PreTrainedConfig, of_layer: Mapping[str, Tensor], of_model: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of MTP layers in the files of `origin`, with these values of the layer, by its state_dict()'s names,
    and of the model, of whose embedding and head files may have copies."""
    begins = trained_names(config.to_dict())
    one = _empty_model(config, next(iter(of_layer.values())).dtype)
    inside = {FIRST + name.removeprefix("layer."): t for name, t in of_layer.items() if name.startswith("layer.")}
    found = {
        begins["layer."] + name.removeprefix(FIRST): t.contiguous()
        for name, t in revert_weight_conversion(one, inside).items()
    }
    for name, tensor in of_layer.items():
        beginning, _, rest = name.partition(".")
        if beginning != "layer":
            found[begins[f"{beginning}."] + rest] = tensor
    for name in mtp_files(origin):
        if shared := shared_with_model(name):
            found[name] = of_model.get(shared, of_model["model.embed_tokens.weight"]).clone()
    return found


class MTPTraining:
    """The layer's loss: the mean cross-entropy of tokens of the loss mask whose two predecessors are in their row, with
    the rows' weights, times a coefficient. Shared prefixes are computed once."""

    def __init__(self, coefficient: float, attention: varlen.Choice, device: torch.device):
        self._coefficient, self._attention, self._device = coefficient, attention, device

    def inputs(self, batch: Batch, layout: PackedLayout | None, limits: list[int] | None) -> MTPInputs:
        """Of a micro-batch on the host, whose forward pass has this layout. `limits` are the most tokens of each
        segment that may be shared; None: all."""
        ids = batch.token_ids.long() if batch.num_tokens else torch.zeros(1, dtype=torch.int64)
        starts, ends = batch.cu_segments[:-1], batch.cu_segments[1:]
        follows = torch.ones(batch.num_tokens, dtype=torch.bool)  # whether the segment has a next token
        follows[ends - 1] = False
        pairs = follows.nonzero()[:, 0]
        following = pairs + 1
        sizes = batch.segment_lengths - 1
        most = sizes if limits is None else torch.minimum(sizes, torch.tensor(limits))
        lengths, capped = sizes[sizes > 0].tolist(), most[sizes > 0].tolist()
        if not lengths:  # one pair without a target, so every parameter is in the graph
            pairs = following = torch.zeros(1, dtype=torch.int64)
            lengths, capped = [1], [1]
        shared = share_prefixes(ids[pairs] << 32 | ids[following], lengths, capped)
        own = PackedLayout(lengths, self._device, shared, self._attention)
        places = batch.loss_mask.nonzero()[:, 0]
        segments = batch.segment_ids[places]
        places = places[places - starts[segments] >= 2]
        if batch.num_tokens and len(places):
            before = shared.places[(follows.cumsum(0) - 1)[places - 2]]
            weights = batch.weights[batch.row_ids[places]]
        else:
            places = before = torch.zeros(1, dtype=torch.int64)
            weights = torch.zeros(1)
        positions = batch.position_ids if batch.num_tokens else torch.zeros(1, dtype=torch.int64)
        kept = pairs[shared.kept]
        moved = (kept, ids[following[shared.kept]], positions[following[shared.kept]], before, ids[places], weights)
        states, tokens, positions, before, targets, weights = (to_device(tensor, self._device) for tensor in moved)
        return MTPInputs(
            states if layout is None else layout.places[states],
            tokens,
            positions,
            own,
            before,
            targets,
            weights,
        )

    def loss(self, logprobs: Tensor, hits: Tensor, weights: Tensor, norms: Norms) -> tuple[Tensor, Stats]:
        """(scalar, statistics) of a micro-batch: log-probs [M] of the targets, whether each is the most probable token,
        and their weights."""
        loss = -(logprobs * weights).sum() * (self._coefficient / max(norms.tokens, 1.0))
        counted = weights > 0
        stats = {"actor/mtp_loss": stat(-logprobs, counted), "actor/mtp_accuracy": stat(hits.float(), counted)}
        return loss, stats
