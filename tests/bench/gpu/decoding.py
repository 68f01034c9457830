"""Tokens per second of a generation engine beside the bandwidth of the memory; how it sleeps and wakes.

All layers of Qwen2.5-7B with random weights. A decode iteration reads each weight except the embedding once, and the
keys and values of every response: no engine can be faster than these bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcrl.config import parse
from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.planner.generator import token_bytes
from tests.bench.gpu.common import GB, Check, Row, num_bytes, random_weights

ASLEEP_SHARE = 0.1
"""The most that an engine may hold asleep, of what it holds awake; CUDA's own memory and workspaces count."""


def native(check: Check) -> Iterator[Row]:
    """Rows of the native engine: with 64 and 256 concurrent responses, then asleep and awake."""
    engine, before, weights = None, check.used(), num_bytes(check.model(few_layers=False)[1])
    for slots in (check.pick(64, 2), check.pick(256, 4)):
        if engine is not None:
            engine.close()
        engine = NativeEngine(
            check.empty_folder(few_layers=False),
            max_num_seqs=slots,
            max_length=sum(_sizes(check)),
            dtype=torch.bfloat16,
            device=check.device,
            load=False,
        )
        seconds = check.seconds(partial(_load, check, engine))
        yield _rate(check, "decode native", engine, slots)
    yield Row("decode native", "load weights", weights / seconds / GB, "GB/s", note="random ones, made on the way")
    yield from _slept(check, "decode native", engine, before)


def vllm(check: Check) -> Iterator[Row]:
    """The same of vLLM with 64 responses."""
    slots, before = check.pick(64, 2), check.used()
    engine = vllm_engine(check, check.empty_folder(few_layers=False), sum(_sizes(check)))
    _load(check, engine)
    yield _rate(check, "decode vllm", engine, slots)
    yield from _slept(check, "decode vllm", engine, before)


def vllm_engine(check: Check, folder: Path, max_length: int, **replica: Any) -> Any:
    """vLLM without weights, as the recipes in bf16 run it: with an fp32 head and, on a GPU, CUDA graphs. ImportError if
    it is not installed."""
    from hpcrl.engines.gen.vllm.engine import VLLMEngine

    return VLLMEngine(
        folder,
        max_num_seqs=check.pick(64, 4),
        max_length=max_length,
        dtype="bfloat16",
        cache_bytes=None if check.on_gpu else 64 << 20,
        gpu_memory_utilization=0.5,
        enforce_eager=not check.on_gpu,
        head_dtype="float32",
        sleeps=check.on_gpu,
        load=False,
        **replica,
    )


def _sizes(check: Check) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    return check.pick(256, 8), check.pick(256, 24)


def _load(check: Check, engine: Any) -> None:
    engine.load_weights(random_weights(check.model(few_layers=False)[1], check.device), version=engine.version + 1)


def _rate(check: Check, part: str, engine: Any, slots: int) -> Row:
    """Generated tokens per second while all slots are in use, after prefill and a few iterations."""
    shape, (length, new) = check.model(few_layers=False)[1], _sizes(check)
    generator = torch.Generator().manual_seed(slots)
    prompts = torch.randint(shape.vocab_size, (slots, length), generator=generator).tolist()
    engine.add([Request(i, ids, SamplingParams(new, ignore_eos=True), seed=i) for i, ids in enumerate(prompts)])
    engine.step(new // 4)
    before = sum(engine.progress().values())
    seconds = check.seconds(lambda: engine.step(new // 2))
    made = sum(engine.progress().values()) - before
    context = length + before / slots + made / slots / 2
    engine.abort(list(engine.progress()))
    embedding = shape.vocab_size * shape.hidden_size * (not shape.tied)
    read = 2 * (shape.num_parameters - embedding) + slots * context * token_bytes(_bf16(), shape)
    limit = slots * check.facts["copy"] * GB / read if "copy" in check.facts else None
    return Row(part, f"{slots} responses", made / seconds, "tokens/s", limit)


def _bf16() -> Any:
    return parse({"generator": {"dtype": "bfloat16"}})


def _slept(check: Check, part: str, engine: Any, before: int) -> Iterator[Row]:
    """Seconds to sleep and to wake with new weights, and what the engine holds meanwhile. before: bytes in use when
    there was none."""
    awake = (check.used() - before) / 2**30
    yield Row(part, "sleep", check.seconds(engine.sleep), "s")
    if check.on_gpu:
        held, allowed = (check.used() - before) / 2**30, awake * ASLEEP_SHARE
        yield Row(part, "held asleep", held, "GiB", allowed, "ok" if held < allowed else "bad", f"{awake:.1f} awake")

    def wake() -> None:
        engine.wake()
        _load(check, engine)

    seconds = check.seconds(wake)
    engine.add([Request(0, [1, 2, 3], SamplingParams(2, ignore_eos=True), seed=0)])
    answered = len(engine.step(3)) == 1
    yield Row(part, "wake and load", seconds, "s", verdict="ok" if answered else "bad")
