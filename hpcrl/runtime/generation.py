"""How responses are asked for: how many at once, and how they are drawn in training and in evaluation."""

from __future__ import annotations

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.control.messages import Sampling


def replica_capacity(config: Config, layout: RoleLayout) -> dict[int, int]:
    """First rank of each replica -> requests it is given at once."""
    return dict.fromkeys((replica[0] for replica in layout.replicas), config.generator.most_requests)


def training_sampling(config: Config) -> Sampling:
    """How training rollouts are drawn."""
    r = config.rollout
    return Sampling(r.max_new_tokens, r.temperature, r.top_p, r.top_k, r.min_p, list(r.stop))


def evaluation_sampling(config: Config, temperature: float) -> Sampling:
    """How held-out responses are drawn: as in training at its temperature, without truncation at any other."""
    r = config.rollout
    length = config.eval.max_new_tokens or r.max_new_tokens
    top_p, top_k, min_p = (r.top_p, r.top_k, r.min_p) if temperature == r.temperature else (1.0, 0, 0.0)
    return Sampling(length, temperature, top_p, top_k, min_p, list(r.stop))
