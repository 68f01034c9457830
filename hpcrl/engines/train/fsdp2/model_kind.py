"""Kinds of models that are built from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM


class Kind(NamedTuple):
    """A class of transformers, options of its config, and tensors that the folder may lack, which then start at
    zero."""

    auto: Any = AutoModelForCausalLM
    what: str = "causal language model"
    options: Mapping[str, Any] = MappingProxyType({})
    may_lack: frozenset[str] = frozenset()


CAUSAL = Kind()
