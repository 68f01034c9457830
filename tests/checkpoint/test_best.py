"""Which step is the best in hand-made series, and that its checkpoint outlives newer ones, also after kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.checkpoint.best import BEST, Best, BestMode, best_of, name_best, read_best
from hpcrl.checkpoint.commit import find_latest
from hpcrl.checkpoint.failpoint import FAILPOINTS
from hpcrl.system.files import steps_in
from tests.checkpoint.test_commit import check_whole, save

METRIC = "val/score/mean"
NAN, INF = float("nan"), float("inf")

SAVE = """
import sys
from pathlib import Path
from hpcrl.checkpoint.best import Best
from tests.checkpoint.test_commit import save
save(Path(sys.argv[1]), 40, attempt=2, best=Best(int(sys.argv[2]), "val/score/mean", "max", 0.5))
"""


def of(step: int, value: float = 0.5, mode: BestMode = "max") -> Best:
    return Best(step, METRIC, mode, value)


def series(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of metrics from step 0 on; a step of value ... was not evaluated."""
    return [{"step": step} | ({METRIC: value} if value is not ... else {}) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "highest", "lowest"),
    [
        ([0.1, 0.2, 0.5, 0.4], 2, 1),
        ([0.1, 0.5, 0.5, 0.5], 1, 1),  # ties keep the earlier
        ([0.1, 0.5, 0.7, 0.7], 2, 1),
        ([0.9, 0.2, 0.3], 2, 1),  # the evaluation before the first step has no checkpoint
        ([0.1, None, NAN, INF, -INF, 0.3], 5, 5),
        ([0.1, NAN, None], None, None),
        ([0.1, ..., -0.5, ..., -0.25], 4, 2),
        ([0.1, 0.0, -0.0], 1, 1),
        ([0.1, True, "0.9", 0.2], 3, 3),
        ([0.1, 1, 2, 1], 2, 1),
        ([0.9], None, None),
        ([], None, None),
    ],
)
def test_the_best_of_a_series(values: Sequence[Any], highest: int | None, lowest: int | None) -> None:
    rows, every = series(values), range(100)
    for mode, expected in (("max", highest), ("min", lowest)):
        best = best_of(rows, METRIC, mode, every)
        assert (best and best.step) == expected
        assert best is None or best.value == values[best.step]


def test_only_steps_with_a_checkpoint_count() -> None:
    rows = series([0.1, 0.2, 0.9, 0.4, 0.8])
    assert best_of(rows, METRIC, "max", [1, 3]) == of(3, 0.4)
    assert best_of(rows, METRIC, "max", []) is None
    assert best_of(rows, "val/other", "max", [1, 3]) is None


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 10, best=of(10))
    for step in (20, 30, 40):
        save(tmp_path, step, best=of(10))
    assert steps_in(tmp_path) == [10, 30, 40] and read_best(tmp_path) == of(10)
    save(tmp_path, 50, best=of(50, 0.6))
    assert steps_in(tmp_path) == [40, 50] and read_best(tmp_path) == of(50, 0.6), "the best is among the newest"
    assert json.loads((tmp_path / BEST).read_text()) == {"step": 50, "metric": METRIC, "mode": "max", "value": 0.6}
    save(tmp_path, 60)
    assert steps_in(tmp_path) == [50, 60], "without a best, only the newest"


def test_best_never_names_a_checkpoint_that_does_not_exist(tmp_path: Path) -> None:
    save(tmp_path, 10, best=of(5))
    assert read_best(tmp_path) is None and not (tmp_path / BEST).exists()
    name_best(tmp_path, of(10))
    name_best(tmp_path, of(11))
    assert read_best(tmp_path) == of(10)
    name_best(tmp_path, None)
    name_best(tmp_path, None)
    assert read_best(tmp_path) is None


@pytest.mark.parametrize("place", FAILPOINTS)
@pytest.mark.parametrize("better", [10, 40], ids=["an earlier step is the best", "the saved step is the best"])
def test_a_kill_during_a_save_never_loses_the_best(tmp_path: Path, place: str, better: int) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, best=of(10))
    environ = os.environ | {"HPCRL_FAILPOINT": place, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SAVE, str(tmp_path), str(better)]
    assert subprocess.run(command, env=environ, check=False, timeout=60).returncode == -signal.SIGKILL
    best = read_best(tmp_path)
    assert best is not None and best.step in steps_in(tmp_path)
    named = FAILPOINTS.index(place) >= FAILPOINTS.index("best_named")
    assert best.step == (better if named else 10)
    assert find_latest(tmp_path).path is not None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[" * 10_000, b"null"])
def test_a_damaged_best_is_named(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 10, best=of(10))
    (tmp_path / BEST).write_bytes(content)
    with pytest.raises(ValueError, match="BEST cannot be read"):
        read_best(tmp_path)
    save(tmp_path, 20, best=of(20))
    assert read_best(tmp_path) == of(20)
    check_whole(tmp_path, 20)
    shutil.rmtree(tmp_path / "step_000020")
