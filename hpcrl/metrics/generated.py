"""What a generation of rows (pipeline=generate) has done: counts, its table, and its files in the run folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "generate"
SUMMARY = "generation.json"
"""In the run folder of a finished generation."""
FIELDS = ("prompts", "responses", "rows", "tokens", "row_tokens", "scored", "score", "scored_rows", "row_score")
REASONS = ("skipped", "dropped", "no_pair")
BLOCK_BYTES = 1 << 20


@dataclass
class GeneratedCounts:
    """Counts of some prompts.

    Args:
        prompts: Prompts that were responded to.
        tokens: Tokens of all responses; `row_tokens` of those that have a row.
        scored: Responses with a reward or an environment; `score` is the sum of their scores.
        scored_rows: Their rows; `row_score` is the sum of their scores, of a pair the chosen response's.
        skipped: Reason -> rows of the data that are no usable prompts.
        dropped: Reason -> responses without a row.
        no_pair: Reason -> prompts without a pair.
    """

    prompts: int = 0
    responses: int = 0
    rows: int = 0
    tokens: int = 0
    row_tokens: int = 0
    scored: int = 0
    score: float = 0.0
    scored_rows: int = 0
    row_score: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    no_pair: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> GeneratedCounts:
        """The counts that as_json() wrote. TypeError if they are none."""
        found = cls(**{name: stored.get(name, 0) for name in FIELDS})
        for name in REASONS:
            getattr(found, name).update(stored.get(name, {}))
        return found

    def as_json(self) -> dict[str, Any]:
        """The counts that are not 0."""
        known = {name: getattr(self, name) for name in (*FIELDS, *REASONS)}
        return {name: dict(value) if name in REASONS else value for name, value in known.items() if value}

    def add(self, other: GeneratedCounts) -> None:
        """Add the counts of other prompts."""
        for name in FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in REASONS:
            getattr(self, name).update(getattr(other, name))

    @property
    def mean_score(self) -> float | None:
        """Of the responses with a score; None without any."""
        return self.score / self.scored if self.scored else None

    def as_table(self) -> list[str]:
        """The lines of a table."""
        lines = [("prompts", self.prompts, "")]
        lines += [(f"  {reason}", count, "rows of the data left out") for reason, count in _most(self.skipped)]
        lines += [(f"  {reason}", count, "no pair") for reason, count in _most(self.no_pair)]
        lines.append(("responses", self.responses, _tokens(self.tokens, self.mean_score)))
        lines += [(f"  {reason}", count, "dropped") for reason, count in _most(self.dropped)]
        kept = self.row_score / self.scored_rows if self.scored_rows else None
        lines.append(("rows", self.rows, _tokens(self.row_tokens, kept)))
        width = max(len(name) for name, _, _ in lines)
        return [f"{name.ljust(width)}  {count:>10,}  {text}".rstrip() for name, count, text in lines]


def work_file(run_dir: Path) -> Path:
    """The rows and counts of each prompt that is done, one line each after a header; its last line may be torn."""
    return run_dir / FOLDER / "prompts.jsonl"


def written_file(run_dir: Path) -> Path:
    """What identifies the file of rows as this run's."""
    return run_dir / FOLDER / "written.json"


def count_done(run_dir: Path) -> int:
    """The prompts whose rows are stored."""
    try:
        if (run_dir / SUMMARY).is_file():
            stored = json.loads((run_dir / SUMMARY).read_bytes())
            return int(stored["counts"]["prompts"])
        with work_file(run_dir).open("rb") as file:
            lines = sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK_BYTES), b""))
        return max(lines - 1, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _most(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def _tokens(tokens: int, score: float | None) -> str:
    return f"{tokens:,} tokens" + (f", mean score {score:.3f}" if score is not None else "")
