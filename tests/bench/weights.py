"""A weight update between processes, beside a plain broadcast of the bytes that a receiver gets, in turns.

    python -m tests.bench.weights [--mib 512] [--rounds 5] [--case 4to2] [--held bfloat16]
    python -m tests.bench.weights --plan

Prints one JSON line per case. `share_cpu`, `share_wall`: cost of the broadcast over that of the update. The update
converts (unless `--held bfloat16`), packs, sends, puts rows together and copies every tensor to its place. The
broadcast, one step at a time into one buffer, does nothing else: from one trainer to all generators, of as many bytes
as one of them gets, so that as many bytes arrive as in the update. `carried_cpu`: the share of an update that neither
converts nor loads. `most_cpu`: the share if an update cost nothing but the broadcast and its copies, which run alone.
All take turns. `cpu_s`: CPU-seconds of all processes. `bytes_over_needed`: what a receiver gets over what it must hold.
`extra_steps`: the most memory that a rank had beyond its weights, over two steps and (a receiver's) the tensor that it
puts together. colocated: four ranks gather as FSDP2 does, against each of them broadcasting its quarter;
`extra_steps`: over two of the largest tensors; `carried_cpu`: the gather, which converts, without the load.

--plan: bytes and seconds of an update of published models, by the plan, at several link speeds; measures nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hpcrl.cluster.layout import RoleLayout
from hpcrl.comm import weight_transfer
from hpcrl.comm.weight_transfer import SendSchedule, UpdateGroup, WeightReceiver, WeightSender
from hpcrl.config import parse
from hpcrl.engines.train.fsdp2.weights import full_tensor
from hpcrl.models.families import read_shape
from hpcrl.planner.generator import update_traffic
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, TensorSlice, full_slice
from tests.bench.machine import tell
from tests.planner.models import PUBLISHED

CASES = {"1to1": (1, 1, 1), "2to2_tp2": (2, 2, 2), "4to2": (4, 2, 1), "colocated": (4, 0, 1)}
"""Trainers, generators, ranks of a replica."""
STEP_BYTES = 16 << 20
WIDTH = 1024
LIMIT = timedelta(seconds=300)
Work = Callable[[], None]


class Still(dist.ProcessGroupGloo):
    """Sends and receives nothing."""

    class Done:
        def wait(self, *_: Any) -> None:
            pass

    def send(self, *_: Any) -> Done:
        return self.Done()

    recv = send


def layout_of(mib: int, trainers: int, dtype: str) -> list[TensorShards]:
    """Layers of five matrices of 1024 x 4096 numbers or less and two vectors, `mib` MiB in bf16."""
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    shapes |= {"norm": (WIDTH,), "other_norm": (WIDTH,)}
    layers = max(1, (mib << 20) // (2 * sum(torch.Size(shape).numel() for shape in shapes.values())))
    named = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    return [TensorShards.rows(name, dtype, shape, trainers) for name, shape in named.items()]


def sliced(held: TensorShards, index: int, num_ranks: int) -> RequiredSlices:
    """As tensor-parallel engines do: rows of what goes in, columns of what comes out, all of the vectors."""
    tensor_slice: TensorSlice = full_slice(held.shape)
    if len(held.shape) == 2 and num_ranks > 1:
        axis = int(held.name.endswith(("out", "down")))
        size = held.shape[axis] // num_ranks
        bounds = [*tensor_slice]
        bounds[axis] = (index * size, (index + 1) * size)
        tensor_slice = tuple(bounds)
    return RequiredSlices("bfloat16", (tensor_slice,))


class Carrying(WeightSender):
    """Sends what its buffers contain."""

    def _pack(self, messages: Any) -> None:
        pass


class Rank:
    """One process: its weights, what it does in an update, and the plain broadcast."""

    def __init__(self, case: str, rank: int, mib: int, dtype: str, folder: Path):
        trainers, generators, tensor = CASES[case]
        size = trainers + generators
        store = dist.FileStore(str(folder / "store"), size)
        self.rank, self.trainers, self.case = rank, trainers, case
        self.layout = layout_of(mib, trainers, dtype)
        self.shards = [
            torch.zeros([b - a for a, b in part]).normal_().to(getattr(torch, dtype))
            for held in self.layout
            if rank < trainers and (part := held.part_of(rank)) is not None
        ]
        self.loaded: dict[str, Tensor] = {}
        self.group = _group(store, "all", range(size), rank)
        self.step_bytes = min(STEP_BYTES, mib << 20)
        weight_transfer.BUCKET_BYTES = STEP_BYTES
        if generators:
            self._join(store, generators, tensor)
        else:
            dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=size)
            self.mesh = init_device_mesh("cpu", (size,))
            self.received = mib << 20
            self.works: dict[str, Work] = {
                "plain": self._broadcast_own,
                "copies": self._convert_and_load,
                "carried": lambda: self._gather(load=False),
                "update": self._gather,
            }

    def _join(self, store: Any, generators: int, tensor: int) -> None:
        rank, trainers = self.rank, self.trainers
        channels: dict[int, UpdateGroup] = {}
        for number, first in enumerate(range(trainers, trainers + generators, tensor)):
            replica = range(first, first + tensor)
            ranks = [*range(trainers), *replica]
            if rank in ranks:
                needs = {r: [sliced(held, i, tensor) for held in self.layout] for i, r in enumerate(replica)}
                channels[number] = UpdateGroup(_group(store, f"{number}", ranks, rank), ranks, self.layout, needs)
        still = {key: replace(channel, group=Still(dist.HashStore(), 0, 1)) for key, channel in channels.items()}
        self.receiving = WeightReceiver(rank, next(iter(channels.values()))) if rank >= trainers else None
        channel = next(iter(channels.values()))
        first_rank = min(channel.needs)
        slices = [tensor_slice for need in channel.needs[first_rank] for tensor_slice in need.slices]
        self.received = sum(2 * torch.Size([b - a for a, b in tensor_slice]).numel() for tensor_slice in slices)
        self.works = {
            "plain": self._broadcast,
            "copies": self._transfer(still),
            "carried": self._transfer(channels, copies=False),
            "update": self._transfer(channels),
        }

    def _transfer(self, channels: dict[int, UpdateGroup], copies: bool = True) -> Work:
        if self.rank < self.trainers:
            schedule = SendSchedule(self.rank, channels)

            def send() -> None:
                sending = (WeightSender if copies else Carrying)(
                    schedule, list(channels), iter(self.shards), LIMIT.total_seconds()
                )
                sending.finish()
                assert not sending.errors

            return send
        receiving = WeightReceiver(self.rank, next(iter(channels.values())))
        needs = receiving.channel.needs[self.rank]
        slices = {held.name: need.slices[0] for held, need in zip(self.layout, needs, strict=True)}

        def receive() -> None:
            named = ((name, tensor[tuple(slice(*b) for b in slices[name])]) for name, tensor in receiving.tensors())
            self._load(named, copies)

        return receive

    def _gather(self, load: bool = True) -> None:
        def full() -> Iterator[tuple[str, Tensor]]:
            for held, shard in zip(self.layout, self.shards, strict=True):
                sharded = DTensor.from_local(shard, self.mesh, [Shard(0)], run_check=False)
                yield held.name, full_tensor(sharded, torch.bfloat16)

        self._load(full(), load)

    def _convert_and_load(self) -> None:
        """What each rank of _gather() does beside the broadcasts: its quarter of every tensor, and the load."""

        def full() -> Iterator[tuple[str, Tensor]]:
            for held, shard in zip(self.layout, self.shards, strict=True):
                whole = torch.empty(held.shape, dtype=torch.bfloat16)
                whole.chunk(self.trainers)[self.rank].copy_(shard)
                yield held.name, whole

        self._load(full(), load=True)

    def _load(self, named: Iterator[tuple[str, Tensor]], load: bool) -> None:
        for name, tensor in named:
            if not load:
                continue
            if name not in self.loaded:
                self.loaded[name] = torch.empty_like(tensor)
            self.loaded[name].copy_(tensor)

    def _broadcast(self) -> None:
        """From the first trainer to the generators."""
        if 0 < self.rank < self.trainers:
            return
        self._send(0, self.received)

    def _broadcast_own(self) -> None:
        for root in range(self.trainers):
            self._send(root, self.received // self.trainers)

    def _send(self, root: int, num_bytes: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks_of_plain.index(root)
        for start in range(0, num_bytes, STEP_BYTES):
            self.plain_group.broadcast([self.buffer[: min(STEP_BYTES, num_bytes - start)]], options).wait()

    def prepare_plain(self, store: Any) -> None:
        """The group and the buffer of the broadcast."""
        size = sum(CASES[self.case][:2])
        taking = range(size) if self.case == "colocated" else [0, *range(self.trainers, size)]
        self.ranks_of_plain = list(taking)
        self.buffer = torch.ones(STEP_BYTES, dtype=torch.uint8)
        if self.rank in self.ranks_of_plain:
            self.plain_group = _group(store, "plain", self.ranks_of_plain, self.rank)

    def largest_bytes(self) -> int:
        """The largest tensor, in bf16."""
        return max(2 * torch.Size(held.shape).numel() for held in self.layout)


def _group(store: Any, name: str, ranks: Any, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    return gloo(dist.PrefixStore(f"group/{name}", store), list(ranks).index(rank), len(ranks), LIMIT)


def _peak(work: Work) -> int:
    """Bytes by which the process's peak exceeds what it held before."""
    status = Path("/proc/self/status")

    def read(key: str) -> int:
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def run_rank(case: str, rank: int, mib: int, dtype: str, rounds: int, folder: Path) -> None:
    """One process of a case; rank 0 prints."""
    torch.set_num_threads(1)
    bench = Rank(case, rank, mib, dtype, folder)
    store = dist.FileStore(str(folder / "store2"), sum(CASES[case][:2]))
    bench.prepare_plain(store)
    works = bench.works
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            _all(bench.group, 0.0)
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            cpu = _all(bench.group, time.process_time() - cpu)
            if number:  # the first connects and allocates
                spent[name].append((time.perf_counter() - wall, cpu))
    _all(bench.group, 0.0)
    extra = _peak(works["update"])
    allowed = 2 * bench.step_bytes + (bench.largest_bytes() if rank >= bench.trainers else 0)
    allowed = 2 * bench.largest_bytes() if case == "colocated" else allowed
    extra_steps = _all(bench.group, extra / allowed, dist.ReduceOp.MAX)
    got = bench.receiving.num_bytes / bench.received if case != "colocated" and rank >= bench.trainers else 1.0
    over = _all(bench.group, got, dist.ReduceOp.MAX)
    _check(bench)
    if rank == 0:
        medians = {name: [statistics.median(c) for c in zip(*values, strict=True)] for name, values in spent.items()}
        plain, copies = medians["plain"][1], medians.get("copies", [])
        most = {"most_cpu": round(plain / (plain + copies[1]), 2)} if copies else {}
        tell(
            {
                "bench": "weights",
                "case": case,
                "held": dtype,
                "mib_per_receiver": round(bench.received / 2**20),
                "share_wall": round(medians["plain"][0] / medians["update"][0], 2),
                "share_cpu": round(medians["plain"][1] / medians["update"][1], 2),
                "carried_cpu": round(medians["plain"][1] / medians["carried"][1], 2),
                **most,
                "cpu_s": {name: round(seconds[1], 3) for name, seconds in medians.items()},
                "gib_per_s": round(bench.received / 2**30 / medians["update"][0], 2),
                "bytes_over_needed": round(over, 4),
                "extra_steps": round(extra_steps, 2),
            }
        )


