"""Durations and results of a run without a model: the section `fake`."""

from __future__ import annotations

from hpcrl.spec.fields import NonNegative, Positive, Section, Share


class FakeConfig(Section):
    """debug=fake: durations and results of engines without a model."""

    decode_s: NonNegative = 0.005
    """Seconds per decode step of a replica, for any number of responses."""
    prefill_s: NonNegative = 0.001
    """Seconds of prefill per response."""
    publish_s: NonNegative = 0.05
    """Seconds to load new weights into a replica."""
    median_tokens: Positive | None = None
    """Median response length, tokens; null: an eighth of the maximum length."""
    tail: NonNegative = 1.0
    """Standard deviation of the log of the response length; 0: all equal; 1: one in 50 is over eight times the
    median."""
    reward_s: NonNegative = 0.0
    """Seconds to score a response in a worker process."""
    pass_rate: Share = 0.5
    """Share of responses with reward 1; the others get reward 0."""
    logprobs_s: NonNegative = 0.1
    """Seconds to compute the log-probs of a batch on a rank, for each of old_logprobs and ref_logprobs."""
    train_s: NonNegative = 0.2
    """Seconds per optimizer step."""
