"""A Megatron model as a folder in Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.engines.train.fsdp2.model import TOKENIZER_FILES
from hpcrl.engines.train.megatron.weights import INDEX, SINGLE, HFWeights
from hpcrl.files import new_folder

FILE_BYTES = 5 << 30


def export(weights: HFWeights, origin: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights with config and index, and the tokenizer and generation config of the folder `origin`. The
    folder is written completely or left unchanged. Collective; rank 0 writes."""
    named = weights.to_files()
    if dist.get_rank() == 0:
        with new_folder(folder) as partial:
            _write_tensors(named, partial)
            content: dict[str, Any] = json.loads((origin / "config.json").read_text())
            content.pop("torch_dtype", None)  # the name that transformers gave it before version 5
            content["dtype"] = str(dtype).removeprefix("torch.")
            (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            for file in sorted(origin.iterdir()):
                if file.is_file() and (file.name in TOKENIZER_FILES or file.name == "generation_config.json"):
                    shutil.copyfile(file, partial / file.name)
    else:
        for _ in named:
            pass
    dist.barrier()


def _write_tensors(named: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Files of at most FILE_BYTES, or one tensor, with an index if there are several."""
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
