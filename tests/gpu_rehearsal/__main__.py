"""Rewrite waits.txt: python -m tests.gpu_rehearsal"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.gpu_rehearsal.parts import PARTS, differing, rehearse
from tests.gpu_rehearsal.table import FILE, NO_REASON, Line, lines_of, read, text


def main() -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    reasons = {line.key: line.reason for line in read()}
    lines: dict[tuple[str, str, str], Line] = {}
    for name in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            results = rehearse(name, Path(folder))
        for result in results:
            assert not differing(result), (name, differing(result))
        lines |= {line.key: line for line in lines_of(results, reasons)}
    FILE.write_text(text(lines.values()))
    missing = sum(line.reason == NO_REASON for line in lines.values())
    print(f"{FILE}: {len(lines)} lines, {missing} without a reason")


if __name__ == "__main__":
    main()
