"""What is wrong with a run, in words, from its metrics: pure functions of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hpcrl.metrics.metric_table import MetricTable

STRETCH = 5
"""An anomaly lasts at least this many steps with the metric."""
BASELINE = 5
"""A run's first steps with a metric; their median is what later values are compared with."""
EQUAL_SHARE = 0.8
"""Share of groups dropped for equal rewards from which a batch takes several times as long to fill."""
COLLAPSED_SHARE, COLLAPSED_NATS = 0.1, 0.05
"""Entropy below both: this share of its beginning, and nats per token."""
KL_NATS = 0.2
"""KL to the reference, nats per token."""
MISMATCH_TIMES, MISMATCH_NATS = 5.0, 1e-3
"""KL between generator and trainer above both: times its beginning, and nats per token."""
TRUNCATED_RISE, TRUNCATED_SHARE = 0.15, 0.5
"""Rise of the share of truncated responses since the beginning; share that is reported without a rise."""
AT_BOUND = 0.95
"""Mean staleness at least this share of rollout.max_staleness."""
SLOW_SPEED = 0.6
"""Speed of the slowest generator replica, relative to the mean."""
WAITING_SHARE = 0.3
"""Share of a step's time in which no generator worked and the run waited for rewards."""


@dataclass(frozen=True)
class Anomaly:
    """Something that a person should look at.

    Args:
        step: The step at which it began; None if unknown.
        until: The last step at which it held; None if it holds at the newest step.
        title: What it is, in a few words.
        text: What was seen, and what to do.
        metrics: The metrics that show it.
    """

    step: int | None
    until: int | None
    title: str
    text: str
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps: the first, the last (None if it is the newest), and the last value."""

    first: int
    last: int | None
    value: float


def series(metrics: MetricTable, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric's finite values after step 0."""
    column = metrics.column(name)
    kept = (column.steps > 0) & np.isfinite(column.values)
    return list(zip(column.steps[kept].tolist(), column.values[kept].tolist(), strict=True))


def smoothed(values: Sequence[tuple[int, float]], width: int = STRETCH) -> list[tuple[int, float]]:
    """Each value replaced by the median of itself and up to width - 1 values before it: one outlier changes nothing."""
    plain = [value for _, value in values]
    found = [median(plain[: at + 1]) for at in range(min(width - 1, len(plain)))]
    if len(plain) >= width:
        found += np.median(np.lib.stride_tricks.sliding_window_view(np.array(plain), width), axis=1).tolist()
    return [(step, value) for (step, _), value in zip(values, found, strict=True)]


def beginning(values: Sequence[tuple[int, float]]) -> float | None:
    """The median of the first BASELINE values; None if there are fewer."""
    return median(value for _, value in values[:BASELINE]) if len(values) >= BASELINE else None


def stretch(
    values: Sequence[tuple[int, float]], holds: Callable[[float], bool], least: int = STRETCH
) -> Stretch | None:
    """The last stretch of at least `least` consecutive values for which `holds` is true."""
    found, begin = None, 0
    for at in range(len(values) + 1):
        if at < len(values) and holds(values[at][1]):
            continue
        if at - begin >= least:
            found = Stretch(values[begin][0], None if at == len(values) else values[at - 1][0], values[at - 1][1])
        begin = at + 1
    return found


def no_signal(metrics: MetricTable) -> Iterator[Anomaly]:
    """All advantages of several steps are 0, or nearly all groups are dropped because their rewards are equal."""
    low, high = dict(series(metrics, "critic/advantages/min")), dict(series(metrics, "critic/advantages/max"))
    spread = [(step, high[step] - low[step]) for step in low if step in high]
    remedy = (
        "use prompts that the model solves sometimes, a supervised warm-up, a reward with partial credit, or a larger "
        "rollout.group_size"
    )
    if found := stretch(spread, lambda value: value == 0):
        text = (
            f"All responses to a prompt got the same reward, so every advantage was 0 and nothing was learnt: {remedy}."
        )
        yield Anomaly(
            found.first, found.last, "No signal in groups", text, ("critic/rewards/mean", "group/mixed_ratio")
        )
    started = dict(series(metrics, "scheduler/query_use_count"))
    dropped = [
        (step, value / started[step]) for step, value in series(metrics, "scheduler/filtered_std") if started.get(step)
    ]
    if found := stretch(dropped, lambda share: share >= EQUAL_SHARE):
        text = (
            f"{found.value:.0%} of the generated groups were dropped because all their rewards were equal "
            f"(rollout.filter_std), so most of the generation is wasted: {remedy}."
        )
        yield Anomaly(found.first, found.last, "Few groups with a signal", text, ("scheduler/filtered_std",))


