"""Number of concurrent requests, and sampling parameters of training and evaluation."""

from __future__ import annotations

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, EvalSampling
from hpcrl.messaging.messages import Sampling


def replica_capacity(config: Config, layout: RoleLayout) -> dict[int, int]:
    """First rank of each replica -> its maximum number of concurrent requests."""
    return dict.fromkeys((replica[0] for replica in layout.replicas), config.generator.most_requests)


def training_sampling(config: Config) -> Sampling:
    """Sampling parameters of training rollouts."""
    r = config.rollout
    return Sampling(r.max_new_tokens, r.temperature, r.top_p, r.top_k, r.min_p, list(r.stop))


def evaluation_sampling(config: Config, asked: EvalSampling) -> Sampling:
    """Sampling parameters of validation responses: as in training at the training temperature, else no truncation."""
    r = config.rollout
    length, temperature = asked.max_new_tokens or r.max_new_tokens, asked.temperature
    top_p, top_k, min_p = (r.top_p, r.top_k, r.min_p) if temperature == r.temperature else (1.0, 0, 0.0)
    return Sampling(length, temperature, top_p, top_k, min_p, list(r.stop))
