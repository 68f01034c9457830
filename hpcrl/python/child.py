"""The process in which hpcrl.train runs the launch, apart from the caller's modules, signals and logging.

    python -m hpcrl.python.child DESCRIPTOR PID [WORD ...]

It writes the run folder to the descriptor when the run has passed its checks. If the caller PID dies, the run gets
SIGTERM: it saves at the next step boundary and stops.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.launch.__main__ import main as launch
from hpcrl.system import log
from hpcrl.system.cli import use_utf8
from hpcrl.system.signals import stop_with


def main(argv: Sequence[str]) -> int:
    """Run the launch; returns its exit code."""
    descriptor, caller, words = int(argv[0]), int(argv[1]), argv[2:]
    stop_with(caller)

    def checked(run_dir: Path) -> None:
        with open(descriptor, "wb") as told:
            told.write(os.fsencode(run_dir))

    return launch(words, checked)


if __name__ == "__main__":
    use_utf8()
    log.start("", console="stderr")
    sys.exit(main(sys.argv[1:]))
