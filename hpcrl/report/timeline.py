"""Section `timeline`: what ranks did in some of the recorded steps, what they waited for, and the lives of samples."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcrl.report.run_files import RunFiles
from hpcrl.report.section import ReportSection
from hpcrl.rollout.types import split_sample_id
from hpcrl.timeline.step_file import FOLDER, ChunkRow, SampleRow, StepTimeline, path_of, read_step, steps_among
from hpcrl.timeline.waiting import LanePiece, RankActivity, RoleShares, role_shares

MAX_STEPS = 12
"""Maximum steps in the page: the newest, the slowest, the first, and steps evenly between them."""
PAGE_BYTES, STEP_BYTES = 2_000_000, 600_000
"""Maximum bytes of all steps, and of the lanes of one step, in the page."""
FINEST, COARSEST = 2000, 60
"""Parts into which a step is cut: shorter events are merged. The step gets as many parts as fit into STEP_BYTES."""
UNITS = 20_000
"""Times are rounded to this fraction of the step."""
MAX_DRAWN, LONGEST = 400, 40
"""Samples of a step that are drawn: the longest ones, and others evenly."""
WAITED = "waited for "
FATES = ("trained", "validated", "baseline", "filtered", "failed", "lost", "dropped")


def section(run: RunFiles) -> ReportSection | None:
    """None for a run without timelines."""
    recorded = steps_among(path.name for path in run.entries(FOLDER))
    shown: list[dict[str, Any]] = []
    size = 0
    for step in _by_importance(recorded, _slowest(run, recorded)):
        path = path_of(run.path, step)
        try:
            status = path.stat()
            data = _read(path, status.st_mtime_ns, status.st_size)
        except (ValueError, OSError) as error:
            run.problems.append(" ".join(str(error).split()))
            continue
        size += len(_json(data))
        if shown and size > PAGE_BYTES:
            break
        shown.append(data)
    if not shown:
        return None
    shown.sort(key=lambda data: int(data["step"]))
    data = {"steps": shown, "recorded": len(recorded), "slowest": _slowest(run, recorded), "units": UNITS}
    return ReportSection("timeline", "Timeline", data, "timeline.js")


@functools.lru_cache(maxsize=MAX_STEPS)
def _read(path: Path, modified_ns: int, size: int) -> dict[str, Any]:
    """A step's data, computed once per version of its file: a server makes the page of a run again and again."""
    return step_data(read_step(path))


