"""Properties of a model family that its models' config.json does not contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.models.grouped import GroupedLayers
from hpcrl.models.megatron_entries import MegatronLayers
from hpcrl.models.shape import Decoder, ModelShape


def nothing_lacks(model: Mapping[str, Any]) -> Iterator[str]:
    """For a family whose config.json features are all implemented by Megatron-Core's layers."""
    yield from ()


@dataclass(frozen=True)
class MegatronModel:
    """A family in Megatron-Core."""

    layers: Callable[[Mapping[str, Any], ModelShape], MegatronLayers] = GroupedLayers
    """Called with config.json and its shape; ValueError for a model without a table of names."""
    biases: tuple[str, ...] = ()
    """Keys of biases that Megatron-Core's layers do not have here."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3")
    """Kinds of rotary embedding whose frequencies do not depend on the sequence, and that scale nothing else."""
    lacks: Callable[[Mapping[str, Any]], Iterator[str]] = nothing_lacks
    """Why a model is not trained, from its config.json, in addition to the keys above."""
    stores_own_names: bool = False
    """Megatron-Core's own layers use their own tensor names, not Transformer Engine's."""


@dataclass(frozen=True)
class Family:
    """One model family, whose models share their code in transformers."""

    model_types: tuple[str, ...]
    """The values of model_type in config.json."""
    decoder: Decoder | None = None
    """The decoder's properties that do not depend on config.json; None: not known, and its models are not planned."""
    read: Callable[[str, Decoder, Mapping[str, Any]], ModelShape] | None = None
    """Called with model_type, decoder and config.json; None: hpcrl.models.grouped.grouped_shape."""
    native: bool = False
    """The native generator runs it."""
    megatron: MegatronModel | None = None
    """None: the Megatron engine does not train it."""
    vllm_slices: bool = False
    """vLLM's split of each weight over tensor parallel ranks is tested; else ranks get all of it."""
    untrainable: str = ""
    """Why no engine that reads hidden states trains it, whatever config.json says. If empty, the engine tries a small
    model before it reads weights (hpcrl.engines.train.fsdp2.trial)."""
    multiplies_logits: bool = False
    """logits_scaling multiplies logits; in other families it divides them."""
    renamed_in_files: bool = False
    """Tensor names in files differ from names in transformers' memory."""
    predicts_further: str = ""
    """The key of config.json with the number of multi-token prediction layers, which are in files after the other
    layers but not in transformers' model."""
    peft_experts: frozenset[str] = frozenset()
    """Last names of layers that peft (0.21) treats as experts in all families whose experts transformers stacks like
    this one's."""
    small_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of a small model (hpcrl.engines.train.fsdp2.small_model) that must match each other."""
