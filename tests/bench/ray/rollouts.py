"""The 512 rollouts that tests/bench/control.py moves, the same for Ray and for hpcrl. Imports numpy alone."""

from __future__ import annotations

import numpy as np

NUM_ROLLOUTS, NUM_TOKENS = 512, 512
FIELDS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "gen_logprobs": np.float32,
    "versions": np.int32,
    "turn_ids": np.int32,
    "old_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "advantages": np.float32,
}

Rollout = dict[str, np.ndarray]


def make_rollouts() -> list[Rollout]:
    """As generation leaves them: one array per rollout and field, 7.6 MB in all."""
    rng = np.random.default_rng(0)
    return [
        {name: rng.integers(0, 2, NUM_TOKENS).astype(dtype) for name, dtype in FIELDS.items()}
        for _ in range(NUM_ROLLOUTS)
    ]


def pack(rollouts: list[Rollout]) -> Rollout:
    """As training takes them: one flat array per field."""
    return {name: np.concatenate([rollout[name] for rollout in rollouts]) for name in FIELDS}


def checksum(packed: Rollout) -> int:
    """Of a few strided elements, so that the receiver proves what it holds without the check being what is timed."""
    return int(sum(array[::4099].astype(np.int64).sum() for array in packed.values()))
