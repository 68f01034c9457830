"""The responses of an evaluation: validation/step_NNNNNN.jsonl in a run folder, and the metrics of its rows.

The first line is a header, each further line a response (docs/evaluation.md). An evaluation alone appends the responses
to a partial file, whose last line may be torn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics import repeated
from hpcrl.metrics.stats import Stats, merge, scalar
from hpcrl.system.files import STEP_NAME, step_name, write_durably

FOLDER = "validation"
FORMAT = 1
ResponseRow = Mapping[str, Any]
"""A response: set, prompt_id, sample, greedy, prompt, response, score, rewards, answer, tokens, truncated, error, tags,
row."""


def responses_file(run_dir: Path, step: int) -> Path:
    """The file with the responses of a step's evaluation."""
    return run_dir / FOLDER / f"{step_name(step)}.jsonl"


def evaluated_steps(run_dir: Path) -> list[int]:
    """Steps whose evaluations have a file of responses, ascending."""
    names = (STEP_NAME.fullmatch(path.stem) for path in (run_dir / FOLDER).glob("*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def partial_file(run_dir: Path) -> Path:
    """The responses of an unfinished evaluation alone."""
    return run_dir / FOLDER / "partial.jsonl"


def header(model: str, step: int, sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The first line's object. `sets` has temperature, samples, max_new_tokens and path of each set."""
    return {"format": FORMAT, "model": model, "step": step, "sets": {name: dict(own) for name, own in sets.items()}}


def as_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The objects as lines of ASCII, so no reader finds an end of line in a text."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_responses(path: Path, head: Mapping[str, Any], rows: Iterable[ResponseRow]) -> None:
    """Replace the file atomically. OSError names a file that cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, as_lines([head, *rows]))


def read_responses(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, rows) of a file. Lines that are torn or no objects are skipped. ValueError without a header of this
    format; OSError if the file cannot be read."""
    lines = path.read_bytes().split(b"\n")[:-1]  # the last line of a whole file is empty
    found = [row for row in map(_object, lines) if row is not None]
    if not found or found[0].get("format") != FORMAT:
        raise ValueError(f"{path}: the first line is no header of an evaluation of format {FORMAT}")
    return found[0], [row for row in found[1:] if "set" in row]


def count_responses(run_dir: Path) -> int:
    """The number of responses that an evaluation alone has stored."""
    path = next((path for path in (partial_file(run_dir), responses_file(run_dir, 0)) if path.is_file()), None)
    return max(path.read_bytes().count(b"\n") - 1, 0) if path is not None else 0


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def by_prompt(rows: Iterable[ResponseRow]) -> dict[tuple[str, int], list[ResponseRow]]:
    """(set, row) -> the responses to this prompt, in order of sample; prompts in order of appearance."""
    found: dict[tuple[str, int], list[ResponseRow]] = {}
    for row in rows:
        found.setdefault((row["set"], row["row"]), []).append(row)
    return {key: sorted(group, key=lambda row: row["sample"]) for key, group in found.items()}


def by_set(rows: Iterable[ResponseRow]) -> dict[str, list[ResponseRow]]:
    """Set -> its responses, in order of appearance."""
    found: dict[str, list[ResponseRow]] = {}
    for row in rows:
        found.setdefault(row["set"], []).append(row)
    return found


def response_stats(prefix: str, rows: Sequence[ResponseRow]) -> Stats:
    """An evaluation's scores, lengths and errors, and its environments' and rewards' metrics (env/SET/NAME); with
    several sets, scores and lengths also per set. Empty without rows."""
    sets = by_set(rows)
    shown: list[Stats] = []
    for name, own in sets.items() if len(sets) > 1 else ():
        told = set_stats(f"{prefix}/{name}", own)
        shown.append({metric.removesuffix("/*"): value for metric, value in told.items()})
    errors = {f"{prefix}/score_errors": scalar(sum(row["error"] is not None for row in rows))} if rows else {}
    played = [
        {f"{prefix}/env/{row['set']}/{name}": scalar(value) for name, value in row["rewards"].items()} for row in rows
    ]
    return merge([set_stats(prefix, rows), *shown, *played, errors])


def set_stats(prefix: str, rows: Sequence[ResponseRow]) -> Stats:
    """Scores of some responses, lengths, the share that reached the maximum length; if all prompts have equally many
    responses, the standard error over prompts and, with several responses, pass@k and maj@n."""
    found: list[Stats] = [
        {
            f"{prefix}/score/*": scalar(row["score"]),
            f"{prefix}/response_length/*": scalar(row["tokens"]),
            f"{prefix}/truncated": scalar(row["truncated"]),
        }
        for row in rows
    ]
    if not found:
        return {}
    prompts = [
        repeated.PromptScores([row["score"] for row in group], [row["answer"] for row in group])
        for group in by_prompt(rows).values()
    ]
    told = {}
    [*others, num_samples] = sorted({len(prompt.scores) for prompt in prompts})
    if not others and len(prompts) > 1:
        told["score_stderr"] = repeated.average(prompts).stderr
    if not others and num_samples > 1:
        told |= {f"pass@{k}": repeated.pass_at(k, prompts).mean for k in repeated.reported_k(num_samples)}
        if any(answer is not None for prompt in prompts for answer in prompt.extracted):
            told[f"maj@{num_samples}"] = repeated.majority(prompts).mean
    return merge(found) | {f"{prefix}/{name}": scalar(value) for name, value in told.items()}