def entropy_collapse(metrics: MetricTable) -> Iterator[Anomaly]:
    """The policy's entropy is a small part of what it was, and near 0."""
    name = "critic/entropy/mean"
    values = series(metrics, name)
    first = beginning(values)
    if first is None:
        return
    below = min(COLLAPSED_SHARE * first, COLLAPSED_NATS)
    if found := stretch(smoothed(values), lambda value: value < below):
        text = (
            f"The entropy fell from {first:.3g} to {found.value:.3g} nats per token: the policy writes nearly the same "
            "response each time, so groups lose their differences. Raise algorithm.entropy_loss_coef or pg_clip_high "
            "(algorithm=dapo, clip_cov, kl_cov), or lower trainer.lr."
        )
        yield Anomaly(found.first, found.last, "Entropy collapse", text, (name,))


def growing_kl(metrics: MetricTable) -> Iterator[Anomaly]:
    """The policy is far from the reference."""
    if found := stretch(smoothed(series(metrics, "critic/kl")), lambda value: value >= KL_NATS):
        text = (
            f"The KL to the reference is {found.value:.3g} nats per token: the policy is far from the model it began "
            "with. Raise algorithm.kl_loss_coef or kl_reward_coef, or lower trainer.lr; look at samples for a reward "
            "that is exploited."
        )
        yield Anomaly(found.first, found.last, "KL to the reference is large", text, ("critic/kl",))


def growing_mismatch(metrics: MetricTable) -> Iterator[Anomaly]:
    """Generator and trainer disagree more and more about the same tokens."""
    name = "mismatch/kl_k3"
    values = series(metrics, name)
    first = beginning(values)
    if first is None:
        return
    above = max(MISMATCH_TIMES * abs(first), MISMATCH_NATS)
    if found := stretch(smoothed(values), lambda value: value >= above):
        text = (
            f"The KL between generator and trainer grew from {first:.3g} to {found.value:.3g} nats per token under the "
            "same weights: gradients are biased. Set algorithm.correction, or a bound (trainer.max_mismatch)."
        )
        yield Anomaly(found.first, found.last, "Mismatch of generator and trainer grows", text, (name,))


def rising_truncation(metrics: MetricTable) -> Iterator[Anomaly]:
    """More responses than at the beginning, or more than half, end at the length limit."""
    name = "token/response_length/clip_ratio"
    values = series(metrics, name)
    first = beginning(values)
    if first is None:
        return
    above = min(first + TRUNCATED_RISE, TRUNCATED_SHARE)
    if found := stretch(smoothed(values), lambda value: value >= above):
        text = (
            f"{found.value:.0%} of the responses end at rollout.max_new_tokens ({first:.0%} in the first steps): such "
            "responses usually have no answer to score. Raise the limit, or penalise length (reward `length`)."
        )
        yield Anomaly(found.first, found.last, "Responses are truncated", text, (name, "token/response_length/mean"))


def staleness_at_bound(metrics: MetricTable, max_staleness: float | None) -> Iterator[Anomaly]:
    """Nearly all responses are as old as rollout.max_staleness permits."""
    if not max_staleness:
        return
    values = series(metrics, "scheduler/staleness/mean")
    if found := stretch(values, lambda value: value >= AT_BOUND * max_staleness, 2 * STRETCH):
        text = (
            f"Responses are {found.value:.3g} versions old on average, and rollout.max_staleness is {max_staleness:g}: "
            "generators wait for trainers. Give trainers more ranks, or generators fewer."
        )
        yield Anomaly(found.first, found.last, "Staleness is at its bound", text, ("scheduler/staleness/mean",))


