"""Mixed losses as a run: cross-entropy on the right responses of one domain and on rows of answers, beside the policy
loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_mixes_losses_by_domain_and_rows_of_answers(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    """The answers, which are all equal, become likely; only rollouts are stored."""
    answers = tmp_path / "answers.jsonl"
    rows = [json.loads(line) | {"answer": "2"} for line in digit_data.read_text().splitlines()]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = f"[{{path:{digit_data},domain:maths}},{{path:{digit_data},domain:plain}}]"
    words = [f"model.path={digit_model}", f"data.train={train}", *(w for w in WORDS if "eval" not in w)]
    words += ["layout=single", "max_steps=3", "save_every=0", "rollout.filter_std=false"]
    words += ["loss.maths.ce=0.1", "loss.maths.ce_above=0", f"imitation.data={answers}", "imitation.num_rows=32"]
    start = Start(tmp_path / "run", words)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    assert "32 rows of answers a step from" in start.text
    reader, learned = RolloutReader(tmp_path / "run"), 0
    for step in (1, 2, 3):
        batch = reader.batch(step)
        domains = reader.domains(step)
        assert batch.group_ids.unique().tolist() == sorted(uid for uids in domains.values() for uid in uids)
        maths = torch.isin(batch.group_ids, torch.tensor(domains.get("maths", [])))
        right = (maths & (batch.rewards > 0))[batch.row_ids] & batch.loss_mask
        assert batch.num_sequences == 16 and batch.ce_weights is not None and batch.divergence_weights is None
        torch.testing.assert_close(batch.ce_weights, 0.1 * right)
        learned += int(right.sum())
    assert learned, "some response of the domain was right"
    logged = read_metrics(tmp_path / "run")[1:]
    assert [(row["imitation/rows"], row["imitation/skipped"]) for row in logged] == [(32, 0)] * 3
    assert logged[-1]["loss/ce"] < 0.7 * logged[0]["loss/ce"]
    for row in logged:
        assert row["loss/policy"] + row["loss/ce"] == pytest.approx(row["actor/total_loss"], rel=1e-4, abs=1e-6)
