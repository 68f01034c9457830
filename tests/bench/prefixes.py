"""Shared prefixes in the native generator: groups of 8 and 64 on prompts of 1,000 tokens, episodes of 8 turns, and long
queues of single prompts. Prints one JSON line.

    python -m tests.bench.prefixes [--repeats 3] [--only groups_of_8 ...] [--vllm]

The model is that of tests/bench/generator.py; one thread, 64 slots, log-normal response lengths of 8 to 256 tokens
(mean about 70). For every case: tokens per CPU-second, the best of the repeats; prefill_ratio, the tokens whose keys
and values are computed before decoding, over those of one prompt per group (of episodes: over all prompts, observations
and responses, each counted once); kv_reserved_ratio, the memory of the KV cache over what the running requests have in
it (a token that several share is counted for each of them), both averaged over the bursts. Episodes also run with an
engine that finds no prefix: over_no_cache is the median ratio of tokens per CPU-second within a repeat.

--vllm: vLLM in its place (fp32, eager, with its prefix cache), whose cache is as large as it is by default here: all
slots at full length. Its kv_used_blocks_ratio counts the blocks that running requests use instead of all. What it
prefills is not counted, and there is no engine without a prefix cache beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import numpy as np
import torch

from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.blocks import Match
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.hf_folder import read_safetensors
from tests.bench.generator import VOCAB, make_model
from tests.bench.machine import tell

KV_TOKEN_BYTES = 2 * 4 * 2 * 64 * 4
"""Keys and values of one token: 4 layers, 2 heads of 64 numbers, fp32."""
SLOTS, PROMPT, TURNS, EPISODES, OBSERVATION, BURST = 64, 1000, 8, 64, 40, 16


class Measured(NativeEngine):
    """Counts what it computes before decoding, and looks at its memory after every burst."""

    def clear(self, path: Path) -> None:
        """Forget prefixes and counts."""
        self.load_weights(read_safetensors(path), version=0)
        self.computed, self.reserved, self.used = 0, 0, 0

    def _prefill(self, rows) -> None:
        self.computed += sum(len(row.tokens) for row in rows)
        super()._prefill(rows)

    def burst(self):
        outputs = self.step(BURST)
        layer = self._cache.layers[0]
        self.reserved += layer.numel() // (layer.shape[2] * layer.shape[4] * 2)
        self.used += int(self._slots.positions[: self._slots.num_live].sum())
        return outputs


class Forgetful(Measured):
    """Computes all tokens of every request."""

    def clear(self, path: Path) -> None:
        super().clear(path)
        self._blocks.match = lambda tokens: Match([])


def vllm(path: Path, length: int):
    """vLLM with the same figures, and `blocks`: those that running requests use, in tokens."""
    from hpcrl.engines.gen.vllm.engine import VLLMEngine
    from hpcrl.engines.gen.vllm.memory import BLOCK_TOKENS

    class MeasuredVLLM(VLLMEngine):
        def clear(self, path: Path) -> None:
            self.load_weights(read_safetensors(path), self.version + 1)  # another version: no prefix is known
            self.reserved, self.used, self.blocks = 0, 0, 0

        def burst(self):
            outputs = self.step(BURST)
            scheduler = self._engine.engine_core.engine_core.scheduler
            pool = scheduler.kv_cache_manager.block_pool
            self.reserved += pool.num_gpu_blocks * BLOCK_TOKENS
            self.blocks += (pool.num_gpu_blocks - pool.get_num_free_blocks()) * BLOCK_TOKENS
            self.used += sum(request.num_computed_tokens for request in scheduler.running)
            return outputs

    blocks = SLOTS * -(-length // BLOCK_TOKENS) + 1
    sizes = {"max_num_seqs": SLOTS, "max_length": length, "cache_bytes": blocks * BLOCK_TOKENS * KV_TOKEN_BYTES}
    return MeasuredVLLM(path, dtype="float32", **sizes)


def lengths(rng: np.random.Generator, count: int) -> list[int]:
    return np.clip(rng.lognormal(3.9, 0.9, size=count), 8, 256).astype(int).tolist()


def prompts(rng: np.random.Generator, sizes: list[int]) -> list[list[int]]:
    return [rng.integers(0, VOCAB, size=size).tolist() for size in sizes]


def groups(engine: Measured, size: int, count: int) -> tuple[int, int]:
    """Tokens generated, and tokens of the prompts, for `count` responses in groups of `size`."""
    rng = np.random.default_rng(0)
    shared = prompts(rng, [PROMPT] * (count // size))
    responses = lengths(rng, count)
    engine.add(
        [Request(i, shared[i // size], SamplingParams(n, ignore_eos=True), seed=i) for i, n in enumerate(responses)]
    )
    return finish(engine), sum(map(len, shared))


def singles(engine: Measured, count: int) -> tuple[int, int]:
    """The same for prompts of 16 to 48 tokens, one response each."""
    rng = np.random.default_rng(0)
    own, responses = prompts(rng, rng.integers(16, 49, size=count).tolist()), lengths(rng, count)
    engine.add([Request(i, own[i], SamplingParams(n, ignore_eos=True), seed=i) for i, n in enumerate(responses)])
    return finish(engine), sum(map(len, own))


def episodes(engine: Measured) -> tuple[int, int]:
    """The same for episodes: a response, an observation of OBSERVATION tokens, and so on."""
    rng = np.random.default_rng(0)
    contexts = prompts(rng, [200] * EPISODES)
    plan = [lengths(rng, TURNS) for _ in contexts]
    turns, count = [0] * EPISODES, 0

    def ask(i: int) -> Request:
        params = SamplingParams(plan[i][turns[i]], ignore_eos=True)
        return Request(i, contexts[i], params, seed=i * TURNS + turns[i], continues=turns[i] + 1 < TURNS)

    engine.add([ask(i) for i in range(EPISODES)])
    while engine.progress():
        outputs = engine.burst()
        count += sum(len(output.token_ids) for output in outputs)
        for output in outputs:
            i = output.id
            turns[i] += 1
            if turns[i] < TURNS:
                observation = rng.integers(0, VOCAB, size=OBSERVATION).tolist()
                contexts[i] = [*contexts[i], *output.token_ids.tolist(), *observation]
                engine.add([ask(i)])
    return count, sum(map(len, contexts))


def finish(engine: Measured) -> int:
    count = 0
    while engine.progress():
        count += sum(len(output.token_ids) for output in engine.burst())
    return count


CASES: dict[str, Callable[[Measured], tuple[int, int]]] = {
    "groups_of_8": lambda engine: groups(engine, 8, 128),
    "groups_of_64": lambda engine: groups(engine, 64, 128),
    "episodes": episodes,
    "singles": lambda engine: singles(engine, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--vllm", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for name in args.only:
            length = 512 if name == "singles" else 4096 if name == "episodes" else PROMPT + 256
            kinds = (Forgetful, Measured) if name == "episodes" else (Measured,)
            sizes = {"max_num_seqs": SLOTS, "max_length": length, "dtype": torch.float32}
            engines = [vllm(Path(folder), length)] if args.vllm else [kind(Path(folder), **sizes) for kind in kinds]
            rates: list[list[float]] = [[] for _ in engines]
            for _ in range(args.repeats):
                for engine, found in zip(engines, rates, strict=True):
                    engine.clear(Path(folder))
                    start = time.process_time()
                    count, once = CASES[name](engine)
                    found.append(count / (time.process_time() - start))
            if len(engines) > 1:
                ratios = (ours / other for other, ours in zip(*rates, strict=True))
                figures[f"{name}_over_no_cache"] = round(median(ratios), 2)
            figures |= {
                f"{name}_tokens_per_cpu_s": round(max(rates[-1])),
                f"{name}_kv_reserved_ratio": round(engine.reserved / engine.used, 2),
            }
            if args.vllm:
                figures[f"{name}_kv_used_blocks_ratio"] = round(engine.blocks / engine.used, 2)
                engine.close()
            else:
                figures[f"{name}_prefill_ratio"] = round(engine.computed / once, 3)
    tell({"bench": "prefixes", "engine": "vllm" if args.vllm else "native"} | figures)


if __name__ == "__main__":
    main()
