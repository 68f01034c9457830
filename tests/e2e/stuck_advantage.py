"""An advantage estimator that hangs on one rank."""

from __future__ import annotations

import os
import time

import torch

from hpcrl.algorithms.interface import AllSum, RewardTable
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch
from tests.e2e.step_advantage import StepAdvantage

STUCK = "STUCK_RANK"
"""Environment variable: the rank that hangs."""


class StuckAdvantage(StepAdvantage):
    """Hangs in the third step."""

    num_calls = 0

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See AdvantageEstimator."""
        StuckAdvantage.num_calls += 1
        while StuckAdvantage.num_calls == 3 and os.environ["HPCRL_RANK"] == os.environ[STUCK]:
            time.sleep(1)
        all_sum(torch.zeros(1))
        return super().assign(batch, table, all_sum)
