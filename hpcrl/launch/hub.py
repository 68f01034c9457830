"""Finds a model by hub name, such as Qwen/Qwen2.5-7B, in the local Hugging Face cache. Downloads nothing: compute nodes
are offline, and a login node should not download hundreds of gigabytes without a request."""

from __future__ import annotations

import re
from pathlib import Path

from hpcrl.config.folders import conf_dir
from hpcrl.models.quantisation import SUFFIX

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
"""Files used from a model on the hub: configuration, tokenizer, and weights in one format."""
NOT_FILES = ["*/*"]
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


def find_model(path: str, plan_only: bool) -> str:
    """The folder of model.path: the path itself, or the cached snapshot of a hub name if the path does not exist.
    ValueError if a name is not in the cache. With `plan_only`, the config.json included in hpcrl is enough
    (conf/model/ORG/NAME)."""
    if Path(path).exists() or not NAME.fullmatch(path):
        return path
    from huggingface_hub import snapshot_download  # takes .2 s to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    known = conf_dir() / "model" / path
    try:
        return snapshot_download(path, local_files_only=True, allow_patterns=FILES, ignore_patterns=NOT_FILES)
    except (LocalEntryNotFoundError, HFValidationError):
        if plan_only and known.is_dir():
            return str(known)
    if known.is_dir() and path.endswith(SUFFIX):
        origin = path.removesuffix(SUFFIX)
        raise ValueError(
            f"model.path: no folder {path}, which is made of {origin}: python -m hpcrl.convert --checkpoint FOLDER "
            f"--output {path}, where FOLDER has {origin} (python -m hpcrl prefetch {origin} prints it)"
        )
    if (parent := Path(path).parent).is_dir():
        text = f"no folder {Path(path).name} in the folder {parent}, and no such name in the local Hugging Face cache"
        raise ValueError(f"model.path: {text}")
    raise ValueError(
        f"model.path: {path} is neither a folder nor in the local Hugging Face cache; "
        f"on a machine with network access, run: python -m hpcrl prefetch {path}"
    )
