"""FSDP2 and vLLM on two ranks: one replica, tensor parallel, on the trainers' own GPUs. As in a run, each rank sees its
own GPU alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpcrl.engines.gen.generation_engine import ReplicaRanks
from hpcrl.node.devices import VISIBLE, visible_gpus
from hpcrl.workers.allocator import grow_segments
from tests.bench.gpu.agreement import of_recipe
from tests.bench.gpu.common import Check, Row, end_after, rows_in
from tests.bench.gpu.peers import RANKS, run_pair

HERE = "tests.bench.gpu.replica"


def vllm(check: Check) -> Iterator[Row]:
    """The rows that rank 0 measures."""
    check.folder()  # written before both want it
    words = [check.device, str(check.scratch), *(["--tiny"] if check.tiny else [])]
    gpus = visible_gpus(os.environ) if check.on_gpu else [""] * len(RANKS)
    yield from rows_in(run_pair(HERE, words, check.pick(115, 500), [{VISIBLE: gpus[rank]} for rank in RANKS]))


def take_part(check: Check, store: Any, rank: int) -> None:
    """What one of the two ranks does. Collective over both."""
    grow_segments(os.environ)
    patience, kinds = timedelta(seconds=check.pick(60, 300)), "cpu:gloo,cuda:nccl" if check.on_gpu else "gloo"
    dist.init_process_group(
        kinds, store=dist.PrefixStore("default", store), rank=rank, world_size=len(RANKS), timeout=patience
    )
    gloo: Any = dist.ProcessGroupGloo
    group = gloo(dist.PrefixStore("replica", store), rank, len(RANKS), patience)
    for row in of_recipe(check, "vllm TP2", replica=ReplicaRanks(RANKS, rank, group)):
        if rank == 0:
            row.say()


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("--tiny", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", words.port, is_master=False)
    end_after(lambda: take_part(Check(words.device, words.tiny, words.scratch), store, words.rank))


if __name__ == "__main__":
    main()
