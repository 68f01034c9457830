"""Where a run's time went: seconds, node-hours and GPU-hours of each phase, from the metrics `time/*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcrl.metrics.metric_table import MetricTable
from hpcrl.report.attempt_history import AttemptHistory

PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("generation", ("time/step_generate", "time/step_read")),
    ("waiting for rewards", ("time/step_reward_wait",)),
    ("rollout transfer", ("time/step_rollout_transfer",)),
    (
        "training",
        (
            "time/step_train",
            "time/critic_train",
            "time/values",
            "time/old_log_probs",
            "time/ref_log_probs",
            "time/teacher",
            "time/old_entropies",
            "time/reference_update",
            "time/teacher_update",
        ),
    ),
    ("weight updates", ("time/step_update_weights",)),
    ("saves", ("time/save",)),
    ("validation", ("time/val_step",)),
)
"""Phase -> the metrics whose sum it is. Generation is without the wait for rewards, which its metric includes."""
OTHER = "other work of steps"
RECOMPUTED = "lost and computed again"
LEFT = "left for a branch"
STARTS = "starts of attempts"


@dataclass(frozen=True)
class PhaseHours:
    """Seconds of one phase on the run's clock. All nodes of a job are paid for in all phases, whichever ranks work."""

    name: str
    seconds: float
    node_hours: float
    gpu_hours: float


def phase_seconds(metrics: MetricTable) -> dict[str, float]:
    """Seconds of each phase over all rows of metrics; the rest of the steps' time is OTHER. Phases without time are
    left out."""
    seconds = {name: sum(map(metrics.dense, parts), np.zeros(len(metrics))) for name, parts in PHASES}
    seconds["generation"] = np.maximum(seconds["generation"] - seconds["waiting for rewards"], 0.0)
    inside = sum(value for name, value in seconds.items() if name != "validation")
    seconds[OTHER] = np.maximum(metrics.dense("time/step_total") - inside, 0.0)
    return {name: total for name, values in seconds.items() if (total := float(values.sum()))}


def phase_hours(
    metrics: MetricTable,
    lost: MetricTable,
    attempts: Sequence[AttemptHistory],
    nodes: int,
    gpus: int,
    left: MetricTable,
) -> list[PhaseHours]:
    """The phases of all steps that count, then of the steps that were lost, of those that were `left` for a branch, and
    of the starts of attempts up to their first step, for a job of this many nodes and GPUs. Queue times between
    attempts are not counted."""
    seconds = phase_seconds(metrics)
    seconds[RECOMPUTED] = sum(phase_seconds(lost).values())
    seconds[LEFT] = sum(phase_seconds(left).values())
    seconds[STARTS] = sum(_start_s(attempt) for attempt in attempts)
    return [
        PhaseHours(name, value, value * nodes / 3600, value * gpus / 3600) for name, value in seconds.items() if value
    ]


def _start_s(attempt: AttemptHistory) -> float:
    """Seconds from an attempt's begin to its first complete step, or to its end if it has none."""
    until = attempt.first_step_at if attempt.first_step_at is not None else attempt.ended
    return max(until - attempt.began, 0.0) if until is not None and attempt.began is not None else 0.0
