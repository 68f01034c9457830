"""The report of a hang, `logs/attempt_NNNN/hang.txt`: who waits for whom, pending prompts, and the stacks of all ranks.

The controller writes it before a deadline ends the run, or rank 0's agent before it kills a controller that hangs. Both
spend at most BUDGET_S on it.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from hpcrl.messaging.trace import UnansweredCommand
from hpcrl.node.stack_requests import RankStack, ask_ranks, find_ranks, read_answers, request_stacks
from hpcrl.run_folder import hang_path
from hpcrl.system.files import write_durably

logger = logging.getLogger(__name__)

BUDGET_S = 5.0
WRITE_S = 1.0  # of it
LOOK_S = 0.05
SILENT_S = 5.0
"""A rank without a heartbeat for this long did not run, or native code held its interpreter lock."""
SHOWN_PROMPTS = 40
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
FRAMES = 12  # innermost frames of the main thread that show for what it waits
COLLECTIVE = (
    (re.compile(r"/torch/distributed/|/hpcrl/comm/|/hpcrl/messaging/abortable\.py"), "other ranks, in {function}"),
    (re.compile(r"/torch/autograd/graph\.py"), "the backward pass, perhaps for other ranks in it"),
)
WAITS = (
    *COLLECTIVE,
    (re.compile(r"/torch/cuda/"), "a GPU, in {function}"),
    (re.compile(r"/hpcrl/messaging/world\.py"), "the address of another rank"),
    (re.compile(r"/(subprocess|multiprocessing/\w+)\.py"), "another process, in {function}"),
    (re.compile(r"/(socket|ssl|http/client|urllib/request)\.py"), "the network, in {function}"),
)
"""Files in the innermost frames of a stack, and for what it waits then."""
NEXT_COMMAND = re.compile(r"/hpcrl/workers/rank_loop\.py"), "serve"
ANSWERS = re.compile(r"/hpcrl/messaging/queues\.py"), "get"
"""File and function in which a rank waits for commands, and rank 0 for answers."""
IDLE = ("idle", "start", "leave")


def frames(one: RankStack) -> list[tuple[str, str, str]]:
    """(file, line, function) of the main thread's innermost frames."""
    return FRAME.findall(one.stacks.partition("\n\n")[0])[:FRAMES] if one.has_own else []


def does(one: RankStack) -> str:
    """For what a rank waits, as far as its activity and its main thread's stack show; else where it is."""
    found = [frame for frame in frames(one) if not frame[0].endswith(("/threading.py", "/queue.py"))]
    if not found:
        return f"waits for something unknown: {one.missing}"
    file, line, function = found[0]
    if any(function == write_hang_report.__name__ for _, _, function in found):
        return "writes the report of the hang"
    if function == NEXT_COMMAND[1] and NEXT_COMMAND[0].search(file):
        return "waits for its next command" + f", while a thread executes code of {one.thread}" * bool(one.thread)
    if function == ANSWERS[1] and ANSWERS[0].search(file) and one.rank == 0:
        return "waits for answers of other ranks"
    for file_, _, function_ in found:
        for pattern, what in WAITS:
            if pattern.search(file_):
                return f"waits for {what.format(function=function_)}"
    between = ", between commands" * (one.doing.partition(" #")[0] == "idle")
    return f"is in {function} ({file}, line {line}){between}"


def in_collective(one: RankStack) -> bool:
    """Whether a rank's main thread waits for other ranks."""
    return any(pattern.search(file) for file, _, _ in frames(one) for pattern, _ in COLLECTIVE)


