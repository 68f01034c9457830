"""Rows of answers in a batch of rollouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.data.answers import EncodedRow, TrainedSequence
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.rollout.types import ANSWER_IDS
from hpcrl.spec.trajectory import Field, Level, Origin, declare
from hpcrl.workers.mixing import with_answers, without_answers
from hpcrl.workers.trainer import _supervised_sample, batch_of_rows
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_invariance import AGGREGATIONS, ALL, norms_of, rows_of


class Answers:
    """Rows of two tokens of a prompt and a growing answer."""

    kind, per_row = "answers", 1

    def encode(self, row: int) -> EncodedRow:
        sequence = TrainedSequence([5, 6, *[7 + row] * (row + 1)], [False, False, *[True] * (row + 1)])
        return EncodedRow([sequence], [True])


def answers(*rows: int) -> Batch:
    return batch_of_rows(Answers(), rows)  # type: ignore[arg-type]


def test_answers_have_only_a_cross_entropy() -> None:
    rollouts = rows_of(ALL)
    rollouts.divergence_weights = rollouts.loss_mask.float()
    mixed = with_answers(rollouts, answers(0, 2), 0.5).check()
    assert mixed.sample_ids.tolist() == [*rollouts.sample_ids.tolist(), ANSWER_IDS, ANSWER_IDS + 2]
    assert mixed.policy_weights is not None and mixed.ce_weights is not None and mixed.divergence_weights is not None
    own = mixed.sample_ids[mixed.row_ids] >= ANSWER_IDS
    assert mixed.ce_weights[own].tolist() == [0, 0, 0.5, 0, 0, 0.5, 0.5, 0.5]
    assert not mixed.ce_weights[~own].any() and not (mixed.policy_weights + mixed.divergence_weights)[own].any()
    assert torch.equal(mixed.policy_weights[~own], rollouts.loss_mask.float())
    back = without_answers(mixed)
    assert {name: values.tolist() for name, values in back.columns.items() if name in rollouts.columns} == {
        name: values.tolist() for name, values in rollouts.columns.items()
    }
    assert without_answers(back) is back


def test_fields_of_every_level_and_shape_are_empty_in_answers() -> None:
    declare(
        Field("choices", "int16", Level.TOKEN, Origin.GENERATOR, "wide", optional=True, width=3, fill=-1),
        Field("parts", "float32", Level.ROW, Origin.GENERATOR, "ragged", optional=True, ragged=True),
    )
    rollouts = rows_of([0, 1])
    rollouts.choices = torch.ones(rollouts.num_tokens, 3, dtype=torch.int16)
    rollouts.parts, rollouts.parts_counts = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 2])
    mixed = with_answers(rollouts, answers(1), 1.0).check()
    assert mixed.choices[-4:].tolist() == [[-1, -1, -1]] * 4 and mixed.parts_counts.tolist() == [1, 2, 0]
    assert with_answers(rollouts, answers(), 1.0).check().num_sequences == 2, "a rank with no answers"
    assert with_answers(rows_of([]), answers(1), 1.0).check().num_sequences == 1, "a rank with no rollouts"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", ["ppo", "kimi"])
def test_the_loss_is_that_of_the_rollouts_plus_the_cross_entropy(surrogate: Any, aggregation: Any) -> None:
    """With the rollouts' and the answers' tokens in the denominator. Metrics of the policy are of the rollouts."""
    section = GRPO(
        surrogate=surrogate, num_mini_batches=2, kl_loss_coef=0.2, entropy_loss_coef=0.1, correction="truncate",
        ratio_level="geometric", loss_aggregation=aggregation, loss_norm_tokens=12,
    )  # fmt: skip
    rollouts, ce = rows_of(ALL), 0.7
    rollouts.on_policy = rollouts.loss_mask & (rollouts.row_ids % 2 == 0)
    mixed = with_answers(rollouts, answers(0, 2), ce)
    norms, found = norms_of(mixed), []
    for batch in (rollouts, mixed):
        assert batch.old_logprobs is not None
        logprobs = (batch.old_logprobs - 0.1 * batch.loss_mask).requires_grad_()
        outputs = Outputs(logprobs, entropy=2 + batch.old_logprobs.detach())
        loss, stats = make_pair(section).objective.loss(outputs, batch, norms)
        loss.backward()
        assert logprobs.grad is not None
        found.append((loss.detach(), logprobs.grad, flatten(stats)))
    (loss, gradient, stats), (whole, whole_gradient, whole_stats) = found
    count = rollouts.num_tokens
    torch.testing.assert_close(whole_gradient[:count], gradient)
    per_token = {
        "token-mean": [ce / norms.tokens] * 4,
        "seq-mean-token-sum": [ce / norms.sequences] * 4,
        "seq-mean-token-mean": [ce / norms.sequences, *[ce / 3 / norms.sequences] * 3],
        "seq-mean-token-sum-norm": [ce / 12 / norms.sequences] * 4,
    }[aggregation]
    mask = mixed.loss_mask[count:]
    torch.testing.assert_close(whole_gradient[count:][mask], -torch.tensor(per_token))
    torch.testing.assert_close(whole, loss + 0.1 * sum(per_token))
    compared = [name for name in stats if not name.endswith("_loss")]
    assert {name: whole_stats[name] for name in compared} == pytest.approx({name: stats[name] for name in compared})
    assert {"mismatch/kl_k1", "critic/entropy/mean", "actor/ratio_mean", "critic/kl"} <= set(compared)


def test_an_answer_is_not_generated() -> None:
    sample = _supervised_sample(3, Answers().encode(1).sequences[0])
    assert set(sample.versions.tolist()) == {-1}, "metrics of the policy are of tokens with a version"


def test_norms_count_both() -> None:
    mixed = with_answers(rows_of(ALL), answers(1), 1.0)
    assert norms_of(mixed) == Norms(norms_of(rows_of(ALL)).tokens + 2, norms_of(rows_of(ALL)).sequences + 1)
