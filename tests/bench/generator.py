"""Native generator against transformers' generate and vLLM on CPU.

One JSON line: generated tokens per CPU-second of one thread, and ratios, on 64 requests with long-tailed lengths
(Qwen2, 4 layers, hidden 256, vocabulary 512). Tokens that a padded batch generates past a request's length do not
count. Each engine runs the same requests `--repeats` times, taking turns; the best counts, after one to warm up.

    python -m tests.bench.generator [--vllm-python PATH] [--repeats N]

vLLM runs in .venv-vllm (tests/bench/vllm/setup.sh) unless told otherwise; without it, it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hpcrl.engines.gen.base import Request, SamplingParams
from hpcrl.engines.gen.native import NativeEngine

ROOT = Path(__file__).resolve().parents[2]
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
        max_position_embeddings=1024,
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


def native(path: Path, prompts: list[list[int]], lengths: list[int], slots: int) -> Callable[[], int]:
    """One run of the native engine; returns the number of tokens."""
    engine = NativeEngine(path, max_slots=slots, max_length=512, dtype=torch.float32)
    requests = [
        Request(i, prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def run() -> int:
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


def best_rates(runs: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Tokens per CPU-second of each, the best of `repeats` turns after a first one."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            tokens = run()
            rates[name].append(tokens / (time.process_time() - start))
    return {name: round(max(values[1:])) for name, values in rates.items()}


def vllm_rate(python: Path, path: Path, prompts: list[list[int]], lengths: list[int], repeats: int) -> float:
    """Tokens per CPU-second of vLLM (fp32, eager, in-process) in another interpreter."""
    job = {"model": str(path), "prompts": prompts, "lengths": lengths, "repeats": repeats}
    script = Path(__file__).parent / "vllm" / "run_vllm.py"
    done = subprocess.run(
        [str(python), str(script)], input=json.dumps(job), stdout=subprocess.PIPE, text=True, timeout=900, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"vllm"')]
    if not lines:
        raise SystemExit(f"vLLM under {python} exited with {done.returncode} and no result")
    return json.loads(lines[-1])["vllm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts, lengths = make_requests()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_model(path)
        runs = {f"native_{slots}_slots": native(path, prompts, lengths, slots) for slots in SLOTS}
        rates = best_rates(runs | {"transformers_generate": generate(path, prompts, lengths)}, args.repeats)
        if args.vllm_python.exists():
            rates["vllm_fp32_eager"] = vllm_rate(args.vllm_python, path, prompts, lengths, args.repeats)
    fastest = rates[f"native_{SLOTS[-1]}_slots"]
    ratios = {f"ratio_vs_{name}": round(fastest / rate, 2) for name, rate in rates.items() if "native" not in name}
    print(json.dumps({"bench": "generator", "unit": "tokens per CPU-second"} | rates | ratios))


if __name__ == "__main__":
    main()
