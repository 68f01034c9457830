"""Weights from the trainer to a generation engine, and log-probs of both under these, in bf16, of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcrl.config import TrainerConfig
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from tests.bench.gpu.common import GB, Check, Row, median, num_bytes
from tests.bench.head_dtype import differences

MAX_NATS = 0.05
"""Mean difference above which the engines do not compute the same model; rounding to bf16 gives less."""


def trainer_of(check: Check, head_dtype: str | None, dtype: torch.dtype = torch.bfloat16, **config: Any) -> FSDP2Engine:
    """The FSDP2 engine on the model of a few layers, computing in bf16."""
    settings = TrainerConfig(param_dtype="bfloat16", head_dtype=head_dtype, logits_chunk_tokens=1024, **config)
    return FSDP2Engine(settings, check.folder(), dtype=dtype, total_steps=10, device=check.device)


def native(check: Check) -> Iterator[Row]:
    """Rows of the native engine, with a vocabulary projection in bf16 and in fp32."""
    with check.alone():
        for head in (None, "float32"):
            engine = NativeEngine(
                check.folder(),
                max_num_seqs=64,
                max_length=sum(_sizes(check)),
                dtype=torch.bfloat16,
                float32_head=head is not None,
                device=check.device,
            )
            yield from _compared(check, "agreement native", trainer_of(check, head), engine, head)
            engine.close()


def vllm(check: Check) -> Iterator[Row]:
    """Rows of vLLM and FSDP2 on one GPU."""
    with check.alone():
        yield from of_recipe(check, "fsdp2 and vllm")


def of_recipe(check: Check, part: str, **replica: Any) -> Iterator[Row]:
    """FSDP2 and vLLM on the same GPUs, as the recipes in bf16 run them: new weights, then log-probs. replica: the ranks
    of vLLM. Collective within the default group."""
    from tests.bench.gpu.decoding import vllm_engine

    engine = vllm_engine(check, check.folder(), sum(_sizes(check)), **replica)
    trainer = trainer_of(check, "float32", torch.float32)
    yield updated(check, part, trainer, engine)
    yield from _compared(check, part, trainer, engine, "float32")


def updated(check: Check, part: str, trainer: FSDP2Engine, generator: Any) -> Row:
    """The trainer's fp32 weights into a generator in bf16 on the same device. Collective within the default group."""
    dtypes = dict.fromkeys((name for name, _ in trainer.weights.items()), torch.bfloat16)
    seconds = []
    for version in range(4):
        seconds.append(check.seconds(lambda v=version: generator.load_weights(trainer.named_weights(dtypes), v)))
    rate = num_bytes(check.model(few_layers=True)[1]) / median(seconds[1:]) / GB
    return Row(part, "weights to the generator", rate, "GB/s", check.facts.get("copy"))


def _sizes(check: Check) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    return check.pick(128, 8), check.pick(64, 8)


def _compared(check: Check, part: str, trainer: FSDP2Engine, engine: Any, head: str | None) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(1)
    length, new = _sizes(check)
    vocab = check.model(few_layers=True)[1].vocab_size
    prompts = torch.randint(vocab, (check.pick(32, 4), length), generator=generator).tolist()
    mean, _, largest = differences(trainer, engine, prompts, new)
    what = f"mean difference, {'fp32' if head else 'bf16'} head"
    yield Row(part, what, mean, "nats", MAX_NATS, "ok" if mean < MAX_NATS else "bad", f"largest {largest:.3g}")
