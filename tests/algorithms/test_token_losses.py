"""Weights per token: policy loss, cross-entropy and divergence in one objective."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.algorithms.token_losses import fill_weights, surrogate_tokens, weighted_advantages
from hpcrl.config import PolicyLoss, parse
from hpcrl.metrics.stats import flatten, merge
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.spec.divergence import Divergence
from tests.algorithms.pairs import make_pair
from tests.algorithms.prime_rl_goldens import GOLDENS
from tests.algorithms.test_invariance import (
    AGGREGATIONS,
    ALL,
    LAYOUTS,
    by_sample,
    norms_of,
    of_tokens,
    rows_of,
    together,
    whole_norms,
)

SAMPLED = Divergence("sampled", beta=1.0, top_k=64, temperature=1.0)
FULL = Divergence("full", beta=0.5, top_k=64, temperature=1.0)
NAMES = ("policy_weights", "ce_weights", "divergence_weights")

# -- goldens by hand


def two_rows(**weights: list[float]) -> Batch:
    """Rows with 2 and 1 model tokens, each after one token of a prompt, of advantages 2, 2, -1."""
    batch = rows_of([3, 3])  # for the other fields
    batch = Batch(
        torch.tensor([0, 3, 5]),
        {name: tensor[:5] if len(tensor) == batch.num_tokens else tensor for name, tensor in batch.columns.items()},
    )
    batch.loss_mask = torch.tensor([False, True, True, False, True])
    batch.turn_ids = torch.where(batch.loss_mask, 0, -1).int()
    batch.weights = torch.ones(2)
    batch.old_logprobs = None
    batch.advantages = torch.tensor([0.0, 2.0, 2.0, 0.0, -1.0])
    batch.teacher_logprobs = torch.tensor([0.0, -0.5, -3.0, 0.0, -1.0])
    for name, values in weights.items():
        setattr(batch, f"{name}_weights", torch.tensor(values))
    return batch


LOGPROBS = [0.0, -1.0, -2.0, 0.0, -3.0]
P, C, D = [0, 1.0, 0.5, 0, 0], [0, 0, 0.1, 0, 2.0], [0, 0.5, 0, 0, 1.0]
EXPECTED = {
    # by token: p A + d (teacher - lp) is 2 + .5 x .5, 1 and 2; the gradient of -(...) lp - c lp is their negative sum
    None: [-2.0, -(1.0 + 0.1), -2.0],
    SAMPLED: [-2.25, -(1.0 + 0.1), -(2.0 + 2.0)],
    FULL: [-2.0 - 0.5 * 3, -(1.0 + 0.1), -2.0 - 1.0 * 3],  # the divergence below is -3 lp
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("divergence", EXPECTED)
def test_every_term_has_its_weight(divergence: Divergence | None, aggregation: Any) -> None:
    section = GRPO(surrogate="vanilla", loss_aggregation=aggregation, loss_norm_tokens=4)
    objective = make_pair(section, divergence).objective
    batch = two_rows(policy=P, ce=C, divergence=D)
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    assert objective.outputs == ({"divergence"} if divergence is FULL else set())
    loss, stats = objective.loss(Outputs(logprobs, divergence=-3 * logprobs), batch, Norms(3.0, 2.0))
    loss.backward()
    shares = {
        "token-mean": [1 / 3, 1 / 3, 1 / 3],
        "seq-mean-token-sum": [1 / 2, 1 / 2, 1 / 2],
        "seq-mean-token-mean": [1 / 4, 1 / 4, 1 / 2],
        "seq-mean-token-sum-norm": [1 / 8, 1 / 8, 1 / 8],
    }[aggregation]
    assert logprobs.grad is not None
    expected = torch.tensor([a * share for a, share in zip(EXPECTED[divergence], shares, strict=True)])
    torch.testing.assert_close(logprobs.grad[batch.loss_mask], expected)
    assert loss.item() == pytest.approx(float((expected * torch.tensor(LOGPROBS)[batch.loss_mask]).sum()))
    logged = flatten(stats)
    parts = logged["loss/policy"] + logged["loss/ce"] + (logged["loss/divergence"] if divergence is FULL else 0)
    assert parts == pytest.approx(logged["actor/total_loss"])
    assert ("loss/divergence" in logged) == (divergence is not None)


def test_the_sampled_divergence_is_clipped_as_an_advantage() -> None:
    """p A = 1 x 2 and d D = 1 x (teacher - old) = -3: the sum, -1, is negative, so the lower clip bound holds."""
    objective = make_pair(GRPO(num_mini_batches=2), SAMPLED).objective
    batch = two_rows(divergence=[0, 1.0, 0, 0, 0])
    batch.old_logprobs, batch.teacher_logprobs = torch.zeros(5), torch.tensor([0, -3.0, 0, 0, 0])
    for logprob, gradient in ((-0.1, 0.904837), (-0.3, 0.0)):  # exp(-.1) is within the range 1 - .2, exp(-.3) below
        logprobs = torch.tensor([0.0, logprob, 0.0, 0.0, 0.0], requires_grad=True)
        objective.loss(Outputs(logprobs), batch, Norms(1.0, 1.0))[0].backward()
        assert logprobs.grad is not None
        assert logprobs.grad[1].item() == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize("surrogate", ["vanilla", "ppo", "kimi"])
def test_a_token_without_policy_and_divergence_has_only_its_cross_entropy(surrogate: Any) -> None:
    """Also with a surrogate whose penalty does not depend on the advantage, and where the ratio is far off."""
    section = GRPO(surrogate=surrogate, num_mini_batches=2, correction="truncate", off_policy_mask=0.1)
    batch = two_rows(policy=[0.0] * 5, ce=[0, 0.3, 0.3, 0, 0.3])
    batch.old_logprobs = torch.tensor([0, -50.0, 0, 0, -1])
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    loss, stats = make_pair(section).objective.loss(Outputs(logprobs), batch, Norms(3.0, 2.0))
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -0.1 * batch.loss_mask.float())
    assert stats["loss/policy"].total == 0 and stats["actor/ratio_mean"].count == 0


def test_rows_of_weight_0_have_no_term() -> None:
    batch = two_rows(ce=[0, 1.0, 1.0, 0, 1.0], divergence=[0, 1.0, 1.0, 0, 1.0])
    batch.weights = torch.tensor([1.0, 0.0])
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    make_pair(GRPO(), FULL).objective.loss(Outputs(logprobs, divergence=-3 * logprobs), batch, Norms(2.0, 1.0))[
        0
    ].backward()
    assert logprobs.grad is not None and logprobs.grad[4] == 0 and bool(logprobs.grad[1:3].all())


def test_the_teacher_must_have_been_asked() -> None:
    batch = two_rows(divergence=D)
    batch.teacher_logprobs = None
    with pytest.raises(ValueError, match=r"teacher_logprobs must be filled for .*loss.DOMAIN.divergence"):
        make_pair(GRPO(), SAMPLED).objective.loss(Outputs(torch.tensor(LOGPROBS)), batch, Norms(3.0, 2.0))


# -- no weights, and weights of 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_1_change_no_bit(aggregation: Any) -> None:
    section = GRPO(**OTHERS, loss_aggregation=aggregation)
    found = []
    for weight in (None, 1.0):
        batch = rows_of(ALL)
        if weight is not None:
            batch.policy_weights = batch.loss_mask.float()
            batch.ce_weights = torch.zeros(batch.num_tokens)
        found.append(losses(section, None, [batch], whole_norms())[:2])
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(values, found[1][1][sample]) for sample, values in found[0][1].items())


def filled(loss: dict[str, Any]) -> Batch:
    batch = rows_of(ALL)
    fill_weights(parse({"loss": loss}), batch, {"math": [1, 2], "code": [3]})
    return batch


def test_nothing_is_filled_for_default_weights() -> None:
    for loss in ({}, {"default": {}}, {"math": {"policy": 1}, "code": {"ce": 0.0}}):
        batch = filled(loss)
        assert all(getattr(batch, name) is None for name in NAMES)


def test_weights_are_filled_by_domain_and_reward() -> None:
    batch = filled({"math": {"ce": 0.1, "ce_above": 0.5}, "default": {"policy": 0.5}})
    assert batch.divergence_weights is None and batch.policy_weights is not None and batch.ce_weights is not None
    of_row = batch.row_ids[batch.loss_mask]
    assert not batch.policy_weights[~batch.loss_mask].any() and not batch.ce_weights[~batch.loss_mask].any()
    math = of_row < 6  # groups 1 and 2
    torch.testing.assert_close(batch.policy_weights[batch.loss_mask], torch.where(math, 1.0, 0.5))
    rewarded = batch.rewards[of_row] > 0.5
    torch.testing.assert_close(batch.ce_weights[batch.loss_mask], torch.where(math & rewarded, 0.1, 0.0))
    assert bool((math & ~rewarded).any()), "some rows of the domain have too low a reward"


def test_a_rank_without_rows_fills_the_same_fields() -> None:
    batch = rows_of([])
    fill_weights(parse({"loss": {"math": {"ce": 0.1}}}), batch, {"math": [1, 2]})
    assert batch.ce_weights is not None and batch.ce_weights.shape == (0,) and batch.policy_weights is None


# -- marks of the step


def test_marks_of_a_step_leave_out_tokens_without_a_surrogate() -> None:
    batch = rows_of(ALL)
    batch.policy_weights = batch.loss_mask.float() * (batch.row_ids != 3)
    for section in (GRPO(surrogate="kl_cov", cov_share=1.0, num_mini_batches=2), GRPO(entropy_share=0.99999)):
        make_pair(section).objective.prepare(batch, lambda x: x)
    index = surrogate_tokens(batch, None)
    assert batch.marked is not None and batch.high_entropy is not None
    assert batch.marked.nonzero()[:, 0].tolist() == index.tolist()
    assert 0 < int(batch.high_entropy.sum()) <= len(index) and bool((batch.row_ids[batch.high_entropy] != 3).all())


# -- any split


OTHERS: dict[str, Any] = {
    "num_mini_batches": 2, "kl_loss_coef": 0.3, "entropy_loss_coef": 0.1, "loss_norm_tokens": 12,
    "correction": "truncate", "correction_normalize": True, "off_policy_mask": 0.3, "entropy_share": 0.7,
}  # fmt: skip


def weighted_rows(rows: list[int], longer: int = 0) -> Batch:
    """Rows whose tokens have different weights, of which some are 0."""
    batch = rows_of(rows, longer)
    for name, speed in {"policy_weights": 0.9, "ce_weights": 1.3, "divergence_weights": 1.6, "teacher": 2.3}.items():
        parts = [
            torch.from_numpy(of_tokens(row, batch.loss_mask[batch.row_ids == number].numpy(), speed))
            for number, row in enumerate(rows)
        ]
        values = torch.cat([*parts, torch.zeros(0)])
        if name == "teacher":
            batch.teacher_logprobs = -values
        else:
            setattr(batch, name, (values - 0.9).clamp(min=0) * batch.loss_mask)
    return batch.check()


def losses(
    section: PolicyLoss, divergence: Divergence | None, parts: list[Batch], norms: Norms
) -> tuple[Tensor, dict[int, Tensor], dict[str, float]]:
    """(loss, gradient of each row's log-probs, statistics) of these micro-batches, each on its own rank."""
    objective, total, gradients = make_pair(section, divergence).objective, torch.zeros(()), {}
    stats = together(parts, objective.prepare)
    for part in parts:
        assert part.old_logprobs is not None
        logprobs = (part.old_logprobs + 0.2 * torch.sin(5 * part.old_logprobs)).detach().requires_grad_()
        outputs = Outputs(logprobs, entropy=2 + part.old_logprobs, divergence=torch.cos(logprobs).square())
        loss, of_part = objective.loss(outputs, part, norms)
        loss.backward()
        assert logprobs.grad is not None
        part.returns = logprobs.grad
        total, gradients, stats = total + loss.detach(), gradients | by_sample(part, "returns"), [*stats, of_part]
    return total, gradients, flatten(merge(stats))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("divergence", [SAMPLED, FULL], ids=["sampled", "full"])
@pytest.mark.parametrize("surrogate", ["ppo", "kl_cov"])
def test_weighted_losses_do_not_depend_on_row_order_prompts_ranks_or_micro_batches(
    surrogate: Any, divergence: Divergence, aggregation: Any
) -> None:
    section = GRPO(**OTHERS, surrogate=surrogate, cov_share=0.2, loss_aggregation=aggregation)
    loss, gradients, stats = losses(section, divergence, [weighted_rows(ALL)], whole_norms())
    assert {"loss/policy", "loss/ce", "loss/divergence"} <= stats.keys()
    for longer, parts in LAYOUTS.values():
        split = [weighted_rows(part, longer) for part in parts]
        other, other_gradients, other_stats = losses(section, divergence, split, whole_norms())
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6)
        for sample, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[sample], gradient, rtol=1e-5, atol=1e-6)
        assert other_stats == pytest.approx(stats, rel=1e-5, abs=1e-6)


