"""The objectives of pipeline=dpo: a loss of pairs, or of labelled answers, as a mean over the step's rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs, required
from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.metrics.stats import Stat, Stats, stat
from hpcrl.rollout.batch import Batch, Norms

CHOSEN_TOKENS = "_chosen_tokens"
"""Coefficient: trained tokens of the chosen answers of a step, over all ranks."""
KL = "kl"
"""Coefficient: KTO's estimate of the divergence from the reference, nats per answer."""
LOG_RATIO = "_log_ratio"
"""Statistic: log-ratio of policy and reference of every answer, nats."""


def make_objective(own: DPOConfig) -> Objective:
    """The objective of a section `dpo`."""
    return LabelledObjective(own) if own.spec.labelled else PairObjective(own)


class AnswerSums(NamedTuple):
    """Float32 [B] of each sequence's trained tokens.

    Attributes:
        logps: Sums of log-probs, with gradients.
        reference: Sums of the reference's log-probs; 0 without a reference.
        counts: Numbers of tokens.
    """

    logps: Tensor
    reference: Tensor
    counts: Tensor

    @classmethod
    def of(cls, outputs: Outputs, batch: Batch, with_reference: bool) -> AnswerSums:
        """The sums of a batch. ValueError if its reference log-probs are lacking."""
        rows = batch.row_ids
        zeros = outputs.logprobs.new_zeros(batch.num_sequences)
        logps = zeros.index_add(0, rows, outputs.logprobs)
        reference = zeros
        if with_reference:
            given = required(batch, "ref_logprobs", "the loss on pairs")
            reference = zeros.index_add(0, rows, given.to(zeros.dtype))
        return cls(logps, reference, zeros.index_add(0, rows, batch.loss_mask.to(zeros.dtype)))


class PairObjective(Objective):
    """The mean over pairs of a loss of the pair's scores, and optionally the mean cross-entropy of the chosen answers'
    tokens. A score is the log-prob of an answer, or its ratio to the reference's."""

    compares_rows = True

    def __init__(self, own: DPOConfig):
        self._own, self._losses = own, own.spec.load()
        self.reads = frozenset({"ref_logprobs"}) if own.uses_reference else frozenset()

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective. ValueError if the sequences of a pair are not adjacent, the chosen one first."""
        _check_pairs(batch)
        own, answers = self._own, AnswerSums.of(outputs, batch, bool(self.reads))
        ratios = answers.logps - answers.reference
        scores = ratios / answers.counts if own.averages else ratios
        losses: Tensor = self._losses(scores[::2], scores[1::2], own)
        num_pairs = norms.sequences / 2
        total = losses.sum() / num_pairs
        stats: Stats = {}
        if own.sft_scale:
            cross_entropy, tokens = -answers.logps[::2].sum(), self.coefficients[CHOSEN_TOKENS]
            total = total + own.sft_scale * cross_entropy / tokens
            stats["nll_loss"] = Stat(float(cross_entropy.detach()), float(answers.counts[::2].sum()))
        stats["loss"] = Stat(float(total.detach()) * num_pairs, float(len(losses)))
        shown = answers.logps.detach()
        if own.spec.per_token and not own.spec.reference:  # as TRL shows them
            shown = shown / answers.counts
        rewards = own.scale * (shown - answers.reference)
        chosen, rejected = rewards[::2], rewards[1::2]
        return total, stats | {
            "rewards/chosen": stat(chosen),
            "rewards/rejected": stat(rejected),
            "rewards/accuracies": stat((chosen > rejected).float()),
            "rewards/margins": stat(chosen - rejected),
            "logps/chosen": stat(shown[::2]),
            "logps/rejected": stat(shown[1::2]),
        }


class LabelledObjective(Objective):
    """The mean over sequences of a loss of their log-ratios and labels, and of the step's coefficient `kl`."""

    reads = frozenset({"ref_logprobs"})

    def __init__(self, own: DPOConfig):
        self._own, self._losses = own, own.spec.load()

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective. ValueError without labels."""
        own, answers = self._own, AnswerSums.of(outputs, batch, True)
        chosen = required(batch, "chosen", f"the loss {own.loss}")
        ratios = answers.logps - answers.reference
        losses: Tensor = self._losses(ratios, chosen, self.coefficients.get(KL, 0.0), own)
        shown = answers.logps.detach()
        rewards = own.scale * (shown - answers.reference)
        return losses.sum() / norms.sequences, {
            "loss": stat(losses),
            "rewards/chosen": stat(rewards, chosen),
            "rewards/rejected": stat(rewards, ~chosen),
            "logps/chosen": stat(shown, chosen),
            "logps/rejected": stat(shown, ~chosen),
            LOG_RATIO: stat(ratios),
        }


def _check_pairs(batch: Batch) -> None:
    chosen = required(batch, "chosen", "a loss on pairs")
    pattern = torch.arange(batch.num_sequences, device=chosen.device) % 2 == 0
    if not chosen.equal(pattern) or not batch.group_ids[::2].equal(batch.group_ids[1::2]):
        raise ValueError(f"a loss on pairs needs whole pairs in a micro-batch, the chosen answer first, got {chosen}")
