"""A preference loss on pairs, on two trainer ranks: the model learns, and a killed run ends like an undisturbed one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.conftest import DIGITS
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 12
WORDS = f"""
pipeline=tests.e2e.simpo:SPEC layout=colocated max_steps={NUM_STEPS} save_every=2 deterministic=true trainer.lr=3e-3
trainer.max_tokens_per_micro_batch=64 cluster.device=cpu
""".split()


@pytest.fixture
def words(tmp_path: Path, digit_model: Path) -> list[str]:
    """20 pairs whose chosen digit is 0."""
    rng = random.Random(0)
    answers = [{"prompt": f"digit {i}", "chosen": DIGITS[0], "rejected": rng.choice(DIGITS[1:])} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return [*WORDS, f"model.path={digit_model}", f"data.train={tmp_path}/pairs.jsonl"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Metrics of every step about rows and learning."""
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    return [{name: row[name] for name in row if name.startswith(("simpo/", "actor/", "rows/"))} for row in rows]


def test_the_margin_grows_and_a_kill_changes_nothing(tmp_path: Path, words: list[str]) -> None:
    whole = Start(tmp_path / "whole", words)
    assert whole.wait() == ExitCode.DONE, whole.text
    steps = metrics(tmp_path / "whole")
    assert len(steps) == NUM_STEPS and all(step["rows/skipped"] == 0 for step in steps)
    margins = [step["simpo/margin"] for step in steps]
    assert abs(margins[0]) < 1 < margins[-1] - margins[0] and margins[-1] > 1, margins

    killed = Start(tmp_path / "killed", words)
    killed.wait_until(lambda: killed.step >= 5)
    killed.kill()
    again = Start(tmp_path / "killed", words)
    assert again.wait() == ExitCode.DONE, again.text
    assert metrics(tmp_path / "killed") == steps


def test_the_plan_shows_both_parts_of_a_pair_and_a_bad_row_stops_the_start(tmp_path: Path, words: list[str]) -> None:
    planned = Start(tmp_path / "run", [*words, "dry_run=true"])
    assert planned.wait() == ExitCode.DONE, planned.text
    assert 'chosen: "0<|im_end|>"' in planned.text and "rejected: " in planned.text
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write('{"prompt": "digit 1", "chosen": "1", "rejected": "1"}\n')
    refused = Start(tmp_path / "run", words)
    assert refused.wait() == ExitCode.BAD_INPUT and "pairs.jsonl:21: chosen and rejected are equal" in refused.text
