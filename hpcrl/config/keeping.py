"""Checks of `keep_best` and `resume_from`: a metric that no evaluation of this run can have, a branch of no run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from hpcrl.config.schema import Config
from hpcrl.spec.problems import Problem

VALIDATION = "val/"
"""The beginning of every validation metric's name."""
SUMMARISED = ("score", "response_length")
"""Metrics that are logged as NAME/mean, NAME/max and NAME/min, but for a single domain as NAME alone."""
PARTS = ("mean", "max", "min")
PLAIN = ("truncated", "score_stderr", "score_errors")
REPEATED = re.compile(r"(pass|maj)@\d+")
"""The other names of hpcrl.metrics.responses.set_stats()."""


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
    elif not _may_exist(metric):
        known = [f"val/{name}/{part}" for name in SUMMARISED for part in PARTS] + [f"val/{name}" for name in PLAIN]
        near = get_close_matches(metric, known, 3, 0.5) or ["val/score/mean"]
        yield Problem(at, f"{text} is no metric of an evaluation; use {' or '.join(near)}, or val/DOMAIN/score")


def _may_exist(metric: str) -> bool:
    """Whether an evaluation may log a metric of this name, of all domains, of one, or of an environment."""
    *before, name = metric.removeprefix(VALIDATION).removeprefix("sampled/").split("/")
    if before[:1] == ["env"]:
        return len(before) > 1
    if name in PARTS:
        return before in ([each] for each in SUMMARISED)
    return name in PLAIN or REPEATED.fullmatch(name) is not None or (name in SUMMARISED and bool(before))


def check_resume_from(config: Config) -> Iterator[Problem]:
    """Report a branch of a run that starts over, and the reason of no branch."""
    if config.resume_reason and config.resume_from is None:
        text = "resume_reason: it is recorded with a branch; give resume_from=N or latest, too"
        yield Problem(("resume_reason",), text, (("resume_from",),))
    if config.resume_from is not None and config.resume == "fresh":
        text = f"resume_from: {config.resume_from} continues a run, and resume=fresh starts another; give one of them"
        yield Problem(("resume_from",), text, (("resume",),))
