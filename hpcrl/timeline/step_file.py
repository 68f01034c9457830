"""The timeline of one step as a file: RUN/timeline/step_NNNNNN.jsonl (docs/run_folder.md).

The first line is a StepHeader, every other line one row: a JSON array that starts with the row's kind. Times are
microseconds of rank 0's clock since the step's beginning, and negative before it; durations are microseconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.system.files import open_regular, step_name

FOLDER = "timeline"
FORMAT = 1
MAX_FILE_BYTES = 256 << 20
"""Larger files were not written by hpcrl, whose recorder has limits."""
NAME = re.compile(r"step_(\d{6,})\.jsonl")


class RankHeader(msgspec.Struct, frozen=True):
    """A rank of the run, with its roles."""

    rank: int
    host: str
    roles: list[str]


class ClockHeader(msgspec.Struct, frozen=True):
    """A host's clock: `offset_s` was added to its times, and may be wrong by `error_s`; null: it is unknown."""

    offset_s: float
    error_s: float | None


class StepHeader(msgspec.Struct, frozen=True):
    """The first line.

    Args:
        began: Unix time of the step's beginning, seconds.
        seconds: Duration of the step, with validation and saves.
        complete: Whether the step has ended; otherwise the run ended in it.
        omitted: Rank -> number of rows beyond the limits; -1: waits of rank 0, -2: samples.
        open_samples: Samples that were drawn, and neither trained nor dropped when the step ended.
    """

    format: int
    step: int
    began: float
    seconds: float
    complete: bool
    ranks: list[RankHeader]
    clocks: dict[str, ClockHeader]
    omitted: dict[int, int] = {}
    open_samples: int = 0


class CommandRow(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """A command that a rank executed; `number` counts the rank's commands from 1."""

    rank: int
    name: str
    number: int
    start: int
    duration: int


class ChunkRow(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """A decode chunk of a replica, on its first rank: tokens decoded; requests that ran and waited at its start."""

    rank: int
    number: int
    start: int
    duration: int
    tokens: int
    running: int
    queued: int


class WorkRow(msgspec.Struct, frozen=True, array_like=True, tag="work"):
    """The scoring of a sample (`reward`), or a turn of its environment (`turn`), until its rank knew the result."""

    what: str
    rank: int
    sample: int
    domain: str
    start: int
    duration: int


class WaitRow(msgspec.Struct, frozen=True, array_like=True, tag="wait"):
    """What the pipeline on rank 0 waited for: the name of a command, `rollouts` or `validation`."""

    what: str
    start: int
    duration: int


class SampleRow(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """The life of a sample that was trained or dropped in this step. Times are null if they are unknown: of an earlier
    attempt, or because the sample was dropped before.

    Args:
        prompt: Number of the prompt.
        replica: First rank of the replica that generated the sample.
        fate: trained, validated, baseline (the group's greedy response), or, for a sample that was not trained:
            filtered or failed (its prompt), lost (its replica), dropped (not needed any more).
        lag: Weight versions between the one that trained the sample and the oldest that wrote its group.
        tokens: The model's tokens, in this many turns.
        drawn: When the prompt was drawn.
        start: When the sample was sent to its replica.
        end: When its last token was decoded.
        scored: When its reward, or the end of its episode, was known on the rank that computed it.
        done: When it had been sent to the trainers, or was dropped.
    """

    sample: int
    prompt: int
    domain: str
    replica: int
    fate: str
    lag: int | None
    tokens: int
    turns: int
    drawn: int | None
    start: int | None
    end: int | None
    scored: int | None
    done: int


TimelineRow = CommandRow | ChunkRow | WorkRow | WaitRow | SampleRow


@dataclass
class StepTimeline:
    """A step as read from its file. `damaged` counts the lines that could not be read."""

    header: StepHeader
    commands: list[CommandRow] = field(default_factory=list)
    chunks: list[ChunkRow] = field(default_factory=list)
    works: list[WorkRow] = field(default_factory=list)
    waits: list[WaitRow] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    damaged: int = 0

    @property
    def length(self) -> int:
        """Duration of the step, microseconds."""
        return max(1, round(self.header.seconds * 1e6))

    def rows(self) -> Iterator[TimelineRow]:
        """All rows."""
        for rows in (self.commands, self.chunks, self.works, self.waits, self.samples):
            yield from rows

    def add(self, row: TimelineRow) -> None:
        """Add a row to the rows of its kind."""
        match row:
            case CommandRow():
                self.commands.append(row)
            case ChunkRow():
                self.chunks.append(row)
            case WorkRow():
                self.works.append(row)
            case WaitRow():
                self.waits.append(row)
            case SampleRow():
                self.samples.append(row)


def path_of(run_dir: Path, step: int) -> Path:
    """The file of a step."""
    return run_dir / FOLDER / f"{step_name(step)}.jsonl"


def recorded_steps(run_dir: Path) -> list[int]:
    """Steps that have a file, ascending; empty without a folder."""
    folder = run_dir / FOLDER
    return steps_among(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps of the files with these names, ascending; other names do not count."""
    found = map(NAME.fullmatch, names)
    return sorted(int(match[1]) for match in found if match)


def encode(step: StepTimeline) -> bytes:
    """The content of the step's file."""
    return msgspec.json.Encoder().encode_lines([step.header, *step.rows()])


def read_step(path: Path) -> StepTimeline:
    """A step's timeline; unreadable lines are counted and left out. ValueError if the file has no valid first line,
    OSError if it cannot be read."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size / 2**20:.0f} MiB, at most {MAX_FILE_BYTES >> 20} MiB are read")
        first, *lines = file.read().split(b"\n")
    try:
        header = msgspec.json.decode(first, type=StepHeader, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}, line 1: not the header of a timeline: {error}") from error
    if header.format != FORMAT:
        raise ValueError(f"{path}: format {header.format}, this version of hpcrl reads format {FORMAT}")
    step, decoder = StepTimeline(header), msgspec.json.Decoder(TimelineRow)
    known = {rank.rank for rank in header.ranks}
    for line in lines:
        if not line:
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            step.damaged += 1
            continue
        if isinstance(row, CommandRow | ChunkRow | WorkRow) and row.rank not in known:
            step.damaged += 1
        else:
            step.add(row)
    return step


def prune(run_dir: Path, keep_steps: int) -> None:
    """Remove the files of old steps: the newest `keep_steps` stay, and every step that `keep_steps` divides."""
    for step in recorded_steps(run_dir)[:-keep_steps]:
        if step % keep_steps:
            path_of(run_dir, step).unlink(missing_ok=True)
