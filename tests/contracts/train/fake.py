from __future__ import annotations

from pathlib import Path

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.base import TrainEngine
from hpcrl.engines.train.fake.engine import FakeTrainEngine
from tests.engines.worlds import VOCAB


def factory(folder: Path) -> TrainEngine:
    config = TrainerConfig(lr=2.0, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2)
    return FakeTrainEngine(config, vocab_size=VOCAB, total_steps=8)
