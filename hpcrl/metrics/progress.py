"""The progress of a run: a live bar on a terminal, else and in the logs a message per step; a summary at the end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from hpcrl.metrics.curves import validated_domains
from hpcrl.metrics.duration import duration
from hpcrl.system.log import BARE, UNSHOWN

logger = logging.getLogger(__name__)

RECENT_STEPS = 20
EVALUATION = "time/val_step"
SHOWN = (
    ("critic/rewards/mean", "reward", "{:.3f}"),
    ("distill/reverse_kl", "reverse KL", "{:.4f}"),
    ("distill/divergence", "divergence", "{:.4f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("rm/loss", "loss", "{:.4f}"),
    ("rm/accuracy", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("rewards/accuracies", "accuracy", "{:.3f}"),
    ("rewards/margins", "margin", "{:.3f}"),
    ("val/rewards/accuracies", "held out", "{:.3f}"),
    ("val/score/mean", "validation", "{:.3f}"),
    ("val/accuracy", "held out", "{:.3f}"),
    ("system/tps", "tokens/s", "{:,.0f}"),
)
"""Metric, its label and format; metrics not measured yet are omitted, the last evaluation stays visible."""
TRAINED = tuple(shown for shown in SHOWN[:-1] if not shown[0].startswith("val/"))
"""Those of SHOWN that a training step has, without the speed."""
SUMMARISED = (*SHOWN[:-1], ("val/sampled/score/mean", "sampled", "{:.3f}"))
REFRESHES_PER_S = 4  # updates of the bar; each costs the controller half a millisecond


def summary(rows: Sequence[Mapping[str, Any]], max_steps: int) -> str:
    """A finished run in one line: steps, seconds per step, first and last value of each metric; and, with several
    domains, in a second line their validation scores. `rows` are all attempts' rows of metrics.jsonl."""
    steps = [row for row in rows if row["step"]]
    of = "" if steps and steps[-1]["step"] == max_steps else f" of {max_steps}"
    parts = [f"{len(steps)}{of} step{'s' * (bool(of) or len(steps) != 1)}"]
    if steps:
        total_s = sum(row.get("time/step_total") or 0.0 for row in steps)
        evaluated_s = sum(row.get(EVALUATION) or 0.0 for row in rows)
        parts[0] += f" in {duration(total_s)} ({total_s / len(steps):.3g} s each)"
        parts += [f"evaluations {duration(evaluated_s)}"] if evaluated_s else []
    for name, word, form in SUMMARISED:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            parts.append(f"{word} {form.format(values[0])} -> {form.format(values[-1])}")
    domains = [f"{name} {v[0]:.3f} -> {v[-1]:.3f}" for name, (_, v) in validated_domains(rows).items() if v]
    return "  ".join(parts) + (f"\nvalidation by domain: {', '.join(domains)}" if domains else "")


def evaluations_left(step: int, max_steps: int, eval_every: int) -> int:
    """Evaluations after `step`: every `eval_every` steps (0: never) and after the last."""
    if not eval_every or step == max_steps:
        return 0
    return (max_steps - 1) // eval_every - step // eval_every + 1


class Progress:
    """Progress of a run from `first_step` (steps done by earlier attempts) to `max_steps`. The time left is estimated
    from this attempt's recent steps and the duration of the last evaluation (every `eval_every` steps and after the
    last)."""

    def __init__(
        self,
        first_step: int,
        max_steps: int,
        screen: TextIO,
        clock: Callable[[], float] = time.monotonic,
        eval_every: int = 0,
    ):
        self._max_steps, self._eval_every = max_steps, eval_every
        self._evaluation_s = self._evaluated_s = 0.0  # seconds of the last evaluation, of all so far
        self._clock = clock
        self._last: dict[str, float] = {}
        self._recent: deque[tuple[int, float]] = deque([(first_step, clock())], maxlen=RECENT_STEPS + 1)
        self._bar: Bar | None = None
        if screen.isatty():
            widest = len(f"step {max_steps}/{max_steps}")  # a narrow terminal cuts the bar and the end, not the step
            self._bar = Bar(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(min_width=widest)),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=Console(file=screen),
                refresh_per_second=REFRESHES_PER_S,
            )
            self._task = self._bar.add_task("starting", total=max_steps, completed=first_step)
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        if step == self._recent[0][0]:
            self._recent.clear()  # an evaluation before the first step: timing starts after it
        if EVALUATION in metrics:
            self._evaluation_s = metrics[EVALUATION]
            self._evaluated_s += self._evaluation_s
        self._recent.append((step, self._clock() - self._evaluated_s))
        self._last |= {name: metrics[name] for name, _, _ in SHOWN if name in metrics}
        parts = [f"{word} {form.format(self._last[name])}" for name, word, form in SHOWN if name in self._last]
        if (left := self._seconds_left()) is not None:
            parts.append(f"ETA {duration(left)}")
        line = "  ".join(parts) or "starting"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        text = f"step {step}/{self._max_steps}  {line}".rstrip()
        logger.info("%s", text, extra=BARE if self._bar is None else UNSHOWN)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _seconds_left(self) -> float | None:
        (start, began), (step, now) = self._recent[0], self._recent[-1]
        if step == start:
            return None
        evaluations = evaluations_left(step, self._max_steps, self._eval_every)
        return (self._max_steps - step) * (now - began) / (step - start) + evaluations * self._evaluation_s
