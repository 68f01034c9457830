"""The section `loss`: weights of the policy loss, the cross-entropy and the divergence from the teacher, by domain."""

from __future__ import annotations

from hpcrl.spec.fields import Float, NonNegative, Section


class LossWeights(Section):
    """What one domain's trained tokens learn from. The key `default` is for all domains without their own key."""

    policy: NonNegative = 1.0
    """Weight of the policy loss, with its KL term and entropy bonus; 0: the domain learns nothing from rewards."""
    ce: NonNegative = 0.0
    """Weight of the cross-entropy, minus the log-prob of the token at the rollouts' temperature."""
    ce_above: Float | None = None
    """Only responses with a reward above this value have the cross-entropy (arXiv 2504.05118); null: all."""
    divergence: NonNegative = 0.0
    """Weight of the divergence from the teacher."""

    @property
    def are_default(self) -> bool:
        """Whether the domain learns only from its rewards, as without a section."""
        return (self.policy, self.ce, self.divergence) == (1.0, 0.0, 0.0)

    @property
    def teach_nothing(self) -> bool:
        """Whether the policy's own tokens of the domain teach nothing."""
        return not (self.policy or self.ce or self.divergence)
