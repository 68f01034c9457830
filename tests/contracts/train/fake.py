from __future__ import annotations

from pathlib import Path

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fake_trainer.engine import FakeTrainEngine
from hpcrl.engines.train.training_engine import TrainEngine
from tests.engines.worlds import VOCAB


def factory(folder: Path) -> TrainEngine:
    config = TrainerConfig(lr=2.0, max_grad_norm=100.0, lr_schedule="linear", lr_warmup_steps=2)
    return FakeTrainEngine(config, vocab_size=VOCAB, total_steps=8)
