"""The Ray half of tests/bench/control.py, run in .venv-ray with its folder in PYTHONPATH (for Ray's workers).

Arguments: number of calls, number of moves. Prints one JSON line of milliseconds (p50).

`call`: a no-op method of an actor in another process, call to answer. `dicts`: a list of 512 dicts of arrays, as a
rollout worker returns it, put into the object store, fetched and packed by the actor. `packed`: packed first, then put
and fetched, the best use of Ray. Both end with the actor's answer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import ray
from rollouts import Rollout, checksum, make_rollouts, pack


@ray.remote
class Peer:
    def noop(self) -> None:
        pass

    def take_dicts(self, rollouts: list[Rollout]) -> int:
        return checksum(pack(rollouts))

    def take_packed(self, packed: Rollout) -> int:
        return checksum(packed)


def p50_ms(action: Callable[[], object], warmup: int, repeats: int) -> float:
    times = []
    for _ in range(warmup + repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:]) * 1e3


def main(calls: int, moves: int) -> None:
    os.environ["RAY_DEDUP_LOGS"] = "0"
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False, logging_level="error"
    )
    try:
        peer = Peer.remote()
        rollouts = make_rollouts()
        expected = checksum(pack(rollouts))
        assert ray.get(peer.take_dicts.remote(ray.put(rollouts))) == expected
        assert ray.get(peer.take_packed.remote(ray.put(pack(rollouts)))) == expected
        result = {
            "call_ms": p50_ms(lambda: ray.get(peer.noop.remote()), calls // 10, calls),
            "dicts_ms": p50_ms(lambda: ray.get(peer.take_dicts.remote(ray.put(rollouts))), 2, moves),
            "packed_ms": p50_ms(lambda: ray.get(peer.take_packed.remote(ray.put(pack(rollouts)))), 2, moves),
        }
    finally:
        ray.shutdown()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
