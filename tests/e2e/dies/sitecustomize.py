"""On PYTHONPATH, lets ranks die or stop when they are told something: HPCRL_TEST_DIES="RANK:COMMAND:K:SIGNAL ...", at
the K-th command of that kind, before it is carried out; their log says so. Or take longer:
HPCRL_TEST_SLOW="RANK:COMMAND:SECONDS ..."."""

import os
import signal
import sys
import time
from collections.abc import Callable


def before(rank: str, command: str, act: Callable[[int], None]) -> None:
    """On a rank, act(k) before the k-th command of this kind."""
    from hpcrl.workers.rank_loop import Worker

    carry_out, heard = Worker._reporting, []

    def reporting(self, seq, what):
        heard.append(what)
        if what == command and rank == os.environ["HPCRL_RANK"]:
            act(heard.count(command))
        return carry_out(self, seq, what)

    Worker._reporting = reporting


def die(command: str, count: int, number: int) -> Callable[[int], None]:
    def act(k: int) -> None:
        if k == count:
            print(f"at the end: {signal.Signals(number).name} before {command}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), number)

    return act


if "HPCRL_RANK" in os.environ or "HPCRL_FORKS" in os.environ:
    for wish in os.environ.get("HPCRL_TEST_DIES", "").split():
        rank, command, count, number = wish.split(":")
        before(rank, command, die(command, int(count), getattr(signal, number)))
    for wish in os.environ.get("HPCRL_TEST_SLOW", "").split():
        rank, command, seconds = wish.split(":")
        before(rank, command, lambda k, seconds=float(seconds): time.sleep(seconds))
