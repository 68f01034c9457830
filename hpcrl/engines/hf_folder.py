"""What of a model's folder in Hugging Face layout goes along when its weights are written anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

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


def copy_beside_weights(origin: Path, folder: Path) -> None:
    """Copy the tokenizer and the generation config."""
    for file in sorted(origin.iterdir()):
        if file.is_file() and (file.name in TOKENIZER_FILES or file.name == "generation_config.json"):
            shutil.copyfile(file, folder / file.name)


def write_config(
    source: Path, folder: Path, dtype: torch.dtype, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write the config.json of the folder `source`, with these changes, for weights of this type."""
    content = json.loads((source / "config.json").read_text()) | changes
    content.pop("torch_dtype", None)  # the name that transformers gave it before version 5
    content["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
