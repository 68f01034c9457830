"""When an evaluation is the best, its step is saved, and the best survives kills and resumes from earlier steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcrl.checkpoint.best import BEST, Best, read_best
from hpcrl.config import ConfigError, parse
from hpcrl.controller.checkpoints import Checkpoints
from hpcrl.system.files import steps_in
from tests.checkpoint.test_commit import flip
from tests.controller.test_saves import Ranks, make
from tests.controller.test_saves import ranks as ranks  # noqa: PLC0414  # a fixture

pytestmark = pytest.mark.usefixtures("console")

METRIC = "val/score/mean"
KEPT = {"keep_best": {"metric": METRIC}, "data": {"val": "task:sort_digits"}}


def train(checkpoints: Checkpoints, run: Path, values: dict[int, float | None], last: int) -> None:
    """The steps after the restored one, with the metric's values at some steps; as a run's controller does it."""
    for step in range(max(checkpoints.restored_step, 0) + 1, last + 1):
        metrics: dict[str, Any] = {METRIC: values[step]} if step in values else {}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        checkpoints.best.judge(step, metrics, evaluated=step in values)
        checkpoints.maybe_save(step)
        checkpoints._drain(wait=True)


def best_of(run: Path) -> tuple[int, float] | None:
    best = read_best(run / "checkpoints")
    return None if best is None else (best.step, best.value)


def test_a_better_step_is_saved_and_kept(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks, **KEPT)
    checkpoints.restore()
    train(checkpoints, tmp_path, {1: 0.1, 3: 0.7, 5: 0.7, 7: 0.2}, last=4)
    assert steps_in(tmp_path / "checkpoints") == [3, 4] and best_of(tmp_path) == (3, 0.7), "1 was deleted"
    checkpoints.restored_step = 4
    train(checkpoints, tmp_path, {5: 0.7, 7: 0.2}, last=8)
    assert steps_in(tmp_path / "checkpoints") == [3, 6, 8], "neither 5 nor 7 was saved"


def test_without_the_metric_nothing_more_is_saved(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks)
    checkpoints.restore()
    train(checkpoints, tmp_path, {1: 0.1, 3: 0.7}, last=4)
    assert steps_in(tmp_path / "checkpoints") == [2, 4] and best_of(tmp_path) is None


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks, **KEPT, save_every=0)
    checkpoints.restore()
    train(checkpoints, tmp_path, {1: float("nan"), 2: None, 3: float("inf")}, last=3)
    assert steps_in(tmp_path / "checkpoints") == [] and checkpoints.best.best is None


def test_the_best_survives_a_resume(tmp_path: Path, ranks: Ranks) -> None:
    first = make(tmp_path, ranks, **KEPT)
    first.restore()
    train(first, tmp_path, {1: 0.3, 3: 0.1}, last=6)
    assert steps_in(tmp_path / "checkpoints") == [1, 4, 6]
    second = make(tmp_path, ranks, **KEPT)
    assert second.restore() == 6
    assert second.best.best == Best(1, METRIC, "max", 0.3)
    train(second, tmp_path, {7: 0.2, 9: 0.4}, last=9)
    assert steps_in(tmp_path / "checkpoints") == [8, 9] and best_of(tmp_path) == (9, 0.4)


def test_values_beyond_the_resumed_step_are_forgotten(tmp_path: Path, ranks: Ranks) -> None:
    first = make(tmp_path, ranks, **KEPT)
    first.restore()
    train(first, tmp_path, {1: 0.3, 3: 0.9}, last=3)
    assert steps_in(tmp_path / "checkpoints") == [2, 3] and best_of(tmp_path) == (3, 0.9)
    flip(tmp_path / "checkpoints/step_000003/shard_1")
    second = make(tmp_path, ranks, **KEPT)
    assert second.restore() == 2
    assert second.best.best is None and not (tmp_path / "checkpoints" / BEST).exists(), "the checkpoint of 1 is gone"
    train(second, tmp_path, {3: 0.2}, last=4)
    assert best_of(tmp_path) == (3, 0.2)


def test_a_kill_between_the_commit_and_its_name_is_made_up_for(tmp_path: Path, ranks: Ranks) -> None:
    first = make(tmp_path, ranks, **KEPT)
    first.restore()
    train(first, tmp_path, {1: 0.3, 3: 0.9}, last=3)
    (tmp_path / "checkpoints" / BEST).write_text(json.dumps({"step": 2, "metric": METRIC, "mode": "max", "value": 0.3}))
    second = make(tmp_path, ranks, **KEPT)
    second.restore()
    assert best_of(tmp_path) == (3, 0.9)


def test_damaged_records_are_made_up_for(tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    first = make(tmp_path, ranks, **KEPT)
    first.restore()
    train(first, tmp_path, {1: 0.3, 3: 0.1}, last=4)
    (tmp_path / "checkpoints" / BEST).write_text("{")
    make(tmp_path, ranks, **KEPT).restore()
    assert "BEST cannot be read" in capsys.readouterr().out and best_of(tmp_path) == (1, 0.3)
    (tmp_path / "metrics.jsonl").unlink()
    make(tmp_path, ranks, **KEPT).restore()
    assert best_of(tmp_path) == (1, 0.3), "from BEST"
    shutil.rmtree(tmp_path / "checkpoints/step_000001")
    make(tmp_path, ranks, **KEPT).restore()
    assert best_of(tmp_path) is None


def test_another_metric_or_none_at_a_resume(tmp_path: Path, ranks: Ranks) -> None:
    first = make(tmp_path, ranks, **KEPT)
    first.restore()
    train(first, tmp_path, {1: 0.3, 3: 0.1}, last=4)
    lowest = make(tmp_path, ranks, **(KEPT | {"keep_best": {"metric": METRIC, "mode": "min"}}))
    lowest.restore()
    assert best_of(tmp_path) == (1, 0.3), "the checkpoint of step 3 was deleted meanwhile, the one of step 1 exists"
    off = make(tmp_path, ranks, data=KEPT["data"])
    assert off.restore() == 4 and best_of(tmp_path) is None
    train(off, tmp_path, {}, last=6)
    assert steps_in(tmp_path / "checkpoints") == [4, 6]


def test_a_metric_that_an_evaluation_lacks_is_named_once(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = make(tmp_path, ranks, **(KEPT | {"keep_best": {"metric": "val/maths/score"}}))
    for step in (0, 10, 20):
        checkpoints.best.judge(step, {"val/math/score": 0.5, "actor/lr": 1.0}, evaluated=True)
        checkpoints.best.judge(step + 1, {"actor/lr": 1.0}, evaluated=False)
    warned = [line for line in capsys.readouterr().out.splitlines() if "keep_best" in line]
    assert len(warned) == 1 and "no val/maths/score" in warned[0] and "it has val/math/score" in warned[0]
    assert checkpoints.best.best is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keep_best": {"metric": "actor/kl"}}, "keep_best.metric: 'actor/kl' is no validation metric"),
        ({"keep_best": {"metric": METRIC}}, "needs validation; give data.val and eval_every above 0"),
        (KEPT | {"eval_every": 0}, "needs validation"),
        (KEPT | {"keep_best": {"metric": "val/score"}}, "use val/score/mean"),
        (KEPT | {"keep_best": {"metric": "val/scroe"}}, "no metric of an evaluation; use val/score/m"),
        (KEPT | {"keep_best": {"metric": "val/score/maen"}}, "use val/score/mean"),
        (KEPT | {"keep_best": {"metric": "val/math/mean"}}, "or val/DOMAIN/score"),
        (KEPT | {"keep_best": {"metric": "val/"}}, "no metric of an evaluation"),
        (
            KEPT | {"keep_best": {"metric": "val/sampled/score/mean"}, "eval": {"temperature": 1.0}},
            "rollout.temperature and eval.temperature are both 1; use val/score/mean",
        ),
        (KEPT | {"keep_best": {"metric": METRIC, "mode": "best"}}, "keep_best.mode"),
    ],
)
def test_a_metric_that_cannot_occur_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"data": {"train": "task:sort_digits"}} | values)
    assert len(error.value.problems) == 1 and said in error.value.problems[0]


def test_the_metric_of_a_domain_is_accepted() -> None:
    for metric in (
        "math/score",
        "truncated",
        "math/pass@4",
        "maj@8",
        "sampled/score/max",
        "env/default/won",
        "a/b/score",
    ):
        assert parse(KEPT | {"keep_best": {"metric": f"val/{metric}"}}).keep_best.metric == f"val/{metric}"
