"""A Megatron model as a folder in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.engines.hf_folder import FILE_BYTES, INDEX, SINGLE, add_mtp, copy_beside_weights, write_config
from hpcrl.engines.train.megatron.adapted_layers import MegatronAdapters
from hpcrl.engines.train.megatron.weights import HFWeights
from hpcrl.models.mtp import MTP
from hpcrl.system.files import new_folder


def export(
    weights: HFWeights,
    origin: Path,
    folder: Path,
    dtype: torch.dtype,
    mtp: MTP,
    config: Mapping[str, Any] = MappingProxyType({}),
    adapters: MegatronAdapters | None = None,
) -> None:
    """Write weights, index, and config, tokenizer and generation config of the folder `origin`, with its multi-token
    prediction layers according to `mtp`. `config` has keys that differ from origin's config.json. Adapters are merged,
    and also written to the subfolder `adapter` for peft. The folder is written completely or left unchanged.
    Collective; rank 0 writes."""
    added = dict(adapters.weights.to_files()) if adapters is not None else {}
    named = weights.to_files()
    if dist.get_rank() == 0:
        with new_folder(folder) as partial:
            if adapters is not None:
                adapters.layout.write(_on_host(added), adapters.hf, origin, partial / "adapter")
                named = adapters.merged(named, added)
            _write_tensors(named, partial)
            write_config(origin, partial, dtype, config)
            add_mtp(origin, partial, mtp)
            copy_beside_weights(origin, partial)
    else:
        for _ in named:
            pass
    dist.barrier()


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _write_tensors(named: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write files with at most FILE_BYTES or with one tensor, and an index if there are several files."""
    file_of: dict[str, int] = {}
    current: dict[str, Tensor] = {}
    total = size = count = 0
    for name, tensor in named:
        if current and size + tensor.nbytes > FILE_BYTES:
            save_file(current, folder / f"{count}.part", metadata={"format": "pt"})
            count, current, size = count + 1, {}, 0
        current[name] = tensor.to("cpu", copy=True).contiguous()
        file_of[name], size, total = count, size + tensor.nbytes, total + tensor.nbytes
    save_file(current, folder / f"{count}.part", metadata={"format": "pt"})
    if count == 0:
        (folder / "0.part").rename(folder / SINGLE)
        return
    names = [f"model-{number + 1:05}-of-{count + 1:05}.safetensors" for number in range(count + 1)]
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[file_of[name]] for name in sorted(file_of)}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
