"""A model's architecture for the native generator, read from an HF folder. Unsupported features are refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.engines.gen.native.unsupported import LINEAR, unsupported
from hpcrl.models.delta import DeltaSizes
from hpcrl.models.families import NATIVE, family_of, read_shape, read_vision_of
from hpcrl.models.mrope import axes_of_pairs
from hpcrl.models.mtp import num_mtp_layers
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import CannotPlanError, Decoder, Latent, ModelShape
from hpcrl.models.vision import Vision


@dataclass(frozen=True)
class Rope:
    """A rotary embedding (arXiv 2104.09864) of a head's first pairs of dimensions."""

    frequencies: tuple[float, ...]  # radians per position, for each rotated pair
    scale: float = 1.0  # factor for the rotated numbers (YaRN, arXiv 2309.00071)

    def rotations(self, num_positions: int, num_pairs: int, device: torch.device) -> Tensor:
        """complex64 [num_positions, num_pairs]: each position's factor for each pair of dimensions."""
        angles = torch.outer(torch.arange(num_positions).float(), torch.tensor(self.frequencies))
        factors = torch.ones(num_positions, num_pairs, dtype=torch.complex64)
        factors[:, : len(self.frequencies)] = torch.polar(torch.full_like(angles, self.scale), angles)
        return factors.to(device)


