"""Training engines by name. An engine's own imports happen here, when it is made."""

from __future__ import annotations

from pathlib import Path

import torch

from hpcrl.config import Config
from hpcrl.engines.train.base import TrainEngine

FAKE_VOCABULARY = 64
"""Of debug=fake: a table over the square of a real one would not fit, and would take time of its own."""


def make_train_engine(config: Config, model_path: Path, trainable: bool) -> TrainEngine:
    """The trainer's engine, or a frozen one. Collective over the ranks of the default group."""
    per_step = 1
    if config.reinforces:
        per_step = config.algorithm.ppo_epochs * config.algorithm.num_mini_batches
    if config.debug == "fake":
        from hpcrl.engines.train.fake.engine import FakeTrainEngine

        return FakeTrainEngine(
            config.trainer,
            vocab_size=FAKE_VOCABULARY,
            total_steps=config.max_steps * per_step,
            logprobs_s=config.fake.logprobs_s,
            train_s=config.fake.train_s,
        )
    from hpcrl.engines.train.fsdp2.engine import FSDP2Engine

    return FSDP2Engine(
        config.trainer,
        model_path,
        dtype=getattr(torch, config.model.dtype),
        total_steps=config.max_steps * per_step,
        device="cuda" if torch.cuda.is_available() else "cpu",
        trainable=trainable,
        deterministic=config.deterministic,
    )
