"""Images of a rollout: with the prompt, with observations, in checkpoints and in a run's files."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from hpcrl.engines.gen.generation_engine import Output
from hpcrl.messaging.messages import EnvObservation
from hpcrl.rollout.batch import Batch, batch_from_samples, concat
from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.pictures import picture_path
from hpcrl.rollout.store import RolloutReader, write_rollouts
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.image_rows import image_rows, image_spans, prefix_keys
from hpcrl.spec.media import IMAGE, IMAGE_MARK, IMAGES, Medium
from hpcrl.spec.trajectory import FIELDS, declare
from hpcrl.workers.held_samples import PromptState, SampleState


@pytest.fixture(autouse=True)
def images_declared() -> None:
    declare(IMAGES)


def grey(value: int, start: int, length: int = 2) -> Medium:
    """An image of 4 x 2 pixels."""
    return Medium(IMAGE, bytes([value]) * 24, 4, 2, start, length)


def output(count: int) -> Output:
    zeros = np.zeros(count, np.float32)
    return Output(1, np.full(count, 5, np.int32), zeros, np.zeros(count, np.int32), FinishReason.STOP)


def observation(sample: int, count: int, *media: Medium) -> EnvObservation:
    ids = np.full(count, 9, np.int32).tobytes()
    content = json.dumps([{"role": "user", "content": IMAGE_MARK * len(media)}]).encode()
    return EnvObservation(sample, ids, content, media=media)


def episode(number: int, by_steps: bool = False) -> SampleState:
    """A prompt of five tokens with an image, a turn of three, an observation of four with two images, a turn of one."""
    prompt = PromptState.__new__(PromptState)
    prompt.token_ids, prompt.messages, prompt.media = np.full(5, 9, np.int32), [], (grey(1, 1),)
    prompt.by_steps = prompt.has_states = by_steps
    held = SampleState(number << 24, prompt)
    held.end_turn(output(3), "a")
    held.observe(observation(held.id, 4, grey(2, 0), grey(1, 2)))
    held.end_turn(output(1), "b")
    return held


def test_equal_tokens_of_different_images_have_different_keys() -> None:
    """Of text tokens the ids, which are not negative; of an image the same ones wherever it is."""
    ids = np.array([5, 7, 7, 6, 7, 7], np.int32)
    ones, twos, back = (
        prefix_keys(ids, image_spans(image_rows([grey(first, 1), grey(second, 4)])))
        for first, second in ((1, 2), (2, 2), (1, 2))
    )
    assert ones[[0, 3]].tolist() == twos[[0, 3]].tolist() == [5, 6] and (ones == back).all()
    assert (ones[[1, 2, 4, 5]] < 0).all() and len({*ones.tolist()}) == 6
    assert (ones[1:3] != twos[1:3]).all() and (ones[4:] == twos[4:]).all() and (twos[1:3] == twos[4:]).all()


def test_images_of_observations_follow_those_of_the_prompt() -> None:
    held = episode(1)
    assert held.media == [grey(1, 1), grey(2, 8), grey(1, 10)]
    assert held.held.columns["images"].tolist() == image_rows(held.media).tolist()
    assert held.held.pictures == {grey(value, 0).digest: bytes([value]) * 24 for value in (1, 2)}
    assert held.context_media == tuple(held.media), "an episode of one sequence"
    held.observe(observation(held.id, 3, grey(7, 1)))
    assert held.media[-1] == grey(7, 14) and held.context_media == tuple(held.media)
    held.take_back()
    assert held.media == [grey(1, 1), grey(2, 8), grey(1, 10)] and len(held.held.pictures) == 2
    assert len(held.held.columns["images"]) == 3


def test_a_turn_of_its_own_sequence_has_the_images_of_its_prompt() -> None:
    held = episode(1, by_steps=True)
    assert held.context_media == (grey(2, 0), grey(1, 2))
    assert held.media == [grey(1, 1), grey(2, 8), grey(1, 10)]


def test_pages_show_each_picture_of_an_episode_once() -> None:
    """In episodes by steps a turn's own prompt repeats pictures. Of a picture in parts, the last part is all of it."""
    held = episode(1)
    assert held.shown == [grey(1, 1), grey(2, 0), grey(1, 2)]
    held.observe(observation(held.id, 3, grey(7, 1)))
    held.take_back()
    assert held.shown == [grey(1, 1), grey(2, 0), grey(1, 2)]
    prompt = PromptState.__new__(PromptState)
    prompt.token_ids, prompt.messages, prompt.media = np.full(5, 9, np.int32), [], (grey(1, 1),)
    prompt.by_steps = prompt.has_states = True
    held = SampleState(1 << 24, prompt)
    for turn in (2, 3):
        held.end_turn(output(2), "a")
        part = msgspec.structs.replace(grey(9, 3), row=1, column=1)
        ids, said = np.full(8, 9, np.int32).tobytes(), json.dumps([{"role": "user", "content": IMAGE_MARK}]).encode()
        held.observe(EnvObservation(held.id, ids, said, media=(grey(1, 1), part, grey(turn, 5))))
    assert [medium.content[0] for medium in held.shown] == [1, 2, 3] and len(held.media) == 7


