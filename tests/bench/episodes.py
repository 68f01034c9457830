"""Episodes with late environments, in real processes: in lockstep and each on its own, with redundant ones, thousands
at once, and what a turn costs.

    python -m tests.bench.episodes [--only NAMES] [--steps N]

Generators without a model (debug=fake: 2 ms a decode step, responses of about 8 tokens), environments of tests/bench/
slow_env.py that wait as coroutines, real controller, scheduler, mail and env ranks. Latencies are the 10 s of ROLL
Flash (arXiv 2510.11345) divided by 50. One JSON line each:

environments  128 episodes of 5 turns of N(.2, .2) s, all turns together and each on its own: seconds until a batch,
              share of time that generators are idle, and what the simulator of tests/bench/flash gives for both.
redundant     32 groups of 8 and 36 of 9, 10 turns of N(.2, .1) s, 1 % ten times slower and .2 % that hang (given up
              after 12 s): the same.
turn          one group of 2 episodes of 60 turns that end at once, one token each: median milliseconds between the
              return of step() and its next call, through env rank, mail, generator and controller.
concurrent    2,000 episodes at once of 4 turns of N(1, .3) s, over two env ranks: seconds, turns a second, memory and
              threads of the controller (rank 0) and the most of another process, CPU-seconds of the controller.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from hpcrl.metrics.log import read_metrics
from tests.bench.flash.batch import batch_rollout
from tests.bench.flash.scenarios import simulate
from tests.bench.flash.settings import Latency, Lengths, Training, World, policy
from tests.bench.machine import tell
from tests.bench.vs_trl import ROOT

LIMIT_S = 400.0
DECODE_S, TOKENS, TAIL = 0.002, 8, 0.5
HUNG_AFTER_S = 12.0
CONTROLLER = "hpcrl-rank-0"
"""The name of its process (hpcrl.run)."""
COMMON = """
pipeline=agentic algorithm=grpo debug=fake layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=2
layout.reward.num_ranks=null layout.reward.colocate_with=env data.train=env:default cluster.oversubscribe=true
env.default.name=class env.default.class_path=tests.bench.slow_env:LateEnv save_every=0 eval_every=0
fake.train_s=0.05 fake.logprobs_s=0.01 fake.publish_s=0 fake.prefill_s=0 rollout.save_rollouts=false
data.max_prompt_tokens=32 rollout.max_new_tokens=64 generator.decode_chunk_tokens=4 algorithm.num_mini_batches=1
trackers=[] cluster.device=cpu
"""


def run(folder: Path, steps: int, **keys: object) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(metrics by step, what was seen of processes). RuntimeError with the end of the log if it fails."""
    log, run_dir = folder / "run.log", folder / "run"
    words = [*COMMON.split(), f"max_steps={steps}", f"run_dir={run_dir}"]
    words += [f"{'+' if name.startswith('env.default.options') else ''}{name}={value}" for name, value in keys.items()]
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcrl.launch", *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    seen: dict[str, float] = {}
    try:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            _look(process.pid, seen, started=bool(read_metrics(run_dir)))
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"hpcrl ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    begun, used = (seen.pop(f"controller_{which}cpu_s", None) for which in ("start_", ""))
    if begun is not None and used is not None:  # else the run was over too soon
        seen["controller_cpu_s"] = round(used - begun, 1)
    return read_metrics(run_dir), seen


def _look(pid: int, seen: dict[str, float], started: bool) -> None:
    """The most threads and MiB so far of the controller and of any other process, and the controller's CPU-seconds;
    those until the run has `started` are its start's."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            who = "controller" if process.name() == CONTROLLER else "other"
            mib, threads, times = process.memory_info().rss / 2**20, process.num_threads(), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seen[f"{who}_mib"] = round(max(seen.get(f"{who}_mib", 0.0), mib))
        seen[f"{who}_threads"] = max(seen.get(f"{who}_threads", 0), threads)
        if who == "controller":
            seen["controller_cpu_s"] = times.user + times.system
            if not started:
                seen["controller_start_cpu_s"] = times.user + times.system


def means(rows: list[dict[str, Any]], skip: int = 1) -> dict[str, float]:
    """Seconds until a batch, episodes of it a second, and the share of time in which a generator does not decode."""
    rows = [row for row in rows if row["step"] > skip]
    waited = statistics.mean(row["time/step_generate"] for row in rows)
    busy = statistics.mean(_decoding_s(row) for row in rows)
    episodes = statistics.mean(row["system/samples"] for row in rows)
    idle = round(1 - busy / waited / 2, 2)
    return {"rollout_s": round(waited, 3), "episodes_per_s": round(episodes / waited), "generators_idle": idle}


def _decoding_s(row: dict[str, Any]) -> float:
    """Seconds of both generators, from the model's tokens in the batch, without those of dropped episodes."""
    tokens = row["scheduler/kept_length"] * row["system/samples"]
    return float(tokens / row["system/decode_tps"])


