"""Checks of `keep_best` and `resume_from`: a metric that no evaluation of this run can have, a branch of no run."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.spec.problems import Problem

VALIDATION = "val/"
"""The beginning of every validation metric's name."""
SUMMARISED = ("score", "response_length")
"""Metrics that are logged as NAME/mean, NAME/max and NAME/min, but for a single domain as NAME alone."""


def check_keep_best(config: Config) -> Iterator[Problem]:
    """Report a metric that is no validation metric, or that this run's evaluations cannot have. Names of domains are
    not known here; the first evaluation warns about those."""
    metric, at = config.keep_best.metric, ("keep_best", "metric")
    if metric is None:
        return
    text = f"keep_best.metric: {metric!r}"
    if not metric.startswith(VALIDATION):
        yield Problem(at, f"{text} is no validation metric, which begins with {VALIDATION}; use val/score/mean")
    elif config.validates_rows:
        return
    elif not config.evaluates:
        needed = (("data", "val"), ("eval_every",))
        yield Problem(at, f"{text} needs validation; give data.val and eval_every above 0", needed)
    elif metric.startswith("val/sampled/") and config.rollout.temperature == config.eval.temperature:
        same = f"rollout.temperature and eval.temperature are both {config.eval.temperature:g}"
        use = f"val/{metric.removeprefix('val/sampled/')}"
        involved = (("rollout", "temperature"), ("eval", "temperature"))
        yield Problem(at, f"{text} is not measured separately, since {same}; use {use}", involved)
    elif metric in {f"val/{prefix}{name}" for prefix in ("", "sampled/") for name in SUMMARISED}:
        yield Problem(at, f"{text} is logged as {metric}/mean, /max and /min; use {metric}/mean")


def check_resume_from(config: Config) -> Iterator[Problem]:
    """Report a branch of a run that starts over, and the reason of no branch."""
    if config.resume_reason and config.resume_from is None:
        text = "resume_reason: it is recorded with a branch; give resume_from=N or latest, too"
        yield Problem(("resume_reason",), text, (("resume_from",),))
    if config.resume_from is not None and config.resume == "fresh":
        text = f"resume_from: {config.resume_from} continues a run, and resume=fresh starts another; give one of them"
        yield Problem(("resume_from",), text, (("resume",),))