@pytest.mark.parametrize("value", [2, 3])
def test_states_of_different_pictures_differ(value: int) -> None:
    """GiGPO compares the turns of a group that begin in one state; placeholders of all pictures are alike."""
    states = []
    for shown in (2, value):
        prompt = PromptState.__new__(PromptState)
        prompt.token_ids, prompt.messages, prompt.media = np.full(5, 9, np.int32), [], (grey(1, 1),)
        prompt.by_steps = prompt.has_states = True
        held = SampleState(1 << 24, prompt)
        held.end_turn(output(2), "a")
        held.observe(observation(held.id, 4, grey(shown, 1)))
        states.append(held.held.states[7])
    assert (states[0] == states[1]) == (value == 2) and all(states)


def test_an_environments_first_observation_replaces_prompt_and_images() -> None:
    prompt = PromptState.__new__(PromptState)
    prompt.token_ids, prompt.messages, prompt.media = np.full(5, 9, np.int32), [], (grey(1, 1),)
    prompt.by_steps = prompt.has_states = False
    held = SampleState(1 << 24, prompt)
    assert held.context_media == (grey(1, 1),)
    held.begin(False)
    held.observe(observation(held.id, 3, grey(3, 1)))
    assert held.media == [grey(3, 1)] and len(held.held.token_ids) == 3
    assert set(held.held.pictures) == {grey(3, 0).digest}


def batch_of(*held: SampleState) -> Batch:
    return batch_from_samples([state.held for state in held], list(range(len(held)))).check()


def test_parts_of_a_batch_keep_their_rows_images() -> None:
    whole = batch_of(episode(1), episode(2), episode(3))
    again = concat([whole.select([2]), whole.select([]), whole.select([0, 1])])
    assert again.images is not None and len(again.images) == 9 and again.cu("images").tolist() == [0, 3, 6, 9]
    assert again.pictures == whole.pictures


def test_checkpoints_keep_images(tmp_path: Path) -> None:
    samples = [episode(1).held, episode(2).held]
    name = write_pending(tmp_path, 0, samples)
    assert (tmp_path / name).read_bytes().count(bytes([1]) * 24) == 1, "equal images of a file are stored once"
    for sample in samples:
        (again,) = read_pending(tmp_path, [name], [sample.id]).values()
        assert again.pictures == sample.pictures
        assert again.columns["images"].tolist() == sample.columns["images"].tolist()


def test_files_of_a_run_refer_to_each_image_once(tmp_path: Path) -> None:
    rollouts, batch = tmp_path / "rollouts", batch_of(episode(1), episode(2))
    for step in (1, 2):
        write_rollouts(rollouts / f"step_00000{step}", 0, 1, batch, {})
    files = {digest: picture_path(rollouts, digest) for digest in batch.pictures}
    assert sorted(files.values()) == sorted((rollouts / "pictures").rglob("*.png"))
    with Image.open(files[grey(2, 0).digest]) as shown:
        assert shown.size == (4, 2) and shown.tobytes() == bytes([2]) * 24
    del FIELDS["images"], FIELDS["images_counts"]  # files describe them
    read = RolloutReader(tmp_path, provisional=True).batch(2)
    assert read.pictures == batch.pictures
    assert read.images is not None and [span.start for span in image_spans(read.images.numpy())] == [1, 8, 10] * 2
    declare(IMAGES)  # as a program does that reads rollouts and then loads a model


def test_ranks_write_the_same_images_at_once(tmp_path: Path) -> None:
    batches = [batch_of(episode(number)) for number in range(8)]
    folder = tmp_path / "rollouts/step_000001"
    with ThreadPoolExecutor(len(batches)) as pool:
        list(pool.map(lambda rank: write_rollouts(folder, rank, len(batches), batches[rank], {}), range(len(batches))))
    assert len(list((tmp_path / "rollouts/pictures").rglob("*"))) == 2 + 2, "two files in two folders"
    assert RolloutReader(tmp_path, provisional=True).batch(1).pictures == batches[0].pictures


@pytest.mark.parametrize(
    ("damage", "problem"),
    [("", "cannot be read"), ("cut", "cannot be read"), ("other", "is not the image of 4")],
)
def test_a_missing_or_damaged_image_is_named(tmp_path: Path, damage: str, problem: str) -> None:
    rollouts, batch = tmp_path / "rollouts", batch_of(episode(1))
    write_rollouts(rollouts / "step_000001", 0, 1, batch, {})
    path = picture_path(rollouts, grey(2, 0).digest)
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:40])
    elif damage == "other":
        Image.new("RGB", (2, 2)).save(path)
    with pytest.raises(ValueError, match=rf"{path}.* {problem}"):
        RolloutReader(tmp_path, provisional=True).batch(1)
