"""Log-probs of the trainer and of a generation engine, both in bf16, of the same tokens under the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcrl.config import TrainerConfig
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from tests.bench.gpu.common import Check, Row
from tests.bench.head_dtype import differences

MOST_NATS = 0.05
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
                max_slots=64,
                max_length=sum(_sizes(check)),
                dtype=torch.bfloat16,
                float32_head=head is not None,
                device=check.device,
            )
            yield from _compared(check, "agreement native", engine, head)
            engine.close()


def vllm(check: Check) -> Iterator[Row]:
    """The row of vLLM."""
    from tests.bench.gpu.decoding import vllm_engine

    with check.alone():
        engine = vllm_engine(check, check.folder(), sum(_sizes(check)), eager=True)
        engine.load_weights(((n, t.to(check.device)) for n, t in read_safetensors(check.folder())), version=0)
        yield from _compared(check, "agreement vllm", engine, None)


def _sizes(check: Check) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    return check.pick(128, 8), check.pick(64, 8)


def _compared(check: Check, part: str, engine: Any, head: str | None) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(1)
    length, new = _sizes(check)
    vocab = check.model(few_layers=True)[1].vocab_size
    prompts = torch.randint(vocab, (check.pick(32, 4), length), generator=generator).tolist()
    mean, _, largest = differences(trainer_of(check, head), engine, prompts, new)
    what = f"mean difference, {'fp32' if head else 'bf16'} head"
    yield Row(part, what, mean, "nats", MOST_NATS, "ok" if mean < MOST_NATS else "bad", f"largest {largest:.3g}")
