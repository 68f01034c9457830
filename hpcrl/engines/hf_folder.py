"""Model folders in Hugging Face layout: save a transformers model, and write the files that new weights need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def save_model(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """model.save_pretrained() without its search for wrapped models, for which accelerate would import DeepSpeed if it
    is installed."""
    with mock.patch("transformers.modeling_utils.unwrap_model", lambda model: model):
        model.save_pretrained(folder, **options)


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors from all *.safetensors files of an HF folder, with one tensor in memory at a time. ValueError
    if there is no such file."""
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model folder {path} has no *.safetensors weights")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (the handle is not a mapping)
                yield name, tensors.get_tensor(name)


def copy_beside_weights(origin: Path, folder: Path) -> None:
    """Copy the tokenizer, the processor and the generation config."""
    for file in sorted(origin.iterdir()):
        if file.is_file() and file.name in (*TOKENIZER_FILES, *PROCESSOR_FILES, "generation_config.json"):
            shutil.copyfile(file, folder / file.name)


def write_config(
    source: Path, folder: Path, dtype: torch.dtype, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write `source`'s config.json, with these changes, for weights of this type."""
    content = json.loads((source / "config.json").read_text()) | changes
    content.pop("torch_dtype", None)  # the name that transformers used before version 5
    content["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
