"""A training step of every engine and split with FSDP2 on the same number of ranks: seconds, memory, bytes exchanged.

    python -m tests.bench.trainers [--ranks 2 4] [--steps N] [--only NAME ...]

A Qwen2 of random weights (4 layers of 512, vocabulary of 8,192, 17M parameters, fp32; mixtures: 8 experts of 512, 2 a
token), 16 sequences of 64 to 192 tokens a step in two micro-batches per data-parallel rank, AdamW, gloo, one thread per
rank. One process per rank, one world per split.

One JSON line per split. `cpu_s`: CPU-seconds of a step, summed over the ranks; `ratio`: to those of FSDP2 that shards
data alone, on as many ranks; `peak_mib`: the largest growth of a rank's resident memory since before the engine was
made; `sent_mib`: what a step sends between all ranks, counted by the kernel in a network namespace of the bench's own
(null where none can be made); `planned_mib`: the plan's figure for the same tokens, with gloo's all-reduce in place of
a reduce-scatter; `planned_nccl_mib`: with NCCL's collectives; `params_mib`: the parameters in fp32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from hpcrl.config.engines import TrainerConfig
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.models.families import shape_of
from hpcrl.planner.traffic import Sent, StepWork, total_bytes
from hpcrl.planner.trainer import train_plan
from hpcrl.rollout.batch import Batch, MicroBatches
from hpcrl.spec.extras import version_of
from hpcrl.spec.tables import TRAIN_ENGINES
from tests.bench.machine import tell
from tests.contracts.splits import Split
from tests.engines.worlds import Weighted, make_batch, norms_of, run_ranks

DENSE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
EXPERTS = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
SHARDED = "fsdp2"
LORA = {"lora": {"rank": 8}}
USUAL = {"logits_chunk_tokens": TrainerConfig().logits_chunk_tokens}  # the tests' splits have very small ones
SPLITS: dict[str, tuple[str, Split]] = {  # each on at least so many ranks
    SHARDED: ("fsdp2", Split(2)),
    "fsdp2 replicas 2": ("fsdp2", Split(2, {"replicas": 2})),
    "fsdp2 tensor 2": ("fsdp2", Split(2, {"tensor_parallel": 2})),
    "fsdp2 context 2": ("fsdp2", Split(2, {"context_parallel": 2})),
    "fsdp2 lora": ("fsdp2", Split(2, trainer=LORA)),
    "deepspeed zero 1": ("deepspeed", Split(2, {"zero_stage": 1})),
    "deepspeed zero 2": ("deepspeed", Split(2, {"zero_stage": 2})),
    "deepspeed zero 3": ("deepspeed", Split(2, {"zero_stage": 3})),
    "deepspeed zero 3, offload": ("deepspeed", Split(2, {"zero_stage": 3, "offload_optimizer": "cpu"})),
    "deepspeed zero 3, lora": ("deepspeed", Split(2, {"zero_stage": 3}, LORA)),
    "megatron data": ("megatron", Split(2)),
    "megatron tensor 2": ("megatron", Split(2, {"tensor_parallel": 2})),
    "megatron tensor 2, sequence": ("megatron", Split(2, {"tensor_parallel": 2, "sequence_parallel": True})),
    "megatron pipeline 2": ("megatron", Split(2, {"pipeline_parallel": 2})),
    "megatron pipeline 2 x 2": ("megatron", Split(2, {"pipeline_parallel": 2, "virtual_pipeline": 2})),
    "megatron context 2": ("megatron", Split(2, {"context_parallel": 2})),
    "megatron tensor 2, pipeline 2": ("megatron", Split(4, {"tensor_parallel": 2, "pipeline_parallel": 2})),
    "megatron tensor 2, context 2": ("megatron", Split(4, {"tensor_parallel": 2, "context_parallel": 2})),
}
MIXTURES: dict[str, tuple[str, Split]] = {
    SHARDED: ("fsdp2", Split(2)),
    "fsdp2 tensor 2": ("fsdp2", Split(2, {"tensor_parallel": 2})),
    "megatron expert 2": ("megatron", Split(2, {"expert_parallel": 2})),
    "megatron expert tensor 2": ("megatron", Split(2, {"expert_tensor_parallel": 2})),
    "megatron tensor 2, expert 2": (
        "megatron",
        Split(4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    ),
}
NUM_ROWS, SHORTEST, LONGEST = 16, 64, 192


def whole_batch() -> Batch:
    lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, NUM_ROWS).tolist()
    return make_batch(lengths, num_prompt_tokens=32)


def share(whole: Batch, group: int, num_groups: int) -> tuple[Batch, MicroBatches]:
    """The rows of a data-parallel rank, and its micro-batches."""
    batch = whole.select(list(range(group, NUM_ROWS, num_groups)))
    rows = list(range(batch.num_sequences))
    return batch, [rows[::2], rows[1::2]]


def planned(engine_name: str, split: Split, model: Path) -> list[Sent]:
    """What the plan says that a rank sends in the same step. FSDP2 packs a common prefix once."""
    config, whole = split.config(engine_name, model), whole_batch()
    num_groups = len(TRAIN_ENGINES[engine_name].division(config, split.num_ranks).groups)
    num_tokens = 0
    for group in range(num_groups):
        batch, plan = share(whole, group, num_groups)
        for part in (batch.select(list(rows)) for rows in plan):
            kept = share_prefixes(part.token_ids, part.lengths.tolist()).kept
            num_tokens += part.num_tokens if engine_name == "megatron" else len(kept)
    work = StepWork(num_tokens // num_groups, num_micro_batches=2)
    return train_plan(config).step_traffic(config, shape_of(model, "model.path"), split.num_ranks, work)


def measure(engine_name: str, split: Split, model: Path, steps: int) -> dict[str, float]:
    """One rank's figures; every rank of the default group runs it."""
    torch.set_num_threads(1)
    config = split.config(engine_name, model)
    spec = TRAIN_ENGINES[engine_name]
    make = spec.load()
    division = spec.division(config, split.num_ranks)
    group = next(i for i, ranks in enumerate(division.groups) if dist.get_rank() in ranks)
    before = psutil.Process().memory_info().rss
    engine = make(config, model, steps + 1, True)
    whole = whole_batch()
    batch, plan = share(whole, group, len(division.groups))
    took: list[float] = []
    cpu = sent = 0.0
    for step in range(steps + 1):
        if step == 1:  # the first one is to warm up
            dist.barrier()
            cpu, sent = time.process_time(), loopback_bytes()
        begun = time.monotonic()
        engine.train_step(batch, plan, Weighted(1.0), norms_of(whole))
        took.append(time.monotonic() - begun)
    used = time.process_time() - cpu
    dist.barrier()
    return {
        "cpu_s": used / steps,
        "step_s": min(took[1:]),
        "sent": (loopback_bytes() - sent) / steps,
        "peak": _peak_bytes() - before,
    }


