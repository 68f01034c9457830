"""Pairs of a better and a worse response to a prompt, by reward. Without torch: rank 0 chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcrl.rollout.types import split_sample_id


class Preference(NamedTuple):
    """The sample ids of a better and a worse response to the same prompt, and by how much their rewards differ."""

    better: int
    worse: int
    margin: float


def preferences(rewards: Mapping[int, float], per_group: int) -> list[Preference]:
    """Up to `per_group` pairs of each prompt's responses, in the order of prompts: the best with the worst, the second
    best with the second worst, and so on, as long as the rewards differ. Every response is in at most one pair; among
    equal rewards, the lower sample id comes first.

    Args:
        rewards: Sample id -> its reward.
    """
    groups: dict[int, list[int]] = {}
    for sample in sorted(rewards):
        groups.setdefault(split_sample_id(sample)[0], []).append(sample)
    found = []
    for samples in groups.values():
        best = sorted(samples, key=lambda sample: -rewards[sample])[: min(per_group, len(samples) // 2)]
        worst = sorted(samples, key=rewards.__getitem__)
        for better, worse in zip(best, worst, strict=False):
            if rewards[better] > rewards[worse]:
                found.append(Preference(better, worse, rewards[better] - rewards[worse]))
    return found
