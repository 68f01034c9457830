"""Properties of a model family that its models' config.json does not contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.models.grouped import GroupedLayers
from hpcrl.models.megatron_entries import MegatronLayers
from hpcrl.models.router import ExpertRouter, softmax_router
from hpcrl.models.shape import Decoder, ModelShape
from hpcrl.models.vision import Vision


def nothing_lacks(model: Mapping[str, Any]) -> Iterator[str]:
    """`lacks` of a family for which Megatron-Core's layers implement every feature of config.json."""
    yield from ()


def no_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """`options` of a family without any."""
    return {}


@dataclass(frozen=True)
class MegatronModel:
    """How Megatron-Core implements a family."""

    layers: Callable[[Mapping[str, Any], ModelShape], MegatronLayers] = GroupedLayers
    """Called with config.json and its shape. ValueError for a model without a table of names."""
    biases: tuple[str, ...] = ()
    """Keys of config.json that ask for biases, which Megatron-Core's layers do not have here."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Supported rotary embeddings: frequencies do not depend on the sequence."""
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = no_options
    """Called with config.json; returns keys of Megatron-Core's configuration that its sizes do not determine.
    activation_func is a name (hpcrl.engines.train.megatron.gpt_model)."""
    lacks: Callable[[Mapping[str, Any]], Iterator[str]] = nothing_lacks
    """Yields further reasons not to train a model, from its config.json."""
    stores_own_names: bool = False
    """Whether Megatron-Core's own layers use other tensor names than Transformer Engine's."""


@dataclass(frozen=True)
class Family:
    """One model family, whose models share their code in transformers."""

    model_types: tuple[str, ...]
    """The values of model_type in config.json."""
    decoder: Decoder | None = None
    """The decoder's properties that do not depend on config.json; if None, transformers builds the models of which the
    plan reads sizes and parameters (hpcrl.models.from_transformers)."""
    unlisted: Decoder | None = None
    """The same for the native generator and Megatron-Core, if `decoder` is None."""
    read: Callable[[str, Decoder, Mapping[str, Any]], ModelShape] | None = None
    """Called with model_type, decoder and config.json; None stands for hpcrl.models.grouped.grouped_shape."""
    measured_layers: bool = False
    """Whether the plan measures its layers' memory on the meta device (hpcrl.planner.layer_memory) instead of computing
    it by formulas, as for every family without a decoder."""
    router: Callable[[Mapping[str, Any]], ExpertRouter] = softmax_router
    """Called with the config.json of a mixture of experts."""
    native: bool = False
    """Whether the native generator runs it."""
    megatron: MegatronModel | None = None
    """None if the Megatron engine does not train it."""
    vllm_slices: bool = False
    """Whether vLLM's split of each weight over tensor-parallel ranks is tested; otherwise, ranks get full weights."""
    untrainable: str = ""
    """Why engines that read hidden states train none of its models. If empty, the engine tries a small model before it
    reads weights (hpcrl.engines.train.fsdp2.trial)."""
    vllm_images: tuple[str, ...] = ()
    """The values of model_type of models for which vLLM gets images from hpcrl
    (hpcrl.engines.gen.vllm.image_prompts)."""
    sglang_images: tuple[str, ...] = ()
    """The same for SGLang (hpcrl.engines.gen.sglang.processor_output)."""
    scorers: tuple[str, ...] = ()
    """The values of model_type of models that transformers has with images for sequence classification."""
    vision: Callable[[Mapping[str, Any], Mapping[str, Any]], Vision | None] | None = None
    """Called with config.json and the image processor's values; ValueError for unusable ones, None for a model without
    a tower. None if no model of the family takes images, or if hpcrl does not know how they see them."""
    multiplies_logits: bool = False
    """Whether logits_scaling multiplies logits; in other families it divides them."""
    renamed_in_files: bool = False
    """Whether tensor names in files differ from transformers' names in memory."""
    transposes_experts: bool = False
    """Whether transformers transposes the merged matrices of experts when it reads files."""
    peft_experts: frozenset[str] = frozenset()
    """Last parts of layer names that peft (0.21) treats as experts, in every family whose experts transformers stacks
    as in this one."""
    reads_positions_from_cache: bool = False
    """Whether some layers in transformers count positions from the length of the cache instead of reading them."""
    mixers: tuple[str, ...] = ()
    """Class names in transformers of modules that mix tokens with neither attention nor a convolution
    (hpcrl.engines.train.fsdp2.row_mixers)."""
    unpackable: str = ""
    """Why sequences of its models are not packed. If empty, the engine tries a small model."""
    row_attention: tuple[str, ...] = ()
    """Class names in transformers of attention that uses no attention interface and takes a causal mask
    (hpcrl.engines.train.fsdp2.row_attention)."""
    peft_refuses: frozenset[str] = frozenset()
    """Last parts of layer names for which peft (0.21) refuses adapters."""
    small_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes for a small model (hpcrl.engines.train.fsdp2.small_model) that must match each other."""