def printable(text: str) -> str:
    """The text without control characters, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def describe(one: RankStack, roles: Sequence[str]) -> str:
    """A rank and its stacks, for people."""
    did = f"in {one.doing} for {one.seconds:.0f} s" if one.doing else "has recorded no activity yet"
    beat = f", last heartbeat {one.heartbeat:.0f} s ago" if one.doing else ""
    lines = [
        f"rank {one.rank} ({', '.join(roles) or 'no role'}) on {one.host}, process {one.process}: {did}{beat}",
        *([does(one)] if one.has_own else []),
        *([f"process: {one.kernel}"] if one.kernel else []),
        *([f"no stack: {one.missing}" if not one.has_own else one.missing] if one.missing else []),
    ]
    return printable("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]) + f"\n\n{one.stacks}".rstrip() + "\n")


def who_waits(
    unanswered: Sequence[UnansweredCommand], found: Mapping[int, RankStack], name: Callable[[int], str]
) -> Iterator[str]:
    """Lines that say which ranks have not answered which command, and which of these keeps the others waiting.
    `name` returns a rank with roles and host."""
    commands: dict[str, list[UnansweredCommand]] = {}
    for one in unanswered:
        commands.setdefault(one.command, []).append(one)
    for command, ranks in commands.items():
        late = {one.rank: _why_late(one, found.get(one.rank)) for one in ranks}
        causes = {rank: why for rank, why in late.items() if why}
        for one in ranks:
            why = causes.get(one.rank) or "it waits for other ranks"
            yield f"{name(one.rank)} has been in {command} #{one.seq} for {one.seconds:.0f} s: {why}"
        waiting = [rank for rank in late if rank not in causes]
        if causes and waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            yield f"{as_ranges(waiting)} {verb} for {as_ranges(causes)} in the same command"
        elif len(waiting) > 1:
            yield f"{as_ranges(waiting)} wait for each other in {command}: compare their stacks"
    late_ranks = {one.rank for one in unanswered}
    if idle := [one.rank for one in found.values() if one.rank not in late_ranks and one.doing.startswith("idle")]:
        verb = "has" if len(idle) == 1 else "have"
        yield f"{as_ranges(idle)} {verb} answered all commands"


def _why_late(late: UnansweredCommand, one: RankStack | None) -> str:
    """Why a rank has not answered by itself; empty if it waits for other ranks."""
    if one is None:
        return "nothing is known about its process"
    if one.missing and not one.has_own:
        return one.missing
    if one.heartbeat > SILENT_S:
        return f"no heartbeat for {one.heartbeat:.0f} s: the process does not run, or native code blocks it"
    doing, _, seq = one.doing.partition(" #")
    if doing in IDLE and seq == str(late.seq):
        return "it has answered, but the answer has not arrived"
    if (doing, seq) != (late.command, str(late.seq)):
        return f"it has not begun it, but been in {one.doing} for {one.seconds:.0f} s, and {does(one)}"
    return "" if in_collective(one) else f"it {does(one)}"


def as_ranges(ranks: Collection[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join("-".join(map(str, part)) for part in parts)


def write_hang_report(
    run_dir: Path,
    attempt: int,
    why: str,
    roles: Sequence[Sequence[str]],
    *,
    unanswered: Sequence[UnansweredCommand] = (),
    prompts: Sequence[str] = (),
    responses: Mapping[int, int] = MappingProxyType({}),
    agents: bool = True,
) -> str:
    """Write the report; returns its path as a part of a message, or why there is none.

    Args:
        why: The message that ends the run.
        roles: Roles of each rank.
        unanswered: What the controller waits for.
        prompts: A line for each pending prompt.
        responses: Rank -> number of responses that wait there for a reward or an environment.
        agents: Whether agents started the ranks; otherwise only this host's ranks can be asked.
    """
    path, end, done = hang_path(run_dir, attempt), time.monotonic() + BUDGET_S, []

    def write() -> None:
        try:
            found = _from_agents(run_dir, attempt, len(roles), end - WRITE_S) if agents else _from_this_host(run_dir)
            text = _compose(run_dir, attempt, why, roles, unanswered, prompts, responses, found)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text.encode(errors="backslashreplace"))
            done.append(f"stacks of all ranks: {path}")
        except Exception as error:  # the run ends for another reason
            logger.error("no report of the hang", exc_info=True)
            done.append(f"no report of the hang: {error}")

    # In a thread, since a file system may not answer, which may be the cause of the hang.
    writer = threading.Thread(target=write, name="hang report", daemon=True)
    writer.start()
    writer.join(BUDGET_S)
    return done[0] if done else f"no report of the hang: {path} could not be written within {BUDGET_S:g} s"


def _from_agents(run_dir: Path, attempt: int, num_ranks: int, end: float) -> dict[int, RankStack]:
    folder = request_stacks(run_dir, attempt)
    found: dict[int, RankStack] = {}
    while len(found) < num_ranks and time.monotonic() < end:
        time.sleep(LOOK_S)
        found |= read_answers(folder, range(num_ranks) - found.keys())
    return found


def _from_this_host(run_dir: Path) -> dict[int, RankStack]:
    return ask_ranks(find_ranks(run_dir))


def _compose(
    run_dir: Path,
    attempt: int,
    why: str,
    roles: Sequence[Sequence[str]],
    unanswered: Sequence[UnansweredCommand],
    prompts: Sequence[str],
    responses: Mapping[int, int],
    found: Mapping[int, RankStack],
) -> str:
    def name(rank: int) -> str:
        at = f", {found[rank].host}" if rank in found else ""
        return f"rank {rank} ({', '.join(roles[rank]) or 'no role'}{at})"

    waits = [
        *who_waits(unanswered, found, name),
        *(f"{n} responses wait for a reward or an environment of {name(r)}" for r, n in sorted(responses.items())),
    ] or ["no command is unanswered: the line above names the cause"]
    shown = [*prompts[:SHOWN_PROMPTS], *([f"and {len(prompts) - SHOWN_PROMPTS} more"] * (len(prompts) > SHOWN_PROMPTS))]
    silent = sorted(set(range(len(roles))) - found.keys())
    lines = [
        f"{run_dir}, attempt {attempt}, {datetime.now(UTC).isoformat(timespec='seconds')}",
        why,
        "",
        "WHO WAITS FOR WHOM",
        *waits,
        "",
        "PENDING PROMPTS",
        *(shown or ["none"]),
        "",
        "STACKS",
        *(
            [f"no answer about {as_ranges(silent)}: their agents do not run, or do not see the run folder"]
            * bool(silent)
        ),
    ]
    stacks = [describe(one, roles[rank]) for rank, one in sorted(found.items())]
    return printable("\n".join(lines)) + "\n\n" + "\n".join(stacks)
