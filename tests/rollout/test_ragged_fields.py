"""Fields with any number of values per row, in samples, batches, checkpoints and files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcrl.engines.gen.generation_engine import Output
from hpcrl.messaging.messages import EnvObservation
from hpcrl.rollout.batch import Batch, batch_from_samples, concat
from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.store import RolloutReader, write_rollouts
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.trajectory import FIELDS, TEXT, Field, Level, Origin, declare
from hpcrl.workers.held_samples import PromptState, SampleState

PATCHES = Field("patches", "float32", Level.ROW, Origin.GENERATOR, "of images", wire="float16", width=2, ragged=True)
MARKS = Field("marks", "int64", Level.ROW, Origin.GENERATOR, "one number each", ragged=True)
COUNTS = (0, 1, 3)


@pytest.fixture(autouse=True)
def ragged() -> None:
    declare(PATCHES, MARKS)


def sample(place: int, count: int) -> Sample:
    """A row of place + 2 tokens, with `count` patches [place, 0], [place, 1], ... and marks 10 place + 0, ..."""
    length = place + 2
    zeros = np.zeros(length, np.float32)
    return Sample(
        (place + 1) << 24,
        token_ids=np.full(length, place, np.int32),
        loss_mask=np.arange(length) > 0,
        gen_logprobs=zeros,
        versions=zeros.astype(np.int32),
        turn_ids=np.arange(length, dtype=np.int32).clip(max=1) - 1,
        patches=np.array([[place, n] for n in range(count)], np.float16).reshape(count, 2),
        marks=np.array([10 * place + n for n in range(count)], np.int64),
    )


def batch_of(*counts: int) -> Batch:
    samples = [sample(place, count) for place, count in enumerate(counts)]
    return batch_from_samples(samples, list(range(len(samples)))).check()


def test_a_rollout_has_no_ragged_values_until_they_are_set() -> None:
    """A prompt of two tokens, a turn of three, an observation of one that is removed again."""
    prompt = PromptState.__new__(PromptState)
    prompt.token_ids, prompt.messages, prompt.media = np.array([90, 91], np.int32), [], ()
    prompt.by_steps = prompt.has_states = False
    held = SampleState(1 << 24, prompt)
    empty = held.begin(False)
    assert empty.patches.shape == (0, 2) and empty.marks.shape == (0,) and empty.marks_counts.tolist() == [0]
    held.held.put("marks", np.array([5, 6]))
    ids, zeros = np.array([1, 2, 3], np.int32), np.zeros(3, np.float32)
    held.end_turn(Output(held.id, ids, zeros, np.zeros(3, np.int32), FinishReason.STOP), "a")
    held.observe(EnvObservation(held.id, np.array([80], np.int32).tobytes(), b'[{"role": "user"}]'))
    held.take_back()
    assert held.held.token_ids.tolist() == [90, 91, 1, 2, 3]
    assert held.held.marks.tolist() == [5, 6] and held.held.marks_counts.tolist() == [2]
    assert batch_from_samples([held.held], [0]).check().cu("marks").tolist() == [0, 2]


def test_a_batch_holds_all_values_and_their_offsets() -> None:
    batch = batch_of(*COUNTS)
    assert batch.patches.dtype == torch.float32
    assert batch.patches.tolist() == [[1, 0], [2, 0], [2, 1], [2, 2]]
    assert batch.marks.tolist() == [10, 20, 21, 22]
    assert batch.patches_counts.tolist() == [0, 1, 3] and batch.cu("patches").tolist() == [0, 0, 1, 4]


def test_rows_keep_their_values_when_selected_and_joined() -> None:
    batch = batch_of(*COUNTS)
    chosen = batch.select([2, 0, 2, 1]).check()
    assert chosen.cu("marks").tolist() == [0, 3, 3, 6, 7]
    assert chosen.patches.tolist() == [[2, 0], [2, 1], [2, 2], [2, 0], [2, 1], [2, 2], [1, 0]]
    without = batch.select([0]).check()
    assert without.patches.shape == (0, 2) and without.marks.shape == (0,) and without.cu("marks").tolist() == [0, 0]
    assert batch.select([]).check().patches.shape == (0, 2)
    joined = concat([batch.select([1]), batch_of(), without, batch_of(0, 0), batch.select([2])]).check()
    assert joined.marks.tolist() == [10, 20, 21, 22] and joined.cu("marks").tolist() == [0, 1, 1, 1, 1, 4]
    again = concat([batch.select(rows) for rows in ([0, 1], [2])]).to("cpu")  # two micro-batches
    assert all(torch.equal(again.columns[name], batch.columns[name]) for name in batch.columns)
    assert batch.as_generated().check().marks.tolist() == batch.marks.tolist()


def test_a_mismatch_of_values_and_counts_is_refused() -> None:
    batch = batch_of(*COUNTS)
    batch.patches = batch.patches[1:]
    with pytest.raises(ValueError, match=r"batch.patches must be torch.float32 \[4, 2\], got torch.float32 \[3, 2\]"):
        batch.check()
    batch.patches_counts = None
    with pytest.raises(ValueError, match=r"batch.patches and batch.patches_counts must be filled together"):
        batch.check()
    batch = batch_of(*COUNTS)
    batch.marks_counts = torch.tensor([2, -1, 3])
    with pytest.raises(ValueError, match=r"batch.marks_counts has a negative number"):
        batch.check()


@pytest.mark.parametrize("counts", [COUNTS, (0, 0)])
def test_a_checkpoint_keeps_ragged_values(tmp_path: Path, counts: tuple[int, ...]) -> None:
    samples = [sample(place, count) for place, count in enumerate(counts)]
    found = read_pending(tmp_path, [write_pending(tmp_path, 0, samples)], [one.id for one in samples])
    for place, (one, count) in enumerate(zip(samples, counts, strict=True)):
        again = found[one.id]
        assert again.patches.dtype == np.float16 and again.patches.shape == (count, 2)
        assert again.marks.tolist() == [10 * place + n for n in range(count)]
        assert again.columns.keys() == one.columns.keys() and again.marks_counts.tolist() == [count]


READ = """
import sys
from hpcrl.rollout.store import RolloutReader
batch = RolloutReader(sys.argv[1], provisional=True).batch(1).check()
print(batch.patches.dtype, batch.patches.tolist(), batch.cu("patches").tolist(), batch.marks.tolist())
"""


@pytest.mark.parametrize(
    ("counts", "read"),
    [
        (COUNTS, "torch.float32 [[1.0, 0.0], [2.0, 0.0], [2.0, 1.0], [2.0, 2.0]] [0, 0, 1, 4] [10, 20, 21, 22]"),
        ((0, 0), "torch.float32 [] [0, 0, 0] []"),
    ],
)
def test_files_describe_ragged_fields(tmp_path: Path, counts: tuple[int, ...], read: str) -> None:
    for number, part in enumerate((batch_of(*counts), batch_of())):
        path = write_rollouts(tmp_path / "rollouts/step_000001", number, 2, part, {})
    with h5py.File(path) as file:
        assert file["patches"].shape == (0, 2) and file["patches"].attrs["ragged"] == 1
        assert "ragged" not in file["patches_counts"].attrs and "ragged" not in file["rewards"].attrs
    other = subprocess.run([sys.executable, "-c", READ, tmp_path], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == read  # by a process without the declaration
    assert RolloutReader(tmp_path, provisional=True).batch(1).marks.tolist() == batch_of(*counts).marks.tolist()


@pytest.mark.parametrize(
    "field",
    [
        Field("notes", TEXT, Level.ROW, Origin.GENERATOR, "", ragged=True),
        Field("notes", "int8", Level.TOKEN, Origin.GENERATOR, "", ragged=True),
        Field("notes", "int8", Level.ROW, Origin.SCORER, "", ragged=True),
    ],
    ids=["text", "token", "scorer"],
)
def test_fields_that_cannot_be_ragged_are_refused(field: Field) -> None:
    with pytest.raises(ValueError, match="field 'notes': ragged fields hold numbers of rows"):
        declare(field)
    assert "notes" not in FIELDS and "notes_counts" not in FIELDS
