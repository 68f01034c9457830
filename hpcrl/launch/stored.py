"""Checks the stored rollouts for debug=train_only before the start: their steps, by file names, and their sampling."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config import Config, ConfigError, Problem
from hpcrl.config.off_policy import starts_clipped, weighed_shares
from hpcrl.run_folder import CONFIG, stored_config
from hpcrl.spec.problems import dotted
from hpcrl.system.files import steps_in


def stored_steps(run_dir: Path) -> int:
    """Number of consecutive steps, counted from step 1, whose rollouts are in a run folder."""
    steps, count = set(steps_in(run_dir / "rollouts")), 0
    while count + 1 in steps:
        count += 1
    return count


def check_rollouts(config: Config) -> list[Problem]:
    """Problems of the run named by `load_rollouts`; none for other modes."""
    if config.debug != "train_only" or config.load_rollouts is None:
        return []
    run_dir = Path(config.load_rollouts)
    count = stored_steps(run_dir)
    if not count:
        text = (
            f"load_rollouts: {run_dir} has no rollouts/step_000001; give the folder of a run that stored its rollouts"
        )
        return [Problem(("load_rollouts",), text)]
    problems = []
    if count < config.max_steps:
        text = f"max_steps: {config.max_steps}, but {run_dir} has rollouts of {count} steps; use max_steps={count}"
        problems.append(Problem(("max_steps",), text, (("load_rollouts",),)))
    return problems + _check_sampling(config, run_dir)


def _check_sampling(config: Config, run_dir: Path) -> list[Problem]:
    """Problems of the stored run's configuration: another temperature; top-k, top-p or min-p that do not fit the
    correction or ratio_to; no greedy responses or decoupled rewards although the algorithm reads them."""
    if not (run_dir / CONFIG).exists():
        return []
    try:
        stored = stored_config(run_dir)
    except ConfigError as error:
        return [Problem(("load_rollouts",), f"load_rollouts: {line}") for line in error.problems]
    problems, asked, drawn = [], config.rollout.temperature, stored.rollout
    if config.algorithm_spec.greedy_baseline and not stored.algorithm_spec.greedy_baseline:
        problems.append(_lacking(f"the reward of a greedy response to every prompt, but the rollouts of {run_dir}"))
    if config.decoupling_eps is not None and stored.decoupling_eps is None:
        problems.append(_lacking(f"decoupled rewards, but the rollouts of {run_dir}"))
    key, given = weighed_shares(config, drawn)
    if key:
        text = (
            f"algorithm.{key}: sequence multiplies the shares of probability that sampling kept at each "
            f"token, but the rollouts of {run_dir} were drawn with {given}; use token, turn or geometric"
        )
        problems.append(Problem(("algorithm", key), text, (("load_rollouts",),)))
    if text := starts_clipped(config, drawn):
        text = f"algorithm.ratio_to: the sampling of the rollouts of {run_dir} does not fit: rollout.top_p={text}"
        problems.append(Problem(("algorithm", "ratio_to"), text, (("load_rollouts",),)))
    if drawn.temperature != asked:
        text = f"rollout.temperature: {asked:g}, but the rollouts of {run_dir} were drawn at {drawn.temperature:g}"
        use = f"{text}; use {drawn.temperature:g}"
        problems.append(Problem(("rollout", "temperature"), use, (("load_rollouts",),)))
    return problems


def _lacking(text: str) -> Problem:
    path = ("algorithm", "advantage_estimator")
    why = f"{dotted(path)}: it needs {text} have none; use rollouts of a run with the same algorithm"
    return Problem(path, why, (("load_rollouts",),))
