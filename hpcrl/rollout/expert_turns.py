"""Which turns of an episode the environment's expert plays (imitation.expert_turns)."""

from __future__ import annotations

import hashlib

from hpcrl.config.imitation import ImitationConfig
from hpcrl.rollout.types import is_greedy, is_validation, split_sample_id


def expert_seed(config: ImitationConfig, seed: int, sample_id: int, turn: int) -> int | None:
    """The 63-bit seed of the expert's random choices if it plays this turn (from 0), else None. A function of the run's
    seed, the sample and the turn, so a resumed run plays the same turns. Validation episodes and greedy baselines are
    the policy's alone."""
    if is_validation(sample_id) or is_greedy(sample_id):
        return None
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{turn}/expert".encode(), digest_size=16).digest()
    drawn = int.from_bytes(digest[:8], "little") / (1 << 64)
    if drawn >= expert_share(config, split_sample_id(sample_id)[0]):
        return None
    return int.from_bytes(digest[8:], "little") >> 1


def expert_share(config: ImitationConfig, uid: int) -> float:
    """The probability for the turns of this prompt; uids count the prompts of a run from 0."""
    if config.expert_decay_prompts is None:
        return config.expert_turns
    return config.expert_turns * max(0.0, 1.0 - uid / config.expert_decay_prompts)
