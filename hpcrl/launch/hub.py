"""A model by its name on the hub, such as Qwen/Qwen2.5-7B: found in the local Hugging Face cache, never fetched.

Compute nodes are offline, and a login node should not start to download hundreds of gigabytes unasked.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcrl.config.compose import conf_dir

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
"""What is taken from a model on the hub: configuration, weights and tokenizer, not the same weights once more."""
NOT_FILES = ["*/*"]
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


def find_model(path: str, plan_only: bool) -> str:
    """The folder that model.path means: itself, or the cached snapshot of a hub name where no such folder is.

    plan_only: the config.json that comes with hpcrl is enough (conf/model/ORG/NAME). ValueError where a name is not in
    the cache.
    """
    if Path(path).exists() or not NAME.fullmatch(path):
        return path
    from huggingface_hub import snapshot_download  # takes .2 s to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, local_files_only=True, allow_patterns=FILES, ignore_patterns=NOT_FILES)
    except (LocalEntryNotFoundError, HFValidationError):
        known = conf_dir() / "model" / path
        if plan_only and known.is_dir():
            return str(known)
    raise ValueError(
        f"model.path: {path} is no folder and not in the local Hugging Face cache; "
        f"where the network is, run: python -m hpcrl.prefetch {path}"
    )
