"""Kinds of models that can be built from a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

HEAD = "score"
"""The head's name in transformers' models for token and for sequence classification."""


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bar and load report; relevant problems still raise errors."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
