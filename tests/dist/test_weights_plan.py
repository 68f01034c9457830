"""The plan of an update: every required value once, from one of its owners, in steps of limited size."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpcrl.comm.weight_plan import padded, plan_pieces
from hpcrl.comm.weight_transfer import SendSchedule, UpdateGroup
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, TensorSlice, count, full_slice

SHAPES = [(12, 7), (1,), (9, 4, 3), (0, 4), (), (40,), (64, 64)]
ALL = [RequiredSlices("bfloat16", (full_slice(shape),)) for shape in SHAPES]
HALVES = [
    [
        RequiredSlices(
            "",
            (((0, s[0]), (i * s[1] // 2, (i + 1) * s[1] // 2), *full_slice(s[2:])),)
            if len(s) > 1
            else (full_slice(s),),
        )
        for s in SHAPES
    ]
    for i in (0, 1)
]


def rows(ranks: list[int]) -> list[TensorShards]:
    size = len(ranks)
    made = (
        TensorShards.rows("w", "float32", s, size) if s else TensorShards.unsharded("w", "float32", s, range(size))
        for s in SHAPES
    )
    return [held.of(ranks) for held in made]


def copies(ranks: list[int]) -> list[TensorShards]:
    return [TensorShards.unsharded("w", "float32", shape, ranks) for shape in SHAPES]


def at(tensor_slice: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in tensor_slice)


@pytest.mark.parametrize(
    "layout",
    [rows([4]), rows([4, 5, 6]), copies([4]), copies([5, 6])],
    ids=["one", "rows", "copy", "copies"],
)
@pytest.mark.parametrize("needs", [{1: ALL}, {1: ALL, 2: ALL}, {1: HALVES[0], 2: HALVES[1]}, {5: ALL}], ids=list)
@pytest.mark.parametrize("step_bytes", [64, 1024, 1 << 20])
def test_every_required_value_is_sent_once_by_an_owner(
    layout: list[TensorShards], needs: dict[int, list[RequiredSlices]], step_bytes: int
) -> None:
    counts = {rank: [torch.zeros(shape) for shape in SHAPES] for rank in needs}
    steps = plan_pieces(layout, needs, step_bytes)
    for step in steps:
        assert sum(padded(piece.num_bytes) for piece in step) <= step_bytes
    pieces = [piece for step in steps for piece in step]
    assert [piece.tensor for piece in pieces] == sorted(piece.tensor for piece in pieces)
    for piece in pieces:
        counts[piece.receiver][piece.tensor][at(piece.tensor_slice)] += 1
        part = layout[piece.tensor].part_of(piece.sender)
        assert part is not None and all(
            a <= c <= d <= b for (a, b), (c, d) in zip(part, piece.tensor_slice, strict=True)
        )
    for rank, own in needs.items():
        for number, need in enumerate(own):
            for tensor_slice in need.slices:
                counts[rank][number][at(tensor_slice)] -= 1
        assert not any(count.any() for count in counts[rank]), rank


def test_an_owner_sends_to_itself_and_copies_share_the_sending() -> None:
    layout = [TensorShards.unsharded(f"w{i}", "float32", (16, 16), [3, 4, 5]) for i in range(30)]
    need = [RequiredSlices("", (full_slice((16, 16)),))] * 30
    pieces = [piece for step in plan_pieces(layout, {4: need, 7: need}) for piece in step]
    assert {piece.sender for piece in pieces if piece.receiver == 4} == {4}
    assert Counter(piece.sender for piece in pieces if piece.receiver == 7) == {3: 10, 4: 10, 5: 10}


def test_all_senders_of_a_large_tensor_send_in_each_step() -> None:
    layout, need = [TensorShards.rows("w", "float32", (4096, 8), 4)], [RequiredSlices("", (full_slice((4096, 8)),))]
    steps = plan_pieces(layout, {9: need}, 4096)
    assert len(steps) == 32
    assert all({piece.sender for piece in step} == {0, 1, 2, 3} for step in steps)


def test_a_large_tensor_with_several_owners_is_divided_among_them() -> None:
    layout, need = (
        [TensorShards.unsharded("w", "float32", (4096, 256), [0, 1, 2])],
        [RequiredSlices("", (full_slice((4096, 256)),))],
    )
    channels = {replica: UpdateGroup(None, (0, 1, 2, replica), layout, {replica: need}) for replica in (3, 4, 5, 6)}
    sent = [sum(p.num_bytes for p in plan_pieces(layout, {3: need})[0] if p.sender == rank) for rank in (0, 1, 2)]
    assert sum(sent) == 4 << 20 and max(sent) < 1.01 * min(sent)
    assert max(SendSchedule(rank, channels).most_bytes for rank in (0, 1, 2)) < 1.01 * (4 << 20) / 3


@pytest.mark.parametrize("layout", [rows([0, 1]), copies([0, 1])], ids=["rows", "copies"])
def test_slices_that_replicas_have_in_common_are_packed_once(layout: list[TensorShards]) -> None:
    channels = {
        replica: UpdateGroup(None, (0, 1, *ranks), layout, {rank: HALVES[i] for i, rank in enumerate(ranks)})
        for replica, ranks in enumerate([(2, 3), (4, 5), (6, 7)])
    }
    got: Counter[int] = Counter()
    for rank in (0, 1):
        for message in [message for step in SendSchedule(rank, channels).steps for message in step]:
            for replica, receiver in message.receivers:
                assert receiver in channels[replica].needs
                got[receiver] += sum(piece.num_bytes for piece in message.pieces)
            assert [receiver - message.receivers[0][1] for _, receiver in message.receivers] == [0, 2, 4]
    wanted = [sum(4 * count(tensor_slice) for need in half for tensor_slice in need.slices) for half in HALVES]
    assert got == {rank: wanted[rank % 2] for rank in range(2, 8)}


def test_a_required_value_without_an_owner_is_an_error() -> None:
    layout = [TensorShards("w", "float32", (4, 4), ((((0, 3), (0, 4)), (0,)),))]
    with pytest.raises(
        ValueError, match="generator rank 1 needs 16 numbers of weight w, and the trainer ranks hold 12"
    ):
        plan_pieces(layout, {1: [RequiredSlices("", (full_slice((4, 4)),))]})


def test_integers_are_sent_without_conversion() -> None:
    layout, need = [TensorShards.unsharded("w", "int64", (3,), [0])], [RequiredSlices("bfloat16", (full_slice((3,)),))]
    assert [piece.dtype for step in plan_pieces(layout, {1: need}) for piece in step] == ["int64"]
