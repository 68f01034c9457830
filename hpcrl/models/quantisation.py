"""Quantised weights: the key of config.json, and the kinds that hpcrl.convert makes bfloat16 of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CONVERTED = ("fp8", "mxfp4", "compressed-tensors")
"""The quant_method values that hpcrl.convert.dequantize reads."""
SUFFIX = "-bf16"
"""What the conversion's output is called in documents and in conf/: the name of the quantised folder, and this."""


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization_config of a config.json, which may be in its text_config; empty without one."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return found if isinstance(found, dict) else {}


def quantised(model: Mapping[str, Any]) -> Iterator[str]:
    """Why no engine trains a model with quantised weights (TrainEngineSpec.unsupported), and the way out."""
    if not (kind := quantisation(model)):
        return
    method = kind.get("quant_method")
    what = f"has no quantised weights (quantization_config of config.json: quant_method={method})"
    if method in CONVERTED:
        yield f"{what}; make bfloat16 of them: python -m hpcrl.convert --checkpoint FOLDER --output FOLDER{SUFFIX}"
    else:
        yield (
            f"{what}, and hpcrl.convert reads only {', '.join(CONVERTED)}; use the model with 16-bit weights from "
            "which it was made"
        )
