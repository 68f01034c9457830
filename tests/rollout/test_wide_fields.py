"""Fields of several numbers per token, from the engine's output to the batch, the checkpoint and the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.engines.gen.generation_engine import Output
from hpcrl.messaging.messages import EnvObservation
from hpcrl.rollout.batch import Batch, batch_from_samples, concat
from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.store import RolloutReader, write_rollouts
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.trajectory import FIELDS, Field, Level, Origin, declare
from hpcrl.workers.held_samples import PromptState, SampleState

WIDTH, NONE = 4, 255
FIELD = Field("wide", "uint8", Level.TOKEN, Origin.GENERATOR, "numbers", fill=NONE, width=WIDTH)


@pytest.fixture(autouse=True)
def wide() -> None:
    declare(FIELD)


def output(first: int, count: int) -> Output:
    """Tokens first, first + 1, ..., with their numbers in the field."""
    ids = np.arange(first, first + count, dtype=np.int32)
    column = np.repeat(ids[:, None], WIDTH, axis=1).astype(np.uint8)
    zeros = np.zeros(count, np.float32)
    return Output(1, ids, zeros, np.zeros(count, np.int32), FinishReason.STOP, columns={"wide": column})


def episode() -> SampleState:
    """A prompt of two tokens, a turn of three, an observation of two, a turn of one."""
    prompt = PromptState.__new__(PromptState)
    prompt.token_ids, prompt.messages = np.array([90, 91], np.int32), []
    prompt.by_steps = prompt.has_states = False
    prompt.media = ()
    held = SampleState(1 << 24, prompt)
    held.end_turn(output(10, 3), "a")
    held.observe(EnvObservation(held.id, np.array([80, 81], np.int32).tobytes(), b'[{"role": "user"}]'))
    held.end_turn(output(20, 1), "b")
    return held


VALUES = [NONE, NONE, 10, 11, 12, NONE, NONE, 20]


def test_wide_fields_of_turns_and_observations_are_concatenated() -> None:
    held = episode()
    assert held.held.columns["wide"].tolist() == [[value] * WIDTH for value in VALUES]
    held.observe(EnvObservation(held.id, np.array([82], np.int32).tobytes(), b'[{"role": "user"}]'))
    held.take_back()
    assert held.held.columns["wide"].shape == (8, WIDTH)


def batch_of(*samples: Sample) -> Batch:
    return batch_from_samples(samples, list(range(len(samples)))).check()


def test_checkpoints_and_files_keep_wide_fields(tmp_path: Path) -> None:
    sample = episode().held
    again = read_pending(tmp_path, [write_pending(tmp_path, 0, [sample, sample])], [sample.id])[sample.id]
    batch = batch_of(sample, again)
    assert batch.wide.dtype == torch.uint8 and batch.wide.tolist() == 2 * [[value] * WIDTH for value in VALUES]
    assert concat([batch.select([1]), batch_of(), batch.select([])]).wide.shape == (8, WIDTH)
    for number, part in enumerate((batch, batch_of())):
        write_rollouts(tmp_path / "rollouts/step_000001", number, 2, part, {})
    del FIELDS["wide"]  # files describe it
    read = RolloutReader(tmp_path, provisional=True).batch(1)
    assert torch.equal(read.wide, batch.wide) and FIELDS["wide"].width == WIDTH


def test_a_different_width_is_refused() -> None:
    batch = batch_of(episode().held)
    batch.wide = batch.wide[:, :3]
    with pytest.raises(ValueError, match=r"batch.wide must be torch.uint8 \[8, 4\], got torch.uint8 \[8, 3\]"):
        batch.check()