def test_the_comparison_notices_norms_of_a_part() -> None:
    """The negative control: denominators of each part's own tokens give another loss."""
    section, parts = GRPO(num_mini_batches=2), [weighted_rows(ALL[:3]), weighted_rows(ALL[3:])]
    whole = losses(section, SAMPLED, [weighted_rows(ALL)], whole_norms())[0]
    own = [losses(section, SAMPLED, [part], norms_of(part))[0] for part in parts]
    assert abs(sum(own) / 2 - whole) > 1e-3


def test_the_sum_of_the_terms_alone_is_the_loss() -> None:
    """Every term has the denominator that it would have alone."""
    section, total = GRPO(num_mini_batches=2), torch.zeros(())
    for kept in NAMES:
        batch = weighted_rows(ALL)
        for name in NAMES:
            if name != kept:
                setattr(batch, name, torch.zeros(batch.num_tokens))
        total += losses(section, FULL, [batch], whole_norms())[0]
    torch.testing.assert_close(total, losses(section, FULL, [weighted_rows(ALL)], whole_norms())[0])


def test_combined_advantages_are_weighted_means() -> None:
    batch = weighted_rows(ALL)
    index = surrogate_tokens(batch, SAMPLED)
    assert batch.policy_weights is not None and batch.divergence_weights is not None
    assert batch.advantages is not None and batch.old_logprobs is not None and batch.teacher_logprobs is not None
    old = batch.old_logprobs[index]
    found = weighted_advantages(batch, index, old, SAMPLED)
    p, d = batch.policy_weights[index], batch.divergence_weights[index]
    expected = p * batch.advantages[index] + d * (batch.teacher_logprobs[index] - old)
    torch.testing.assert_close((p + d) * found, expected)
    assert len(index) == int(
        ((batch.policy_weights + batch.divergence_weights > 0) & (batch.weights > 0)[batch.row_ids]).sum()
    )


