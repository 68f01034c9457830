"""The tensors of a model folder with quantised weights, as bfloat16: 8-bit floats with scales per block, row or tensor
(DeepSeek-V3, MiniMax-M2, Qwen3-FP8), and 4-bit floats with a scale per 32 numbers (MXFP4: gpt-oss)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.convert.weight_files import WeightFiles
from hpcrl.models.quantisation import CONVERTED, quantisation

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
QUANTISED = {**FLOAT8, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
"""Additional safetensors dtypes of such folders."""
SCALES = ("_scale_inv", "_scale")
"""What follows the name of a matrix of 8-bit floats in the name of its scales, which multiply it."""
UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")
"""Last parts of the names of scales that are not the weights'."""
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a 4-bit float (2 bits of exponent, 1 of mantissa); the highest bit of 4 is the sign."""
EXPONENT_BIAS = 127
PER_BYTE = 2


class _Scaled(NamedTuple):
    """A tensor of 8-bit floats, and its scales: one per block of this size."""

    values: str
    scales: str
    block: tuple[int, ...]


class _Packed(NamedTuple):
    """Experts' matrices of 4-bit floats: [experts, rows, groups, 16] bytes, and an exponent per group."""

    blocks: str
    scales: str


class QuantisedWeights:
    """HF tensors from a folder with quantised weights (TensorSource). Matrices of 4-bit floats are stored transposed,
    [experts, in, out], as transformers reads gpt-oss. ValueError if the kind of quantisation is not known, or scales
    are missing or have wrong shapes."""

    values = False

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        kind = quantisation(config)
        self._block = tuple(kind.get("weight_block_size") or ())
        method = kind.get("quant_method")
        if method not in CONVERTED:
            raise ValueError(
                f"{folder}/config.json: quant_method={method!r}; only {', '.join(CONVERTED)} are converted"
            )
        self._files = WeightFiles(folder, QUANTISED)
        self._of: dict[str, _Scaled | _Packed] = dict(self._quantised())
        used = {name for found in self._of.values() for name in found[:2]}
        plain = [name for name in self._files.tensors if name not in used and not name.endswith(UNUSED)]
        if alone := [name for name in plain if name.endswith(SCALES)]:
            raise ValueError(f"{folder}: {alone[0]} are scales of a tensor that does not have 8-bit floats")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name in sorted([*plain, *self._of]):
            if name in self._of:
                self.shapes[name], self.dtypes[name] = self._shape(name), torch.bfloat16
                continue
            place = self._files.tensors[name]
            if place.dtype in QUANTISED.values():
                raise ValueError(f"{folder / place.file}: {name} is {place.dtype}, and no scales belong to it")
            self.shapes[name], self.dtypes[name] = place.shape, place.dtype

    def _quantised(self) -> Iterator[tuple[str, _Scaled | _Packed]]:
        tensors = self._files.tensors
        for name, place in tensors.items():
            if place.dtype in FLOAT8.values():
                scales = next((name + end for end in SCALES if name + end in tensors), None)
                if scales is not None:
                    yield name, _Scaled(name, scales, self._block_of(name, place.shape, tensors[scales].shape))
            elif name.endswith("_blocks") and (stem := name.removesuffix("_blocks")) + "_scales" in tensors:
                if len(place.shape) != 4 or tensors[stem + "_scales"].shape != place.shape[:3]:
                    raise ValueError(
                        f"{self._files.folder}: {name} has shape {list(place.shape)}, and its scales differ"
                    )
                yield stem, _Packed(name, stem + "_scales")

    def _block_of(self, name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers per scale in each dimension."""
        known = (1,) * (len(shape) - len(self._block)) + self._block
        grid = grid if len(grid) == len(shape) else (*grid, *(1,) * (len(shape) - len(grid)))
        found = []
        for size, count, block in zip(shape, grid, known if len(known) == len(shape) else shape, strict=False):
            if count == -(-size // block):
                found.append(block)
            elif count in (1, size):
                found.append(size // count)
        if len(found) != len(shape) or len(grid) != len(shape):
            raise ValueError(
                f"{self._files.folder}: the scales of {name} {list(shape)} have shape {list(grid)}, "
                f"which fits neither weight_block_size={list(self._block)} nor rows"
            )
        return tuple(found)

    def _shape(self, name: str) -> tuple[int, ...]:
        found = self._of[name]
        shape = self._files.tensors[found[0]].shape
        if isinstance(found, _Scaled):
            return shape
        experts, rows, groups, size = shape
        return experts, groups * size * PER_BYTE, rows

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows of an HF tensor."""
        found = self._of.get(name)
        if found is None:
            return self._files.read(name, first, last)
        values = self._files.read(found[0], first, last)
        if isinstance(found, _Packed):
            return _unpacked(values, self._files.read(found.scales, first, last))
        start = first // found.block[0]
        scales = self._files.read(found.scales, start, -(-last // found.block[0]))
        scales = scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales.float()
        scales = scales.reshape(*scales.shape, *(1,) * (values.dim() - scales.dim()))
        for dim, (block, size) in enumerate(zip(found.block, values.shape, strict=True)):
            begin = first if dim == 0 else 0
            scales = scales.index_select(dim, torch.arange(begin, begin + size) // block - (start if dim == 0 else 0))
        return (values.float() * scales).to(torch.bfloat16)

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """Does nothing: safetensors files have no checksums."""

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with plain weights."""
    found = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return found


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, in, out] in bfloat16. A byte has two numbers, the first in its lower half."""
    table = torch.tensor([*FLOAT4, *(-value for value in FLOAT4)], dtype=torch.bfloat16)
    numbers = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    scaled = torch.ldexp(numbers.flatten(3), scales.int()[..., None] - EXPONENT_BIAS)
    experts, rows = blocks.shape[:2]
    return scaled.to(torch.bfloat16).view(experts, rows, math.prod(scaled.shape[2:])).transpose(1, 2).contiguous()
