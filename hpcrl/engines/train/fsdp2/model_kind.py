"""Kinds of models that can be built from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


class Kind(NamedTuple):
    """A class of transformers, options for its config, and tensors that start at zero if the folder lacks them."""

    auto: Any = AutoModelForCausalLM
    what: str = "causal language model"
    options: Mapping[str, Any] = MappingProxyType({})
    may_lack: frozenset[str] = frozenset()


CAUSAL = Kind()
SEEING = Kind(AutoModelForImageTextToText, "vision-language model")
