"""Branches of a run: it continues from a chosen checkpoint, with other values of keys that no plain resume may change.

`resume_from` in config.yaml is the step of a branch that has been opened, but whose later work has not been set aside
yet. The controller sets it aside and then calls settle_branch(), so a kill in between loses nothing: the next attempt,
however it is started, begins the branch again. facts.json has every branch, with the attempt that opened it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcrl.config import ConfigError
from hpcrl.config.config_file import arguments_in, write_config
from hpcrl.run_folder.records import CONFIG, read_attempts
from hpcrl.system.files import steps_in, write_durably

RESUME_FROM, REASON = "resume_from", "resume_reason"
OPENING_KEYS = (RESUME_FROM, REASON)
BRANCH_KEYS = (
    *(
        f"{section}.{key}"
        for section in ("trainer", "critic")
        for key in ("lr", "min_lr", "lr_warmup_steps", "lr_schedule", "lr_decay_steps", "weight_decay", "max_grad_norm")
    ),
    "trainer.betas",
    "trainer.eps",
    "critic.value_clip",
    *(f"algorithm.{key}" for key in ("pg_clip_low", "pg_clip_high", "dual_clip", "reward_clip", "advantage_clip")),
    *(f"algorithm.{key}" for key in ("kl_loss_coef", "kl_reward_coef", "kl_loss_estimator", "kl_reward_estimator")),
    *(f"algorithm.{key}" for key in ("kl_target", "kl_horizon")),
    *(f"algorithm.{key}" for key in ("entropy_loss_coef", "entropy_target", "entropy_coef_step")),
    *(f"algorithm.{key}" for key in ("correction_low", "correction_high", "off_policy_mask", "max_len_mask")),
    *(f"algorithm.difficulty_{key}" for key in ("mask", "low_threshold", "high_threshold")),
    "algorithm.error_max_len_clip",
    "loss",
    "rollout.temperature",
)
"""Keys that may differ at a branch, in addition to those that may differ at any resume. No state in a checkpoint
depends on them, except coefficients that the algorithm adapts (algorithms/adaptive.py)."""


@dataclass(frozen=True)
class Branch:
    """A branch to open from the checkpoint of `step`; `asked` is the value of resume_from, a step or latest."""

    step: int
    asked: int | str
    reason: str

    def record(self, changes: Sequence[str], arguments: Sequence[str] | None) -> dict[str, Any]:
        """Its entry in facts.json."""
        known = None if arguments is None else list(arguments)
        told = {"from": self.step, "asked": self.asked, "reason": self.reason}
        return told | {"changes": list(changes), "arguments": known}


def branches_of(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The branches in these records of attempts, oldest first, each with the attempt that opened it."""
    found = [(entry.get("attempt"), entry.get("branch")) for entry in attempts]
    known = [
        (attempt, each) for attempt, each in found if isinstance(each, Mapping) and isinstance(each.get("from"), int)
    ]
    return [{"attempt": attempt, "changes": [], "reason": "", **branch} for attempt, branch in known]


def is_same(branch: Mapping[str, Any], asked: int | str, reason: str) -> bool:
    """Whether a recorded branch, empty without one, was opened from this step, for this reason."""
    return asked in (branch.get("asked"), branch.get("from")) and reason == str(branch.get("reason", ""))


def find_branch(folder: Path, asked: int | str, reason: str, max_steps: int) -> Branch:
    """The branch to open. ConfigError, with the steps that have a checkpoint, if there is none at this step, or if no
    step would be left to train."""
    steps = steps_in(folder / "checkpoints")
    present = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
    step = (steps or [-1])[-1] if asked == "latest" else int(asked)
    if step not in steps:
        what = "there is none to begin from" if asked == "latest" else f"none of step {step}"
        raise ConfigError([f"resume_from: {folder} has {present}, {what}"])
    if max_steps and step >= max_steps:
        text = f"resume_from: step {step} is the run's last, with max_steps={max_steps}; raise max_steps"
        raise ConfigError([f"{text}, or choose an earlier step ({present})"])
    return Branch(step, asked, reason)


def changed_keys(branch: Mapping[str, Any]) -> Collection[str]:
    """The dotted keys that a recorded branch has changed."""
    return {str(line).partition(": ")[0] for line in branch.get("changes", [])}


def newest_branch(folder: Path) -> dict[str, Any] | None:
    """The run's newest branch; None without one. ConfigError if facts.json is damaged."""
    found = branches_of(read_attempts(folder))
    return found[-1] if found else None


def settle_branch(folder: Path) -> None:
    """Record that the work after the branch's checkpoint is set aside: from now on the run resumes from its newest
    checkpoint (idempotent)."""
    path = folder / CONFIG
    text = path.read_text()
    stored = yaml.safe_load(text)
    if stored.get(RESUME_FROM) is not None:
        write_durably(path, write_config(stored | {RESUME_FROM: None, REASON: ""}, arguments_in(text)))
