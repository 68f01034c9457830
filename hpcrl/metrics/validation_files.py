"""Reads the responses of a run's validation, `validation/step_NNNNNN.jsonl`, for a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

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
from hpcrl.metrics.responses import FOLDER, FORMAT, evaluated_steps, responses_file


class _Header(msgspec.Struct):
    format: Any
    model: str | None = None
    step: int | None = None
    sets: dict[str, dict[str, Any]] = {}


class _Scored(msgspec.Struct):
    set: str
    prompt_id: str
    score: float
    row: int
    error: str | None = None


def validation_file(run: Path, step: int | None) -> Path:
    """The file of a step, or of the newest one. ValueError names the steps that a run has."""
    steps = evaluated_steps(run)
    if not steps:
        raise ValueError(
            f"{run}: no {FOLDER}/step_NNNNNN.jsonl, which runs with data.val and eval_every, and hpcrl eval, write"
        )
    if step is not None and step not in steps:
        raise ValueError(f"{run}@{step}: no validation of step {step}; there are steps {', '.join(map(str, steps))}")
    return responses_file(run, steps[-1] if step is None else step)


def read_validation(file: Path, by: By = "prompt") -> ComparedSide:
    """The responses of a validation file. An incomplete last line, of a file that is being written, is left out.
    ValueError names a line that is invalid, a file of another format, and a file without responses."""
    lines = lines_of(file)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{file}: the file is empty")
    try:
        header = msgspec.json.decode(first.content, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}:1: not the header of a validation file: {error}") from error
    if header.format != FORMAT:
        raise ValueError(
            f"{file}:1: format {header.format!r}, but this version of hpcrl reads format {FORMAT}: "
            "compare with the version that wrote the file"
        )
    side = ComparedSide(file, "hpcrl", header.model or "", header.step, header.sets)
    decoder = msgspec.json.Decoder(_Scored)
    for line in lines:
        try:
            row = decoder.decode(line.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not line.ended:
                side.torn = file
                break
            if (found := _with_surrogates(line.content)) is None:
                raise ValueError(f"{file}:{line.number}: not a scored response: {error}") from error
            row = found
        key = row.prompt_id if by == "prompt" else str(row.row)
        response = ComparedResponse(row.score, row.error is not None, file, line.offset)
        side.prompts.setdefault(row.set, {}).setdefault(key, []).append(response)
    if not side.prompts:
        raise ValueError(f"{file}: a header, but no responses")
    return side


def _with_surrogates(line: bytes) -> _Scored | None:
    """A response with half characters, as in an error's text with a file name that is no Unicode: Python's json writes
    them, and msgspec refuses them. None if the line is invalid for another reason."""
    try:
        row = msgspec.convert(object_of(line), type=_Scored)
    except (ValueError, msgspec.ValidationError):
        return None
    return row if math.isfinite(row.score) else None


def validation_texts(response: ComparedResponse) -> ResponseTexts:
    """Prompt, response and its answer of a line of a validation file."""
    line = line_at(response)
    answer = line.get("answer")
    texts = as_text(line.get("prompt")), as_text(line.get("response"))
    return ResponseTexts(*texts, answer="" if answer is None else str(answer), gold="")
