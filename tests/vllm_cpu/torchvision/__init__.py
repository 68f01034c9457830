"""Stands in for torchvision, whose wheels do not load beside a torch for CPUs. vLLM's and transformers' classes of
vision-language models import it, but hpcrl's engine does not compute with it (hpcrl.engines.gen.vllm.image_prompts)."""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.28.0"


def missing(*args: Any, **kwargs: Any) -> NoReturn:
    """In place of any function."""
    raise NotImplementedError("tests/vllm_cpu has only names of torchvision")


def name_of(name: str) -> Any:
    """The __getattr__ of the other modules: imported names exist and cannot be called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return missing
