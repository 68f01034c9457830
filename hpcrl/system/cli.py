"""The console command `hpcrl`: `hpcrl status RUN` or `python -m hpcrl status RUN`. Also how hints name commands.

Imports no module of a command before it is called.
"""

from __future__ import annotations

import argparse
import io
import locale
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import hpcrl
from hpcrl.system import log
from hpcrl.system.exit_codes import ExitCode

COMMANDS = {
    "init": ("hpcrl.launch.init", "write a small project: rows, a reward with its test, runs that learn in minutes"),
    "launch": ("hpcrl.launch.__main__", "check a run, print its plan, start it here or submit it to Slurm"),
    "status": ("hpcrl.commands.status", "show a run's state, step, time left, checkpoints, restarts, errors"),
    "logs": ("hpcrl.commands.logs", "show the messages of all ranks, nodes and attempts of a run, in order of time"),
    "timeline": ("hpcrl.commands.timeline", "show what the ranks did in a step, and what they waited for"),
    "cost": ("hpcrl.commands.cost", "show a run's node-hours, GPU-hours and energy, by attempt, phase and role"),
    "stacks": ("hpcrl.commands.stacks", "show what every rank of a living run does, and its Python stacks"),
    "plot": ("hpcrl.metrics.plot", "draw reward and validation accuracy of a run"),
    "data": ("hpcrl.commands.show_data", "look at the rows of a data set as a run would read them"),
    "report": ("hpcrl.commands.report", "write what happened in a run, or in several, into one HTML file"),
    "serve": ("hpcrl.commands.serve", "serve the reports of all runs below a folder to a browser, as they are now"),
    "eval": ("hpcrl.launch.evaluation", "evaluate a model or a run's checkpoint: scores, pass@k, a page of responses"),
    "compare": (
        "hpcrl.commands.compare",
        "compare two models on the same prompts: difference, interval, changed prompts",
    ),
    "score": ("hpcrl.commands.score", "try a reward on an answer or on a file of rows, without a run"),
    "convert": ("hpcrl.convert.__main__", "convert a checkpoint to a model in HF layout, or an HF model to Megatron"),
    "track": ("hpcrl.commands.track", "upload the metrics of a run to a tracker, from a machine with network access"),
    "prefetch": (
        "hpcrl.launch.prefetch",
        "download a model or a data file on a machine with network access, for compute nodes without it",
    ),
    "bundle": (
        "hpcrl.launch.bundle.command",
        "put all that a job reads into one archive; unpack it on a node, check it with the network off",
    ),
}
"""Name -> (module with main(argv), what it does)."""

USAGE = """\
usage: hpcrl COMMAND [WORD ...]
       hpcrl --version

Reinforcement learning for large language models, on this machine or as a Slurm job.

commands (details: hpcrl COMMAND --help)
{commands}

examples
  python -m hpcrl.launch +experiment=demo_sft
      supervised warm-up of a tiny model on digit sorting, here
  python -m hpcrl.launch +experiment=demo model.path=runs/demo_sft/hf dry_run=true
      check a run and print its plan, start nothing
  python -m hpcrl.launch +cluster=slurm cluster.partition=debug +experiment=demo model.path=runs/demo_sft/hf
      the same as a Slurm job; the same command again resumes it
  python -m hpcrl status
      a line for each run in runs/

`PYTHON -m hpcrl COMMAND` is the same, with any interpreter PYTHON that has hpcrl.
"""

MODULE = re.compile(r"\bpython -m (hpcrl[. ](\w+(?:\.\w+)*))")
SCRIPT = re.compile(r"\bpython launch/(\w+\.py)")


class ArgumentParser(argparse.ArgumentParser):
    """Parser of a command such as `python -m hpcrl.launch` or `hpcrl status`. ValueError for wrong arguments."""

    def __init__(self, command: str, about: str):
        super().__init__(
            prog=in_shell(f"python -m {command}"),
            description=in_shell(about),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def in_shell(text: str) -> str:
    """The text with each `python -m hpcrl...` and `python launch/NAME.py` as it works in the user's shell and current
    folder. This is `hpcrl NAME`, or the script's path, if the command was called so or PATH leads to this
    installation's command; else the running interpreter's path. The running script keeps the path with which it was
    started."""
    return SCRIPT.sub(lambda found: _script(found[1]), MODULE.sub(lambda found: _command(found[2], found[1]), text))


def use_utf8() -> None:
    """Make this program read and write text as UTF-8, whatever the locale, and print characters that a stream cannot
    encode as escapes. Under another locale the program replaces itself by a new one in Python's UTF-8 mode (PEP 540),
    with the same process id; its children inherit the mode."""
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def show(text: str) -> bool:
    """Print a text at once; False if the reader has closed its end, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return False
    return True


def _command(name: str, module: str) -> str:
    script = shutil.which("hpcrl")
    called = Path(sys.argv[0])
    if name in COMMANDS and called.name == "hpcrl" and called.is_file():  # the script, perhaps called by its path
        by_path = script is None or not called.samefile(script)
        return f"{_short(called) if by_path else 'hpcrl'} {name}"
    if name in COMMANDS and script is not None and Path(script).parent == Path(sys.executable).parent:
        return f"hpcrl {name}"
    return f"{_python()} -m {module}"


def _script(name: str) -> str:
    path = sys.argv[0] if Path(sys.argv[0]).name == name else f"launch/{name}"
    return f"{_python()} {shlex.quote(path)}"


def _python() -> str:
    return _short(Path(sys.executable))


def _short(path: Path) -> str:
    """The path for the shell, relative to the current folder if it is inside."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def main(argv: Sequence[str] | None = None) -> int:
    """Call a command with the arguments after its name; returns its exit code."""
    use_utf8()
    log.start("", console="stderr")
    arguments = sys.argv[1:] if argv is None else list(argv)
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    usage = in_shell(USAGE.format(commands=commands))
    match arguments:
        case ["-h" | "--help" | "help"]:
            show(usage.rstrip())
            return ExitCode.DONE
        case ["--version"]:
            show(f"hpcrl {hpcrl.__version__}")
            return ExitCode.DONE
        case [name, *rest] if name in COMMANDS:
            return int(import_module(COMMANDS[name][0]).main(rest))
        case [name, *_]:
            print(f"hpcrl: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        case _:
            print(usage, end="", file=sys.stderr)
    return ExitCode.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
