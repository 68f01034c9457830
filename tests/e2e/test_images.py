"""Learning from images: the demonstration demo_vl in short, its control, a resume, and asynchronous rollouts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_resume import NUM_STEPS, Runs, survive

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(600)]

SHORT = f"""
+experiment=demo_vl deterministic=true max_steps={NUM_STEPS} save_every=2 eval_every=3 eval.num_prompts=6
rollout.num_prompts=8 eval.num_examples=2
""".split()


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The metrics of a run."""
    start = Start(folder, list(words))
    assert start.wait(400) == ExitCode.DONE, start.text
    return read_metrics(folder)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that names colours and does not count."""
    folder = tmp_path_factory.mktemp("images") / "sft"
    run(folder, "+experiment=demo_vl_sft", "eval_every=0", "save_every=0")
    return folder / "hf"


def test_a_model_learns_to_count_what_it_sees(tmp_path: Path, warm: Path) -> None:
    words = ["max_steps=60", "save_every=0", "trainer.lr_schedule=constant"]
    rows = run(tmp_path / "run", "+experiment=demo_vl", f"model.path={warm}", *words)
    before, after = rows[0], rows[-1]
    assert before["val/sampled/number/score"] < 0.4, "chance is .25"
    # After these 60 of the demonstration's 200 steps 1.00 with AVX-512 and .75 with AVX2.
    assert after["val/number/score"] > 0.55 and after["val/colour/score"] > 0.9
    assert after["val/number_of_other_image/score"] < 0.4, "without its image there is nothing to count"
    assert max(row["mismatch/diff/max"] for row in rows[1:]) < 1e-3, "generator and trainer see the same pixels"
    assert after["images/per_row/mean"] == 1 and after["images/tokens_per_row/mean"] == 4
    page = (tmp_path / "run/examples.html").read_text()
    assert page.count("<img ") == page.count("<table>") == 5


@pytest.mark.soak
def test_images_of_other_prompts_teach_nothing(tmp_path: Path, warm: Path) -> None:
    """The control of the learning: the same run, in which images do not belong to answers."""
    other = "data.train=[{path: task:shapes, options: {other_image: true}}]"
    rows = run(tmp_path / "run", "+experiment=demo_vl", f"model.path={warm}", "max_steps=30", "save_every=0", other)
    assert rows[-1]["val/number/score"] < 0.45


@pytest.mark.soak
def test_a_kill_changes_nothing(tmp_path: Path, warm: Path) -> None:
    survive(Runs(tmp_path, [*SHORT, f"model.path={warm}"]), "killed", random.Random(3), 1)


def test_rollouts_ahead_of_training_keep_their_images(tmp_path: Path, warm: Path) -> None:
    """Generators of their own, weights that arrive in the middle of responses, prompts of more than a step, and
    redundant prompts and responses."""
    ahead = """
    layout=disaggregated rollout.max_staleness=1 rollout.on_new_weights=recompute generator.decode_chunk_tokens=1
    rollout.extra_prompts=2 rollout.extra_members=1 generator.max_num_seqs=16
    """
    words = [*SHORT, "deterministic=false", f"model.path={warm}", *ahead.split()]
    rows = run(tmp_path / "run", *words)
    batch = RolloutReader(tmp_path / "run").batch(NUM_STEPS)
    assert len(batch.pictures) == 8, "one image for each prompt"
    assert any(row.get("scheduler/staleness/max") for row in rows), "some rollouts are of earlier weights"
    assert sum(row.get("scheduler/redundant") or 0 for row in rows) > 0
    assert max(row["mismatch/diff/max"] for row in rows[1:] if row.get("mismatch/diff/max") is not None) < 1e-3
