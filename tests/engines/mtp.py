"""Multi-token prediction layers in model folders, as published models have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
OWN_NAMES = {
    "qwen3_next": "mtp.layers.0.",
    "qwen3_5_text": "mtp.layers.0.",
    "mimo": "model.mtp_layers.0.",
    "ernie4_5_moe": "model.mtp_block.0.",
}
"""Beginnings of names, of families whose MTP layers do not continue the numbers of the others."""


def add_mtp_layers(folder: Path, key: str | None = "num_nextn_predict_layers") -> set[str]:
    """Add a random MTP layer, in bfloat16, to the files of a model; returns its tensors' names. Not all of its tensors
    are like another layer's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    begin = OWN_NAMES.get(config["model_type"], f"model.layers.{config['num_hidden_layers']}.")
    path.write_text(json.dumps(config | ({key: 1} if key else {})))
    size = config["hidden_size"]
    random = torch.Generator().manual_seed(1)
    shapes = {
        "enorm.weight": (size,),
        "hnorm.weight": (size,),
        "eh_proj.weight": (size, 2 * size),
        "input_layernorm.weight": (size,),
        "self_attn.o_proj.weight": (size, size),
        "shared_head.norm.weight": (size,),
    }
    added = {f"{begin}{name}": torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    save_file(load_file(folder / FILE) | added, folder / FILE, metadata={"format": "pt"})
    return set(added)
