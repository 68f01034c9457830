"""Control and bulk hand-over between two processes: hpcrl (messages, gloo) against Ray (actor calls, object store).

    python -m tests.bench.control

Prints one JSON line: milliseconds (p50) of both sides and their ratios. Ray runs in .venv-ray, made by
tests/bench/ray/setup.sh. The sides alternate, each figure is the median of the rounds: machines drift.

`call_ms`: a command to another process and its answer (hpcrl's is signed, numbered and schema-checked; Ray's is a no-op
actor method). `move_ms`: 512 rollouts of 8 fields x 512 tokens, held as one array per rollout and field in one process,
until the other holds them packed and has answered.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hpcrl.comm.transfer import TransferGroup
from hpcrl.messaging.bootstrap import ProcessInfo
from hpcrl.messaging.messages import Done, DropBatch, Move, Shutdown, TransferRollouts
from hpcrl.messaging.world import CONTROLLER_QUEUE, World, join, rank_queue
from tests.bench.machine import tell
from tests.bench.ray.rollouts import FIELDS, NUM_ROLLOUTS, NUM_TOKENS, checksum, make_rollouts, pack

ROOT = Path(__file__).resolve().parents[2]
RAY_PYTHON = ROOT / ".venv-ray" / "bin" / "python"
RAY_PROGRAM = ROOT / "tests" / "bench" / "ray" / "run_ray.py"
SENDER, PEER = 0, 1
TIMEOUT_S = 60.0
SAMPLES = list(range(NUM_ROLLOUTS))
MOVES = [Move(SENDER, PEER, SAMPLES, [NUM_TOKENS] * NUM_ROLLOUTS)]
TOKEN_FIELDS = [(name, np.dtype(dtype)) for name, dtype in FIELDS.items()]


def p50_ms(action: Callable[[], object], warmup: int, repeats: int) -> float:
    times = []
    for _ in range(warmup + repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:]) * 1e3


def join_pair(rank: int, folder: Path) -> tuple[World, TransferGroup]:
    """Collective over both processes."""
    place = ProcessInfo("rank", "agent", rank, node=0, num_nodes=1)
    world = join(place, 2, folder, start_s=TIMEOUT_S, store_s=TIMEOUT_S, command_s=TIMEOUT_S)
    return world, TransferGroup(world.group("bench", [SENDER, PEER], 0), [SENDER, PEER])


def run_peer(folder: Path) -> None:
    """Answers commands as a rank does, until it is told to leave."""
    world, transfer_group = join_pair(PEER, folder)
    while (message := world.commands.get(TIMEOUT_S)) is not None:
        _, seq, command = message
        match command:
            case TransferRollouts():
                [(_, packed)] = transfer_group.exchange(PEER, command.moves, TOKEN_FIELDS, [], pick=lambda samples: {})
                world.sender.send(CONTROLLER_QUEUE, Done(seq, texts=[str(checksum(packed))]))
            case DropBatch():
                world.sender.send(CONTROLLER_QUEUE, Done(seq))
            case Shutdown():
                return


def measure_hpcrl(calls: int, moves: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        peer = subprocess.Popen([sys.executable, "-m", "tests.bench.control", "--peer", folder], cwd=ROOT)
        try:
            world, transfer_group = join_pair(SENDER, Path(folder))
            rollouts = make_rollouts()
            expected = str(checksum(pack(rollouts)))

            def answer() -> Done:
                message = world.events.get(TIMEOUT_S)
                assert message is not None and isinstance(message[2], Done)
                return message[2]

            def call() -> None:
                world.sender.send(rank_queue(PEER), DropBatch(0))
                answer()

            def pick(samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
                return {name: [rollouts[i][name] for i in samples] for name in FIELDS}

            def move() -> None:
                scalars = np.zeros(NUM_ROLLOUTS, np.float32).tobytes()
                command = TransferRollouts(
                    batch=0,
                    group="bench",
                    moves=MOVES,
                    fields=list(FIELDS),
                    scored={"rewards": scalars, "scores": scalars},
                    forms=True,
                )
                world.sender.send(rank_queue(PEER), command)
                transfer_group.exchange(SENDER, MOVES, TOKEN_FIELDS, [], pick)
                assert answer().texts == [expected]

            result = {"call_ms": p50_ms(call, calls // 10, calls), "move_ms": p50_ms(move, 3, moves)}
            world.sender.send(rank_queue(PEER), Shutdown())
            assert peer.wait(TIMEOUT_S) == 0
        finally:
            peer.kill()
            peer.wait()
    return result


def measure_ray(calls: int, moves: int) -> dict[str, float]:
    command = [str(RAY_PYTHON), str(RAY_PROGRAM), str(calls), str(moves)]
    environment = os.environ | {"PYTHONPATH": str(RAY_PROGRAM.parent)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(r[key] for r in rounds), 4) for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        run_peer(options.peer)
        return
    if not RAY_PYTHON.exists():
        print(json.dumps({"bench": "control", "skipped": "no .venv-ray: run tests/bench/ray/setup.sh"}))
        return
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(measure_hpcrl(options.calls, options.moves))
        theirs.append(measure_ray(options.calls, options.moves))
    hpcrl, ray = median(ours), median(theirs)
    report = {
        "bench": "control",
        "hpcrl": hpcrl,
        "ray": ray,
        "call_ratio": round(ray["call_ms"] / hpcrl["call_ms"], 2),
        "move_ratio_dicts": round(ray["dicts_ms"] / hpcrl["move_ms"], 2),
        "move_ratio_packed": round(ray["packed_ms"] / hpcrl["move_ms"], 2),
        "cores": os.cpu_count(),
    }
    tell(report)


if __name__ == "__main__":
    main()