def loopback_bytes() -> int:
    """Bytes that were sent over the loopback interface of this network namespace."""
    [line] = [text for text in Path("/proc/net/dev").read_text().splitlines() if text.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def _peak_bytes() -> int:
    [line] = [text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def alone(module: str) -> bool:
    """Whether this program, `python -m module`, runs in a network namespace of its own; it starts itself again in one
    if it can."""
    if os.environ.get("HPCRL_BENCH_NETWORK"):
        return True
    enter = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    there = shutil.which("unshare") and shutil.which("ip")
    if not there or subprocess.run([*enter, "true"], check=False).returncode:
        return False
    environ = {**os.environ, "HPCRL_BENCH_NETWORK": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-m", module, *sys.argv[1:]]
    raise SystemExit(subprocess.run([*enter, *words], env=environ, check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="names of splits; each is compared with fsdp2 all the same")
    options = parser.parse_args()
    counted = alone("tests.bench.trainers")
    with tempfile.TemporaryDirectory() as scratch:
        for family, settings, splits in (("qwen2", DENSE, SPLITS), ("qwen3_moe", EXPERTS, MIXTURES)):
            model = Split(1, family=family, model=settings).make_model(Path(scratch) / family)
            params = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            for num_ranks in options.ranks:
                reference: dict[str, Any] = {}
                for name, (engine, least) in splits.items():
                    if num_ranks < least.num_ranks or (options.only and name not in {SHARDED, *options.only}):
                        continue
                    if missing := [module for module in TRAIN_ENGINES[engine].needs if not version_of(module)]:
                        print(f"{name}: left out, {missing[0]} is not installed", file=sys.stderr)
                        continue
                    split = replace(least, num_ranks=num_ranks, family=family, trainer={**USUAL, **least.trainer})
                    ranks = run_ranks(num_ranks, measure, engine, split, model, options.steps)
                    plan = planned(engine, split, model)
                    on_gloo, on_nccl = (num_ranks * total_bytes(plan, gloo) / 2**20 for gloo in (True, False))
                    row = {
                        "cpu_s": round(sum(rank["cpu_s"] for rank in ranks), 3),
                        "step_s": round(max(rank["step_s"] for rank in ranks), 3),
                        "peak_mib": round(max(rank["peak"] for rank in ranks) / 2**20),
                        "sent_mib": round(ranks[0]["sent"] / 2**20, 1) if counted else None,
                        "planned_mib": round(on_gloo, 1),
                        "planned_nccl_mib": round(on_nccl, 1),
                        "params_mib": round(params / 2**20, 1),
                    }
                    reference = reference or row
                    row["ratio"] = round(row["cpu_s"] / reference["cpu_s"], 2)
                    tell({"bench": "trainers", "model": family, "ranks": num_ranks, "split": name, **row})


if __name__ == "__main__":
    main()
