"""Evaluations of one run's steps, side by side: a table, and whether their scores are comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.metrics.evaluated import score_text

COMPARABLE = ("temperature", "samples", "max_new_tokens", "path", "prompts")
"""Keys of a set in evaluation.json without which scores of two steps are not comparable."""


def table_over_steps(summaries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The lines of a table with a row for each step and a column for each set: score ± standard error, `-` for a set
    that the step was not evaluated on. `summaries`: step -> its evaluation.json."""
    steps = sorted(summaries)
    sets = list(dict.fromkeys(name for step in steps for name in summaries[step]["sets"]))
    cells = [["step", *(" ".join(name.split()) for name in sets)]]
    for step in steps:
        own = summaries[step]["sets"]
        cells.append([str(step), *(score_text(own[name]) if name in own else "-" for name in sets)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def unlike_the_last(summaries: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The steps whose sets, sampling or number of prompts are not those of the last step, ascending."""
    if not summaries:
        return []
    last = _comparable(summaries[max(summaries)])
    return [step for step in sorted(summaries) if _comparable(summaries[step]) != last]


def _comparable(summary: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [own.get(key) for key in COMPARABLE] for name, own in summary["sets"].items()}
