"""The logs of two attempts of a run with two ranks, each from its start to a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.log import HEADER
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.e2e.test_faults import REWARD, WORDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_logs_show_all_messages_of_two_attempts(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    run = tmp_path / "run"
    words = [*WORDS, f"model.path={digit_model}", f"data.train={digit_data}", "layout.trainer.num_ranks=1"]
    words += [*f"{REWARD}talking_reward".split(), "trainer.lr=1e30"]  # which breaks the weights in the first step
    for _ in range(2):
        start = Start(run, words, {"PYTHONPATH": str(ROOT)})
        assert start.wait() == ExitCode.NO_PROGRESS, start.text
        assert HEADER.search(start.text) is None, "a user gets lines without header"
        (line,) = start.errors.read_text().splitlines()
        assert re.match(
            r"hpcrl: rank 1 \(.*\) on \S+ failed in command .*not finite.* \(logs: .*hpcrl logs \S+/run\)$", line
        )

    files = {f"{path.parent.name}/{path.name}": path.read_text() for path in (run / "logs").rglob("*.log")}
    assert sorted(files) == [
        f"attempt_000{n}/{name}.log" for n in (1, 2) for name in ("agent_0000", "rank_0000", "rank_0001")
    ]
    for name, text in files.items():
        who = "agent" if "agent" in name else f"rank {int(name[-5])}"
        assert HEADER.match(text) and "\nhpcrl" not in text, name
        assert {found["who"] for found in HEADER.finditer(text)} == {who}
        other = {line for line in text.splitlines() if not HEADER.match(line) and not line.startswith("  ")}
        assert other <= {"printed by a reward"}, name

    command = [sys.executable, "-m", "hpcrl", "logs", str(run)]
    merged = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(merged) == sorted(line for text in files.values() for line in text.splitlines())
    headers = [found for line in merged if (found := HEADER.match(line))]
    assert [found["time"] for found in headers] == sorted(found["time"] for found in headers)
    told = [line.split(" ", 2)[2] for line in merged if HEADER.match(line)]
    in_order = (
        r"agent INFO started rank 0 \(pid \d+\), 1 \(pid \d+\)",
        r"rank 1 INFO process \d+ is rank 1: trainer, generator, reward",
        r"rank 1 INFO trainer ready in [\d.]+ s",
        r"rank 1 WARNING a_lab\.rewards: scores a response",
        r"rank 0 INFO step 1/2000  reward .*",
        r"rank 1 ERROR failed in DecodeChunk #\d+",
        r"rank 0 ERROR the run ends",
        r"agent ERROR rank 1 \(.*\) on \S+ failed in command .*",
        r"agent INFO started rank 0 .*",  # the second attempt
    )
    place = 0
    for pattern in in_order:
        place = next((i for i, line in enumerate(told) if i >= place and re.fullmatch(pattern, line)), -1)
        assert place >= 0, (pattern, "\n".join(merged))
    failed = next(i for i, line in enumerate(merged) if "rank 1 ERROR failed in DecodeChunk" in line)
    end = next(i for i in range(failed + 1, len(merged)) if not merged[i].startswith("  "))
    assert merged[failed + 1] == "  Traceback (most recent call last):" and "not finite" in merged[end - 1]
