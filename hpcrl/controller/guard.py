"""Decide whether a run continues: it owns its folder, got no signal, has time for another step, and makes progress."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Sequence

from hpcrl.controller.deadline import Deadline
from hpcrl.metrics.stats import Stats

logger = logging.getLogger(__name__)

MAX_FRUITLESS_STEPS = 3
"""A run ends after this many steps in a row without an update, or with a non-finite loss."""
MAX_EMPTY_STEPS = 20
"""A run ends after this many steps in a row whose masks left no response to learn from. Matches the default of
rollout.max_generated_groups: 20 x num_prompts if filters reject all groups of a step."""
MAX_SILENT_STEPS = 5
"""The user is warned after this many steps in a row without a signal."""
LOSSES = ("actor/total_loss", "critic/loss", "sft/loss", "rm/loss", "loss")
OTHER_LOSSES = ("loss/ce", "loss/divergence")
"""Losses of weighted tokens (hpcrl.algorithms.token_losses) that need no reward."""
SHARES = ("_mask_ratio", "/positive_ratio")
"""Name endings of statistics that give the fraction of responses that a mask keeps."""
LEARNERS = {"actor": "", "critic": " of the critic"}


class Stopped(Exception):
    """The run ends early, and the next attempt resumes it. signal_number: 0 if the job is about to end."""

    def __init__(self, signal_number: int, text: str):
        self.signal_number = signal_number
        super().__init__(text)


class NoProgress(RuntimeError):
    """Several steps in a row made no progress."""


class MismatchError(RuntimeError):
    """Trainer and generator give the same tokens too different probabilities under the same weights."""


def after_divergence(saved: Sequence[int]) -> str:
    """The way out of a divergence for the user; `saved` are the steps of the checkpoints before it, ascending."""
    if not saved:
        return "there is no checkpoint before: lower trainer.lr or trainer.max_grad_norm and start over (resume=fresh)"
    steps = ", ".join(map(str, saved))
    return (
        f"continue from a checkpoint before with a lower rate or norm: resume_from={saved[-1]} trainer.lr=... "
        f"trainer.max_grad_norm=... (checkpoints of steps {steps})"
    )


class Guard:
    """Checks at step boundaries."""

    def __init__(
        self,
        fence: Callable[[], None],
        expected_save_s: Callable[[], float],
        signal_lead_s: float,
        deadline: Deadline,
        max_mismatch: float | None = None,
        saved: Callable[[], Sequence[int]] = tuple,
    ):
        """Create the checks of a run.

        Args:
            fence: Raises SupersededError if another attempt owns the run.
            expected_save_s: Returns a save's expected duration.
            max_mismatch: Bound of check_mismatch(); None: no bound.
            saved: Returns the steps of the checkpoints, ascending.
        """
        self.fence = fence
        self._expected_save_s, self._signal_lead_s, self._deadline = expected_save_s, signal_lead_s, deadline
        self._max_mismatch, self._saved = max_mismatch, saved
        self.stop_signal = 0  # the first signal that arrived
        self._told_notice = False
        self._num_fruitless = self._num_empty = self._num_silent = 0

    def stop(self, signal_number: int) -> None:
        """End the run at the next step boundary because of a signal; safe in a signal handler."""
        self.stop_signal = self.stop_signal or signal_number

    def before_step(self) -> None:
        """Log once, as soon as possible, whether Slurm's signal comes early enough. SupersededError from the fence."""
        notice = self._deadline.notice(self._expected_save_s(), self._signal_lead_s)
        if notice and not self._told_notice:
            logger.warning("%s", notice)
            self._told_notice = True
        self.fence()

    def after_step(self, step_s: float) -> None:
        self._deadline.record(step_s)

    def left_s(self) -> float:
        return self._deadline.left_s()

    def must_stop(self) -> str:
        """Why no further step may begin; empty if one may."""
        if self.stop_signal:
            return signal.Signals(self.stop_signal).name
        save_s = self._expected_save_s()
        if self._deadline.is_near(save_s):
            left, needed = self._deadline.left_s(), self._deadline.needed_s(save_s)
            return f"the job's end, which is {left:.0f} s away (another step with its save takes up to {needed:.0f} s)"
        return ""

    def check_progress(self, step: int, stats: Stats) -> None:
        """NoProgress once the statistics of several steps in a row show no learning."""
        losses = {name: stats[name].total / stats[name].count for name in LOSSES if name in stats and stats[name].count}
        signs = [f"{name} is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        for learner, whose in LEARNERS.items():
            updates = stats.get(f"{learner}/skipped_update")
            if updates is not None and updates.total == updates.count:
                signs.append(f"all {updates.count:g} updates{whose} were skipped, their gradients were not finite")
        self._num_fruitless = self._num_fruitless + 1 if signs else 0
        if self._num_fruitless == MAX_FRUITLESS_STEPS:
            first = step - MAX_FRUITLESS_STEPS + 1
            way_out = after_divergence([number for number in self._saved() if number < first])
            raise NoProgress(f"no progress in steps {first} to {step}: {'; '.join(signs)}; {way_out}")
        self._check_empty(step, stats)
        self._check_signal(step, stats)

    def _check_empty(self, step: int, stats: Stats) -> None:
        """NoProgress once masks have excluded all responses of several steps in a row."""
        is_empty = "actor/empty_updates" in stats and "actor/total_loss" not in stats
        self._num_empty = self._num_empty + 1 if is_empty else 0
        if self._num_empty == MAX_EMPTY_STEPS:
            ratios = [name for name in stats if name.startswith("actor/") and name.endswith(SHARES)]
            kept = ", ".join(f"{name} {stats[name].total / max(stats[name].count, 1):.2g}" for name in ratios)
            raise NoProgress(
                f"no progress in steps {step - MAX_EMPTY_STEPS + 1} to {step}: masks left no response to learn from "
                f"({f'shares kept: {kept}' if kept else 'all weights are 0'}); relax algorithm's masks "
                "(resume_from=latest algorithm.KEY=...), or choose prompts that suit the model"
            )

    def _check_signal(self, step: int, stats: Stats) -> None:
        """Warn once all advantages of several steps in a row were 0, or these steps had no pairs: the policy learns
        nothing from such steps, unless its tokens have other losses."""
        advantages, rewards = stats.get("critic/advantages/*"), stats.get("critic/rewards/*")
        is_silent = advantages is not None and advantages.count > 0 and advantages.low == advantages.high == 0
        is_silent &= not any(name in stats and stats[name].total for name in OTHER_LOSSES)
        lacks_pairs = "pairs/count" in stats and not stats["pairs/count"].total
        is_silent |= lacks_pairs
        self._num_silent = self._num_silent + 1 if is_silent else 0
        if self._num_silent == MAX_SILENT_STEPS:
            mean = f" (reward {rewards.total / rewards.count:.3g} on average)" if rewards and rewards.count else ""
            logger.warning(
                "steps %d to %d had no signal%s: all responses to a prompt got the same reward, so %s; use prompts "
                "that the model solves sometimes, a warm-up by supervised training (pipeline=sft), a reward with "
                "partial credit, or a larger rollout.group_size",
                *(step - MAX_SILENT_STEPS + 1, step, mean),
                "there are no pairs" if lacks_pairs else "all advantages are 0",
            )

    def check_mismatch(self, step: int, stats: Stats) -> None:
        """MismatchError if this step's mean difference of probabilities exceeds the bound."""
        diff, kl = stats.get("mismatch/diff/*"), stats.get("mismatch/kl_k3")
        if self._max_mismatch is None or diff is None or kl is None or not diff.count:
            return
        mean = diff.total / diff.count
        if not mean <= self._max_mismatch:  # also for NaN
            raise MismatchError(
                f"step {step}: trainer and generator give the {diff.count:g} tokens that weights {step - 1} wrote "
                f"probabilities that differ by {mean:.3g} on average, more than trainer.max_mismatch="
                f"{self._max_mismatch:g} (largest difference {diff.high:.3g}, KL {kl.total / kl.count:.3g} nats a "
                "token). The step is not saved. Start again with a larger trainer.max_mismatch (null: off) to resume "
                "from the last checkpoint, or begin a new run with one type on both sides (trainer.param_dtype, "
                "generator.dtype, and head_dtype of both) or with algorithm.correction"
            )
