"""Pending rollouts are restored unchanged from a checkpoint, also on other ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.types import FinishReason, Sample


def sample(sample_id: int, count: int, reason: FinishReason, truncated: bool = False) -> Sample:
    rng = np.random.default_rng(sample_id)
    return Sample(
        id=sample_id,
        token_ids=rng.integers(0, 320, count).astype(np.int32),
        loss_mask=rng.random(count) < 0.5,
        gen_logprobs=rng.normal(size=count).astype(np.float32),
        versions=rng.integers(-1, 9, count).astype(np.int32),
        turn_ids=np.arange(-1, count - 1, dtype=np.int32),
        finish_reason=reason,
        messages=[{"role": "user", "content": "é" * count}, {"role": "assistant", "content": str(sample_id)}],
        gen_logprobs_behaviour=rng.normal(size=count).astype(np.float32) if truncated else None,
    )


@pytest.mark.parametrize("truncated", [False, True])
def test_rollouts_written_by_two_ranks_are_read_by_a_third(tmp_path: Path, truncated: bool) -> None:
    a = [sample(1 << 40, 5, FinishReason.STOP, truncated), sample(7, 1, FinishReason.LENGTH, truncated)]
    b = [sample(3, 8, FinishReason.STOP, truncated)]
    assert write_pending(tmp_path, 2, a) == "pending_rank0002.safetensors"
    names = ["state.json", "pending_rank0002.safetensors", write_pending(tmp_path, 3, b)]
    (tmp_path / "pending_rank0004.safetensors").write_bytes(b"of a rank that was lost while it wrote")
    found = read_pending(tmp_path, names, {7, 3, 1 << 40})
    assert found.keys() == {7, 3, 1 << 40}
    for one in (*a, *b):
        other = found[one.id]
        assert other.finish_reason is one.finish_reason
        assert other.messages == one.messages and other.text() == one.text()
        for name in ("token_ids", "loss_mask", "gen_logprobs", "versions", "turn_ids", "gen_logprobs_behaviour"):
            left, right = getattr(one, name), getattr(other, name)
            assert left is right is None or (left.dtype == right.dtype and (left == right).all())
            if right is not None:
                right[:] = 0  # own writable memory
    assert read_pending(tmp_path, names, {3}).keys() == {3}


def test_missing_or_damaged_pending_rollouts_are_named(tmp_path: Path) -> None:
    names = [write_pending(tmp_path, 1, [sample(3, 4, FinishReason.STOP)])]
    with pytest.raises(ValueError, match=r"lacks 2 responses that its state has, e\.g\. sample 4"):
        read_pending(tmp_path, names, {3, 4, 5})
    (tmp_path / "pending_rank0001.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"pending_rank0001\.safetensors cannot be read"):
        read_pending(tmp_path, names, {3})
