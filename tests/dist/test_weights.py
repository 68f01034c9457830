"""Weights from their owners to the ranks that require them: every bit, shape and dtype, in order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.comm import weight_checksums, weight_transfer
from hpcrl.comm.weight_checksums import LoadedSums, add_sums, checksum, shard_checksums
from hpcrl.comm.weight_transfer import (
    SendSchedule,
    UpdateGroup,
    WeightReceiver,
    WeightSender,
    connect,
    inside,
    receive_layout,
    send_layout,
)
from hpcrl.messaging.abortable import AbortableGroup
from hpcrl.messaging.world import World
from hpcrl.rollout.store import RolloutReader
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, TensorSlice, full_slice
from tests.dist.conftest import SIZE, Threads
from tests.dist.like_nccl import WHOLE, LikeNCCL
from tests.planner.measuring import peak_bytes

SHAPES = [(3, 5), (1,), (), (7, 1, 3), (0, 4), (64,), (33, 9), (0,)]
DTYPES = {"float32": torch.int32, "bfloat16": torch.int16}  # and the integer dtypes that show their bits
PATIENCE_S = 20.0
Named = dict[str, Tensor]


def make_weights(dtype: str) -> Named:
    """Tensors of any bits, NaN included; one is not contiguous and one requires gradients."""
    bits = DTYPES[dtype]
    torch.manual_seed(3)
    made = {
        f"layers.{i}.weight": torch.randint(-(2**15), 2**15, shape).to(bits).view(getattr(torch, dtype))
        for i, shape in enumerate(SHAPES)
    }
    made["transposed"] = made["layers.6.weight"].t()
    made["parameter"] = torch.nn.Parameter(made["layers.5.weight"].clone())
    return {f"{dtype}.{name}": tensor for name, tensor in made.items()}


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(DTYPES[str(tensor.dtype).removeprefix("torch.")])


def assert_same(got: Named, expected: Named) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits_of(got[name]), bits_of(tensor)), name


def layout_of(named: Named, ranks: Sequence[int], rows: bool) -> list[TensorShards]:
    """Rows divided over the ranks, or all rows on every rank."""
    found = []
    for name, tensor in named.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        divided = rows and tensor.ndim > 0
        made = TensorShards.rows if divided else TensorShards.unsharded
        found.append(made(name, dtype, tensor.shape, len(ranks) if divided else range(len(ranks))).of(ranks))
    return found


def held(named: Named, layout: Sequence[TensorShards], rank: int) -> Iterator[Tensor]:
    """The tensors as an engine yields them: copies in one memory, each overwritten by the next."""
    memory = torch.empty(4096, dtype=torch.uint8)
    for item in layout:
        if (part := item.part_of(rank)) is not None:
            tensor = named[item.name].detach()[tuple(slice(*bounds) for bounds in part)]
            copy = memory.fill_(0x55)[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            yield copy.copy_(tensor)


def transfer(
    threads: Threads,
    name: str,
    named: Named,
    layout: list[TensorShards],
    needs: dict[int, list[RequiredSlices]],
    times: int = 1,
    kind: Callable[[World, Any], Any] | None = None,
) -> list[Named]:
    """What every rank of a world received in the last of several updates."""

    def update(rank: int) -> Named:
        world = threads.worlds[rank]
        group = (kind or plain)(world, world.group(f"weights/{name}", range(SIZE), 0))
        senders = {sender for item in layout for _, holders in item.parts for sender in holders} or {0}
        first, told = min(senders), layout
        connect(group, range(SIZE), rank, senders, needs)
        if rank == first:
            send_layout(group, range(SIZE), layout, set(needs) - senders)
        elif rank not in senders and rank in needs:
            told = receive_layout(group, range(SIZE), first)
        channel = UpdateGroup(group, range(SIZE), told, needs)
        schedule = SendSchedule(rank, {0: channel}) if rank in senders else None
        receiving = WeightReceiver(rank, channel) if rank in needs else None
        got: Named = {}
        for _ in range(times):
            sending = (
                WeightSender(schedule, [0], held(named, layout, rank), PATIENCE_S) if schedule is not None else None
            )
            if receiving is not None:
                got = {key: tensor.clone() for key, tensor in receiving.tensors(sending)}
            elif sending is not None:
                sending.finish()
            assert sending is None or not sending.errors
        return got

    return threads.every(update)


def all_of(named: Named, dtype: str = "") -> list[RequiredSlices]:
    return [RequiredSlices(dtype, (full_slice(tensor.shape),)) for tensor in named.values()]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 256)


@pytest.mark.parametrize("rows", [False, True], ids=["copies", "rows"])
@pytest.mark.parametrize("senders", [[0], [0, 2], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("dtypes", [["float32"], ["bfloat16"], ["float32", "bfloat16"]], ids="-".join)
def test_weights_held_by_trainers_arrive(
    threads: Threads, small_steps: None, dtypes: list[str], senders: list[int], rows: bool
) -> None:
    """Rank 1 generates, separate from the trainers or as one of them."""
    named = {name: tensor for dtype in dtypes for name, tensor in make_weights(dtype).items()}
    layout = layout_of(named, senders, rows)
    name = f"{'-'.join(dtypes)}/{senders}/{rows}"
    got = transfer(threads, name, named, layout, {1: all_of(named)}, times=2)
    assert_same(got[1], named)
    assert got[0] == got[2] == {}


def test_ranks_of_a_replica_get_their_slices_in_their_dtype(threads: Threads, small_steps: None) -> None:
    """Rank 0 holds everything, ranks 1 and 2 need half of the columns, and the whole of what has none."""
    named = {name: tensor for name, tensor in make_weights("float32").items() if tensor.ndim != 3}

    def half(shape: Sequence[int], index: int) -> TensorSlice:
        if len(shape) < 2:
            return full_slice(shape)
        middle = shape[1] // 2
        return (0, shape[0]), ((0, middle), (middle, shape[1]))[index]

    needs = {
        rank: [RequiredSlices("bfloat16", (half(tensor.shape, rank - 1),)) for tensor in named.values()]
        for rank in (1, 2)
    }
    got = transfer(threads, "slices", named, layout_of(named, [0], False), needs)
    for rank in (1, 2):
        assert list(got[rank]) == list(named)
        for name, tensor in named.items():
            index = tuple(slice(*bounds) for bounds in half(tensor.shape, rank - 1))
            assert torch.equal(bits_of(got[rank][name][index]), bits_of(tensor.detach()[index].bfloat16())), name


def plain(world: World, group: Any) -> Any:
    return group


def on_gpus(world: World, group: Any) -> Any:
    """A group as weights_group() makes it, with gloo under NCCL's rules in place of NCCL."""
    return AbortableGroup(LikeNCCL(group, world.rank), "weights", range(SIZE), PATIENCE_S, world.lost_ranks)


