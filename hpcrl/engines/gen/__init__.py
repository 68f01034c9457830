"""Generation engines by name. An engine's own imports happen here, when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcrl.config import Config
from hpcrl.engines.gen.base import GenEngine


def make_gen_engine(config: Config, model_path: Path, tokenizer: Any) -> GenEngine:
    """The engine of one replica, without weights (they are pulled from the trainer)."""
    if config.debug == "fake":
        from hpcrl.engines.gen.fake.engine import FakeEngine, long_tailed

        fake = config.fake
        return FakeEngine(
            max_slots=config.generator.max_slots,
            max_length=config.max_sequence_tokens,
            vocab_size=len(tokenizer),
            lengths=long_tailed(fake.median_tokens, fake.tail),
            decode_s=fake.decode_s,
            prefill_s=fake.prefill_s,
            load_s=fake.publish_s,
        )
    from hpcrl.engines.gen.native.engine import NativeEngine

    return NativeEngine(
        model_path,
        tokenizer=tokenizer,
        max_slots=config.generator.max_slots,
        max_length=config.max_sequence_tokens,
        dtype=getattr(torch, config.generator.dtype),
        kv_bucket=config.generator.kv_bucket,
        device="cuda" if torch.cuda.is_available() else "cpu",
        deterministic=config.deterministic,
        load=False,
    )
