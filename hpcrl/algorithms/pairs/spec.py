"""The keys of pipeline=dpo and online_dpo and the specifications of their losses; without torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpcrl.config.part_names import listed
from hpcrl.spec.fields import NUMBER, NonNegative, Positive, PositiveFloat, Section
from hpcrl.spec.kinds import PairLossSpec
from hpcrl.spec.tables import DPO_LOSSES


class DPOConfig(Section):
    """Training on pairs of a chosen and a rejected answer (docs/pairs.md)."""

    loss: Annotated[str, AfterValidator(functools.partial(listed, DPO_LOSSES))] = "sigmoid"
    """The loss: sigmoid (DPO), ipo, robust, simpo, orpo, cpo or kto, or the path of a PairLossSpec."""
    batch_size: Positive = 64
    """Rows per step."""
    beta: PositiveFloat | None = None
    """Scale of the loss's rewards; null: 2 with simpo, otherwise .1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER] = 0.0
    """Assumed share of pairs whose labels are swapped: conservative DPO, CPO and SimPO, or robust DPO."""
    length_normalized: bool = False
    """Compare mean log-probs per token instead of sums over the answer. ipo, simpo and orpo always do."""
    reference_free: bool = False
    """Compare the policy's log-probs themselves instead of their ratios to the reference's; no reference is loaded."""
    gamma: NonNegative = 0.5
    """Margin by which SimPO's reward of the chosen answer is to exceed that of the rejected one."""
    sft_weight: NonNegative | None = None
    """Weight of the mean cross-entropy of the chosen answers' tokens, which is added to the loss; null: 1 with orpo and
    cpo, otherwise 0."""
    desirable_weight: NonNegative = 1.0
    """KTO's weight of good answers."""
    undesirable_weight: NonNegative = 1.0
    """KTO's weight of bad answers."""
    pairs_per_group: Positive = 1
    """Maximum pairs of a prompt's responses with pipeline=online_dpo: the best with the worst by reward, the second
    best with the second worst, and so on."""
    validation: Literal["pairs", "responses"] = "pairs"
    """pairs: data.val has rows like data.train, whose first eval.num_prompts give val/loss and val/rewards; responses:
    data.val has prompts, which the policy answers."""

    @property
    def spec(self) -> PairLossSpec:
        """The specification of the loss."""
        return DPO_LOSSES[self.loss]

    @property
    def uses_reference(self) -> bool:
        """Whether the loss reads the reference's log-probs."""
        return self.spec.reference and not (self.reference_free and "reference_free" in self.spec.keys)

    @property
    def scale(self) -> float:
        """`beta`, or the loss's default."""
        return self.spec.beta if self.beta is None else self.beta

    @property
    def sft_scale(self) -> float:
        """`sft_weight`, or the loss's default."""
        return self.spec.sft_weight if self.sft_weight is None else self.sft_weight

    @property
    def averages(self) -> bool:
        """Whether the loss compares mean log-probs per token."""
        return self.spec.per_token or (self.length_normalized and "length_normalized" in self.spec.keys)

    def unread(self) -> Iterator[str]:
        """Keys that the loss does not read."""
        for key in ("label_smoothing", "length_normalized", "reference_free", "gamma", "sft_weight"):
            if key not in self.spec.keys:
                yield key
        if not self.spec.labelled:
            yield from ("desirable_weight", "undesirable_weight")


SIGMOID = PairLossSpec(
    about="DPO (arXiv 2305.18290), with label_smoothing conservative DPO.",
    make="hpcrl.algorithms.pairs.sigmoid:sigmoid",
    keys=("label_smoothing", "length_normalized", "reference_free", "sft_weight"),
)

IPO = PairLossSpec(
    about="IPO (arXiv 2310.12036), on mean log-probs per token.",
    make="hpcrl.algorithms.pairs.ipo:ipo",
    keys=("reference_free", "sft_weight"),
    per_token=True,
)

ROBUST = PairLossSpec(
    about="Robust DPO (arXiv 2403.00409): unbiased if a share label_smoothing of the labels is swapped.",
    make="hpcrl.algorithms.pairs.robust:robust",
    keys=("label_smoothing", "length_normalized", "reference_free", "sft_weight"),
)

SIMPO = PairLossSpec(
    about="SimPO (arXiv 2405.14734), without a reference.",
    make="hpcrl.algorithms.pairs.simpo:simpo",
    keys=("label_smoothing", "gamma", "sft_weight"),
    beta=2.0,
    reference=False,
    per_token=True,
)

ORPO = PairLossSpec(
    about="ORPO (arXiv 2403.07691), without a reference.",
    make="hpcrl.algorithms.pairs.orpo:orpo",
    keys=("sft_weight",),
    sft_weight=1.0,
    reference=False,
    per_token=True,
)

CPO = PairLossSpec(
    about="CPO (arXiv 2401.08417), without a reference.",
    make="hpcrl.algorithms.pairs.cpo:cpo",
    keys=("label_smoothing", "length_normalized", "sft_weight"),
    sft_weight=1.0,
    reference=False,
)

KTO = PairLossSpec(
    about="KTO (arXiv 2402.01306), for answers that are labelled good or bad.",
    make="hpcrl.algorithms.pairs.kto:kto",
    labelled=True,
)