@pytest.mark.slow
def test_a_rank_may_join_its_group_late(threads: Threads) -> None:
    """Here later than the timeout of a store call (timeouts.store_s)."""
    stores = [world.store for world in threads.worlds]
    before = stores[0].timeout

    def meet(rank: int) -> float:
        time.sleep(1.6 if rank == 0 else 0)
        group = threads.worlds[rank].weights_group("weights/late", range(SIZE), 0)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item()

    try:
        for store in stores:
            store.set_timeout(timedelta(seconds=1))
        assert threads.every(meet) == [SIZE] * SIZE
    finally:
        for store in stores:
            store.set_timeout(before)


def test_one_communicator_carries_each_step_of_an_update_in_one_batch(
    threads: Threads, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2 train, rank 1 generates: besides the steps, each rank connects and, of the layout, sends or gets
    its size and itself; rank 2 only connects."""
    monkeypatch.setattr(weight_transfer, "_device", lambda group: torch.device("cpu"))
    named = make_weights("float32")
    groups: dict[int, LikeNCCL] = {}

    def kind(world: World, group: Any) -> Any:
        made = on_gpus(world, group)
        groups[world.rank] = made._group
        return made

    layout, needs = layout_of(named, [0, 2], True), {1: all_of(named)}
    got = transfer(threads, "batches", named, layout, needs, times=2, kind=kind)
    assert_same(got[1], named)
    steps = UpdateGroup(None, range(SIZE), layout, needs).steps
    assert len(steps) > 5
    for rank, others in ((0, 2), (1, 2), (2, 0)):
        assert groups[rank].communicators == [WHOLE]
        taking = [step for step in steps if any(rank in (piece.sender, piece.receiver) for piece in step)]
        assert len(groups[rank].batches) == 1 + others + 2 * len(taking)
    for batch in groups[1].batches[3:]:
        peers = [peer for sends, peer in batch if not sends]
        assert len(batch) == len(set(peers)), "one message from each sender"


@pytest.mark.parametrize("kind", [plain, on_gpus], ids=["gloo", "in batches"])
def test_ranks_of_a_replica_that_also_train_send_to_each_other(
    threads: Threads,
    small_steps: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[World, Any], Any],
    request: pytest.FixtureRequest,
) -> None:
    """All ranks train, ranks 0 and 1 generate; their checksums are those of the trainers, too."""
    monkeypatch.setattr(weight_transfer, "_device", lambda group: torch.device("cpu"))
    named = make_weights("float32")
    layout, needs = layout_of(named, range(SIZE), True), [all_of(named, "bfloat16")] * 2

    def update(rank: int) -> tuple[Named, list[str]]:
        world = threads.worlds[rank]
        group = kind(world, world.group(f"weights/{request.node.name}", range(SIZE), 0))
        connect(group, range(SIZE), rank, range(SIZE), [0, 1])
        channel = UpdateGroup(group, range(SIZE), layout, dict(enumerate(needs)))
        sending = WeightSender(SendSchedule(rank, {0: channel}), [0], held(named, layout, rank), PATIENCE_S)
        loaded, got = LoadedSums(layout, needs[0]), Named()
        if rank in channel.needs:
            got = {
                name: tensor.clone() for name, tensor in loaded.noting(WeightReceiver(rank, channel).tensors(sending))
            }
        else:
            sending.finish()
        sums = add_sums(channel, rank, range(SIZE), shard_checksums(rank, layout, needs, held(named, layout, rank)))
        return got, loaded.differing(sums) if got else []

    wanted = {name: tensor.detach().bfloat16() for name, tensor in named.items()}
    for got, differing in threads.every(update)[:2]:
        assert_same(got, wanted)
        assert differing == []


@pytest.mark.parametrize("named", [{}, {"none": torch.empty(0, 3)}], ids=["no tensors", "an empty tensor"])
def test_nothing_to_send(threads: Threads, named: Named, request: pytest.FixtureRequest) -> None:
    got = transfer(threads, request.node.name, named, layout_of(named, [0], False), {1: all_of(named)})
    assert_same(got[1], named)


def test_a_lost_replica_does_not_delay_the_others(threads: Threads, small_steps: None) -> None:
    """Rank 0 trains; rank 1 generates, and rank 2, in its own group, does not take part."""
    named = make_weights("float32")
    layout = layout_of(named, [0], False)

    def update(rank: int) -> tuple[Named, list[int]]:
        groups = {
            other: threads.worlds[rank].group(f"weights/lost/{other}", (0, other), 0) if rank in (0, other) else None
            for other in (1, 2)
        }
        for other, group in groups.items():
            if group is not None:
                connect(group, (0, other), rank, [0], [other])
        channels = {
            other: UpdateGroup(group, (0, other), layout, {other: all_of(named)}) for other, group in groups.items()
        }
        if rank == 1:
            return {name: tensor.clone() for name, tensor in WeightReceiver(1, channels[1]).tensors()}, []
        if rank == 0:
            sending = WeightSender(SendSchedule(0, channels), [1, 2], held(named, layout, 0), send_timeout_s=5.0)
            sending.finish()
            return {}, sorted(sending.errors)
        return {}, []

    got = threads.every(update)
    assert got[0] == ({}, [2])
    assert_same(got[1][0], named)


@pytest.mark.slow
def test_pipeline_stages_drop_only_the_replica_that_hangs(small_steps: None, tmp_path: Path) -> None:
    """Rank 0 holds the first four of six tensors, rank 1 the others. Rank 3 generates and takes nothing; rank 2
    generates, too, and takes nothing of rank 1 before rank 0 has given rank 3 up."""
    named = {name: tensor for name, tensor in make_weights("float32").items() if tensor.numel() > 1}
    layout = [TensorShards.unsharded(name, "float32", t.shape, [i // 4]) for i, (name, t) in enumerate(named.items())]
    threads = Threads(tmp_path, 4)
    kept: list[Any] = []  # a group that ends is not a replica that hangs

    def update(rank: int) -> tuple[Named, list[int]]:
        channels = {}
        for other in (2, 3):
            if rank in (0, 1, other):
                ranks = (0, 1, other)
                group = threads.worlds[rank].group(f"weights/hangs/{other}", ranks, 0)
                connect(group, ranks, rank, [0, 1], [other])
                channels[other] = UpdateGroup(group, ranks, layout, {other: all_of(named)})
        kept.append(channels)
        if rank == 2:
            return {name: tensor.clone() for name, tensor in WeightReceiver(2, channels[2]).tensors()}, []
        if rank == 3:
            return {}, []
        if rank == 0:
            time.sleep(0.2)  # ranks never begin at the same moment
        sending = WeightSender(SendSchedule(rank, channels), [2, 3], held(named, layout, rank), send_timeout_s=4.0)
        sending.finish()
        return {}, sorted(sending.errors)

    got = threads.every(update)
    threads.close()
    assert [errors for _, errors in got] == [[3], [3], [], []]
    assert_same(got[2][0], named)


def test_checksums_of_parts_add_up_and_cover_every_bit_and_position() -> None:
    for name, tensor in {**make_weights("float32"), **make_weights("bfloat16")}.items():
        tensor, shape = tensor.detach().clone(), tensor.shape
        whole = checksum(tensor, full_slice(shape), shape)
        for axis, size in enumerate(shape):
            cut = [[*full_slice(shape)], [*full_slice(shape)]]
            cut[0][axis], cut[1][axis] = (0, size // 3), (size // 3, size)
            parts = [
                checksum(inside(tensor, tuple(tensor_slice), full_slice(shape)), tuple(tensor_slice), shape)
                for tensor_slice in cut
            ]
            assert sum(parts) == whole, name
        flat = tensor.view(-1).view(DTYPES[str(tensor.dtype).removeprefix("torch.")]) if tensor.is_contiguous() else []
        for place in range(len(flat)):
            flat[place] ^= 1 << (place % 15)
            assert checksum(tensor, full_slice(shape), shape) != whole, (name, place)
            flat[place] ^= 1 << (place % 15)
        if len(flat) > 1 and flat[0] != flat[-1]:
            flat[[0, -1]] = flat[[-1, 0]]
            assert checksum(tensor, full_slice(shape), shape) != whole, name


def test_a_checksum_takes_little_memory_for_any_row_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experts = torch.randn(2, 64, 512)
    tensor_slice = ((1, 3), (0, 64), (3, 515))
    expected = checksum(experts.bfloat16(), tensor_slice, (4, 64, 520))
    monkeypatch.setattr(weight_checksums, "CHUNK", 1 << 12)
    found: list[Tensor] = []
    peak = peak_bytes(
        lambda: found.append(checksum(experts, tensor_slice, (4, 64, 520), torch.bfloat16)), tmp_path / "trace.json"
    )
    assert peak < 40 << 12
    assert found == [expected]


def test_positive_and_negative_zero_have_the_same_checksum() -> None:
    zeros, signed = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert checksum(zeros, full_slice((3,)), (3,)) == checksum(signed, full_slice((3,)), (3,))
    assert checksum(zeros, full_slice((3,)), (3,)) != checksum(signed + 1e-30, full_slice((3,)), (3,))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.timeout(240)
def test_a_disaggregated_run_publishes_its_weights_over_nccl(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path / 'run'}", "layout=disaggregated", "layout.trainer.num_ranks=1", "max_steps=2"]
    words += ["layout.generator.num_ranks=1", "cluster.device=cuda", "rollout.filter_std=false", "eval_every=0"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.launch", "+experiment=demo", *words],
        env={**os.environ, "NCCL_DEBUG": "INFO"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    batch = RolloutReader(tmp_path / "run").batch(2)
    assert batch.old_logprobs is not None
    # The generator has the trainer's weights; otherwise its log-probs would differ.
    assert (batch.old_logprobs - batch.gen_logprobs)[batch.loss_mask].abs().max() < 1e-3
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("rank_*.log"))
    assert "NCCL INFO" in logs
