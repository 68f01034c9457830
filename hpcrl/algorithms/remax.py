"""The advantage estimator of ReMax (arXiv 2310.10505): a reward minus the reward of the prompt's greedy response."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.interface import AllSum, RewardTable, required
from hpcrl.algorithms.spec import ReMax
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch


class ReMaxAdvantage(ReturnsAdvantage[ReMax]):
    """See the module's docstring. The baseline depends on the prompt and not on the sampled responses, so the gradient
    is unbiased, also with a single response per prompt."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage. ValueError for rollouts without greedy responses, such as rollouts stored by a run with
        another algorithm."""
        if table.baselines is None:
            text = "the rewards of greedy responses, and these rollouts have none"
            raise ValueError(f"algorithm.advantage_estimator=remax needs {text}")
        return table.rewards - table.baselines

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See AdvantageEstimator. critic/baseline: the rewards of the greedy responses, one per row."""
        return super().assign(batch, table, all_sum) | {
            "critic/baseline/*": stat(required(batch, "baselines", "remax"))
        }
