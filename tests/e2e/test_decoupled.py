"""GDPO as a run: the advantages follow from each response's reward parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GDPO = """
algorithm=gdpo layout=single max_steps=2 rollout.filter_std=false reward.default.name=composed
+reward.default.options.parts.right={name:exact_match,weight:1} algorithm.std_eps=0
+reward.default.options.parts.alike={name:f1,weight:.5}
""".split()  # noqa: SIM905


def test_a_run_trains_on_separately_normalised_reward_parts(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    words = [word for word in WORDS if "kl_loss_coef" not in word and "reward." not in word]
    start = Start(tmp_path / "run", [*inputs, *words, *GDPO])
    assert start.wait(200.0) == ExitCode.DONE, start.text
    for step in (1, 2):
        batch = RolloutReader(tmp_path / "run").batch(step)
        values = batch.decoupled_rewards.double()
        wanted = (values - values.mean()) / values.std()
        found = batch.advantages[batch.loss_mask].double().numpy()
        np.testing.assert_allclose(found, wanted[batch.row_ids][batch.loss_mask].numpy(), atol=1e-5)
        assert len(values.unique()) > 2, "the parts differ"
        for uid in batch.group_ids.unique():
            assert abs(values[batch.group_ids == uid].sum()) < 1e-5, "each part was compared with its mean"
