"""The policy-gradient objective, with one of several surrogates (hpcrl.algorithms.surrogates).

    loss = weight x surrogate + kl_loss_coef KL(policy, reference) - entropy_loss_coef entropy

With weights per token (hpcrl.algorithms.token_losses) the surrogate has the weight p, or p + d with the sampled
divergence, and the KL and the entropy have p; added are c times the cross-entropy and, with the other forms, d times
the divergence. All terms have one denominator, so a token's gradient depends on its own weights only, not on how many
other tokens have the same term.

The weight is 1, or with `correction` the importance weight of responses from older weights
(hpcrl.algorithms.correction). Rows of weight 0 are ignored. A batch trained once on its own rollouts needs no
old_logprobs: the ratio has value 1 and the gradient of the current log-probs. With `ratio_to=generator` the ratio is
relative to the generator's log-probs (after truncation, if any) and needs no old_logprobs. Unless the advantage
estimator reads old_logprobs, metrics of the policy before the step are then taken from the current policy, and with
several optimizer steps the mismatch of trainer and generator is not reported, since they diverge within the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.adaptive import ENTROPY_COEF, KL_SCALE, adapted
from hpcrl.algorithms.correction import behaviour_logprobs, corrected, mean_weight, off_policy_tokens
from hpcrl.algorithms.covariance import mark
from hpcrl.algorithms.high_entropy import choose_high_entropy
from hpcrl.algorithms.interface import AllSum, Coefficients, Objective, Outputs, model_tokens, required
from hpcrl.algorithms.metrics import LossSums
from hpcrl.algorithms.policy_tokens import PolicyTokens
from hpcrl.algorithms.surrogates import SURROGATES
from hpcrl.algorithms.token_losses import is_sampled, surrogate_weights, weighted_advantages
from hpcrl.metrics.stats import Stat, Stats, scalar
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.spec.divergence import Divergence
from hpcrl.spec.policy_loss import MARKS_TOKENS, PolicyLoss


class PolicyGradient(Objective):
    """See the module's docstring. `temperature` is the rollouts' temperature: ratios compare sampling distributions."""

    def __init__(self, config: PolicyLoss, temperature: float = 1.0, divergence: Divergence | None = None):
        self.config, self.temperature, self.divergence = config, temperature, divergence
        self.num_epochs, self.num_mini_batches = config.ppo_epochs, config.num_mini_batches
        rewarded = config.entropy_loss_coef != 0 or config.entropy_target is not None
        self.outputs = config.outputs if rewarded else frozenset()
        if divergence is not None and not is_sampled(divergence):
            self.outputs |= {"divergence"}
        self.logged = config.outputs - self.outputs
        self._normalizes = config.correction_normalize and config.correction != "none"
        reads = {"advantages"}
        self._marks = config.surrogate in MARKS_TOKENS
        if self._normalizes or self._marks or (self.optimizer_steps > 1 and not config.compares_with_generator):
            reads.add("old_logprobs")
        if config.entropy_share < 1:
            reads.add("old_entropies")
        if config.kl_loss_coef > 0:
            reads.add("ref_logprobs")
        self.reads = frozenset(reads)

    def prepare(self, batch: Batch, all_sum: AllSum) -> Stats:
        """See Objective."""
        stats = mark(self.config, batch, all_sum, self.divergence) if self._marks else {}
        if self.config.entropy_share < 1:
            stats |= choose_high_entropy(self.config.entropy_share, batch, all_sum, self.divergence)
        if self._normalizes:
            mean = mean_weight(self.config, batch, all_sum)
            batch.correction_scale = torch.full_like(batch.weights, 1.0 / mean)
            stats["actor/correction_norm"] = scalar(mean)
        return stats

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        config, index = self.config, model_tokens(batch)
        rows, logprobs = batch.row_ids[index], outputs.logprobs[index]
        if "old_logprobs" in self.reads:
            steps = self.optimizer_steps > 1
            required(batch, "old_logprobs", "more than one optimizer step per batch" if steps else "sums over the step")
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[index]
        coefficients = F.token_weights(rows, batch.weights, config.loss_aggregation, config.loss_norm_tokens)
        sums = LossSums(batch, rows, config.loss_aggregation)
        total, stats = self._policy_loss(outputs, batch, index, old, coefficients, sums)
        if (added := self._weighted_terms(outputs, batch, index, old, coefficients, total, sums)) is not None:
            total = total + added
        sums.add_loss("actor/total_loss", total)
        stats |= self._policy_stats(outputs, batch, index, old, sums)
        return total / F.denominator(norms, config.loss_aggregation), sums.stats() | stats

    def _policy_stats(self, outputs: Outputs, batch: Batch, index: Tensor, old: Tensor, sums: LossSums) -> Stats:
        """Add what compares the policy with other policies at the tokens that it drew; returned apart if there may be
        others, of an expert."""
        own = sums
        if batch.ce_weights is not None:
            drawn = batch.versions[index] >= 0
            index, old = index[drawn], old[drawn]
            own = LossSums(batch, batch.row_ids[index], self.config.loss_aggregation)
        own.add_train_infer(old, batch.gen_logprobs[index])
        if batch.on_policy is not None and (batch.old_logprobs is not None or self.optimizer_steps == 1):
            own.add_mismatch(old, batch.gen_logprobs[index], batch.on_policy[index])
        if outputs.entropy is not None:
            own.add_tokens("critic/entropy/mean", outputs.entropy[index])
        if batch.ref_logprobs is not None:
            own.add_tokens("critic/kl", F.kl_divergence(old, batch.ref_logprobs[index], "k3"))
        return {} if own is sums else own.stats()

    def _policy_loss(
        self, outputs: Outputs, batch: Batch, index: Tensor, old: Tensor, coefficients: Tensor, sums: LossSums
    ) -> tuple[Tensor, Stats]:
        """(sum over the model tokens, statistics of the tokens that have a policy loss)."""
        config, own = self.config, sums
        of_terms = of_surrogate = coefficients
        if (weights := surrogate_weights(batch, self.divergence)) is not None:
            kept = weights[index] > 0
            index, old, coefficients = index[kept], old[kept], coefficients[kept]
            of_surrogate = coefficients * weights[index]
            of_terms = coefficients if batch.policy_weights is None else coefficients * batch.policy_weights[index]
            own = LossSums(batch, batch.row_ids[index], config.loss_aggregation)
        rows, turns, logprobs = batch.row_ids[index], batch.turn_ids[index], outputs.logprobs[index]
        sequences = batch.segment_ids[index]
        base = behaviour_logprobs(batch)[index] if config.compares_with_generator else old
        advantages = weighted_advantages(batch, index, old, self.divergence)
        marked = None if batch.marked is None else batch.marked[index]
        tokens = PolicyTokens(logprobs, base, advantages, sequences, turns, marked)
        token_losses, clipped = SURROGATES[config.surrogate](config, tokens)
        own.add_policy(F.importance_ratio(logprobs, base), logprobs - base, clipped)
        if config.correction != "none":
            correction = corrected(config, old, behaviour_logprobs(batch)[index], sequences, turns)
            token_losses = correction.weights * token_losses
            if self._normalizes:
                token_losses = token_losses * required(batch, "correction_scale", "correction_normalize")[rows]
            own.add_correction(correction)
        if config.off_policy_mask is not None:
            masked = off_policy_tokens(tokens, batch.gen_logprobs[index], config.off_policy_mask)
            token_losses = torch.where(masked, 0.0, token_losses)
            own.add_tokens("actor/off_policy_masked", masked)
        if config.entropy_share < 1:
            chosen = required(batch, "high_entropy", "entropy_share below 1")[index]
            token_losses = torch.where(chosen, token_losses, 0.0)
        total = pg_loss = (of_surrogate * token_losses).sum()
        sums.add_loss("actor/pg_loss", pg_loss)
        if config.kl_loss_coef > 0:
            ref = required(batch, "ref_logprobs", "kl_loss_coef > 0")[index]
            kl_loss = (of_terms * _divergence(config, tokens, ref)).sum()
            total = total + config.kl_loss_coef * self.coefficients.get(KL_SCALE, 1.0) * kl_loss
            sums.add_loss("actor/kl_loss", kl_loss)
        if "entropy" in self.outputs:
            assert outputs.entropy is not None, "an entropy bonus needs the engine's entropy"
            bonus = self.coefficients.get(ENTROPY_COEF, config.entropy_loss_coef)
            total = total - bonus * (of_terms * outputs.entropy[index]).sum()
        return total, {} if own is sums else own.stats()

    def _weighted_terms(
        self,
        outputs: Outputs,
        batch: Batch,
        index: Tensor,
        old: Tensor,
        coefficients: Tensor,
        policy_loss: Tensor,
        sums: LossSums,
    ) -> Tensor | None:
        """The sum of the cross-entropy and the divergence over the model tokens; None if no token has any. The sampled
        divergence is a part of the policy loss, and is only logged."""
        ce_weights, weights, divergence = batch.ce_weights, batch.divergence_weights, self.divergence
        total = None
        if ce_weights is not None:
            total = -(coefficients * ce_weights[index] * outputs.logprobs[index]).sum()
            sums.add_loss("loss/ce", total)
        if weights is not None and divergence is not None:
            sampled = is_sampled(divergence)
            if sampled:
                values = old - required(batch, "teacher_logprobs", "the sampled divergence")[index]
            else:
                assert outputs.divergence is not None, f"the divergence {divergence.form} needs the engine's"
                values = outputs.divergence[index]
            term = (coefficients * weights[index] * values).sum()
            sums.add_loss("loss/divergence", term)
            name = "distill/reverse_kl" if sampled else "distill/divergence"
            sums.add_tokens(name, values, among=weights[index] > 0)
            if not sampled:
                total = term if total is None else total + term
        if ce_weights is not None or weights is not None or batch.policy_weights is not None:
            sums.add_loss("loss/policy", policy_loss)
        return total

    def adapt(self, stats: Mapping[str, Stat]) -> Coefficients:
        """See Adaptive: the coefficients of the KL terms and of the entropy bonus."""
        return adapted(self.config, self.coefficients, stats)


def _divergence(config: PolicyLoss, tokens: PolicyTokens, reference: Tensor) -> Tensor:
    """float32 [M]: the KL term of the loss. k3_weighted is k3 times the ratio to the policy that drew the tokens; both
    have gradients, which in expectation gives the exact KL's gradient (DeepSeek-V3.2, arXiv 2512.02556)."""
    if config.kl_loss_estimator == "k3_weighted":
        return tokens.ratio("token") * F.kl_divergence(tokens.logprobs, reference, "k3")
    return F.kl_divergence(tokens.logprobs, reference, config.kl_loss_estimator)
