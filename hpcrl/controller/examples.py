"""Validation completions of every evaluation: examples.json and examples.html in the run folder, and rows of the
trackers' tables."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.controller.pages import page, small, tag
from hpcrl.spec.media import Medium
from hpcrl.system.files import write_durably

logger = logging.getLogger(__name__)

FILE, PAGE, TABLE = "examples.json", "examples.html", "examples"
Examples = dict[int, list[dict[str, Any]]]
"""Step -> its completions: domain and row, prompt, answer, response, score."""


def read_examples(run_dir: Path) -> Examples:
    """The completions in the run folder; none if the file is damaged, which does not end a run."""
    try:
        return {int(step): list(rows) for step, rows in json.loads((run_dir / FILE).read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s cannot be read: %s; continuing without it", run_dir / FILE, error)
        return {}


def keep_examples(
    run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]], media: Sequence[Sequence[Medium]]
) -> None:
    """Add a step's completions. `media` has the images of each one's prompt."""
    kept: dict[int, Any] = read_examples(run_dir) | {step: rows}
    write_durably(run_dir / FILE, json.dumps(kept, indent=1).encode())
    images = {example_key(row): shown for row, shown in zip(rows, media, strict=True)}
    write_durably(run_dir / PAGE, _page(f"{run_dir.name}: validation", kept, images))


def example_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identifies a completion's prompt; prompts with different images may have equal texts. Versions until 0.6 stored
    only the text."""
    return row.get("domain"), row.get("row"), row["prompt"]


def _page(title: str, kept: Examples, images: Mapping[tuple[Any, ...], Sequence[Medium]]) -> bytes:
    """For each prompt its images, its answer, and the responses of all evaluations."""
    found: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for step in sorted(kept):
        for row in kept[step]:
            found.setdefault(example_key(row), []).append((step, row))
    body = []
    for key, responses in found.items():
        first = responses[0][1]
        shown = "".join(tag(small(medium), "an image of the prompt") for medium in images.get(key, ()))
        told = "".join(
            f"<tr><td>{step}</td><td>{row['score']:.4g}</td><td><pre>{html.escape(str(row['response']))}</pre></td></tr>"
            for step, row in responses
        )
        asked, answer = (html.escape(str(first.get(name, ""))) for name in ("prompt", "answer"))
        body.append(
            f"<div><pre>{asked}</pre>{shown}<p>Answer: {answer}</p>"
            f"<table><tr><th>step</th><th>score</th><th>response</th></tr>{told}</table></div>"
        )
    return page(title, body)


def as_table(step: int, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a tracker's table."""
    return [{"step": step, **row} for row in rows]
