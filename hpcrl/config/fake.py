"""How long a run without a model takes over its work: the section `fake`."""

from __future__ import annotations

from hpcrl.spec.fields import NonNegative, Positive, Section, Share


class FakeConfig(Section):
    """debug=fake: what engines without a model take for their work, and what comes of it."""

    decode_s: NonNegative = 0.005
    """Seconds of one decode step of a replica, however many responses it decodes."""
    prefill_s: NonNegative = 0.001
    """Seconds for each response that gets a slot."""
    publish_s: NonNegative = 0.05
    """Seconds in which a replica takes new weights."""
    median_tokens: Positive | None = None
    """Half of the responses are shorter; null: an eighth of the longest there may be."""
    tail: NonNegative = 1.0
    """Standard deviation of the logarithm of the length: 0: all are alike; 1: one of 50 is eight times the median."""
    reward_s: NonNegative = 0.0
    """Seconds in which a worker process scores a response."""
    pass_rate: Share = 0.5
    """Share of responses with reward 1; the others get 0."""
    logprobs_s: NonNegative = 0.1
    """Seconds in which a rank computes the log-probs of a batch, for old_logprobs and ref_logprobs alike."""
    train_s: NonNegative = 0.2
    """Seconds of an optimizer step."""
