from __future__ import annotations

from pathlib import Path

import torch

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.base import TrainEngine
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine


def factory(folder: Path) -> TrainEngine:
    config = TrainerConfig(lr=0.02, max_grad_norm=100.0, lr_schedule="linear", warmup_steps=2)
    return FSDP2Engine(config, folder, dtype=torch.float32, total_steps=8)
