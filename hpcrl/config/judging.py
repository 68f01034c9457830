"""Checks of the models that a run's own ranks serve to rewards. The judge's engine is checked as a generator's."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.spec.problems import Path, Problem
from hpcrl.spec.tables import GEN_ENGINES

JUDGE_ENGINE = ("judge", "engine")
KEYS = {
    "generator": "judge",
    "model": "judge",
    "layout.generator": "layout.judge",
    "data.max_prompt_tokens": "judge.max_prompt_tokens",
    "rollout.max_new_tokens": "judge.max_new_tokens",
    "eval.max_new_tokens": "judge.max_new_tokens",
}
"""A generator's key that Config.of_judge() fills -> the judge's own key."""


def as_judges(problem: Problem) -> Problem:
    """A problem of Config.of_judge(), under the judge's own keys."""

    def own(path: Path) -> Path:
        for old, new in KEYS.items():
            keys = tuple(old.split("."))
            if path[: len(keys)] == keys:
                return (*new.split("."), *path[len(keys) :])
        return path

    text = problem.text
    for old, new in KEYS.items():
        ending = "" if "." in old and "layout" not in old else "."
        text = text.replace(old + ending, new + ending)
    return Problem(own(problem.path), text, tuple(map(own, problem.involves)))


def check_reward_model(config: Config) -> Iterator[Problem]:
    """Report a reward model without a folder."""
    if (domains := config.asks("reward_model")) and config.reward_model.path is None:
        text = f"reward_model.path: missing; reward.{domains[0]}.name=reward_model needs the folder of one"
        yield Problem(("reward_model", "path"), text, (("reward", domains[0]),))


def check_judge(config: Config) -> Iterator[Problem]:
    """Report a judge without a model, or with an engine that does not meet the run's requirements."""
    if not (domains := config.asks("judge")):
        return
    domain = domains[0]
    if config.judge.path is None:
        text = f"judge.path: missing; reward.{domain} has a judge with role=judge, which needs a model folder"
        yield Problem(("judge", "path"), text, (("reward", domain),))
    if config.deterministic and not GEN_ENGINES[config.judge.engine].deterministic:
        able = " or ".join(name for name, spec in GEN_ENGINES.items() if spec.deterministic and spec.selectable)
        text = f"deterministic: the {config.judge.engine} judge is not deterministic; use false, or judge.engine={able}"
        yield Problem(("deterministic",), text, (JUDGE_ENGINE,))
