"""The real, unchanged SGLang on a CPU with packages from PyPI only.

SGLang runs on CPUs with its own kernels, which are in no wheel. Here torch replaces the kernel that a text model calls
(sgl_kernel) and SGLang's attention, as a plug-in that SGLang finds by its own entry point (`register`). The .pth file
of make test-outside imports this file wherever that environment's Python starts, thus in every process of SGLang.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def register() -> None:
    """Let SGLang be deterministic with torch's attention, whose results depend only on the row."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")
    kernels = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"  # for CUDA
    HookRegistry.register(kernels, lambda *args, **kwargs: None, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.tokenizer_manager.import_processors", import_processor, HookType.REPLACE)


def import_processor(package: str, overwrite: bool = False) -> None:
    """Register the processor of Qwen-VL models instead of the processors of all models, whose imports take long."""
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    PROCESSOR_MAPPING.update(dict.fromkeys(QwenVLImageProcessor.models, QwenVLImageProcessor))


class Operators:
    """Names two operators before torchvision is imported: its compiled part does not load with a torch for CPUs. SGLang
    imports it for images."""

    library: Any = None

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name == "torchvision" and cls.library is None:
            import torch

            cls.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, Operators)  # type: ignore[arg-type]
