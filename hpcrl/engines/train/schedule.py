"""Learning rates as a function of only the optimizer step, so resuming needs no other state; and step statistics."""

from __future__ import annotations

import math

from hpcrl.config import TrainerConfig
from hpcrl.metrics.stats import Stats, scalar


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (the first is 0) of `total_steps`. It rises linearly to lr, which it
    reaches at step lr_warmup_steps - 1, and then follows the schedule. All schedules but constant end at min_lr in the
    last step and stay there; wsd (arXiv 2404.06395) leaves lr only for the last lr_decay_steps."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    first = config.lr_warmup_steps
    if config.lr_schedule == "wsd":
        first = max(first, total_steps - 1 - (config.lr_decay_steps or math.ceil(total_steps / 10)))
    done = min(max(step - first, 0) / max(total_steps - 1 - first, 1), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if config.lr_schedule == "cosine" else 1 - done
    return config.min_lr + (config.lr - config.min_lr) * left


def update_stats(rate: float, grad_norm: float) -> Stats:
    """Statistics of an optimizer step at this learning rate; it is skipped if the gradient norm is not finite."""
    finite = math.isfinite(grad_norm)
    stats = {"actor/lr": scalar(rate), "actor/skipped_update": scalar(not finite)}
    return stats | ({"actor/grad_norm": scalar(grad_norm)} if finite else {})
