"""Whether hpcrl works on this machine's GPUs, and how far from their limits: one table, and one line of JSON.

    make gpu-check
    python -m tests.bench.gpu [--only PART ...] [--json FILE] [--seconds N]
    python -m tests.bench.gpu --device cpu --tiny     # the same code at sizes for a CPU: no figure means anything

Each part runs in a process of its own with a time limit: an error, a crash or a hang is a line of the table, and
what the part wrote to stderr, with the stacks of one that hangs, follows on stderr. Parts that need two GPUs, vLLM,
DeepSpeed or Megatron-Core say so where these are missing. The code is 1 if a part failed or a verdict is bad.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.bench.gpu.common import Check, Row, end_after, no_gpu, rows_in
from tests.bench.gpu.ending import STACKS, end_all
from tests.bench.machine import tell


@dataclasses.dataclass(frozen=True)
class Part:
    """entry: module:function of a Check, which yields rows. cold_s: added to limit_s, for what is compiled where no
    earlier run has left it. num_gpus: needed at least. module: needed too; gpu_module: needed on a GPU."""

    entry: str
    limit_s: float
    cold_s: float = 0.0
    num_gpus: int = 1
    module: str = ""
    gpu_module: str = ""


HERE = "tests.bench.gpu"
COLD_S = 180.0
"""vLLM compiles the model, and other packages kernels. A guess: not measured on a GPU."""
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")
"""How the last line of a traceback begins."""
PARTS = {
    "device": Part(f"{HERE}.device:measure", 20),
    "attention": Part(f"{HERE}.attention:measure", 30),
    "agreement native": Part(f"{HERE}.agreement:native", 35),
    "training": Part(f"{HERE}.training:measure", 55),
    "fsdp2 and vllm": Part(f"{HERE}.agreement:vllm", 90, COLD_S, module="vllm"),
    "decode vllm": Part(f"{HERE}.decoding:vllm", 120, COLD_S, module="vllm"),
    "vllm TP2": Part(f"{HERE}.replica:vllm", 120, COLD_S, num_gpus=2, module="vllm"),
    "decode native": Part(f"{HERE}.decoding:native", 40),
    "two ranks": Part(f"{HERE}.peers:update", 60, num_gpus=2),
    "lost peer": Part(f"{HERE}.peers:lost_peer", 120, num_gpus=2),
    "training deepspeed": Part(f"{HERE}.training:deepspeed", 40, COLD_S, module="deepspeed"),
    "training megatron": Part(
        f"{HERE}.training:megatron", 40, COLD_S, module="megatron", gpu_module="transformer_engine"
    ),
}
"""In this order: what most runs do comes first, should time run out."""
FAILURES = ("bad", "failed")
NO_END = "no end after"


def run_part(entry: str, check: Check) -> NoReturn:
    """In the part's process: print its rows as they come."""
    from hpcrl.workers.allocator import grow_segments

    module, function = entry.split(":")
    grow_segments(os.environ)  # as in a rank

    def work() -> None:
        for row in getattr(importlib.import_module(module), function)(check):
            row.say()

    end_after(work)


def rows_of(name: str, part: Part, check: Check, limit_s: float, num_gpus: int) -> Iterator[Row]:
    """The rows of a part that runs in another process, and how it failed."""
    for module in (part.module, part.gpu_module if check.on_gpu else ""):
        if module and importlib.util.find_spec(module) is None:
            yield Row(name, verdict="not installed", note=module)
            return
    if check.on_gpu and num_gpus < part.num_gpus:
        yield Row(name, verdict="not run", note=f"needs {part.num_gpus} GPUs, {num_gpus} found")
        return
    if limit_s <= 0:
        yield Row(name, verdict="not run", note="no time left (--seconds)")
        return
    limit_s = min(part.limit_s + part.cold_s, limit_s)
    words = [sys.executable, "-m", HERE, "--device", check.device, *(["--tiny"] if check.tiny else [])]
    words += ["--part", part.entry, "--facts", json.dumps(dict(check.facts)), "--scratch", str(check.scratch)]
    with tempfile.TemporaryFile("w+") as errors:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        child = subprocess.Popen(words, **pipes, env={**os.environ, **STACKS}, start_new_session=True)
        why = ""
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            why = f"{NO_END} {limit_s:.0f} s"
        finally:
            end_all(child)
        if why:
            out, _ = child.communicate()
        elif child.returncode < 0:
            why = f"ended by {signal.Signals(-child.returncode).name}"
        errors.seek(0)
        said = errors.read()
    lines = [line for line in said.splitlines() if line.strip()]
    last = ([line for line in lines if ERROR.match(line)] or lines or [""])[-1]  # Python warns after an error, at exit
    yield from rows_in(out)
    if why or child.returncode:
        print(said, file=sys.stderr, flush=True)
        yield Row(name, verdict="failed", note=why or last[:200] or f"code {child.returncode}")


def table(rows: Sequence[Row]) -> str:
    """Columns of equal width: part, what, value, limit, share of it, verdict, note."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    lines = [("part", "what", "value", "", "limit", "share", "verdict", "note")]
    lines += [
        (r.part, r.what, number(r.value), r.unit, number(r.limit), number(r.share), r.verdict, r.note) for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, help="also write the line of JSON to this file")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole check, at most")
    for hidden in ("--part", "--facts", "--scratch"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    if words.part:
        run_part(words.part, Check(words.device, words.tiny, Path(words.scratch), json.loads(words.facts)))
    import torch

    if words.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: {no_gpu()}; --device cpu --tiny tries the same code on the CPU")
        return 2
    if words.device == "cpu" and not words.tiny:
        parser.error("--device cpu needs --tiny: the full sizes are for a GPU")
    if words.json is not None:
        try:
            words.json.parent.mkdir(parents=True, exist_ok=True)
            words.json.touch()
        except OSError as error:
            parser.error(f"--json: {error}; name another file")
    num_gpus = torch.cuda.device_count()
    started, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="hpcrl-gpu-") as scratch:
        check = Check(words.device, words.tiny, Path(scratch))
        for name in dict.fromkeys(("device", *words.only)):  # which gives the others their limits
            new = list(rows_of(name, PARTS[name], check, words.seconds - (time.monotonic() - started), num_gpus))
            rows += new
            facts = {row.what: row.value for row in new if row.part == "device" and row.value is not None}
            check = dataclasses.replace(check, facts={**check.facts, **facts})
            print(f"{time.monotonic() - started:4.0f} s  {name}: {len(new)} rows", file=sys.stderr, flush=True)
    print(table(rows))
    report = {"bench": "gpu", "device": words.device, "num_gpus": num_gpus, "tiny": words.tiny}
    report["rows"] = [dataclasses.asdict(row) for row in rows]
    tell(report)
    if words.json is not None:
        words.json.write_text(json.dumps(report) + "\n")
    return int(any(row.verdict in FAILURES for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