def step_data(step: StepTimeline) -> dict[str, Any]:
    """One step for the page; its lanes have at most STEP_BYTES, unless there are thousands of ranks."""
    activity, header = RankActivity(step), step.header
    idle = {rank.rank for rank in header.ranks if rank.roles == ["controller"]}  # the pipeline's lane shows rank 0
    pieces = {rank.rank: _pieces(activity, rank.rank) for rank in header.ranks if rank.rank not in idle}
    pipeline = activity.pipeline()
    names = sorted({what for each in (*pieces.values(), pipeline) for *_, what in each})
    counts = _counts(step)
    parts = 2 * FINEST
    while parts > COARSEST:
        parts //= 2
        coded = {rank: coded_pieces(each, step.length, parts, names) for rank, each in pieces.items()}
        loads = {rank: coded_counts(counts.get(rank, []), step.length, parts // 10) for rank in pieces}
        if len(_json([coded, loads])) <= STEP_BYTES:
            break
    ranks = [rank for rank in header.ranks if rank.rank in pieces]
    errors = [clock.error_s for clock in header.clocks.values()]
    return {
        "step": header.step,
        "seconds": header.seconds,
        "complete": header.complete,
        "names": names,
        "pipeline": coded_pieces(pipeline, step.length, FINEST, names),
        "lanes": [[rank.rank, rank.host, ", ".join(rank.roles), coded[rank.rank], loads[rank.rank]] for rank in ranks],
        "merged_below_s": header.seconds / parts,
        "roles": [_shares(shares, header.seconds) for shares in role_shares(step, activity)],
        "fates": Counter(sample.fate if sample.fate in FATES else "other" for sample in step.samples).most_common(),
        "samples": [_sample(sample) for sample in _drawn(step.samples)],
        "open": header.open_samples,
        "omitted": sum(header.omitted.values()),
        "damaged": step.damaged,
        "clock_error_s": max((error for error in errors if error is not None), default=0.0),
        "clocks_unknown": sum(error is None for error in errors),
    }


def coded_pieces(pieces: Sequence[LanePiece], length: int, parts: int, names: Sequence[str]) -> list[int]:
    """Pieces that cover the step as (duration in UNITS, index in `names`, number of pieces), in one list. Pieces
    shorter than a part of the step are merged with their short neighbours, up to a part, under what most of this time
    was; less than a quarter of a part belongs to the piece before."""
    coded: list[int] = []
    index, at = {name: number for number, name in enumerate(names)}, 0
    for end, what, number in _merged(pieces, length / parts):
        until = round(end / length * UNITS)
        if until > at:
            coded += until - at, index[what], number
            at = until
    return coded


def _merged(pieces: Sequence[LanePiece], part: float) -> Iterator[tuple[int, str, int]]:
    """(end, what, number of pieces)."""
    short: Counter[str] = Counter()
    last: tuple[int, str, int] | None = None
    begin = number = end = 0
    for start, end, what in pieces:
        whole = end - start >= part
        if number and (whole or end - begin > part):
            if last and start - begin < part / 4:
                last = start, *last[1:]
            else:
                if last:
                    yield last
                last = start, short.most_common(1)[0][0], number
            short.clear()
            number = 0
        if whole:
            if last:
                yield last
            last = end, what, 1
            continue
        begin = begin if number else start
        short[what] += end - start
        number += 1
    if last:
        yield last
    if number:
        yield end, short.most_common(1)[0][0], number


def coded_counts(chunks: Sequence[ChunkRow], length: int, parts: int) -> list[int]:
    """Running and queued requests as (start in UNITS, running, queued), in one list: the first of each part, if they
    have changed."""
    coded: list[int] = []
    place = -1
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        start = min(max(chunk.start, 0), length)
        counts = [chunk.running, chunk.queued]
        if start * parts // length > place and counts != coded[-2:]:
            place = start * parts // length
            coded += round(start / length * UNITS), *counts
    return coded


def _pieces(activity: RankActivity, rank: int) -> list[LanePiece]:
    waiting = [(start, end, WAITED + cause) for start, end, cause in activity.waiting(rank)]
    return sorted([*activity.busy.get(rank, []), *waiting])


def _counts(step: StepTimeline) -> dict[int, list[ChunkRow]]:
    found: dict[int, list[ChunkRow]] = {}
    for chunk in step.chunks:
        found.setdefault(chunk.rank, []).append(chunk)
    return found


def _shares(shares: RoleShares, seconds: float) -> dict[str, Any]:
    whole = max(seconds, 1e-9)
    busy, waiting = ([[what, s / whole] for what, s in found.items()] for found in (shares.busy, shares.waiting))
    return {"roles": ", ".join(shares.roles), "ranks": shares.num_ranks, "busy": busy, "waiting": waiting}


def _drawn(samples: Sequence[SampleRow]) -> list[SampleRow]:
    """The samples to draw, in order of their start."""
    started = sorted((sample for sample in samples if sample.start is not None), key=lambda sample: sample.start or 0)
    if len(started) <= MAX_DRAWN:
        return started
    longest = sorted(range(len(started)), key=lambda place: (started[place].start or 0) - started[place].done)[:LONGEST]
    evenly = (number * len(started) // (MAX_DRAWN - LONGEST) for number in range(MAX_DRAWN - LONGEST))
    return [started[place] for place in sorted({*longest, *evenly})]


def _sample(sample: SampleRow) -> list[Any]:
    prompt, attempt, member = split_sample_id(max(sample.sample, 0))
    of_model = [sample.tokens, sample.turns, sample.lag]
    times = [sample.drawn, sample.start, sample.end, sample.scored, sample.done]
    return [f"{prompt}.{attempt}.{member}", sample.domain, sample.replica, sample.fate, *of_model, *times]


def _slowest(run: RunFiles, recorded: Sequence[int]) -> int | None:
    """The recorded step that took the longest, without validation."""
    total = run.metrics.column("time/step_total")
    took = dict(zip(total.steps.tolist(), total.values.tolist(), strict=True))
    return max((step for step in recorded if took.get(step, 0.0) > 0), key=lambda step: took[step], default=None)


def _by_importance(recorded: Sequence[int], slowest: int | None) -> list[int]:
    """At most MAX_STEPS of the steps: the newest, the slowest, the first, and steps that halve what lies between."""
    if not recorded:
        return []
    found = [recorded[-1], *([] if slowest is None else [slowest]), recorded[0]]
    for parts in (2, 4, 8, 16):
        found += [recorded[number * (len(recorded) - 1) // parts] for number in range(1, parts)]
    return list(dict.fromkeys(found))[:MAX_STEPS]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
