"""On PYTHONPATH, lets ranks die or stop when they are told something: HPCRL_TEST_DIES="RANK:COMMAND:K:SIGNAL ...", at
the K-th command of that kind, before it is carried out."""

import os
import signal


def watch(command: str, count: int, number: int) -> None:
    from hpcrl.roles.worker import Worker

    carry_out, heard = Worker._reporting, []

    def reporting(self, seq, what):
        heard.append(what)
        if heard.count(command) == count:
            os.kill(os.getpid(), number)
        return carry_out(self, seq, what)

    Worker._reporting = reporting


for wish in os.environ.get("HPCRL_TEST_DIES", "").split():
    rank, command, count, number = wish.split(":")
    if rank == os.environ.get("HPCRL_RANK"):
        watch(command, int(count), getattr(signal, number))
