"""Validation completions of every evaluation: examples.json in the run folder, and rows of the trackers' tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.system.files import write_durably

logger = logging.getLogger(__name__)

FILE, TABLE = "examples.json", "examples"
Examples = dict[int, list[dict[str, Any]]]
"""Step -> its completions: prompt, answer, response, score."""


def read_examples(run_dir: Path) -> Examples:
    """The completions in the run folder; none if the file is damaged, which does not end a run."""
    try:
        return {int(step): list(rows) for step, rows in json.loads((run_dir / FILE).read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s cannot be read: %s; continuing without it", run_dir / FILE, error)
        return {}


def keep_examples(run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add a step's completions."""
    kept: dict[int, Any] = read_examples(run_dir) | {step: rows}
    write_durably(run_dir / FILE, json.dumps(kept, indent=1).encode())


def as_table(step: int, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a tracker's table."""
    return [{"step": step, **row} for row in rows]
