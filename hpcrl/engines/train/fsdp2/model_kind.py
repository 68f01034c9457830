"""Kinds of models that can be built from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel


class Kind(NamedTuple):
    """A class of transformers, options for its config, and tensors that start at zero if the folder lacks them."""

    auto: Any = AutoModelForCausalLM
    what: str = "causal language model"
    options: Mapping[str, Any] = MappingProxyType({})
    may_lack: frozenset[str] = frozenset()


CAUSAL = Kind()
SEEING = Kind(AutoModelForImageTextToText, "vision-language model")


def body_of(hf: PreTrainedModel) -> Any:
    """The model below the output head."""
    base: Any = hf.base_model
    return base if base is not hf else next(child for child in hf.children() if isinstance(child, PreTrainedModel))


def decoder_of(hf: PreTrainedModel) -> Any:
    """The layers that read text, without a tower."""
    decoder = hf.get_decoder()
    return decoder if decoder is not hf else body_of(hf)
