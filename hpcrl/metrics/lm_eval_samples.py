"""Reads samples of lm-evaluation-harness (`--log_samples`: `samples_TASK_DATE.jsonl`) for a comparison."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from hpcrl.metrics.compared_side import (
    By,
    ComparedResponse,
    ComparedSide,
    ResponseTexts,
    as_text,
    line_at,
    lines_of,
    object_of,
)

NAME = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[^/]*)\.jsonl")
"""A file's name: task and date."""


def is_samples(file: Path) -> bool:
    """Whether a file begins with a sample of lm-evaluation-harness."""
    first = next(lines_of(file), None)
    try:
        return first is not None and "doc_id" in object_of(first.content)
    except ValueError:
        return False


def newest_samples(folder: Path) -> dict[str, Path]:
    """Task -> its newest file in a folder, in order of the tasks; empty if there is none."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("samples_*.jsonl"), key=lambda path: path.name):
        if found := NAME.fullmatch(path.name):
            newest[found[1]] = path
    return dict(sorted(newest.items()))


def read_samples(files: list[Path], by: By = "prompt", metric: str | None = None) -> ComparedSide:
    """The samples of tasks, one file each. A prompt is a document of the task: its hash, or with by=row its number.

    Args:
        metric: METRIC or METRIC,FILTER; None: the first metric and the first filter of each file.

    ValueError names a line that is invalid, and a metric or filter that a file does not have.
    """
    side = ComparedSide(files[0] if len(files) == 1 else files[0].parent, "lm-evaluation-harness")
    side.model = files[0].absolute().parent.name  # lm-evaluation-harness has a folder for each model
    for file in files:
        _read_task(side, file, by, metric or "")
    return side


def _read_task(side: ComparedSide, file: Path, by: By, metric: str) -> None:
    """Add a task's samples. Each filter has a line of its own for each document; one filter is read."""
    name, _, wanted = metric.partition(",")
    task = found[1] if (found := NAME.fullmatch(file.name)) else file.stem
    prompts: dict[str, list[ComparedResponse]] = {}
    filters: dict[str, None] = {}
    for line in lines_of(file):
        try:
            row = object_of(line.content)
        except ValueError as error:
            if not line.ended:
                side.torn = file
                break
            raise ValueError(f"{file}:{line.number}: not JSON: {error}") from error
        if "doc_id" not in row:
            raise ValueError(f"{file}:{line.number}: no doc_id, which each sample of lm-evaluation-harness has")
        filtered = str(row.get("filter", "none"))
        filters[filtered] = None
        wanted = wanted or filtered
        if filtered != wanted:
            continue
        metrics = row.get("metrics") or []
        name = name or str(next(iter(metrics), ""))
        score = row.get(name)
        if not isinstance(score, bool | int | float) or not math.isfinite(score):
            there = ", ".join(map(str, metrics)) or "not named in the file"
            raise ValueError(
                f"{file}:{line.number}: no number for the metric {name or '(none)'}; --metric METRIC[,FILTER] selects "
                f"another (there: {there}), --set NAME reads one task only"
            )
        key = str(row["doc_id"]) if by == "row" or "doc_hash" not in row else str(row["doc_hash"])
        prompts.setdefault(key, []).append(ComparedResponse(float(score), False, file, line.offset))
    if not prompts:
        if filters:
            there = ", ".join(filters)
            raise ValueError(
                f"{file}: no samples of the filter {wanted}, which --metric selects (there: {there}); --set NAME reads "
                "one task only"
            )
        raise ValueError(f"{file}: no samples")
    side.prompts[task] = prompts
    side.settings[task] = {"metric": f"{name},{wanted}"}


def sample_texts(response: ComparedResponse) -> ResponseTexts:
    """Prompt, response, filtered response and target of a sample; log-likelihoods as they are written."""
    line = line_at(response)
    arguments, prompt = line.get("arguments"), ""
    if isinstance(arguments, dict) and isinstance(request := next(iter(arguments.values()), None), dict):
        prompt = as_text(next(iter(request.values()), ""))
    shown, answer = _only(line.get("resps")), _only(line.get("filtered_resps"))
    return ResponseTexts(prompt, shown, answer="" if answer == shown else answer, gold=str(line.get("target", "")))


def _only(responses: Any) -> str:
    """The only text in nested lists, else the lists as JSON."""
    while isinstance(responses, list) and len(responses) == 1:
        responses = responses[0]
    return responses if isinstance(responses, str) else json.dumps(responses, ensure_ascii=False)
