"""The command line of `python -m hpcrl.launch`."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from hpcrl.cluster import slurm
from hpcrl.config import ConfigError
from hpcrl.launch.help import overview, reference, section
from hpcrl.launch.start import start
from hpcrl.system import log
from hpcrl.system.cli import in_shell, show, use_utf8
from hpcrl.system.exit_codes import ExitCode


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code (hpcrl/system/exit_codes.py)."""
    try:
        if help_at := [i for i, word in enumerate(argv) if word in ("-h", "--help")]:
            topic = argv[help_at[0] + 1 :]
            show(reference() if topic == ["markdown"] else section(topic[0]) if topic else in_shell(overview()))
            return ExitCode.DONE
        if "-m" in argv or "--multirun" in argv:
            from hpcrl.launch.sweep import sweep

            return sweep([word for word in argv if word not in ("-m", "--multirun")])
        return start(argv)
    except ConfigError as error:
        print(in_shell("\n".join(error.problems)), file=sys.stderr)
        return ExitCode.BAD_INPUT
    except slurm.SlurmError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except OSError as error:  # a full disk, a removed folder
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT if error.errno == errno.ENAMETOOLONG else ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    use_utf8()
    log.start("", console="stderr")
    sys.exit(main(sys.argv[1:]))
