"""Memory and time of log-probs and their gradient from hidden states: in chunks, and of the whole vocabulary at once.

    python -m tests.bench.logits_memory [--tokens N] [--vocab N] [--hidden N] [--chunk N] [--dtype float32|bfloat16]

One JSON line per way: `chunks`, the most that the allocator held at once beyond what there was before, the gradient of
the projection's matrix and its copy left out, in fp32 tensors [chunk, vocab] (`whole`: [tokens, vocab]); `peak_gib`,
all of it; `seconds`, the best of three of forward and backward.
`hpcrl`: hpcrl.engines.train.fsdp2.logits, without entropy, with entropy for the log, with entropy in the loss. `dense`:
log_softmax of all logits in fp32, as in the forward of transformers with a loss of one's own. `trl`:
selective_log_softmax of TRL over such logits, where TRL is installed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.engines.train.fsdp2.logits import Head, token_logprobs
from tests.planner.measuring import peak_bytes


def ways(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> dict[str, Callable[[], Tensor]]:
    """Name -> the loss of each way to compute it."""

    def hpcrl(asked: str) -> Tensor:
        logprobs, entropy = token_logprobs(
            hidden, weight, None, targets, head=Head(), temperature=1.0, chunk_tokens=chunk, entropy=asked != "no"
        )
        return logprobs.sum() + entropy.sum() if asked == "loss" and entropy is not None else logprobs.sum()

    def logits() -> Tensor:
        return torch.nn.functional.linear(hidden, weight).float()

    found: dict[str, Callable[[], Tensor]] = {
        "hpcrl": lambda: hpcrl("no"),
        "hpcrl, entropy logged": lambda: hpcrl("log"),
        "hpcrl, entropy in the loss": lambda: hpcrl("loss"),
        "dense": lambda: logits().log_softmax(-1).gather(1, targets[:, None]).sum(),
    }
    try:
        from trl.trainer.utils import selective_log_softmax
    except ImportError:
        return found
    return found | {"trl": lambda: selective_log_softmax(logits()[None], targets[None]).sum()}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 1024), ("vocab", 151936), ("hidden", 64), ("chunk", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(args.vocab, args.hidden, generator=generator).mul_(0.05).to(dtype).requires_grad_()
    targets = torch.randint(args.vocab, (args.tokens,), generator=generator)
    matrix = args.vocab * args.hidden * (4 + dtype.itemsize)
    for name, loss in ways(hidden, weight, targets, args.chunk).items():
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            loss().backward()
            seconds.append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            peak = peak_bytes(lambda loss=loss: loss().backward(), Path(folder) / "trace.json")
        rows = args.chunk if name.startswith("hpcrl") else args.tokens
        result = {
            "bench": "logits_memory", "way": name, "dtype": args.dtype, "tokens": args.tokens, "rows": rows,
            "vocab": args.vocab, "chunks": round((peak - matrix) / (rows * args.vocab * 4), 2),
            "peak_gib": round(peak / 2**30, 2), "seconds": round(min(seconds), 2), "threads": torch.get_num_threads(),
        }  # fmt: skip
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