def world(slots: int, turns: int, latency: Latency) -> World:
    """What the processes do, in the simulator's terms."""
    lengths = Lengths("lognormal", TOKENS, TAIL, 64, 0.0)
    return World(2, slots, lengths, 1.0, turns, latency, Latency(0.0), DECODE_S, 0.0, decode_chunk_tokens=4)


def environments(folder: Path, steps: int) -> dict[str, Any]:
    """Lockstep against each episode on its own."""
    keys: dict[str, object] = {"rollout.num_prompts": 16, "rollout.group_size": 8, "generator.max_num_seqs": 64}
    keys |= {"env.default.max_turns": 5, "env.default.options.mean_s": 0.2, "env.default.options.std_s": 0.2}
    keys |= {"fake.decode_s": DECODE_S, "fake.median_tokens": TOKENS, "fake.tail": TAIL, "layout.env.num_ranks": 1}
    found: dict[str, Any] = {}
    for name, more in {"lockstep": {"env.default.options.together": 128}, "own": {}}.items():
        rows, _ = run(_sub(folder, name), steps, **keys, **more)
        found[name] = means(rows)
    simulated, training = world(64, 5, Latency(0.2, 0.2)), Training(16, steps)
    lockstep = batch_rollout(simulated, 8, training, filtered=False).rollout_s
    own = simulate(simulated, policy(8), training).rollout_s
    found["speedup"] = round(found["lockstep"]["rollout_s"] / found["own"]["rollout_s"], 2)
    return found | {"simulated": {"lockstep_s": lockstep, "own_s": own, "speedup": round(lockstep / own, 2)}}


def redundant(folder: Path, steps: int) -> dict[str, Any]:
    """32 x 8 against 36 x 9."""
    keys: dict[str, object] = {"rollout.num_prompts": 32, "rollout.group_size": 8, "generator.max_num_seqs": 162}
    keys |= {"env.default.max_turns": 10, "env.default.options.mean_s": 0.2, "env.default.options.std_s": 0.1}
    keys |= {"env.default.options.turns": 10, "env.default.options.slow_share": 0.01, "layout.env.num_ranks": 1}
    keys |= {"env.default.options.hung_share": 0.002, "env.default.timeout_s": HUNG_AFTER_S}
    keys |= {"fake.decode_s": DECODE_S, "fake.median_tokens": TOKENS, "fake.tail": TAIL}
    found: dict[str, Any] = {}
    choices = {"plain": {}, "redundant": {"rollout.extra_prompts": 4, "rollout.extra_members": 1}}
    for name, more in choices.items():
        rows, _ = run(_sub(folder, name), steps, **keys, **more)
        found[name] = means(rows)
    simulated = world(162, 10, Latency(0.2, 0.1, 0.01, 10.0, 0.002, HUNG_AFTER_S))
    training = Training(32, steps)
    plain = simulate(simulated, policy(8), training).rollout_s
    extra = simulate(simulated, policy(8, extra_prompts=4, extra_members=1), training).rollout_s
    found["speedup"] = round(found["plain"]["rollout_s"] / found["redundant"]["rollout_s"], 2)
    return found | {"simulated": {"plain_s": plain, "redundant_s": extra, "speedup": round(plain / extra, 2)}}


def turn(folder: Path, steps: int) -> dict[str, Any]:
    """What a turn costs beside decoding and the environment."""
    keys: dict[str, object] = {"rollout.num_prompts": 1, "rollout.group_size": 2, "env.default.options.turns": 60}
    keys |= {"env.default.max_turns": 60, "fake.decode_s": 0, "fake.median_tokens": 1, "fake.tail": 0}
    keys |= {"layout.env.num_ranks": 1, "rollout.max_new_tokens": 2}
    rows, _ = run(_sub(folder, "turn"), steps, **keys)
    return {"turn_ms": [round(row["env/default/gap_ms"], 2) for row in rows if row["step"]]}


def concurrent(folder: Path, steps: int) -> dict[str, Any]:
    """Two thousand episodes at once."""
    keys: dict[str, object] = {"rollout.num_prompts": 250, "rollout.group_size": 8, "generator.max_num_seqs": 1000}
    keys |= {"env.default.max_turns": 4, "env.default.options.mean_s": 1.0, "env.default.options.std_s": 0.3}
    keys |= {"env.default.options.turns": 4, "layout.env.num_ranks": 2}
    keys |= {"fake.decode_s": DECODE_S, "fake.median_tokens": TOKENS, "fake.tail": TAIL}
    rows, seen = run(_sub(folder, "concurrent"), steps, **keys)
    found = means(rows, skip=0)
    return found | {"turns_per_s": round(8000 / found["rollout_s"]), **seen}


def _sub(folder: Path, name: str) -> Path:
    (path := folder / name).mkdir()
    return path


CASES = {"environments": environments, "redundant": redundant, "turn": turn, "concurrent": concurrent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            tell({"bench": "episodes", "case": name, **CASES[name](Path(folder), options.steps)})


if __name__ == "__main__":
    main()
