"""Requirements on the run whose rollouts debug=train_only trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.config import parse
from hpcrl.launch.stored import check_rollouts
from hpcrl.run_folder import CONFIG


def stored(folder: Path, **rollout: Any) -> Path:
    """A run folder with one step's rollouts, sampled with these settings."""
    (folder / "rollouts/step_000001").mkdir(parents=True)
    (folder / CONFIG).write_text(yaml.safe_dump(parse({"rollout": rollout}).model_dump(mode="json")))
    return folder


@pytest.mark.parametrize(("level", "problems"), [("token", 0), ("sequence", 1)])
def test_sequence_level_correction_is_refused_for_truncated_sampling(tmp_path: Path, level: str, problems: int) -> None:
    """This run's own sampling, which is only for evaluation, does not matter."""
    run_dir = stored(tmp_path / "run", top_k=50)
    algorithm = {"advantage_estimator": "grpo", "correction": "truncate", "correction_level": level}
    told = [
        str(problem.text)
        for problem in check_rollouts(
            parse({"debug": "train_only", "load_rollouts": str(run_dir), "max_steps": 1, "algorithm": algorithm})
        )
    ]
    assert len(told) == problems and all(
        f"{run_dir} were drawn with rollout.top_k=50; use token" in text for text in told
    )
    uncut = stored(tmp_path / "uncut")
    data = {"debug": "train_only", "load_rollouts": str(uncut), "max_steps": 1, "algorithm": algorithm}
    assert check_rollouts(parse(data | {"rollout": {"top_k": 50}})) == []


@pytest.mark.parametrize(
    ("name", "told"), [("remax", "needs the reward of a greedy"), ("gdpo", "needs decoupled rewards")]
)
def test_stored_rollouts_without_fields_of_the_estimator_are_refused(name: str, told: str, tmp_path: Path) -> None:
    run_dir = stored(tmp_path / "run")
    data = {
        "debug": "train_only",
        "load_rollouts": str(run_dir),
        "max_steps": 1,
        "algorithm": {"advantage_estimator": name},
    }
    (problem,) = check_rollouts(parse(data))
    assert problem.path == ("algorithm", "advantage_estimator") and told in problem.text
    (run_dir / CONFIG).write_text(
        yaml.safe_dump(parse({"algorithm": {"advantage_estimator": name}}).model_dump(mode="json"))
    )
    assert check_rollouts(parse(data)) == []
