"""Mixed losses as a run: cross-entropy on the right responses of one domain, beside the policy loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_mixes_losses_by_domain(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    train = f"[{{path:{digit_data},domain:maths}},{{path:{digit_data},domain:plain}}]"
    words = [
        f"model.path={digit_model}",
        f"data.train={train}",
        *(w for w in WORDS if "eval" not in w),
        "layout=single",
    ]
    words += ["max_steps=2", "save_every=0", "rollout.filter_std=false", "loss.maths.ce=0.1", "loss.maths.ce_above=0"]
    start = Start(tmp_path / "run", words)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    reader, learned = RolloutReader(tmp_path / "run"), 0
    for step in (1, 2):
        batch = reader.batch(step)
        maths = torch.isin(batch.group_ids, torch.tensor(reader.domains(step).get("maths", [])))
        right = (maths & (batch.rewards > 0))[batch.row_ids] & batch.loss_mask
        assert batch.ce_weights is not None and batch.policy_weights is None and batch.divergence_weights is None
        torch.testing.assert_close(batch.ce_weights, 0.1 * right)
        learned += int(right.sum())
    assert learned, "some response of the domain was right"
    rows = read_metrics(tmp_path / "run")[1:]
    assert all("loss/divergence" not in row for row in rows)
    assert max(row["loss/ce"] for row in rows) > 0
    for row in rows:
        assert row["loss/policy"] + row["loss/ce"] == pytest.approx(row["actor/total_loss"], rel=1e-5, abs=1e-7)
