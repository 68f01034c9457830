"""Memory and time of the divergence from a teacher and its gradient: in chunks, and with all logits at once; and bytes
a token that a teacher sends to its student.

    python -m tests.bench.divergence_memory [--tokens N] [--vocab N] [--hidden N] [--teacher-hidden N] [--chunk N]
        [--top-k N] [--beta X] [--dtype float32|bfloat16]

One JSON line per way: `peak_gib`, the most that the allocator held at once beyond what there was before, gradients
included; `chunks`, without the gradient of the student's matrix and its copy, in fp32 tensors [chunk, vocab] (`whole`:
[tokens, vocab]); `seconds`, the best of two of forward and backward. `hpcrl, top-k` and `hpcrl, full`:
hpcrl.engines.train.fsdp2.token_divergence. `naive`: softmaxes of all logits of both models in fp32, as with
transformers. `trl`: GKDTrainer.generalized_jsd_loss over these logits, where TRL is installed (.venv-trl:
tests/bench/trl/setup.sh). A last line has the bytes a token on the wire.
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

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.fsdp2.taught import TaughtStates, TaughtTopK
from hpcrl.engines.train.fsdp2.teacher_top_k import teacher_top_k
from hpcrl.engines.train.fsdp2.token_divergence import token_divergence
from hpcrl.spec.divergence import Divergence, DivergenceForm
from tests.planner.measuring import peak_bytes


def bytes_per_token(form: DivergenceForm, top_k: int, width: int) -> int:
    """What a teacher sends about a token: a log-prob; ids and log-probs; or a state in fp32."""
    return {"sampled": 4, "top_k": 8 * top_k, "full": 4 * width}[form]


def ways(
    args: argparse.Namespace, hidden: Tensor, weight: Tensor, states: Tensor, matrix: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Name -> the summed divergence of each way to compute it."""
    told = teacher_top_k(states, matrix, None, args.top_k, head=Head(), temperature=1.0, chunk_tokens=args.chunk)
    top_k = TaughtTopK(Divergence("top_k", args.beta, args.top_k, 1.0), told[0].long(), told[1])
    full = TaughtStates(Divergence("full", args.beta, 0, 1.0), states, TeacherHead(matrix))

    def chunked(taught: TaughtTopK | TaughtStates) -> Tensor:
        return token_divergence(hidden, weight, None, taught, head=Head(), chunk_tokens=args.chunk).sum()

    def logits() -> tuple[Tensor, Tensor]:
        return torch.nn.functional.linear(hidden, weight).float(), torch.nn.functional.linear(states, matrix).float()

    def naive() -> Tensor:
        log_q, log_p = (some.log_softmax(-1) for some in logits())
        weights = torch.tensor([1 - args.beta, args.beta]).log()
        log_m = torch.logsumexp(torch.stack([log_q + weights[0], log_p + weights[1]]), 0)
        of_teacher, of_student = (log.exp() * (log - log_m) for log in (log_p, log_q))
        return (args.beta * of_teacher + (1 - args.beta) * of_student).sum()

    found = {"hpcrl, top-k": lambda: chunked(top_k), "hpcrl, full": lambda: chunked(full), "naive": naive}
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        return found
    return found | {"trl": lambda: GKDTrainer.generalized_jsd_loss(*logits(), beta=args.beta, reduction="sum")}


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"tokens": 1024, "vocab": 151936, "hidden": 64, "teacher-hidden": 128, "chunk": 512, "top-k": 64}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--beta", type=float, default=0.5, help="between 0 and 1")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    dtype, generator = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    hidden, weight = (
        (torch.randn(rows, args.hidden, generator=generator) * scale).to(dtype).requires_grad_()
        for rows, scale in ((args.tokens, 1.0), (args.vocab, 0.05))
    )
    states, matrix = (
        (torch.randn(rows, args.teacher_hidden, generator=generator) * scale).to(dtype)
        for rows, scale in ((args.tokens, 1.0), (args.vocab, 0.05))
    )
    gradient = args.vocab * args.hidden * (4 + dtype.itemsize)
    for name, loss in ways(args, hidden, weight, states, matrix).items():
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            value = loss()
            value.backward()
            seconds.append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            peak = peak_bytes(lambda loss=loss: loss().backward(), Path(folder) / "trace.json")
        rows = args.chunk if name.startswith("hpcrl") else args.tokens
        result = {
            "bench": "divergence_memory", "way": name, "dtype": args.dtype, "tokens": args.tokens, "rows": rows,
            "vocab": args.vocab, "beta": args.beta, "value": round(value.item() / args.tokens, 5),
            "chunks": round((peak - gradient) / (rows * args.vocab * 4), 2), "peak_gib": round(peak / 2**30, 2),
            "seconds": round(min(seconds), 2), "threads": torch.get_num_threads(),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    forms: tuple[DivergenceForm, ...] = ("sampled", "top_k", "full")
    sent = {form: bytes_per_token(form, args.top_k, args.teacher_hidden) for form in forms}
    about = {"top_k": args.top_k, "teacher_hidden": args.teacher_hidden, "dtype": args.dtype, "vocab": args.vocab}
    naive = 4 * args.vocab
    print(json.dumps({"bench": "divergence_memory", "bytes_per_token": sent | {"all logits": naive}, **about}))


if __name__ == "__main__":
    main()
