"""How fast a conversion is against a plain copy, and the memory it takes.

    python -m tests.bench.convert [--layers N] [--hidden N] [--rounds N]

A model in HF layout (bf16, random) goes to Megatron's torch_dist and back, each in a process of its own, in turns with
a copy of the same files that is synced to the disk, as a conversion's are; neither reads from the page cache. One JSON
line, medians: `to_hf_mb_s`, `to_megatron_mb_s`, `copy_mb_s`; `to_hf_of_copy` and `to_megatron_of_copy`;
`peak_bytes` of the conversion to HF, of which `idle_bytes` is a process that has imported what a conversion imports;
`largest_tensor_bytes`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from hpcrl.engines.train.megatron.names import table
from tests.bench.machine import tell

PROGRAM = """
import sys, time
from hpcrl.convert.__main__ import main
import hpcrl.convert.conversions
import torch
from hpcrl.engines.train.dcp import frame
frame((1,), torch.float32)  # torch imports a second's worth more at the first one
start = time.perf_counter()
code = main(sys.argv[1:]) if len(sys.argv) > 1 else 0
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.perf_counter() - start, int(peak) * 1024, file=sys.stderr)
sys.exit(code)
"""


def make_model(folder: Path, layers: int, hidden: int) -> int:
    """Writes the model; returns the bytes of its largest tensor."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    shapes = table(config).shapes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.randint(-128, 128, (*shape, 2), dtype=torch.int8).view(torch.bfloat16).squeeze(-1)
               for name, shape in shapes.items()}  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    return max(tensor.nbytes for tensor in tensors.values())


def forget(folder: Path) -> int:
    """Drops the files from the page cache; returns their bytes."""
    size = 0
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size
    return size


def copy(source: Path, target: Path) -> float:
    forget(source)
    start = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def convert(*words: object) -> tuple[float, int]:
    """Seconds after all imports, and the most bytes of memory; without words, of the imports alone."""
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak = done.stderr.split()[-2:]
    return float(seconds), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    found: dict[str, list[float]] = {"to_hf": [], "to_megatron": [], "copy": []}
    peaks = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        largest = make_model(folder / "model", words.layers, words.hidden)
        _, idle = convert()
        for number in range(words.rounds):
            size = forget(folder / "model")
            dist, hf = folder / f"dist{number}", folder / f"hf{number}"
            seconds, _ = convert("--to", "megatron", "--checkpoint", folder / "model", "--output", dist)
            found["to_megatron"].append(size / 1e6 / seconds)
            found["copy"].append(size / 1e6 / copy(folder / "model", folder / f"copy{number}"))
            forget(dist)
            seconds, peak = convert("--checkpoint", dist, "--output", hf)
            found["to_hf"].append(size / 1e6 / seconds)
            peaks.append(peak)
            for made in (dist, hf, folder / f"copy{number}"):
                shutil.rmtree(made)
    rates = {name: median(values) for name, values in found.items()}
    tell(
        {
            "bench": "convert",
            "model_bytes": size,
            "rounds": words.rounds,
            **{f"{name}_mb_s": round(rate) for name, rate in rates.items()},
            **{f"{name}_of_copy": round(rates[name] / rates["copy"], 2) for name in ("to_hf", "to_megatron")},
            "peak_bytes": max(peaks),
            "idle_bytes": idle,
            "largest_tensor_bytes": largest,
        }
    )


if __name__ == "__main__":
    main()
