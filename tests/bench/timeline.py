"""The cost of recording a timeline: replays the steps that a run has recorded.

    python -m tests.bench.timeline RUN

For each step: CPU time of rank 0's main thread in the recorder's calls, of its writer's thread to convert and encode
the step, and of all ranks to time and report their commands; and the share of all of it in the step's duration.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from hpcrl.messaging.messages import Done, Span
from hpcrl.timeline.recorder import RecordedStep, Recorder
from hpcrl.timeline.step_file import ChunkRow, CommandRow, StepTimeline, encode, path_of, read_step, recorded_steps


class LastStep:
    """Keeps the last step."""

    step: RecordedStep

    def put(self, step: RecordedStep) -> None:
        self.step = step

    def close(self, within_s: float) -> None: ...


def replay(step: StepTimeline) -> tuple[float, float, float]:
    """Seconds of rank 0's main thread, of its writer's thread, and of all ranks."""
    kept = LastStep()
    recorder = Recorder([rank.roles for rank in step.header.ranks], "node1", kept)
    for header in step.header.ranks:
        recorder.joined(header.rank, header.host)
    now = time.monotonic()
    recorder.begin(step.header.step)
    commands: list[tuple[int, str, int, tuple[int, int, int, int] | None]] = []
    every: list[CommandRow | ChunkRow] = [*step.commands, *step.chunks]
    for row in every:
        if isinstance(row, CommandRow):
            commands.append((row.rank, row.name, row.number, None))
        else:
            commands.append((row.rank, "DecodeChunk", row.number, (row.number, row.tokens, row.running, row.queued)))
    began = time.thread_time()
    for rank, name, number, chunk in commands:
        recorder.sent(rank, number, name, now)
        recorder.executed(rank, [(number, now, 0.1)], chunk)
    for wait in step.waits:
        recorder.waited(wait.what, now)
    for sample in step.samples:
        recorder.drawn([(sample.prompt, sample.domain)])
        recorder.admitted(sample.replica, [(sample.sample, sample.prompt)])
        for _ in range(sample.turns):
            recorder.decoded(sample.replica, now, [(sample.sample, sample.tokens)])
    for work in step.works:
        recorder.worked(work.what, work.rank, work.sample, now, now, final=True)
    recorder.closed([sample.sample for sample in step.samples], "trained", 0)
    recorder.end()
    main_s, began = time.thread_time() - began, time.thread_time()
    encode(kept.step.converted())
    writer_s = time.thread_time() - began
    return main_s, writer_s, _of_ranks(len(commands))


def _of_ranks(num_commands: int) -> float:
    """Seconds to time the commands and to send and read them with the answers."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Done)

    def spend(spans: bool) -> float:
        began = time.thread_time()
        for number in range(num_commands):
            told: list[Span] = []
            if spans:
                start = time.monotonic()
                told.append((number, start, time.monotonic() - start))
            decoder.decode(encoder.encode(Done(number, spans=told)))
        return time.thread_time() - began

    return min(spend(True) for _ in range(5)) - min(spend(False) for _ in range(5))


def main() -> None:
    run = Path(sys.argv[1])
    for number in recorded_steps(run):
        step = read_step(path_of(run, number))
        main_s, writer_s, ranks_s = min((replay(step) for _ in range(5)), key=sum)
        size, num_rows, seconds = path_of(run, number).stat().st_size, len(list(step.rows())), step.header.seconds
        spent = f"main thread {1e3 * main_s:.2f} ms, writer {1e3 * writer_s:.2f} ms, ranks {1e3 * ranks_s:.2f} ms"
        share = (main_s + writer_s + ranks_s) / seconds
        print(f"step {number}: {num_rows} rows, {size / 1024:.0f} KiB, {seconds:.2f} s; {spent}: {share:.2%}")


if __name__ == "__main__":
    main()
