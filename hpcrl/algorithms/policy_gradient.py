"""The policy-gradient objective, with one of several surrogates (hpcrl.algorithms.surrogates).

    loss = weight x surrogate + kl_loss_coef KL(policy, reference) - entropy_loss_coef entropy

The weight is 1, or with `correction` the importance weight of responses from older weights
(functional.behaviour_weights). Rows of weight 0 are ignored. A batch trained once on its own rollouts needs no
old_logprobs: the ratio has value 1 and the gradient of the current log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.adaptive import ENTROPY_COEF, KL_SCALE, adapted
from hpcrl.algorithms.base import Numbers, Objective, Outputs, model_tokens, required
from hpcrl.algorithms.metrics import LossSums
from hpcrl.algorithms.surrogates import SURROGATES, PolicyTokens
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.spec.policy_loss import PolicyLoss


class PolicyGradient(Objective):
    """See the module's docstring. temperature: that of the rollouts, so that ratios compare sampling distributions."""

    def __init__(self, config: PolicyLoss, temperature: float = 1.0):
        self.config, self.temperature = config, temperature
        self.num_epochs, self.num_mini_batches = config.ppo_epochs, config.num_mini_batches
        rewarded = config.entropy_loss_coef != 0 or config.entropy_target is not None
        self.outputs = config.outputs if rewarded else frozenset()
        self.logged = config.outputs - self.outputs
        reads = {"advantages"}
        if self.optimizer_steps > 1:
            reads.add("old_logprobs")
        if config.kl_loss_coef > 0:
            reads.add("ref_logprobs")
        self.reads = frozenset(reads)

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        config, index = self.config, model_tokens(batch)
        rows, turns, logprobs = batch.row_ids[index], batch.turn_ids[index], outputs.logprobs[index]
        sequences = batch.segment_ids[index]
        if self.optimizer_steps > 1:
            required(batch, "old_logprobs", "more than one optimizer step per batch")
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[index]
        advantages = required(batch, "advantages", "the policy loss")[index]
        tokens = PolicyTokens(logprobs, old, advantages, sequences, turns)
        token_losses, clipped = SURROGATES[config.surrogate](config, tokens)
        behaviour = batch.gen_logprobs if batch.gen_logprobs_behaviour is None else batch.gen_logprobs_behaviour
        if config.correction != "none":
            weights, cut = F.behaviour_weights(
                old, behaviour[index], sequences, turns, config.correction_level, config.correction,
                config.correction_low, config.correction_high,
            )  # fmt: skip
            token_losses = weights * token_losses
        coefficients = F.token_coefficients(rows, batch.weights, config.loss_aggregation, config.loss_norm_tokens)
        total = pg_loss = (coefficients * token_losses).sum()
        sums = LossSums(batch, rows, coefficients, config.loss_aggregation)
        sums.add_loss("actor/pg_loss", pg_loss)
        if config.kl_loss_coef > 0:
            ref = required(batch, "ref_logprobs", "kl_loss_coef > 0")[index]
            kl_loss = (coefficients * F.kl_divergence(logprobs, ref, config.kl_loss_estimator)).sum()
            total = total + config.kl_loss_coef * self.numbers.get(KL_SCALE, 1.0) * kl_loss
            sums.add_loss("actor/kl_loss", kl_loss)
        if self.outputs:
            assert outputs.entropy is not None, "an entropy bonus needs the engine's entropy"
            bonus = self.numbers.get(ENTROPY_COEF, config.entropy_loss_coef)
            total = total - bonus * (coefficients * outputs.entropy[index]).sum()
        sums.add_loss("actor/total_loss", total)
        sums.add_policy(F.importance_ratio(logprobs, old), logprobs - old, clipped)
        sums.add_train_infer(old, batch.gen_logprobs[index])
        if batch.on_policy is not None:
            sums.add_mismatch(old, batch.gen_logprobs[index], batch.on_policy[index])
        if config.correction != "none":
            sums.add_tokens("actor/correction_mean", weights)
            sums.add_tokens("actor/correction_cut", cut)
        if outputs.entropy is not None:
            sums.add_tokens("critic/entropy/mean", outputs.entropy[index])
        if batch.ref_logprobs is not None:
            sums.add_tokens("critic/kl", F.kl_divergence(old, batch.ref_logprobs[index], "k3"))
        return total / F.denominator(norms, config.loss_aggregation), sums.stats()

    def adapt(self, stats: Mapping[str, Stat]) -> Numbers:
        """See Adaptive: the coefficients of the KL terms and of the entropy bonus."""
        return adapted(self.config, self.numbers, stats)
