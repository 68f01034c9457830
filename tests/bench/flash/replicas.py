"""What requests that wait at a replica cost, on equal replicas and where one is slow."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.bench.flash.bounds import check
from tests.bench.flash.settings import Lengths, Training, World, policy
from tests.bench.flash.simulation import Simulation


def measure_replicas() -> dict[str, Any]:
    """Seconds per batch of 64 x 8 on 8 replicas of 32 slots, where requests wait at their replica or centrally (512
    samples for 256 slots), with one replica as fast as the others or slower by a factor, told or not."""
    rows = []
    training = Training(need=64, steps=8)
    for requests, (factor, told) in product((1, 2), ((1.0, False), (3.0, False), (3.0, True))):
        slowness = ((0, factor),) if factor > 1 else ()
        world = World(8, 32, Lengths(), requests_per_slot=requests, slowness=slowness, told_pace=told)
        for together in (True, False):
            run = Simulation(world, policy(8, group_affinity=together), training).run()
            share = check(run, world, training)
            row = {"requests_per_slot": requests, "slow": factor, "told": told, "group_affinity": together}
            rows.append(row | {"rollout_s": run.rollout_s, "efficiency": share})
    return {"bench": "flash.replicas", "rows": rows}