# -- prime-rl


def test_weighted_losses_are_prime_rls() -> None:
    """With the generator's ratio, without a clip, and with one count of tokens for its three components. prime-rl adds
    a constant 1e-3 (lp - gen)^2 to its ref_kl."""
    golden = json.loads(GOLDENS.read_text())
    lengths = [len(row) for row in golden["trainer"]]

    def packed(name: str) -> Tensor:
        return torch.cat([torch.tensor([0.0, *row]) for row in golden[name]])

    batch = rows_of([0] * len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0) + torch.arange(len(lengths) + 1)
    mask = torch.ones(int(cu[-1]), dtype=torch.bool).index_fill(0, cu[:-1], False)
    of_rows = {name: batch.columns[name] for name in ("weights", "sample_ids", "group_ids")}
    batch = Batch(cu, of_rows, token_ids=mask.long(), loss_mask=mask, turn_ids=mask.int() - 1)
    batch.weights, batch.versions = torch.ones(len(lengths)), mask.int() - 1
    batch.gen_logprobs, batch.advantages, batch.teacher_logprobs = map(packed, ("inference", "advantages", "teacher"))
    for name, theirs in zip(NAMES, ("rl_weights", "ce_weights", "ref_kl_weights"), strict=True):
        setattr(batch, name, packed(theirs))
    section = GRPO(ratio_to="generator", pg_clip_low=10, pg_clip_high=10)
    logprobs = packed("trainer").requires_grad_()
    norms = Norms(float(sum(lengths)), float(len(lengths)))
    loss, _ = make_pair(section, SAMPLED).objective.loss(Outputs(logprobs), batch, norms)
    assert batch.divergence_weights is not None
    loss = loss + (batch.divergence_weights * 1e-3 * (logprobs - batch.gen_logprobs).square()).sum() / norms.tokens
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(golden["loss"], rel=1e-5)
    torch.testing.assert_close(logprobs.grad, packed("gradient"), rtol=1e-5, atol=1e-7)
