"""The stacks in what failed processes wrote, and the waits that the rehearsal knows of in the functions they name."""

from __future__ import annotations

import re
from collections.abc import Iterable

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t]+.*\n)+\S.*", re.M)
THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):\n(?:  .*\n)+", re.M)
"""As faulthandler writes it."""
FRAME = re.compile(r'File ".*/hpcrl/(.+?)", line \d+,? in (\S+)')
MOST_LINES = 200


def stack_in(texts: Iterable[str], hangs: bool) -> str:
    """Tracebacks, the last one first, then threads; where it hangs, threads first. Those with functions of hpcrl come
    before others. Empty if there are none."""
    whole = "\n".join(texts)
    tracebacks = [match[0] for match in TRACEBACK.finditer(whole)][::-1]
    threads = [match[0].strip() for match in THREAD.finditer(whole)]
    threads.sort(key=lambda stack: not stack.startswith("Current"))
    found = dict.fromkeys(threads + tracebacks if hangs else tracebacks + threads)
    ordered = sorted(found, key=lambda stack: not FRAME.search(stack))
    return "\n".join("\n\n".join(ordered).splitlines()[:MOST_LINES])


def table_lines(stack: str) -> list[str]:
    """Lines of waits.txt for the functions of hpcrl in the first stack, innermost first."""
    from tests.gpu_rehearsal.table import read  # which imports all engines

    first = stack.partition("\n\n")[0]
    frames = FRAME.findall(first)
    places = dict.fromkeys(frames if "most recent call first" in first else frames[::-1])
    said = {}
    for line in read():
        file, _, name = line.place.partition(":")
        said[file, name.rpartition(".")[2]] = f"{line.what} in {line.place}: {line.reason}"
    return [said[place] for place in places if place in said]
