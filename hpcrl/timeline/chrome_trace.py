"""A step's timeline in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", Google, 2016. Used are complete events (X), counters (C) and metadata (M); times are
microseconds. A process is a rank, or the samples of a replica; a thread is a lane in which events do not overlap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from hpcrl.timeline.step_file import SampleRow, StepTimeline, WorkRow
from hpcrl.timeline.waiting import WORKS

COMMANDS, WAITS, FIRST_LANE = 1, 0, 2
"""Threads of a rank: its commands, the pipeline's waits on rank 0, and the first lane of samples that it works on."""

TraceEvent = dict[str, Any]


def chrome_trace(step: StepTimeline) -> dict[str, Any]:
    """The JSON object format: `traceEvents` in order of time, from 0 on, metadata first."""
    header = step.header
    first_process = max((rank.rank for rank in header.ranks), default=0) + 1  # of samples
    events = [*_of_ranks(step), *_of_samples(step, first_process)]
    begin = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] -= begin
    events.sort(key=lambda event: event["ts"])
    named = list(_names(step, events, first_process))
    told = {"step": header.step, "began": header.began, "seconds": header.seconds, "complete": header.complete}
    return {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": {"program": "hpcrl", **told}}


def _of_ranks(step: StepTimeline) -> Iterator[TraceEvent]:
    for wait in step.waits:
        yield _span(f"wait for {wait.what}", "wait", wait.start, wait.duration, 0, WAITS)
    for command in step.commands:
        of_rank = command.rank, COMMANDS
        yield _span(command.name, "command", command.start, command.duration, *of_rank, {"number": command.number})
    for chunk in step.chunks:
        counts = {"running": chunk.running, "queued": chunk.queued}
        told = {"number": chunk.number, "tokens": chunk.tokens, **counts}
        yield _span("DecodeChunk", "command", chunk.start, chunk.duration, chunk.rank, COMMANDS, told)
        yield {"name": "requests", "ph": "C", "ts": chunk.start, "pid": chunk.rank, "tid": COMMANDS, "args": counts}
    by_rank: dict[int, list[tuple[int, int, WorkRow]]] = {}
    for work in step.works:
        by_rank.setdefault(work.rank, []).append((work.start, work.duration, work))
    for rank, works in by_rank.items():
        for lane, work in _lanes(works):
            of_sample = {"sample": str(work.sample), "domain": work.domain}
            name = WORKS.get(work.what, work.what)
            yield _span(name, "work", work.start, work.duration, rank, FIRST_LANE + lane, of_sample)


def _of_samples(step: StepTimeline, first_process: int) -> Iterator[TraceEvent]:
    by_replica: dict[int, list[tuple[int, int, SampleRow]]] = {}
    for sample in step.samples:
        if sample.start is not None:
            lived = sample.start, max(sample.done - sample.start, 0), sample
            by_replica.setdefault(sample.replica, []).append(lived)
    for replica, samples in by_replica.items():
        for lane, sample in _lanes(samples):
            told: dict[str, Any] = {"sample": str(sample.sample), "prompt": sample.prompt, "domain": sample.domain}
            told |= {"fate": sample.fate, "lag": sample.lag, "tokens": sample.tokens, "turns": sample.turns}
            assert sample.start is not None
            ends = {"generated": sample.end, "scored": sample.scored, sample.fate: sample.done}
            start, process = sample.start, first_process + replica
            for what, end in ends.items():
                if end is not None:
                    yield _span(f"until {what}", "sample", start, max(end - start, 0), process, lane, told)
                    start = max(start, end)


def _span(
    name: str, kind: str, start: int, duration: int, process: int, lane: int, told: dict[str, Any] | None = None
) -> TraceEvent:
    event = {"name": name, "cat": kind, "ph": "X", "ts": start, "dur": duration, "pid": process, "tid": lane}
    return event if told is None else event | {"args": told}


def _lanes(spans: Iterable[tuple[int, int, Any]]) -> Iterator[tuple[int, Any]]:
    """(lane, row) of each (start, duration, row), in the lowest lane that is free; in a lane no spans overlap."""
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # (end, lane)
    for start, duration, row in sorted(spans, key=lambda span: span[:2]):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (start + duration, lane))
        yield lane, row


def _names(step: StepTimeline, events: Iterable[TraceEvent], first_process: int) -> Iterator[TraceEvent]:
    """Names of all processes and threads."""
    ranks = {rank.rank: f"rank {rank.rank}: {', '.join(rank.roles)} ({rank.host})" for rank in step.header.ranks}
    for process, lane in sorted({(event["pid"], event["tid"]) for event in events}):
        yield _named("process_name", process, lane, ranks.get(process, f"samples of replica {process - first_process}"))
        yield _named("process_sort_index", process, lane, process, "sort_index")
        of_rank = {COMMANDS: "commands", WAITS: "the pipeline waits"}.get(lane, f"work {lane - FIRST_LANE + 1}")
        yield _named("thread_name", process, lane, of_rank if process in ranks else f"lane {lane + 1}")


def _named(what: str, process: int, lane: int, value: str | int, key: str = "name") -> TraceEvent:
    return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": lane, "args": {key: value}}
