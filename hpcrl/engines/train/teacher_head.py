"""The output head of a teacher's folder, with which a student's trainer makes logits of the teacher's final states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.engines.hf_folder import tensor_files
from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.fsdp2.model import empty_model
from hpcrl.engines.train.fsdp2.model_kind import CAUSAL, SEEING
from hpcrl.models.families import vision_of


def read_teacher_head(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> TeacherHead:
    """The output head, or the embedding to which it is tied, in this dtype. Reads only these tensors. Needs no other
    rank. ValueError if the folder has no model, or its *.safetensors files lack the head."""
    path = Path(folder)
    try:
        hf = empty_model(path, dtype, CAUSAL if vision_of(path) is None else SEEING)
    except ValueError as error:
        raise ValueError(f"teacher: {error}") from error
    head: Any = hf.get_output_embeddings()
    if head is None:
        raise ValueError(f"teacher: {path}: {hf.config.model_type} has no output head; take another model")
    try:
        files = tensor_files(path)
        weight, bias = (
            None if wanted is None else _read(path, files, hf, wanted).to(device, dtype)
            for wanted in (head.weight, head.bias)
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"teacher: {path}: the output head cannot be read: {error}") from error
    assert weight is not None
    facts = Head.from_config(hf.config.get_text_config())
    return TeacherHead(weight, bias, facts.softcap, facts.scale)


def _read(path: Path, files: Mapping[str, str], hf: PreTrainedModel, wanted: Tensor) -> Tensor:
    """The tensor in files of a parameter of the model. ValueError if it is in none, or has another shape."""
    names = [name for name, own in hf.named_parameters(remove_duplicate=False) if own is wanted]
    found = next(_in_files(names, files), None)
    if found is None:
        raise ValueError(f"no file has {' or '.join(names)}; the teacher's folder needs them as *.safetensors")
    with safe_open(path / files[found], framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(found)
    if tensor.shape != wanted.shape:
        raise ValueError(f"{found} has shape {[*tensor.shape]}, config.json asks for {[*wanted.shape]}")
    return tensor


def _in_files(names: list[str], files: Mapping[str, str]) -> Iterator[str]:
    """Names in files of a parameter with these names: the same, or else with other modules before the last one, as
    older folders of vision-language models have."""
    yield from (name for name in names if name in files)
    ends = tuple(".".join(name.split(".")[-2:]) for name in names)
    yield from (name for name in files if name.endswith(ends))
