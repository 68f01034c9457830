"""Keep transformers' classes unchanged for other engines in the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def transformers_classes_kept() -> Iterator[None]:
    """Context in which vLLM changes a subclass, so a trainer or reference in this process keeps the original class.
    vLLM 0.32 runs many families with transformers' code (OLMo 2, SmolLM3, Seed-OSS), and changes the decoder's class in
    place, after which only vLLM can construct and call it."""
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile
    with ExitStack() as stack:

        def decorate_subclass(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
            own = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
            for name in (cls.__module__, cls.__module__.rpartition(".")[0]):  # where AutoModel looks it up
                if hasattr(module := sys.modules.get(name), cls.__name__):  # code in a model's folder has no package
                    stack.enter_context(patch.object(module, cls.__name__, own))
            decorate(self, own, *args, **kwargs)

        stack.enter_context(patch.object(Base, "_decorate_cls_for_torch_compile", decorate_subclass))
        yield
