"""Model folders in Hugging Face layout: save a transformers model, and write the files that new weights need, with the
multi-token prediction layers of the folder that was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hpcrl.data.dialogue_tokens import padding_token
from hpcrl.models.mtp import MTP, mtp_names, with_mtp_keys

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5 << 30
"""Maximum size of a weight file, or one tensor."""
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


def padding_id(folder: Path, vocab_size: int) -> int:
    """The pad_token_id of a reward model that is exported with this folder's tokenizer (hpcrl.data.dialogue_tokens).
    ValueError if the model has no such token."""
    from transformers import AutoTokenizer

    found = padding_token(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    if found >= vocab_size:
        raise ValueError(
            f"model.path {folder}: the tokenizer's padding token has the id {found}, and vocab_size in config.json is "
            f"{vocab_size}, so transformers cannot load a reward model with it; set pad_token in tokenizer_config.json "
            "to a token of the vocabulary"
        )
    return found


def write_config(
    source: Path, folder: Path, dtype: torch.dtype, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write `source`'s config.json, with these changes, for weights of this type."""
    content = json.loads((source / "config.json").read_text()) | changes
    content.pop("torch_dtype", None)  # the name that transformers used before version 5
    content["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def add_mtp(source: Path, folder: Path, mtp: MTP | Mapping[str, Tensor]) -> None:
    """Add tensors of multi-token prediction layers to the weights of `folder`: the source's, unchanged, or the given
    ones. Set the layers' number in its config.json: the source's, or 0 with `drop` and for a source without such
    tensors."""
    origin = json.loads((source / "config.json").read_text())
    kept = mtp if isinstance(mtp, Mapping) else mtp_files(source) if mtp == "keep" else {}
    config = folder / "config.json"
    content = with_mtp_keys(json.loads(config.read_text()), origin, kept=bool(kept))
    config.write_text(json.dumps(content, indent=2) + "\n")
    if isinstance(mtp, Mapping):
        _add_files(mtp.items(), folder)
    elif kept:
        _add_files(read_mtp(source), folder)


def mtp_files(source: Path) -> dict[str, str]:
    """Tensor -> file of the multi-token prediction layers in a model's folder."""
    files = tensor_files(source)
    return {name: files[name] for name in mtp_names(json.loads((source / "config.json").read_text()), files)}


def read_mtp(source: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of mtp_files(), one at a time in memory."""
    from safetensors import safe_open

    files = mtp_files(source)
    for file in dict.fromkeys(files.values()):
        with safe_open(source / file, framework="pt") as tensors:
            for name in (name for name, of in files.items() if of == file):
                yield name, tensors.get_tensor(name)


def _add_files(added: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors to further weight files of a folder, at most FILE_BYTES at a time in memory."""
    from safetensors.torch import save_file

    index = _index_of(folder)
    current: dict[str, Tensor] = {}
    count = 0

    def write() -> None:
        nonlocal count
        name = f"model-mtp-{(count := count + 1):05}.safetensors"
        save_file(current, folder / name, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(current, name)
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in current.values())
        current.clear()

    for name, tensor in added:
        if current and tensor.nbytes + sum(other.nbytes for other in current.values()) > FILE_BYTES:
            write()
        current[name] = tensor
    write()
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor -> safetensors file of a folder; empty for other formats."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return found
    files: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file.name)
    return files


def _index_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's index. A single weight file gets a name that readers of an index prefer."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        found: dict[str, Any] = json.loads((folder / INDEX).read_text())
        return found
    name = "model-00001-of-00001.safetensors"
    size = (file := folder / SINGLE).stat().st_size
    file.rename(folder / name)
    with safe_open(folder / name, framework="pt") as tensors:
        return {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(tensors.keys(), name)}
