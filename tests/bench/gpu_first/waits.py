"""Where the host waits for a GPU in steps and decoding, by the warnings of torch.cuda.set_sync_debug_mode("warn"),
beside the rehearsal's table: rows of what is in one of them alone. On a CPU the rehearsal's device stands in.

python -m tests.bench.gpu_first.waits cuda
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu.common import Check, Row
from tests.engines.worlds import make_model_folder
from tests.gpu_rehearsal.device import SYNCHRONIZE, gpu
from tests.gpu_rehearsal.ledger import Ledger
from tests.gpu_rehearsal.parts import PARTS
from tests.gpu_rehearsal.table import read

SEEN = ("fsdp2 plain", "native")
"""Parts of the rehearsal for one process: steps, log-probs, snapshot, offload; admission, decoding, new weights."""
WARNING = "called a synchronizing CUDA operation"


@contextlib.contextmanager
def warned(ledger: Ledger) -> Iterator[None]:
    """CUDA's warnings go into the ledger, with the function of hpcrl that runs."""

    def note(message: Warning | str, *about: Any, **more: Any) -> None:
        if WARNING in str(message):
            ledger.note(WARNING)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def compare(found: dict[str, set[str]]) -> Iterator[Row]:
    """found: section -> places. Explicit waits may be found or not: torch warns of those for a stream alone."""
    lines = [line for line in read() if line.during in found]
    known = {(line.during, line.place) for line in lines}
    implicit = {(line.during, line.place) for line in lines if line.what != SYNCHRONIZE}
    seen = {(during, place) for during, places in found.items() for place in places}
    differing = {"places that the table lacks": seen - known, "places of the table that did not occur": implicit - seen}
    for what, places in differing.items():
        yield Row("", what, len(places), note="; ".join(map(": ".join, sorted(places)))[:400])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as name, Check(device, True, Path(name)).alone():
        folder = make_model_folder("qwen2", Path(name) / "model", num_key_value_heads=4)
        for part in SEEN:
            ledger = Ledger()
            with warned(ledger) if device == "cuda" else gpu(ledger):
                PARTS[part].run(folder, "cuda", ledger.section)
            found |= {during: {place for place, _ in counts} for during, counts in ledger.sections.items()}
    for row in compare(found):
        row.say()


if __name__ == "__main__":
    main()