def _check(bench: Rank) -> None:
    """That a receiver of everything has what the trainers have: the sums of some tensors are theirs."""
    for number, held in enumerate(bench.layout[:7]):
        own = float(bench.shards[number].bfloat16().double().sum()) if bench.rank < bench.trainers else 0.0
        whole = _all(bench.group, own)
        if held.name in bench.loaded and tuple(bench.loaded[held.name].shape) == held.shape:
            assert abs(float(bench.loaded[held.name].double().sum()) - whole) < 1e-3, held.name


def _all(group: Any, value: float, op: Any = dist.ReduceOp.SUM) -> float:
    """The value over all processes, which also meet here."""
    tensor, options = torch.tensor([value], dtype=torch.float64), dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return float(tensor)


RUNS = {
    "Qwen2.5-7B": (8, 8, 1),
    "Qwen3-30B-A3B": (16, 16, 1),
    "Qwen3-235B-A22B": (256, 64, 8),
}
"""Trainers, generators, ranks of a replica."""


def planned() -> Iterator[dict[str, object]]:
    """Bytes and least seconds of updates in bf16 between ranks of their own, by the plan."""
    for model, (trainers, generators, tensor) in RUNS.items():
        shape = read_shape(PUBLISHED[model][0])
        own = {"num_ranks": generators, "colocate_with": None, "tensor_parallel": tensor}
        engine = {"engine": "vllm", "dtype": "bfloat16"}
        config = parse({"layout": {"trainer": {"num_ranks": trainers}, "generator": own}, "generator": engine})
        received, sent = update_traffic(config, RoleLayout.from_config(config), shape)
        seconds = {str(rate): round(max(received, sent) / rate / 1e9, 2) for rate in (12.5, 25, 50, 100)}
        gib = {"received_gib": round(received / 2**30, 1), "sent_gib": round(sent / 2**30, 1)}
        ranks = {"trainers": trainers, "generators": generators, "tensor_parallel": tensor}
        yield {"model": model, **ranks, **gib, "seconds_at_gb_per_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--held", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        rank, folder = int(words.rank[0]), Path(words.rank[1])
        run_rank(words.case, rank, words.mib, words.held, words.rounds, folder)
        return
    if words.plan:
        tell({"bench": "weights", "plan": list(planned())})
        return
    for case in [words.case] if words.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            same = [sys.executable, "-m", "tests.bench.weights", "--case", case]
            same += ["--mib", str(words.mib), "--rounds", str(words.rounds), "--held", words.held, "--rank"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen([*same, str(rank), folder], env=environment) for rank in range(sum(CASES[case][:2]))
            ]
            assert [rank.wait() for rank in ranks] == [0] * len(ranks), case


if __name__ == "__main__":
    main()
