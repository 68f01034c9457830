"""Segments of rows, whatever the position ids are."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcrl.rollout.batch import Batch, concat, pack
from hpcrl.rollout.store import RolloutReader, write_rollouts

LENGTHS = [5, 3]
STATES = [7, 0, 9, 0, 0, 0, 0, 0]
"""The first row has segments of 2 and 3 tokens, the second is one."""
AXES = [[0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1], [2, 2, 2]]
"""An image in the middle of both rows: several tokens have 0 in some axis, and one of them in all but the first."""


def batch_of(states: list[int] | None) -> Batch:
    total = sum(LENGTHS)
    columns = {name: np.zeros(total) for name in ("token_ids", "loss_mask", "gen_logprobs", "versions", "turn_ids")}
    columns |= {name: np.zeros(2) for name in ("status", "rewards", "scores")}
    columns |= {} if states is None else {"states": np.array(states)}
    return pack([1 << 24, 2 << 24], LENGTHS, columns).check()


@pytest.mark.parametrize(
    ("states", "cu", "ids", "indices"),
    [
        (None, [0, 5, 8], [0, 0, 0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 0, 1, 2]),
        (STATES, [0, 2, 5, 8], [0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 0, 1, 2]),
    ],
    ids=["rows", "by steps"],
)
def test_segments_do_not_depend_on_position_ids(
    states: list[int] | None, cu: list[int], ids: list[int], indices: list[int]
) -> None:
    batch = batch_of(states)
    assert batch.position_ids.tolist() == indices
    for positions in (batch.position_ids, torch.tensor(AXES)):
        batch.position_ids = positions
        assert batch.check().cu_segments.tolist() == cu
        assert batch.segment_ids.tolist() == ids and batch.segment_indices.tolist() == indices
        assert batch.prefix_lengths().tolist() == np.diff(cu).tolist()
        second = batch.select([1, 0]).check()
        assert second.cu_segments.tolist() == [0, *(3 + end for end in cu[:-1])]
        assert torch.equal(second.position_ids, positions[[5, 6, 7, 0, 1, 2, 3, 4]])
    assert batch.select([]).cu_segments.tolist() == [0] and batch.select([]).position_ids.shape == (0, 3)


def test_files_keep_all_position_axes(tmp_path: Path) -> None:
    batch, none = batch_of(STATES), batch_of(STATES).select([])
    batch.position_ids = torch.tensor(AXES)
    for number, part in enumerate((batch, none)):
        path = write_rollouts(tmp_path / "rollouts/step_000001", number, 2, part, {})
    with h5py.File(path.with_name("rank_00000.h5")) as file:
        assert file["position_ids"].attrs["width"] == 3
    read = RolloutReader(tmp_path, provisional=True).batch(1).check()
    assert torch.equal(read.position_ids, batch.position_ids) and read.cu_segments.tolist() == [0, 2, 5, 8]
    assert torch.equal(concat([read, none, read]).position_ids, batch.position_ids.repeat(2, 1))


@pytest.mark.parametrize(("wrong", "shape"), [((7, 3), "7, 3"), ((8, 3, 1), "8, 3, 1")])
def test_other_shapes_of_positions_are_refused(wrong: tuple[int, ...], shape: str) -> None:
    batch = batch_of(None)
    batch.position_ids = torch.zeros(wrong, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=rf"batch.position_ids must be torch.int64 \[8.*\], got torch.int64 \[{shape}\]"
    ):
        batch.check()


def test_other_fields_keep_one_width() -> None:
    batch = batch_of(None)
    batch.versions = torch.zeros(8, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"batch.versions must be torch.int32 \[8\], got torch.int32 \[8, 3\]"):
        batch.check()
