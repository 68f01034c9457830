"""A copy of the policy of an earlier step: updates, what a checkpoint restores, and which exports are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hpcrl.checkpoint.state import STATE, encode_state
from hpcrl.controller.clients import Trainer
from hpcrl.controller.policy_copy import PolicyCopy
from hpcrl.system.files import step_name, steps_in


class Exports:
    """A trainer that only makes folders."""

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)


TRAINER = cast(Trainer, Exports())


def save(run: Path, step: int, state: dict[str, Any]) -> None:
    folder = run / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / STATE).write_bytes(encode_state({"cursor": {}, "scheduler": {}, "counters": {}, **state}))


def test_exports_stay_as_long_as_a_checkpoint_needs_them(tmp_path: Path) -> None:
    loaded: list[Path] = []
    copy = PolicyCopy(tmp_path, "teacher", loaded.append)
    assert copy.state_dict() == {"teacher": {"step": 0}}
    for step in (2, 4, 6):
        assert copy.update(step, TRAINER).keys() == {"time/teacher_update"}
        save(tmp_path, step, copy.state_dict())
    folder = tmp_path / "teacher"
    assert loaded == [folder / step_name(step) for step in (2, 4, 6)] and steps_in(folder) == [2, 4, 6]
    for step in (2, 4):
        (tmp_path / "checkpoints" / step_name(step) / STATE).write_bytes(
            encode_state({"cursor": {}, "scheduler": {}, "counters": {}, "teacher": {"step": 6}})
        )
    copy.update(8, TRAINER)
    assert steps_in(folder) == [6, 8]


def test_a_checkpoint_restores_its_copy_or_names_the_folder_that_is_gone(tmp_path: Path) -> None:
    loaded: list[Path] = []
    PolicyCopy(tmp_path, "teacher", loaded.append).update(2, TRAINER)
    resumed = PolicyCopy(tmp_path, "teacher", loaded.append)
    resumed.load_state_dict({})
    resumed.load_state_dict({"teacher": {"step": 0}, "reference": {"step": 9}})
    assert len(loaded) == 1, "the initial policy is there"
    resumed.load_state_dict({"teacher": {"step": 2}})
    assert loaded == [tmp_path / "teacher" / "step_000002"] * 2 and resumed.state_dict() == {"teacher": {"step": 2}}
    with pytest.raises(ValueError, match=r"teacher/step_000004, the teacher of this checkpoint, does not exist"):
        resumed.load_state_dict({"teacher": {"step": 4}})
    assert resumed.state_dict() == {"teacher": {"step": 2}}
