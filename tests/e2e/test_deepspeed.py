"""GRPO with DeepSpeed: the steps of a run, also of a resumed one, are those of FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from tests.e2e.program import Start
from tests.e2e.test_parity import GRADIENTS, LOGPROBS, WORDS

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

EQUAL = ("critic/score/mean", "token/response_length/mean", "actor/lr", "actor/skipped_update")
CLOSE = ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/clipfrac", "actor/ratio_mean")
STEPS = (1, 2, 3)


def run(run_dir: Path, words: list[str]) -> str:
    start = Start(run_dir, [*WORDS, "layout=colocated", "algorithm.num_mini_batches=2", *words])
    assert start.wait(150) == 0, start.text
    return start.text


def test_three_steps_equal_those_of_fsdp2(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    """Two trainer ranks with ZeRO-3, on which the reference and the generators are, too; the third step after a
    resume."""
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}"]
    run(tmp_path / "fsdp2", [*inputs, "max_steps=3"])
    words = [*inputs, "trainer.engine=deepspeed"]
    run(tmp_path / "zero3", [*words, "max_steps=2"])
    assert "resumed from" in run(tmp_path / "zero3", [*words, "max_steps=3"])
    ours, theirs = ({row["step"]: row for row in read_metrics(tmp_path / name)} for name in ("zero3", "fsdp2"))
    stored, wanted = (RolloutReader(tmp_path / name) for name in ("zero3", "fsdp2"))
    for step in STEPS:
        one, other = stored.batch(step), wanted.batch(step)
        assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.rewards, other.rewards), step
        for name in ("old_logprobs", "ref_logprobs"):
            assert torch.allclose(getattr(one, name), getattr(other, name), rtol=0, atol=LOGPROBS), (step, name)
        for name in EQUAL:
            assert ours[step][name] == theirs[step][name], (step, name)
        for name in CLOSE:
            tolerance = GRADIENTS if step == 1 else 1e-3  # Adam multiplies rounding errors
            assert ours[step][name] == pytest.approx(theirs[step][name], rel=tolerance, abs=1e-6), (step, name)
    assert len({theirs[step]["actor/grad_norm"] for step in STEPS}) == len(STEPS)
