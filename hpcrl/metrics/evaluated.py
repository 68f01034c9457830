"""The results of an evaluation: evaluation.json, and its table as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.metrics.responses import FORMAT, ResponseRow, by_prompt, by_set, response_stats, set_stats
from hpcrl.metrics.stats import flatten

SUMMARY = "evaluation.json"
"""In the folder of a run that only evaluates."""
MAX_TAGS = 30
"""Tags of a set that have results of their own, those with the most responses."""
COLUMNS = ("set", "prompts", "samples", "score", "pass@k", "maj@n", "length", "truncated", "errors")


def summarised(head: Mapping[str, Any], rows: Sequence[ResponseRow]) -> dict[str, Any]:
    """The content of evaluation.json: `metrics` by the names of metrics.jsonl, and `sets`, the same for each set by the
    names' ends, with `tags`, the same for each tag, if rows have different ones. `head` is the header of the responses'
    file."""
    sets = {name: _of_set(own, head["sets"].get(name, {})) for name, own in by_set(rows).items()}
    known = {key: head[key] for key in ("model", "step")}
    return {"format": FORMAT, **known, "metrics": flatten(response_stats("val", rows)), "sets": sets}


def _of_set(rows: Sequence[ResponseRow], asked: Mapping[str, Any]) -> dict[str, Any]:
    tags = {tag: _results(own) for tag, own in _by_tag(rows).items()}
    return {**asked, **_results(rows), "tags": tags}


def _results(rows: Sequence[ResponseRow]) -> dict[str, Any]:
    stats = flatten({name.removesuffix("/*"): value for name, value in set_stats("val", rows).items()})
    told = {name.removeprefix("val/"): value for name, value in stats.items()}
    errors = sum(row["error"] is not None for row in rows)
    counts = {"prompts": len(by_prompt(rows)), "responses": len(rows)}
    return {**counts, "score_stderr": None, **told, "score_errors": errors}


def _by_tag(rows: Sequence[ResponseRow]) -> dict[str, list[ResponseRow]]:
    """Tag -> its responses, by name; empty if all responses have the same tags."""
    found: dict[str, list[ResponseRow]] = {}
    for row in rows:
        for tag in dict.fromkeys(row["tags"]):
            found.setdefault(tag, []).append(row)
    if all(len(own) == len(rows) for own in found.values()):
        return {}
    most = sorted(found, key=lambda tag: (-len(found[tag]), tag))[:MAX_TAGS]
    return {tag: found[tag] for tag in sorted(most)}


def as_table(summary: Mapping[str, Any]) -> list[str]:
    """The lines of a table with a row for each set, and for each of its tags."""
    cells = [COLUMNS, *table_rows(summary)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def table_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's cells in the order of COLUMNS: a row for each set, and below it a row for each tag."""
    found = []
    for name, own in summary["sets"].items():
        found.append(_cells(" ".join(name.split()), own, own["samples"]))
        for tag, of_tag in own.get("tags", {}).items():
            found.append(_cells(f"- {' '.join(tag.split())}", of_tag, own["samples"]))
    return found


def scores_in_short(summary: Mapping[str, Any]) -> list[str]:
    """`SET SCORE`, with the standard error if there is one, for each set. KeyError, TypeError or AttributeError if the
    summary is not one."""
    return [f"{' '.join(name.split())} {score_text(own)}" for name, own in summary["sets"].items()]


def score_text(own: Mapping[str, Any]) -> str:
    """`score`, with the standard error if there is one, of a set in evaluation.json."""
    stderr = own["score_stderr"]
    return f"{own['score']:.3f}" + (f" \u00b1 {stderr:.3f}" if stderr is not None else "")


def _cells(name: str, own: Mapping[str, Any], samples: int) -> tuple[str, ...]:
    passed = " ".join(f"{key.removeprefix('pass')}={own[key]:.3f}" for key in own if key.startswith("pass@"))
    voted = next((f"{own[key]:.3f}" for key in own if key.startswith("maj@")), "-")
    counts = str(own["prompts"]), str(samples)
    rest = f"{own['response_length']:.1f}", f"{own['truncated']:.1%}", str(own["score_errors"])
    return name, *counts, score_text(own), passed or "-", voted, *rest
