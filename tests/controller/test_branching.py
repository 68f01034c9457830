"""The controller carries out a branch: it loads the chosen step, sets later work aside, and does so once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.controller.checkpoints import CheckpointError, Checkpoints
from hpcrl.run_folder import close_run, settle_branch
from hpcrl.system.files import steps_in
from tests.checkpoint.test_commit import flip
from tests.controller.test_best_step import KEPT, best_of, train
from tests.controller.test_saves import Ranks, make
from tests.controller.test_saves import ranks as ranks  # noqa: PLC0414  # a fixture

pytestmark = pytest.mark.usefixtures("console")

MANY: dict[str, Any] = {"keep_checkpoints": 9}


def trained(run: Path, ranks: Ranks, last: int = 8, **values: Any) -> None:
    """An attempt that ends after these steps, with a checkpoint of every second one."""
    first = make(run, ranks, **MANY, **values)
    first.restore()
    train(first, run, {}, last)
    for step in range(1, last + 1):
        (run / "rollouts" / f"step_{step:06d}").mkdir(parents=True)
    for step in (0, 4, 8):
        (run / "episodes" / f"step_{step:06d}").mkdir(parents=True)
        (run / "validation").mkdir(exist_ok=True)
        (run / "validation" / f"step_{step:06d}.jsonl").write_text("{}")


def opened(run: Path, ranks: Ranks, **values: Any) -> Checkpoints:
    """A new attempt, which reads the step of a branch from config.yaml, as rank 0 does."""
    made = make(run, ranks, **MANY, **values)
    pending = yaml.safe_load((run / "config.yaml").read_text())["resume_from"]
    made._config = made._config.model_copy(update={"resume_from": pending})
    return made


def pending(run: Path) -> int | None:
    return yaml.safe_load((run / "config.yaml").read_text())["resume_from"]


def rows(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


SLOWER: dict[str, Any] = {"trainer": {"lr": 1e-7}}


def test_later_work_is_set_aside_once(tmp_path: Path, ranks: Ranks) -> None:
    trained(tmp_path, ranks)
    branch = opened(tmp_path, ranks, **SLOWER, resume_from=4)
    assert pending(tmp_path) == 4
    assert branch.restore() == 4 and ranks.loaded == ["step_000004", "step_000004"]
    aside = tmp_path / "abandoned/2"
    assert steps_in(tmp_path / "checkpoints") == [2, 4] and steps_in(aside / "checkpoints") == [6, 8]
    assert rows(tmp_path / "metrics.jsonl") == [1, 2, 3, 4] and rows(aside / "metrics.jsonl") == [5, 6, 7, 8]
    assert steps_in(tmp_path / "rollouts") == [1, 2, 3, 4] and steps_in(aside / "rollouts") == [5, 6, 7, 8]
    assert steps_in(tmp_path / "episodes") == [0, 4] and steps_in(aside / "episodes") == [8]
    assert [path.name for path in (aside / "validation").iterdir()] == ["step_000008.jsonl"]
    assert (tmp_path / "checkpoints/LATEST").read_text() == "step_000004\n" and pending(tmp_path) is None
    train(branch, tmp_path, {}, last=6)
    assert steps_in(aside / "checkpoints") == [6, 8], "a commit deletes none of them"
    # The same command, and the one without resume_from, go on.
    for values in ({"resume_from": 4}, {}):
        again = opened(tmp_path, ranks, **SLOWER, **values)
        assert again.restore() == 6 and ranks.loaded[-1] == "step_000006"
    assert not (tmp_path / "abandoned/3").exists() and not (tmp_path / "abandoned/4").exists()


def test_a_kill_before_the_branch_is_settled_begins_it_again(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, ranks)
    killed = opened(tmp_path, ranks, **SLOWER, resume_from=4)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as at, pytest.raises(Killed):
        at.setattr("hpcrl.controller.checkpoints.settle_branch", die)
        killed.restore()
    assert pending(tmp_path) == 4
    again = opened(tmp_path, ranks, **SLOWER)
    assert again.restore() == 4 and pending(tmp_path) is None
    assert steps_in(tmp_path / "abandoned/2/checkpoints") == [6, 8]


def test_a_damaged_step_moves_nothing(tmp_path: Path, ranks: Ranks) -> None:
    trained(tmp_path, ranks)
    flip(tmp_path / "checkpoints/step_000004/shard_1")
    branch = opened(tmp_path, ranks, **SLOWER, resume_from=4)
    with pytest.raises(CheckpointError, match=r"shard_1 is not what was committed.*nothing was moved.*steps 2, 6, 8\)"):
        branch.restore()
    assert steps_in(tmp_path / "checkpoints") == [2, 4, 6, 8] and not (tmp_path / "abandoned").exists()
    other = opened(tmp_path, ranks, **SLOWER, resume_from=6)
    assert other.restore() == 6 and steps_in(tmp_path / "abandoned/3/checkpoints") == [8]


def test_a_superseded_attempt_does_not_settle_a_branch(tmp_path: Path, ranks: Ranks) -> None:
    trained(tmp_path, ranks)
    branch = opened(tmp_path, ranks, **SLOWER, resume_from=4)

    def taken_over() -> None:
        ranks.while_loading = lambda: None
        close_run(tmp_path, 2)
        make(tmp_path, ranks, **MANY, **SLOWER)

    ranks.while_loading = taken_over
    with pytest.raises(Exception, match="attempt 3 now owns the run"):
        branch.restore()
    assert pending(tmp_path) == 4


def test_the_best_of_the_abandoned_work_is_forgotten(tmp_path: Path, ranks: Ranks) -> None:
    first = make(tmp_path, ranks, **MANY, **KEPT)
    first.restore()
    train(first, tmp_path, {1: 0.3, 3: 0.5, 7: 0.9}, last=8)
    assert best_of(tmp_path) == (7, 0.9)
    branch = opened(tmp_path, ranks, **KEPT, **SLOWER, resume_from=4)
    assert branch.restore() == 4 and best_of(tmp_path) == (3, 0.5)
    assert steps_in(tmp_path / "abandoned/2/checkpoints") == [6, 7, 8]


def test_adapted_coefficients_of_changed_keys_start_again(tmp_path: Path, ranks: Ranks) -> None:
    ranks.algorithm.numbers = {"actor/kl_scale": 3.0, "_reward_moments/mean/math": 0.5}
    to = {"advantage_estimator": "grpo", "kl_loss_coef": 0.1, "kl_target": 0.01}
    trained(tmp_path, ranks, 2, algorithm=to)
    branch = opened(tmp_path, ranks, algorithm=to | {"kl_target": 0.02}, resume_from=2)
    branch.restore()
    assert ranks.algorithm.numbers == {"_reward_moments/mean/math": 0.5}


def test_a_settled_configuration_keeps_its_arguments(tmp_path: Path) -> None:
    first = '# words: ["a=1", "b=x y"]\n'
    (tmp_path / "config.yaml").write_text(first + "resume_from: 4\nresume_reason: 'why: 1e5'\nrun_name: '1e5'\n")
    settle_branch(tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith(first)
    assert yaml.safe_load(text) == {"resume_from": None, "resume_reason": "", "run_name": "1e5"}
