"""How long many ranks of one machine take to join: start of the program to its first step, without a model.

    python -m tests.bench.many_ranks [--ranks 4 16 32]
    python -m tests.bench.many_ranks --gpu-nodes 2 4 8

One JSON line for each number of generator ranks: wall seconds, CPU seconds of all processes until then, and memory that
a rank has for itself. Three further ranks control, train and score. The CPU time of a rank is what its imports take; on
nodes with a core for each rank they take it side by side.

With --gpu-nodes the recipe rlvr_200b starts, as the heterogeneous job that it is, on a Slurm of this machine whose 34
nodes claim what the recipe requests; it gets so many of its 32 nodes of 8 ranks, generators and rewards in proportion,
and both CPU nodes. `debug=fake` takes the place of engines and rewards; pipeline stages are fewer where 8 do not divide
the ranks. `mib_by_role` is private memory, `all_gib` that of all processes, with what they share counted once. The last
line is a fit over all starts: seconds = a + b x ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from tests.bench.machine import tell
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.slurm.conftest import load_one_machine
from tests.slurm.jobs import COMPLETED, processes, ranks, submit, wait_gone, wait_state, wait_step

OTHERS = 3
WORDS = ["+experiment=demo", "cluster=local", "cluster.oversubscribe=true", "debug=fake", "layout=disaggregated"]
WORDS += ["layout.trainer.num_ranks=1", "max_steps=1", "save_every=0", "eval_every=0", "timeouts.start_s=550"]
WORDS += ["rollout.filter_std=false", "reward.default.num_processes=1", "fake.train_s=0", "fake.decode_s=0.001"]

RECIPE, GPU_NODES, CPU_NODES, PER_NODE = "rlvr_200b", 32, 2, 8
"""The recipe, the nodes of its two components, and ranks on a node of the first."""
SHORT = ["debug=fake", "eval_every=0", "save_every=0", "cluster.device=cpu", "cluster.time=00:30:00"]
SHORT += ["timeouts.start_s=550", "fake.median_tokens=16", "fake.tail=0", "fake.train_s=0", "fake.logprobs_s=0"]
START_S = 560.0


def measure(folder: Path, num_ranks: int) -> dict[str, object]:
    """Start `num_ranks` generator ranks and wait for the first step."""
    begin = time.perf_counter()
    start = Start(folder, [*WORDS, f"layout.generator.num_ranks={num_ranks}"])
    start.wait_until(lambda: start.step == 1, START_S)
    wall = time.perf_counter() - begin
    cpu = sum(sum(process.cpu_times()[:2]) for process in start.processes())
    own = [private_mib(psutil.Process(pid)) for pid in start.ranks.values()]
    assert start.wait() == 0, start.text
    found = {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "cpu_s_per_rank": round(cpu / (num_ranks + OTHERS), 2)}
    return {"bench": "many_ranks", "ranks": num_ranks + OTHERS, **found, "own_mib": round(statistics.median(own))}


def private_mib(process: psutil.Process) -> float:
    return float(process.memory_full_info().uss) / 2**20


def scaled(num_nodes: int) -> list[str]:
    """The recipe's words for so many of its GPU nodes."""
    trainers = num_nodes * PER_NODE
    generators = trainers * 200 // 256 // 8 * 8
    words = [f"layout.trainer.num_ranks={trainers}", f"layout.generator.num_ranks={generators}"]
    rewards = max(CPU_NODES, num_nodes // CPU_NODES * CPU_NODES)
    words += [f"layout.reward.num_ranks={rewards}", f"cluster.components.cpu.ranks_per_node={rewards // CPU_NODES}"]
    stages = next(stages for stages in (8, 4, 2, 1) if trainers % (8 * stages) == 0)
    return [*words, f"trainer.megatron.pipeline_parallel={stages}"]


def start_recipe(cluster: Any, folder: Path, num_nodes: int) -> dict[str, object]:
    """Submit the recipe for so many nodes and wait for the first step."""
    model = folder / "model"  # the tokenizer of another, and no weights
    make_tiny_model(TinyModel(), model)
    (model / "model.safetensors").unlink()
    shutil.copy(ROOT / "conf/model/Qwen/Qwen3-235B-A22B/config.json", model)
    words = [f"+experiment={RECIPE}", *SHORT, f"model.path={model}", *scaled(num_nodes)]
    words.append(f"max_steps={max(3, 20 // num_nodes)}")  # long enough to look at every process after the first
    layout = RoleLayout.from_config(load(["+cluster=slurm", *words]))
    begin = time.perf_counter()
    job = submit(cluster, folder / "run", *words)
    wait_step(cluster, folder / "run", job, 1, START_S)
    wall = time.perf_counter() - begin
    all_of_it, of_rank = processes(cluster, job), ranks(cluster, job)
    cpu, memory = 0.0, {}
    for process in all_of_it:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper of Slurm's that has ended
            cpu += sum(process.cpu_times()[:2])
    for process in all_of_it:  # while it takes further steps
        with contextlib.suppress(psutil.NoSuchProcess):
            memory[process] = process.memory_full_info()
    by_role: dict[str, list[float]] = {}
    for rank, process in of_rank.items():
        by_role.setdefault("+".join(layout.roles_of(rank)), []).append(memory[process].uss / 2**20)
    wait_state(cluster, folder / "run", job, [COMPLETED], START_S)
    wait_gone(cluster, job)
    found: dict[str, object] = {"bench": "many_ranks", "recipe": RECIPE, "ranks": layout.world_size}
    found |= {"processes": len(memory), "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}
    mib = {role: round(statistics.median(own)) for role, own in by_role.items()}
    return {**found, "mib_by_role": mib, "all_gib": round(sum(info.pss for info in memory.values()) / 2**30, 2)}


def recipes(folder: Path, nodes: Sequence[int]) -> Iterator[dict[str, object]]:
    """Each number of nodes in turn, on one cluster; then the fit."""
    Nodes = load_one_machine().Nodes
    claimed = [
        Nodes("g", GPU_NODES, cpus=64, memory_mb=1500 << 10, gpus=8),
        Nodes("c", CPU_NODES, cpus=64, memory_mb=240 << 10),
    ]
    points: list[tuple[float, float, float]] = []
    with load_one_machine().Cluster(folder / "slurm", claimed) as cluster:
        for number in nodes:
            found: Any = start_recipe(cluster, folder / f"of_{number}", number)
            points.append((found["ranks"], found["wall_s"], found["cpu_s"]))
            yield found
    if len(points) > 1:
        ranks_, walls, cpus = zip(*points, strict=True)
        fits = {name: np.polyfit(ranks_, values, 1) for name, values in (("wall_s", walls), ("cpu_s", cpus))}
        yield {
            "bench": "many_ranks",
            "recipe": RECIPE,
            "fit": {name: {"a": round(float(a), 1), "b": round(float(b), 2)} for name, (b, a) in fits.items()},
        }


def main() -> None:
    """Print the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--gpu-nodes", type=int, nargs="+", help=f"of {RECIPE}, on a Slurm of this machine")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if words.gpu_nodes:
            for found in recipes(Path(folder), words.gpu_nodes):
                tell(found)
            return
        for num_ranks in words.ranks:
            tell(measure(Path(folder) / f"run_{num_ranks}", num_ranks))


if __name__ == "__main__":
    main()
