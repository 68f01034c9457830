"""The stacks in what failed processes wrote, and the waits that the rehearsal knows of in the functions they name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t]+.*\n)+\S.*", re.M)
INNERMOST_FIRST = "most recent call first"
THREAD = re.compile(rf"^(?:Current thread|Thread) 0x.*\({INNERMOST_FIRST}\):\n(?:  .*\n)+", re.M)
"""As faulthandler writes it."""
FRAME = re.compile(r'File ".*/hpcrl/(.+?)", line \d+,? in (\S+)')
MOST, SHOWN, SHOWN_LINES = 40, 4, 7


def stacks_in(texts: Mapping[str, str], hangs: bool) -> list[str]:
    """Of each text, with its name: the threads where it hangs, else tracebacks, the last one first, and without any the
    threads of a crash. Those with functions of hpcrl come before others."""

    def of(pattern: re.Pattern[str]) -> list[str]:
        found = ((name, stack.strip()) for name, text in texts.items() for stack in pattern.findall(text)[::-1])
        return [f"{name}: {stack}" for name, stack in found]

    found = of(THREAD) if hangs else of(TRACEBACK) or of(THREAD)
    found.sort(key=lambda stack: (not FRAME.search(stack), ": Current" not in stack))
    return found[:MOST]


def shortened(stacks: Sequence[str]) -> list[str]:
    """The innermost lines of the first stacks."""
    lines: list[str] = []
    for stack in stacks[:SHOWN]:
        head, *frames = (line for line in stack.splitlines() if line.strip(" ~^"))
        lines += [head, *(frames[:SHOWN_LINES] if INNERMOST_FIRST in head else frames[-SHOWN_LINES:])]
    return lines


def table_lines(stacks: Sequence[str]) -> list[str]:
    """Lines of waits.txt for the functions of hpcrl in the stacks that are shown, innermost first."""
    from tests.gpu_rehearsal.table import read  # which imports all engines

    said = {}
    for line in read():
        file, _, name = line.place.partition(":")
        said[file, name.rpartition(".")[2]] = f"{line.what} in {line.place}: {line.reason}"
    ordered = (FRAME.findall(stack)[:: 1 if INNERMOST_FIRST in stack else -1] for stack in stacks[:SHOWN])
    places = dict.fromkeys(place for frames in ordered for place in frames)
    return [said[place] for place in places if place in said]
