"""Checks that the environment swe can play a row."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hpcrl.data.env_sources import SEED_COLUMN
from hpcrl.envs.swe.hidden import problem_of

COLUMNS = ("files", "repository", "hidden_tests")
FOREIGN = ("base_commit", "instance_id", "test_patch", "FAIL_TO_PASS", "docker_image", "image_name")
"""Columns of SWE-bench, SWE-Gym, R2E and SWE-smith."""
OF_ROW = ("prompt", "answer", "messages", SEED_COLUMN)


def problem_of_row(columns: Mapping[str, Any]) -> str:
    """Why a row with these columns cannot be played, or would play another task; empty if it can be played."""
    given = {name: columns[name] for name in COLUMNS if columns.get(name) is not None}
    if not given and columns.get(SEED_COLUMN) is not None:
        return ""  # a generated task, of this seed
    if there := [name for name in FOREIGN if name in columns and "files" not in given and "repository" not in given]:
        return (
            f"column {there[0]}: rows of SWE-bench, SWE-Gym, R2E and SWE-smith need an image and a commit for each "
            "task, which swe does not support; give the columns files or repository, and hidden_tests"
        )
    for missing in (name for name in COLUMNS if name not in given):
        others = [name for name in columns if name not in (*COLUMNS, *OF_ROW)]
        if near := get_close_matches(missing, others, n=1, cutoff=0.75):
            return f"column {near[0]}: did you mean {missing}?"
    if not given:
        return "it has neither files nor repository with hidden_tests; for generated tasks use data.train=env:NAME"
    if "files" in given and "repository" in given:
        return "it needs one of the columns files and repository, but has both"
    if "hidden_tests" not in given:
        return "it has no hidden_tests, which judge the repair"
    if "files" not in given and "repository" not in given:
        return "it has hidden_tests without the columns files or repository"
    for name in ("files", "hidden_tests"):
        if name in given and not _texts(given[name]):
            return f"column {name} must be an object, path -> text, not {str(given[name])[:60]!r}"
    if "repository" in given and not isinstance(given["repository"], str):
        return f"column repository must be a folder or an archive, not {str(given['repository'])[:60]!r}"
    return problem_of(given["hidden_tests"])


def expert_problem_of_row(columns: Mapping[str, Any]) -> str:
    """Why the expert, which knows the repairs of generated tasks, cannot play a row; empty if it can."""
    if any(columns.get(name) is not None for name in COLUMNS):
        return (
            "the expert (imitation.expert_turns) plays only generated tasks (env:NAME), and this is a task of its own"
        )
    return ""


def _texts(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and bool(value) and all(isinstance(text, str) for text in [*value, *value.values()])
    )
