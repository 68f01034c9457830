"""What no scheduler can beat, and ROLL Flash's bounds on what one may cost (arXiv 2510.11345, Propositions 1 and 2)."""

from __future__ import annotations

from tests.bench.flash.settings import Training, World
from tests.bench.flash.simulation import Run

ROUNDING = 1 + 1e-6


def lower_bound_s(run: Run, world: World, training: Training) -> float:
    """Seconds in which the run's work can be done at least: what was executed at full capacity, or the longest accepted
    sample alone on the fastest replica; and all training. Step by step where nothing overlaps steps."""
    if not training.overlap and all(step.lag == 0 for step in run.steps):
        executed = [0.0] + [step.executed for step in run.steps]
        parts = zip(run.steps, executed[:-1], executed[1:], strict=True)
        work = sum(max((b - a) / world.tokens_per_s, step.longest_s) for step, a, b in parts)
        return work + len(run.steps) * training.train_s
    training_s = len(run.steps) * training.train_s
    if not training.overlap:
        return training_s + run.steps[-1].executed / world.tokens_per_s
    return max(run.executed / world.tokens_per_s, training_s, *(step.longest_s for step in run.steps))


def check(run: Run, world: World, training: Training) -> float:
    """The share of the run's time that the lower bound explains; asserts that it is no more than all of it."""
    bound = lower_bound_s(run, world, training)
    assert bound <= run.time * ROUNDING, f"{run.time:.1f} s is less than the lower bound of {bound:.1f} s"
    return bound / run.time


def steady_efficiency(run: Run, world: World, training: Training, skipped: int) -> float:
    """Lower bound / time of the steps after the first `skipped`, from batch to batch."""
    first, last = run.steps[skipped - 1], run.steps[-1]
    work_s = (last.executed - first.executed) / world.tokens_per_s
    train_s = (len(run.steps) - skipped) * (training.train_s + training.publish_s)
    share = max(work_s, train_s) / (last.taken - first.taken)
    assert share <= ROUNDING, f"{share:.4f} of the capacity was used"
    return share


def proposition_1_s(workers: float, num_samples: int, mean_s: float, longest_s: float, lag: float) -> float:
    """Most seconds per batch of `num_samples` for `workers` slots of constant rate without aborts."""
    return num_samples * mean_s / workers + longest_s / (lag + 1)


def training_share(
    workers: float, num_samples: int, mean_s: float, longest_s: float, lag: float, train_s: float
) -> float:
    """Proposition 2's beta*, the share of the workers that train; train_s: seconds per sample on one worker."""
    trained = num_samples * train_s
    return trained / (workers * proposition_1_s(workers, num_samples, mean_s, longest_s, lag) + trained)


def proposition_2_s(
    workers: float, num_samples: int, mean_s: float, longest_s: float, lag: float, train_s: float
) -> float:
    """Most seconds per step where a share beta* of the workers trains and the others generate."""
    return proposition_1_s(workers, num_samples, mean_s, longest_s, lag) + num_samples * train_s / workers