@dataclass(frozen=True)
class Architecture:
    """A decoder of blocks with rotary attention, grouped-query or latent, or a gated delta rule, and a gated MLP or a
    mixture of experts.

    With latent attention, all heads read one vector per token (LatentAttention in weights.py), which is cached: one
    key head, of width head_dim, whose first value_dim numbers are the values.
    """

    decoder: Decoder
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int  # width of a value head
    latent: Latent | None  # None: grouped-query attention
    intermediate_size: int
    norm_eps: float
    tied: bool  # the vocabulary projection is the embedding
    qkv_bias: bool
    out_bias: bool
    expert_layers: frozenset[int]
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int  # width of the shared experts; 0: none
    router: ExpertRouter
    correction_shape: tuple[int, ...]  # of the router's bias per expert in files
    clamp: tuple[float, float]  # the clamped MLP's limit and the gain of its gate, for decoder.biased_experts
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None  # scores are cap * tanh(scores / cap) (arXiv 2408.00118)
    logit_softcap: float | None
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    recurrent: tuple[bool, ...]  # per layer, whether it has a delta rule instead of attention
    delta: DeltaSizes | None  # of these layers
    windows: tuple[int | None, ...]  # per layer, how many tokens a token attends to, itself included; None: all
    max_positions: int
    further_layers: int  # layers in files, after the others, that are not used
    eos_ids: tuple[int, ...]
    vision: Vision | None  # None: it takes no images
    axis_of_pair: tuple[int, ...]  # the position axis of each rotated pair (hpcrl.models.vision); empty: one axis

    @property
    def decoder_prefix(self) -> str:
        """The beginning of the decoder's tensor names."""
        return "model." if self.vision is None else "model.language_model."

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - sum(self.recurrent)

    @property
    def cached_at(self) -> tuple[int, ...]:
        """For each layer, the number of layers before it that mix tokens in the same way."""
        return tuple(self.recurrent[:i].count(kind) for i, kind in enumerate(self.recurrent))

    @property
    def cached_tensors(self) -> int:
        """Per layer with attention: keys and values, or the latent vectors, which are both."""
        return 2 if self.latent is None else 1

    def keys_and_values(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., head_dim] and values [..., value_dim] in [cached_tensors, ..., head_dim]."""
        return cached[0], cached[-1][..., : self.value_dim]

    @property
    def num_gates(self) -> int:
        """Number of q heads whose output has a gate."""
        return self.num_heads if self.decoder.gated_attention else 0

    @property
    def num_qk_heads(self) -> int:
        return self.num_heads + self.num_kv_heads

    @property
    def num_qkv_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def num_rotated(self) -> int:
        """The number of a head's dimensions, from the first on, that are rotated."""
        return 2 * len(self.ropes[0].frequencies)

    def rotations(self, num_positions: int, device: torch.device) -> list[Tensor]:
        """For each rope, complex64 [num_positions, pairs]: each position's factors for the pairs of dimensions of a
        head or, with latent attention, of its rotated part."""
        width = self.head_dim if self.latent is None else self.latent.rope
        return [rope.rotations(num_positions, width // 2, device) for rope in self.ropes]


def read_architecture(path: Path) -> Architecture:
    """The architecture of the model in an HF folder. ValueError if there is no config.json, the family is not in NATIVE
    or the config needs an unsupported feature (rotary embeddings that depend on the length, quantisation, other
    activations than the family's, bidirectional attention)."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {path} has no config.json")
    model_type = json.loads((path / "config.json").read_text()).get("model_type")
    if model_type not in NATIVE:
        raise ValueError(f"model_type {model_type!r} in {path}/config.json: the native generator runs {NATIVE}")
    from transformers import AutoConfig  # takes a second; fills in the defaults of every family

    config, vision = AutoConfig.from_pretrained(path), read_vision_of(path)
    tied = config.tie_word_embeddings
    family = family_of(config.model_type)  # reads mistral with layer_types as ministral
    try:
        shape = read_shape(config.to_dict())
    except CannotPlanError as error:
        raise ValueError(f"{path}/config.json: {error}") from error
    decoder = family.unlisted or shape.decoder
    config = config.get_text_config()
    for feature in unsupported({**config.to_dict(), "model_type": model_type}):
        raise ValueError(
            f"{path}/config.json: {feature} is not implemented by the native generator; use another engine"
        )
    latent, head_dim = shape.latent, shape.head_dim
    kinds = _layer_types(config, decoder)
    ropes = tuple(dict.fromkeys(_rope(config, kind, shape) for kind in kinds))
    scalar = config.query_pre_attn_scalar if decoder.gemma else head_dim
    recurrent = tuple(kind == LINEAR for kind in kinds)
    return Architecture(
        decoder=decoder,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads if latent is None else 1,
        head_dim=head_dim if latent is None else latent.rank + latent.rope,
        value_dim=head_dim if latent is None else latent.rank,
        latent=latent,
        intermediate_size=shape.intermediate_size,
        norm_eps=config.rms_norm_eps,
        tied=tied,
        qkv_bias=shape.qkv_bias,
        out_bias=shape.out_bias,
        expert_layers=shape.expert_layers,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_size=shape.expert_size,
        shared_size=shape.shared_size,
        router=family.router(config.to_dict()),
        correction_shape=next((p.shape for p in shape.parameters if p.name.endswith(decoder.correction_name)), ()),
        clamp=(config.swiglu_limit, config.swiglu_alpha) if decoder.biased_experts else (0.0, 0.0),
        embedding_scale=config.hidden_size**0.5 if decoder.gemma else 1.0,
        attention_scale=scalar**-0.5 * (1.0 if latent is None else _yarn_gain(config.rope_parameters)),
        attention_softcap=config.attn_logit_softcapping if decoder.soft_capped else None,
        logit_softcap=config.final_logit_softcapping if decoder.gemma else None,
        ropes=ropes,
        rope_of_layer=tuple(ropes.index(_rope(config, kind, shape)) for kind in kinds),
        recurrent=recurrent,
        delta=_delta(config) if any(recurrent) else None,
        windows=tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        max_positions=_max_positions(config),
        further_layers=num_mtp_layers(config.to_dict()),
        eos_ids=_eos_ids(path, config),
        vision=vision,
        axis_of_pair=_axes(config, decoder, head_dim) if vision is not None else (),
    )


def _layer_types(config: Any, decoder: Decoder) -> list[str]:
    if decoder.windows == "by layer" or decoder.delta_rule:
        return list(config.layer_types)
    sliding = decoder.windows == "all" and config.sliding_window is not None
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def _axes(config: Any, decoder: Decoder, head_dim: int) -> tuple[int, ...]:
    sections = config.rope_parameters.get("mrope_section", (11, 11, 10))
    return axes_of_pairs(sections, head_dim // 2, interleaved=decoder.delta_rule)


def _delta(config: Any) -> DeltaSizes:
    return DeltaSizes(
        key_heads=config.linear_num_key_heads,
        group=config.linear_num_value_heads // config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )


def _rope_sections(config: Any) -> dict[str | None, dict[str, Any]]:
    """The rope parameters by layer type; the key None stands for all layers."""
    sections = {kind: value for kind, value in config.rope_parameters.items() if isinstance(value, dict)}
    return sections or {None: config.rope_parameters}


def _rope(config: Any, layer_type: str, shape: ModelShape) -> Rope:
    """The rotary embedding that transformers computes for sequences of any accepted length (_max_positions)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sections = _rope_sections(config)
    kind = layer_type if layer_type in sections else None
    rope = sections[kind]
    theta, rope_type = rope["rope_theta"], rope.get("rope_type", "default")
    if rope_type == "dynamic" and shape.decoder.rope_alpha:
        theta *= rope["alpha"] ** (shape.head_dim / (shape.head_dim - 2))
    elif rope_type != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), layer_type=kind)
        return Rope(tuple(frequencies.tolist()), scale)
    width = shape.head_dim if shape.latent is None else shape.latent.rope
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    return Rope(tuple((1.0 / (theta ** (torch.arange(0, rotated, 2).float() / rotated))).tolist()))


def _yarn_gain(rope: dict[str, Any]) -> float:
    """The factor of latent attention's scores for lengthened contexts, as in DeepSeek-V2 (arXiv 2405.04434)."""
    gain, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor", 1.0)
    if rope.get("rope_type", "default") == "default" or factor <= 1:
        return 1.0
    return (0.1 * gain * math.log(factor) + 1.0) ** 2


def _max_positions(config: Any) -> int:
    """The maximum sequence length; with longrope (arXiv 2402.13753), the maximum for which the short factors apply."""
    return min(
        (
            rope["original_max_position_embeddings"]
            for rope in _rope_sections(config).values()
            if rope.get("rope_type") == "longrope"
        ),
        default=config.max_position_embeddings,
    )


def _eos_ids(path: Path, config: Any) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    file = path / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
