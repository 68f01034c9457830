"""Where a run's time went: seconds, node-hours and GPU-hours of each phase, from the metrics `time/*`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def phase_seconds(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase over all rows of metrics; the rest of the steps' time is OTHER. Phases without time are
    left out."""
    found = {name: 0.0 for name, _ in PHASES} | {OTHER: 0.0}
    for row in rows:
        seconds = {name: sum(_value(row, metric) for metric in metrics) for name, metrics in PHASES}
        seconds["generation"] = max(seconds["generation"] - seconds["waiting for rewards"], 0.0)
        inside = sum(value for name, value in seconds.items() if name != "validation")
        seconds[OTHER] = max(_value(row, "time/step_total") - inside, 0.0)
        for name, value in seconds.items():
            found[name] += value
    return {name: value for name, value in found.items() if value}


def phase_hours(
    rows: Iterable[Mapping[str, Any]],
    lost: Iterable[Mapping[str, Any]],
    attempts: Sequence[AttemptHistory],
    nodes: int,
    gpus: int,
    left: Iterable[Mapping[str, Any]] = (),
) -> list[PhaseHours]:
    """The phases of all steps that count, then of the steps that were lost, of those that were `left` for a branch, and
    of the starts of attempts up to their first step, for a job of this many nodes and GPUs. Queue times between
    attempts are not counted."""
    seconds = phase_seconds(rows)
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


def _value(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
