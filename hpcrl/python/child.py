"""The process in which hpcrl.train and hpcrl.evaluate run the command, apart from the caller's modules, signals and
logging.

    python -m hpcrl.python.child DESCRIPTOR PID COMMAND [WORD ...]

It writes the run folder to the descriptor when the run has passed its checks. If the caller PID dies, the run gets
SIGTERM: it saves at the next step boundary and stops.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from hpcrl.launch.start import on_checked
from hpcrl.system import log
from hpcrl.system.cli import COMMANDS, use_utf8
from hpcrl.system.signals import stop_with


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    descriptor, caller, command, words = int(argv[0]), int(argv[1]), argv[2], argv[3:]
    stop_with(caller)

    def checked(run_dir: Path) -> None:
        with open(descriptor, "wb") as told:
            told.write(os.fsencode(run_dir))

    on_checked.set(checked)
    return int(import_module(COMMANDS[command][0]).main(words))


if __name__ == "__main__":
    use_utf8()
    log.start("", console="stderr")
    sys.exit(main(sys.argv[1:]))
