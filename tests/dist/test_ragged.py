"""Fields with any number of values per row, from two generator ranks to two trainer ranks, and inside a replica."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.comm.data_parallel import DataParallel
from hpcrl.comm.transfer import PeerLost, TransferGroup
from hpcrl.config import parse
from hpcrl.controller import transfers
from hpcrl.controller.batches import moves
from hpcrl.controller.transfers import rollout_transfers
from hpcrl.messaging.messages import BroadcastBatch, Move, TransferRollouts
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.types import Sample, Sizes, make_sample_id
from hpcrl.spec.division import Division
from hpcrl.spec.image_rows import image_rows, image_spans
from hpcrl.spec.media import IMAGE, IMAGES, Medium
from hpcrl.spec.trajectory import FIELDS, Field, Level, Origin, declare, generated_fields
from hpcrl.workers.exchange import Exchange
from hpcrl.workers.generator import GeneratorRole
from hpcrl.workers.trainer import TrainerRole
from tests.dist.conftest import Threads

RANKS, GENERATORS = (0, 1, 2, 3), (0, 1)
SAMPLES = [make_sample_id(uid, 0, 0) for uid in range(6)]
MIXED = dict(zip(SAMPLES, (1, 0, 3, 0, 0, 1), strict=True))
NONE = dict.fromkeys(SAMPLES, 0)
HOMES = {sample: place % 2 for place, sample in enumerate(SAMPLES)}
TRAINED = {2: [SAMPLES[0], SAMPLES[1], SAMPLES[4]], 3: [SAMPLES[2], SAMPLES[3], SAMPLES[5]]}


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threads]:
    threads = Threads(tmp_path_factory.mktemp("world"), len(RANKS))
    yield threads
    threads.close()


@pytest.fixture(scope="module", autouse=True)
def ragged() -> Iterator[None]:
    fields = (
        Field("pixels", "float32", Level.ROW, Origin.GENERATOR, "of patches", wire="float16", width=2, ragged=True),
        Field("image_grid", "int64", Level.ROW, Origin.GENERATOR, "of images", width=3, ragged=True),
    )
    declare(*fields, IMAGES)
    yield
    for field in (*fields, IMAGES):
        del FIELDS[field.name], FIELDS[field.counts.name]


def pixels(place: int, count: int) -> list[list[float]]:
    """Two patches for each image."""
    return [[place, n / 2] for n in range(2 * count)]


def grid(place: int, count: int) -> list[list[int]]:
    return [[1, place, n] for n in range(count)]


def images(place: int, count: int) -> list[Medium]:
    """Of one pixel each; every other row has equal ones."""
    return [Medium(IMAGE, bytes([place % 2, n, 0]), 1, 1, start=n, length=1) for n in range(count)]


def sample_of(sample: int, count: int) -> Sample:
    place = SAMPLES.index(sample)
    length, media = place + 2, images(place, count)
    made = Sample(
        sample,
        token_ids=np.full(length, place, np.int32),
        loss_mask=np.arange(length) > 0,
        gen_logprobs=np.zeros(length, np.float32),
        versions=np.full(length, 6, np.int32),
        turn_ids=np.zeros(length, np.int32),
        messages=[{"role": "user", "content": str(place)}],
        pixels=np.array(pixels(place, count), np.float16).reshape(-1, 2),
        image_grid=np.array(grid(place, count), np.int64).reshape(-1, 3),
    )
    made.put(IMAGES.name, image_rows(media))
    made.pictures = {medium.digest: medium.content for medium in media}
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its image token is the token of the rows at place 3."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "image_token_id": 3}))
    return folder


def workers_of(threads: Threads, model: Path, counts: dict[int, int], epoch: int) -> list[Any]:
    """Stand-ins for workers with what an Exchange reads; the generators hold the samples."""
    groups = threads.every(lambda rank: threads.worlds[rank].group("rollout", RANKS, epoch))
    workers = []
    for rank, group in enumerate(groups):
        role: Any = GeneratorRole.__new__(GeneratorRole)
        held = {s: SimpleNamespace(held=sample_of(s, counts[s])) for s in SAMPLES if HOMES[s] == rank}
        role.samples = held
        workers.append(
            SimpleNamespace(
                world=threads.worlds[rank], config=parse({}), batches={}, roles={"generator": role} if held else {},
                transfer_groups={"rollout": TransferGroup(group, RANKS)}, model_path=model,
            )
        )  # fmt: skip
    return workers


def hand_over(threads: Threads, workers: Sequence[Any], trained: dict[int, list[int]]) -> None:
    exchanges = [Exchange(worker) for worker in workers]
    texts = {sample: len(sample_of(sample, 0).text()) for sample in SAMPLES}
    sizes = {s: Sizes(place + 2, place + 1, texts[s]) for place, s in enumerate(SAMPLES)}
    scored = {sample: {"rewards": float(sample), "scores": 0.0, "turn_rewards": ()} for sample in SAMPLES}
    fields = [field.name for field in generated_fields(False, False)]
    between = moves(HOMES, trained, sizes, readers=trained)
    for part in rollout_transfers(7, "rollout", between, trained, scored, fields):
        threads.every(
            lambda rank, part=part: (
                exchanges[rank].handlers()[TransferRollouts](part[rank], 1) if rank in part else None
            )
        )


def check(batch: Batch, samples: Sequence[int], counts: dict[int, int]) -> None:
    """The batch has these rows with their values."""
    assert batch.check().sample_ids.tolist() == samples
    places = [SAMPLES.index(sample) for sample in samples]
    assert batch.token_ids.tolist() == [place for place in places for _ in range(place + 2)]
    wanted = [(place, counts[SAMPLES[place]]) for place in places]
    assert batch.pixels.dtype == torch.float32 and batch.pixels.shape[1] == 2 and batch.image_grid.shape[1] == 3
    assert batch.pixels.tolist() == [patch for place, count in wanted for patch in pixels(place, count)]
    assert batch.image_grid.tolist() == [image for place, count in wanted for image in grid(place, count)]
    assert batch.cu("pixels").diff().tolist() == [2 * count for _, count in wanted]
    shown = [medium for place, count in wanted for medium in images(place, count)]
    assert batch.images is not None and batch.images.tolist() == image_rows(shown).tolist()
    assert batch.pictures == {medium.digest: medium.content for medium in shown}
    mask = [place != 3 and token > 0 for place in places for token in range(place + 2)]
    assert batch.loss_mask.tolist() == mask, "image tokens that the model wrote are not trained on"


@pytest.mark.parametrize("part_samples", [100, 2], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("counts", "trained"),
    [(MIXED, TRAINED), (NONE, TRAINED), (MIXED, {2: SAMPLES, 3: []}), (MIXED, {1: SAMPLES[:2], 3: SAMPLES[2:]})],
    ids=["both", "without values", "one idle", "one generates too"],
)
def test_ragged_values_arrive(
    threads: Threads,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    counts: dict[int, int],
    trained: dict[int, list[int]],
    part_samples: int,
) -> None:
    monkeypatch.setattr(transfers, "PART_SAMPLES", part_samples)
    workers = workers_of(threads, model, counts, zlib.crc32(request.node.name.encode()))
    hand_over(threads, workers, trained)
    for rank, samples in trained.items():
        batch = workers[rank].batches[7]
        check(batch, samples, counts)
        assert batch.texts == {"messages": [sample_of(s, 0).text().decode() for s in samples]}


@pytest.mark.parametrize("counts", [MIXED, NONE], ids=["mixed", "without values"])
def test_all_ranks_of_a_replica_get_the_same_values(threads: Threads, model: Path, counts: dict[int, int]) -> None:
    workers = workers_of(threads, model, counts, 1 if counts is MIXED else 2)
    hand_over(threads, workers, {2: SAMPLES})
    division, name = Division(((2, 3),), (2,), ((2, 3),)), f"trainer{counts is MIXED}"

    def broadcast(rank: int) -> None:
        role: Any = TrainerRole.__new__(TrainerRole)
        role._worker, role._ranks = workers[rank], DataParallel(threads.worlds[rank], name, division)
        role._broadcast(BroadcastBatch(7, "trainer", ""), 1)

    threads.every(lambda rank: broadcast(rank) if rank in division.ranks else None)
    for rank in division.ranks:
        check(workers[rank].batches[7], SAMPLES, counts)


def test_equal_images_of_a_transfer_are_sent_once(threads: Threads) -> None:
    """Rank 0 sends three samples with the same image, of 3 MB, and one with another."""
    sent: list[int] = []
    contents = {9: bytes(3 << 20), 8: bytes([1]) * 3}
    sides = {9: 1 << 10, 8: 1}

    def rows(sample: int) -> np.ndarray:
        side = sides[9 if sample < 3 else 8]
        return image_rows([Medium(IMAGE, contents[9 if sample < 3 else 8], side, side, 0, 1)])

    def pick(samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
        return {IMAGES.name: [rows(s) for s in samples], IMAGES.counts.name: [np.ones(1, np.int64) for _ in samples]}

    def pictures(samples: Sequence[int]) -> dict[bytes, bytes]:
        found = {image_spans(rows(s))[0].digest: contents[9 if s < 3 else 8] for s in samples}
        sent.extend(map(len, found.values()))
        return found

    groups = threads.every(lambda rank: threads.worlds[rank].group("once", RANKS, 0))
    kind = np.dtype((np.int64, (IMAGES.width,)))

    def carry_out(rank: int) -> list[tuple[Move, dict[str, np.ndarray]]]:
        own = [Move(0, 2, [0, 1, 2, 3], [1] * 4)] if rank in (0, 2) else []
        counts = (IMAGES.counts.name, np.dtype(np.int64))
        return TransferGroup(groups[rank], RANKS).exchange(
            rank, own, [], [counts], pick, "", [(IMAGES.name, kind, IMAGES.counts.name)], pictures
        )

    ((_, values),) = threads.every(carry_out)[2]
    assert sorted(sent) == [3, 3 << 20]
    received = {name: len(array) for name, array in values.items() if name.startswith("picture")}
    assert sorted(received.values()) == [3, 3 << 20] and len(values[IMAGES.name]) == 4


def test_a_silent_rank_does_not_delay_values_from_others(threads: Threads) -> None:
    """Rank 0 waits for rank 3, which is silent, and for rank 1, whose values come after their counts: rank 1 must not
    treat rank 0 as lost."""
    many = np.arange(1 << 20, dtype=np.int64)
    held = {"counts": [np.array([len(many)])], "many": [many]}
    groups = threads.every(lambda rank: replace(threads.worlds[rank], timeout_s=3).group("silent", RANKS, 0))
    listed = [Move(3, 0, [2], [1]), Move(1, 0, [1], [1])]
    kind = np.dtype(np.int64)

    def carry_out(rank: int) -> tuple[float, str]:
        start, own = time.monotonic(), [move for move in listed if rank in (move.source, move.dest)]
        try:
            TransferGroup(groups[rank], RANKS).exchange(
                rank, own, [], [("counts", kind)], lambda _: held, ragged_fields=[("many", kind, "counts")]
            )
        except PeerLost as lost:
            return time.monotonic() - start, f"lost {lost.peer}"
        return time.monotonic() - start, ""

    assert {error for _, error in threads.every(carry_out)} == {""}  # all of them connect
    (waited, first), (sent, second), *_ = threads.every(lambda rank: carry_out(rank) if rank < 2 else (0.0, ""))
    assert (first, second) == ("lost 3", "") and sent < waited / 2