def failing_rewards(metrics: MetricTable, errors: Sequence[Mapping[str, Any]]) -> Iterator[Anomaly]:
    """Rewards or environments that raised errors: `errors` are the kinds of errors.json."""
    values = series(metrics, "scheduler/score_errors")
    failed = [(step, value) for step, value in values if value > 0]
    if not failed and not errors:
        return
    first = failed[0][0] if failed else None
    until = failed[-1][0] if failed and failed[-1][0] != values[-1][0] else None
    count = sum(int(kind["count"]) for kind in errors)
    worst = errors[0] if errors else {}
    told = f" The most frequent, {worst['count']} times: {worst['error']}" if worst else ""
    number = f"{count} samples" if count else f"{sum(value for _, value in failed):g} samples"
    text = f"{number} had an error of a reward, an environment or a generator, and were scored 0 or dropped.{told}"
    yield Anomaly(first, until, "Rewards or environments fail", text, ("scheduler/score_errors",))


def slow_replica(metrics: MetricTable) -> Iterator[Anomaly]:
    """One generator replica is much slower than the others."""
    means = dict(series(metrics, "scheduler/replica_speed/mean"))
    values = [
        (step, low / means[step])
        for step, low in series(metrics, "scheduler/replica_speed/min")
        if means.get(step, 0) > 0
    ]
    if found := stretch(values, lambda share: share < SLOW_SPEED):
        text = (
            f"The slowest generator replica decodes at {found.value:.0%} of the mean speed: look at its node (another "
            "job, a throttled GPU), which cluster.exclude avoids."
        )
        yield Anomaly(found.first, found.last, "A slow rank", text, ("scheduler/replica_speed/min",))


def waiting_for_rewards(metrics: MetricTable) -> Iterator[Anomaly]:
    """Much of a step passes while no generator works and scores are missing."""
    totals = dict(series(metrics, "time/step_total"))
    waits = series(metrics, "time/step_reward_wait")
    values = smoothed([(step, wait / totals[step]) for step, wait in waits if totals.get(step)])
    if found := stretch(values, lambda share: share >= WAITING_SHARE):
        text = (
            f"In {found.value:.0%} of the time no generator works and the run waits for rewards: give rewards more "
            "ranks or processes (layout.reward, reward.NAME.num_processes), or score faster."
        )
        yield Anomaly(found.first, found.last, "Waiting for rewards", text, ("time/step_reward_wait",))


def not_finite(metrics: MetricTable) -> Iterator[Anomaly]:
    """Losses or gradients that were not finite: null in metrics.jsonl."""
    for name, what in (("actor/total_loss", "loss"), ("actor/grad_norm", "norm of the gradients")):
        column = metrics.column(name)
        bad = column.steps[np.isnan(column.values)].tolist()
        if bad:
            last = None if bad[-1] == metrics.last_step else bad[-1]
            text = f"The {what} was not finite in {len(bad)} step(s): lower trainer.lr or trainer.max_grad_norm."
            yield Anomaly(bad[0], last, f"The {what} is not finite", text, (name,))


def anomalies(metrics: MetricTable, max_staleness: float | None, errors: Sequence[Mapping[str, Any]]) -> list[Anomaly]:
    """Everything found, in the order of the steps at which it began; what still holds comes first."""
    found = [
        *no_signal(metrics),
        *entropy_collapse(metrics),
        *growing_kl(metrics),
        *growing_mismatch(metrics),
        *rising_truncation(metrics),
        *staleness_at_bound(metrics, max_staleness),
        *failing_rewards(metrics, errors),
        *slow_replica(metrics),
        *waiting_for_rewards(metrics),
        *not_finite(metrics),
    ]
    return sorted(found, key=lambda each: (each.until is not None, each.step or 0))
