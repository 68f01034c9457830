"""Prints what every rank of a living run does, for what it waits, and its Python stacks.

    python -m hpcrl stacks RUN                   all ranks on all nodes; RUN is a folder, a name in runs/ or a job
    python -m hpcrl stacks RUN --rank 0,3        two ranks
    python -m hpcrl stacks RUN --wait 60         wait up to a minute for the answers (15 s)
    python -m hpcrl stacks RUN --local           the ranks on this machine, without the node agents

The command writes a request into the run folder, and the agents of the run's nodes answer there within seconds, also if
ranks hang. Only the run's user may ask. --local asks the processes themselves: for ranks under torchrun or MPI, which
have no agents, and if the file system hangs; run the command on the rank's node.
A rank gives its stacks in native code, too, but not while it is stopped (SIGSTOP), or waits in the kernel.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.commands.status import RunFolder, find_job, find_run, state
from hpcrl.config import Config, ConfigError
from hpcrl.node.hang_report import as_ranges, describe
from hpcrl.node.preflight import read_reports
from hpcrl.node.stack_requests import RankStack, ask_ranks, find_ranks, read_answers, request_stacks
from hpcrl.run_folder import hang_path, world_folder
from hpcrl.system.cli import ArgumentParser, in_shell, show, use_utf8
from hpcrl.system.exit_codes import ExitCode

WAIT_S, LONGEST_S = 15.0, 3600.0
LOOK_S = 0.1
LIVES = ("running", "ending", "starting", "unknown")
"""States in which ranks may run; unknown: on another host."""


def main(argv: Sequence[str]) -> int:
    """Command line."""
    parser = ArgumentParser("hpcrl stacks", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="LIST", help="ranks, such as 0,3; default: all")
    parser.add_argument("--wait", metavar="SECONDS", default=WAIT_S, type=float, help="wait at most this long")
    parser.add_argument("--local", action="store_true", help="only this machine's ranks, without the agents")
    try:
        given = parser.parse_args(argv)
        if not 0 < given.wait <= LONGEST_S:
            raise ValueError(f"--wait {given.wait:g}: seconds, above 0 and up to {LONGEST_S:g}")
        return _show(find_run(given.run), given.rank, given.wait, given.local)
    except ConfigError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
    except ValueError as error:
        print(f"hpcrl: {error} (see --help)", file=sys.stderr)
    except OSError as error:
        print(f"hpcrl: no stacks: {error}", file=sys.stderr)
    return ExitCode.BAD_INPUT


def _show(run_dir: Path, words: str | None, wait_s: float, local: bool) -> int:
    """Print the stacks; DEADLINE if a rank that was asked for did not answer. ValueError for other ranks than the
    run's, ConfigError for a run that does not live, OSError for a folder that cannot be written."""
    run = RunFolder(run_dir)
    config = run.config
    if config is None:
        raise ConfigError([run.obstacle or f"{run_dir} has not started"])
    layout = RoleLayout.from_config(config)
    ranks = _ranks(words, layout.world_size)
    if local:
        there = {rank: process for rank, process in find_ranks(run_dir).items() if rank in ranks}
        if not there:
            raise ConfigError([f"{run_dir}: none of its ranks runs on this machine as a process of this user"])
        found = ask_ranks(there)
        ranks = ranks if words else list(found)
    else:
        now = state(run, find_job(run))
        if now.partition(":")[0] not in LIVES:
            hang = hang_path(run_dir, run.attempt)
            last = f"; the stacks at its end: {hang}" if hang.is_file() else ""
            raise ConfigError([f"{run_dir} does not run: {now}{last}"])
        folder = request_stacks(run_dir, run.attempt, ranks if words else None)
        found, end = {}, time.monotonic() + wait_s
        while len(found) < len(ranks) and time.monotonic() < end:
            time.sleep(LOOK_S)
            found |= read_answers(folder, set(ranks) - found.keys())
    _print(found, layout)
    missing = [rank for rank in ranks if rank not in found]
    if missing:
        why = "no such process here" if local else f"no answer within {wait_s:g} s"
        print(f"hpcrl: {_whose(run_dir, run, config, layout, missing)}: {why}{_hint(local)}", file=sys.stderr)
    return ExitCode.DEADLINE if missing else ExitCode.DONE


def _hint(local: bool) -> str:
    return "" if local else in_shell("; on the node itself: python -m hpcrl stacks RUN --local")


def _ranks(words: str | None, world_size: int) -> list[int]:
    if words is None:
        return list(range(world_size))
    found = words.split(",")
    for word in found:
        if not re.fullmatch(r"\d{1,6}", word) or int(word) >= world_size:
            raise ValueError(f"--rank {words}: {word!r} is none of the run's ranks 0 to {world_size - 1}")
    return sorted({int(word) for word in found})


def _print(found: dict[int, RankStack], layout: RoleLayout) -> None:
    for rank, one in sorted(found.items()):
        if not show(describe(one, layout.roles_of(rank))):
            return


def _whose(run_dir: Path, run: RunFolder, config: Config, layout: RoleLayout, ranks: Collection[int]) -> str:
    """The ranks with their nodes."""
    if config.cluster.name != "slurm":
        return as_ranges(ranks)
    names = {report.node: report.name for report in read_reports(world_folder(run_dir, run.attempt))}
    parts = []
    for number, its_ranks in enumerate(Placement.from_config(config, layout).nodes):
        if mine := [rank for rank in its_ranks if rank in ranks]:
            parts.append(f"node {names.get(number, number)} ({as_ranges(mine)})")
    return ", ".join(parts)


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
