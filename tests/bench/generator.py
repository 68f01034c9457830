"""Native generator against transformers' generate, vLLM and SGLang on CPU.

One JSON line: generated tokens per CPU-second of one thread, and ratios, on 64 requests with long-tailed lengths
(Qwen2, 4 layers, hidden 256, vocabulary 512). Tokens that a padded batch generates past a request's length do not
count. The engines take turns at the same requests, `--repeats` times after one to warm up: the best rate of each, and
the median over the turns of the ratio within one.

    python -m tests.bench.generator [--repeats N]

vLLM (eager) and SGLang run in fp32 and in bf16, each in processes of its own; what is not installed is left out. SGLang
is there with the environment of make test-outside (.venv-outside/bin/python), with the attention that is plain torch
and without its kernels: on a CPU it says nothing of SGLang on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.hf_folder import read_safetensors
from tests.bench.machine import tell

NUM_REQUESTS, MAX_NEW, VOCAB = 64, 256, 512
SLOTS = (16, 64)


def make_model(path: Path) -> None:
    """Save a seeded random model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def make_requests() -> tuple[list[list[int]], list[int]]:
    """Prompts of 16 to 48 tokens and log-normal response lengths of 8 to 256 (mean about 70)."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size=size).tolist() for size in rng.integers(16, 49, size=NUM_REQUESTS)]
    lengths = np.clip(rng.lognormal(3.9, 0.9, size=NUM_REQUESTS), 8, MAX_NEW).astype(int)
    return prompts, lengths.tolist()


def native(
    path: Path, prompts: list[list[int]], lengths: list[int], slots: int, dtype: torch.dtype = torch.float32
) -> Callable[[], int]:
    """One run of the native engine; returns the number of tokens."""
    engine = NativeEngine(path, max_num_seqs=slots, max_length=512, dtype=dtype)
    weights = list(read_safetensors(path))
    requests = [
        Request(i, prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def run() -> int:
        engine.load_weights(weights, version=0)  # else it would know the prompts from the run before
        engine.add(requests)
        count = 0
        while engine.progress():
            count += sum(len(output.token_ids) for output in engine.step(16))
        return count

    return run


def generate(path: Path, prompts: list[list[int]], lengths: list[int]) -> Callable[[], int]:
    """One run of transformers.generate on the padded batch with its default (dynamic) cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(lengths), pad_token_id=0
            )
        assert out.shape[1] == longest + max(lengths)
        return sum(lengths)

    return run


@contextmanager
def engine(
    name: str, path: Path, prompts: list[list[int]], lengths: list[int], dtype: str
) -> Iterator[Callable[[], float]]:
    """One run of vLLM or SGLang in another process; returns its tokens per CPU-second."""
    job = json.dumps({"model": str(path), "prompts": prompts, "lengths": lengths, "dtype": dtype})
    command = [sys.executable, "-m", f"tests.bench.generators.run_{name}", job]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None

    def run() -> float:
        child.stdin.write("run\n")
        child.stdin.flush()
        for line in child.stdout:  # vLLM logs to stdout, too
            if line.startswith("RATE "):
                return float(line.split()[1])
        raise SystemExit(f"{name} exited with {child.wait()}")

    try:
        yield run
    finally:
        child.stdin.close()
        child.wait()


def timed(run: Callable[[], int]) -> Callable[[], float]:
    """The same run, returning tokens per CPU-second."""

    def rate() -> float:
        start = time.process_time()
        return run() / (time.process_time() - start)

    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts, lengths = make_requests()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        make_model(path)
        runs = {f"native_{slots}_slots": timed(native(path, prompts, lengths, slots)) for slots in SLOTS}
        runs["native_bf16"] = timed(native(path, prompts, lengths, SLOTS[-1], torch.bfloat16))
        others = {"transformers_generate": timed(generate(path, prompts, lengths))}
        for name in filter(find_spec, ("vllm", "sglang")):
            for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
                others[f"{name}_{short}"] = stack.enter_context(engine(name, path, prompts, lengths, dtype))
        turns = [{name: run() for name, run in (runs | others).items()} for _ in range(args.repeats + 1)][1:]
    best = {name: round(max(turn[name] for turn in turns)) for name in turns[0]}
    mine = f"native_{SLOTS[-1]}_slots"
    ratios = {f"ratio_vs_{name}": round(median(turn[mine] / turn[name] for turn in turns), 2) for name in others}
    tell({"bench": "generator", "unit": "tokens per CPU-second"} | best | ratios)


if __name__ == "__main__":
    main()
