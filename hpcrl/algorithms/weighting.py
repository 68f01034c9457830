"""Masks and weights of a step's responses, by length, outcome and difficulty.

A masked response still counts in the statistics for reward normalisation. A prompt's difficulty is 1 minus its
responses' mean score. Masks and weights are ROLL's (arXiv 2506.06122), which reads difficulty from a column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import RewardTable
from hpcrl.metrics.stats import Stats, stat
from hpcrl.spec.policy_loss import PolicyLoss


def response_weights(config: PolicyLoss, table: RewardTable) -> tuple[Tensor, Stats]:
    """(float32 [N], statistics): the weight of each response of the table, 0 where a mask drops it. The weights by
    difficulty and by length have mean 1 over the remaining responses. The statistics report the share that each active
    mask keeps, under ROLL's names."""
    scores, mean_scores = table.scores, _group_means(table)
    kept = torch.ones_like(scores, dtype=torch.bool)
    stats: Stats = {}
    masks = {
        "max_len": (config.max_len_mask, ~table.truncated),
        "difficulty": (
            config.difficulty_mask,
            (mean_scores > config.difficulty_low_threshold) & (mean_scores < config.difficulty_high_threshold),
        ),
        "error_len": (
            config.error_max_len_clip is not None,
            (scores >= 1) | (table.lengths < (config.error_max_len_clip or 0)),
        ),
    }
    for name, (active, keeps) in masks.items():
        if active:
            kept &= keeps
            stats[f"actor/{name}_mask_ratio"] = stat(keeps)
    if stats:
        stats["actor/final_mask_ratio"] = stat(kept)
    weights = kept.float()
    if config.difficulty_loss_weight:
        weights *= _rescaled(0.5 + 1.5 * (1.0 - mean_scores).clamp(0, 1), kept)
    if config.length_loss_weight:
        lengths = table.lengths.float()
        shortest, longest = (lengths.min(), lengths.max()) if lengths.numel() else (lengths.sum(), lengths.sum())
        weights *= _rescaled(1.5 - (lengths - shortest) / (longest - shortest).clamp(min=1), kept)
    return weights, stats


def _group_means(table: RewardTable) -> Tensor:
    """float32 [N]: the mean score of each response's group."""
    _, groups, counts = torch.unique(table.group_ids, return_inverse=True, return_counts=True)
    sums = table.scores.new_zeros(len(counts)).index_add(0, groups, table.scores)
    means: Tensor = (sums / counts)[groups]
    return means


def _rescaled(weights: Tensor, kept: Tensor) -> Tensor:
    """The weights divided by their mean over the kept responses."""
    return weights / weights[kept].mean() if kept.any() else weights
