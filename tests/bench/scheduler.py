"""Events per second of the rollout scheduler with thousands of simulated replicas. Prints one JSON line.

A sample costs two events, its end in a Decoded and its Rewarded, besides its Generate. Replicas end their bursts in
random order, one burst per plan(), scores come back in random order. Only the scheduler's own CPU time is counted.
"""

from __future__ import annotations

import argparse
import random
import time

from hpcrl.rollout.scheduling.events import Decoded, Drop, Generate, Rewarded
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import FinishReason
from tests.bench.machine import tell


def measure(num_replicas: int, slots: int, need: int, group_size: int, deterministic: bool) -> dict[str, float]:
    rng = random.Random(0)
    config = SchedulerConfig(group_size, need // 8, filter_std=True, deterministic=deterministic)
    scheduler = RolloutScheduler(config, dict.fromkeys(range(num_replicas), slots))
    running: dict[int, set[int]] = {replica: set() for replica in range(num_replicas)}
    busy: list[int] = []  # replicas with something to do, in random order of burst ends
    scored: list[Rewarded] = []
    spent, num_events, num_commands, uid = 0.0, 0, 0, 0
    scheduler.begin_step(0, need)
    while not scheduler.ready():
        events: list[Decoded | Rewarded] = [scored.pop() for _ in range(min(len(scored), rng.randint(0, 8)))]
        if busy:
            position = rng.randrange(len(busy))
            busy[position], busy[-1] = busy[-1], busy[position]
            replica = busy.pop()
            ended = rng.sample(sorted(running[replica]), min(len(running[replica]), rng.randint(1, 4)))
            running[replica].difference_update(ended)
            events.append(Decoded(replica, tuple((i, rng.randint(1, 999), FinishReason.STOP) for i in ended)))
            scored += [Rewarded(i, reward := float(rng.random() < 0.5), reward) for i in ended]
            if running[replica]:
                busy.append(replica)
        elif scored:
            rng.shuffle(scored)
        start = time.process_time()
        wanted = scheduler.num_wanted()
        scheduler.add_prompts(range(uid, uid + wanted))
        commands = scheduler.plan(events)
        spent += time.process_time() - start
        uid += wanted
        num_events += sum(len(e.finished) if isinstance(e, Decoded) else 1 for e in events)
        num_commands += len(commands)
        for command in commands:
            held = running[command.replica]
            if isinstance(command, Generate):
                if not held:
                    busy.append(command.replica)
                held.update(command.sample_ids)
            elif isinstance(command, Drop):
                held.difference_update(command.sample_ids)
        busy = [r for r in busy if running[r]] if any(isinstance(c, Drop) for c in commands) else busy
    return {"events_per_s": round(num_events / spent), "events": num_events, "commands": num_commands, "cpu_s": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--groups", type=int, default=16384)
    parser.add_argument("--group-size", type=int, default=8)
    options = parser.parse_args()
    sizes = (options.replicas, options.slots, options.groups, options.group_size)
    default, deterministic = measure(*sizes, False), measure(*sizes, True)
    report = {"bench": "scheduler", **vars(options), "target_events_per_s": 20_000}
    tell(report | {"default": default, "deterministic": deterministic})


if __name__ == "__main__":
    main()
