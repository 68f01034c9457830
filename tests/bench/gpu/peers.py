"""Two ranks on two devices: weights from one to the other, and a rank whose peer is lost. Over NCCL; on the CPU over
gloo."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.comm.batched_p2p import Begun, Transfer, begin
from hpcrl.comm.weight_transfer import SendSchedule, UpdateGroup, WeightReceiver, WeightSender, connect
from hpcrl.messaging.abortable import AbortableGroup, make_nccl
from hpcrl.planner.traffic import SEND_BYTES, seconds_to_make
from hpcrl.spec.weight_layout import CHANNELS, RequiredSlices, full_slice
from hpcrl.workers.allocator import grow_segments
from tests.bench.gpu.common import GB, Check, Row, median
from tests.bench.weights import layout_of

HERE = "tests.bench.gpu.peers"
PATIENCE_S = 20.0
RANKS = (0, 1)
MIB = 1 << 20
SURVIVED = "still here True"
"""What rank 0 says at last if the loss of its peer has not ended it."""


def update(check: Check) -> Iterator[Row]:
    """Weights in bf16 from an fp32 trainer to a generator, beside a plain transfer of the same bytes, in turns."""
    said = pair("update", check.device, check.pick(2048, 1))
    rate, plain, made_s, mib = (float(word) for word in said.rpartition("GB/s ")[2].split())
    yield Row("two ranks", "weights to the generator", rate, "GB/s", plain, note="beside a plain transfer")
    yield Row("two ranks", "to make and connect a group", made_s, "s", seconds_to_make(len(RANKS)), note="the plan")
    if check.on_gpu:
        yield Row("two ranks", "the group on the sender", mib, "MiB", CHANNELS * SEND_BYTES / MIB, note="the plan")


def lost_peer(check: Check) -> Iterator[Row]:
    """A peer that dies, and, under NCCL, one that hangs: the other goes on."""
    for how in ("dies", "hangs") if check.on_gpu else ("dies",):
        said = pair(how, check.device)
        error = said.splitlines()[0] if said else "nothing said"
        yield Row("lost peer", how, verdict="ok" if SURVIVED in said else "bad", note=error[:80])


def pair(what: str, device: str, mib: int = 4) -> str:
    """What rank 0 prints. what: update, dies or hangs."""
    return run_pair(HERE, [what, device, str(mib)], 60)


def run_pair(
    module: str, words: Sequence[str], timeout_s: float, environs: Sequence[Mapping[str, str]] = ({}, {})
) -> str:
    """What rank 0 of two prints. Each runs the module with these words, the port of a store and its rank, under further
    variables. RuntimeError with its last line if it fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", module, *words, str(store.port)]
    pipes: list[dict[str, Any]] = [
        {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        {"stdout": subprocess.DEVNULL},  # nobody would empty a pipe of its errors
    ]
    peers = [subprocess.Popen([*command, str(r)], env={**os.environ, **environs[r]}, **pipes[r]) for r in RANKS]
    try:
        said, errors = peers[0].communicate(timeout=timeout_s)
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    if peers[0].returncode:
        raise RuntimeError(f"rank 0 ended with code {peers[0].returncode}: {(errors or said).strip()[-300:]}")
    return said


def _group(store: Any, rank: int, device: str) -> Any:
    """As World.weights_group makes it."""
    if device == "cpu":
        gloo: Any = dist.ProcessGroupGloo
        return gloo(store, rank, len(RANKS), timedelta(seconds=PATIENCE_S))
    torch.cuda.set_device(rank)
    grow_segments(os.environ)
    nccl = make_nccl(store, rank, len(RANKS))
    return AbortableGroup(nccl, "pair", RANKS, 60.0, lambda: {1} if store.check(["lost"]) else set())


def _between(group: Any, rank: int, sender: int, tensor: Tensor) -> Begun:
    """A transfer from `sender` to the other rank."""
    return begin(group, [Transfer(tensor, 1 - rank, sends=rank == sender)])


def _lose_peer(group: Any, store: Any, rank: int, device: str, hangs: bool) -> None:
    connect(group, RANKS, rank, [1], [0])
    tensor = torch.zeros(1 << 20, device=device)
    _between(group, rank, 1, tensor).wait()
    if rank == 1:
        store.set("gone", "")
        time.sleep(600 if hangs else 0)
        return
    store.wait(["gone"])
    try:
        started = _between(group, rank, 1, tensor)
        if hangs:
            store.set("lost", "")
        started.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
    time.sleep(3 if device == "cuda" else 0)  # torch's default would end the process meanwhile
    print("still here", float((tensor + 1).sum()) > 0)


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _update(group: Any, rank: int, device: str, mib: int) -> None:
    torch.zeros(1, device=device)  # the context of the GPU
    free, began = _free_bytes(device), time.perf_counter()
    connect(group, RANKS, rank, [0], [1])
    made = time.perf_counter() - began, (free - _free_bytes(device)) / MIB
    layout = layout_of(mib, 1, "float32")
    needs = {1: [RequiredSlices("bfloat16", (full_slice(held.shape),)) for held in layout]}
    channel = UpdateGroup(group, RANKS, layout, needs)
    shards = [torch.ones(held.shape, device=device) for held in layout] if rank == 0 else []
    places = [torch.empty(held.shape, dtype=torch.bfloat16, device=device) for held in layout] if rank == 1 else []
    schedule = SendSchedule(0, {0: channel}) if rank == 0 else None
    receiving = WeightReceiver(1, channel) if rank == 1 else None

    def new_weights() -> None:
        if schedule is not None:
            sending = WeightSender(schedule, [0], iter(shards), PATIENCE_S)
            sending.finish()
            assert not sending.errors, sending.errors
        if receiving is not None:
            for place, (_, tensor) in zip(places, receiving.tensors(), strict=True):
                place.copy_(tensor)

    size = sum(2 * torch.Size(held.shape).numel() for held in layout)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def plain() -> None:
        _between(group, rank, 0, buffer).wait()

    seconds: dict[Any, list[float]] = {new_weights: [], plain: []}
    for _ in range(4):
        for work, spent in seconds.items():
            group_meets(group, rank, device)
            start = time.perf_counter()
            work()
            group_meets(group, rank, device)
            spent.append(time.perf_counter() - start)
    if rank == 0:
        print("GB/s", *(size / median(spent[1:]) / GB for spent in seconds.values()), *made)


def group_meets(group: Any, rank: int, device: str) -> None:
    """Both ranks are here, and their devices have done what was asked before."""
    if device == "cuda":
        torch.cuda.synchronize()
    token = torch.zeros(1, device=device)
    for sender in RANKS:
        _between(group, rank, sender, token).wait()
    token.item()


def take_part(what: str, device: str, mib: int, store: Any, rank: int) -> None:
    """What one of the two ranks does. Collective over both."""
    group = _group(dist.PrefixStore("pair", store), rank, device)
    if what == "update":
        _update(group, rank, device, mib)
    else:
        _lose_peer(group, store, rank, device, what == "hangs")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("update", "dies", "hangs"))
    parser.add_argument("device")
    for name in ("mib", "port", "rank"):
        parser.add_argument(name, type=int)
    words = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", words.port, is_master=False)
    take_part(words.what, words.device, words.mib, store, words.rank)


if __name__ == "__main__":
    main()
