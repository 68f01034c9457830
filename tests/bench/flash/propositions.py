"""Mean times against ROLL Flash's Propositions, and the efficiency of saturated async, asserted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import isclose
from typing import Any

from tests.bench.flash.bounds import (
    ROUNDING,
    check,
    proposition_1_s,
    proposition_2_s,
    steady_efficiency,
    training_share,
)
from tests.bench.flash.settings import Latency, Lengths, Training, World, policy
from tests.bench.flash.simulation import Run, Simulation

SKIPPED = 4  # steps until the pipeline is full
LONG = Lengths("lognormal", shape=1.0)


def constant_rate(replicas: int, slots: int, lengths: Lengths) -> World:
    """The propositions' world: a slot's rate does not depend on the others; ends are seen at once and cost nothing."""
    return World(replicas, slots, lengths, decode_b_s=0.0, decode_chunk_tokens=1, reward=Latency(0.0))


def skipped(run: Run) -> str:
    """Why a run is not held against its bound; empty: it is. The propositions know no limit on the age of a sample."""
    if run.count("cancelled"):
        return "groups that had grown too old were started anew"
    return "the trainer waited for groups that would have grown too old" if run.stale_wait_s else ""


def proposed(lag: int, slots: int, group_size: int, trained_by: float) -> dict[str, Any]:
    """Mean seconds of a step once the pipeline is full, and their bound. trained_by: share of the workers that train;
    the training time is that for which it is Proposition 2's beta*. 0: Proposition 1.

    There is no slack but for rounding. Proposition 1: mean and longest are of the samples that the run itself had, and
    its rows lie far below. Proposition 2: at beta* training alone takes all of the bound, so that a row can only meet
    it, and does as long as the trainer never waits, whatever the samples.
    """
    world, batch = constant_rate(8, slots, LONG), 512
    config, need, steps = policy(group_size, max_staleness=lag), batch // group_size, 16
    run = Simulation(world, config, Training(need, steps, overlap=lag > 0)).run()
    lengths_s = [tokens * world.decode_a_s for tokens in run.lengths]
    mean_s, longest_s = sum(lengths_s) / len(lengths_s), max(lengths_s)
    workers = 8 * slots / (1 - trained_by)
    bound_s = generation_s = proposition_1_s(workers, batch, mean_s, longest_s, lag)
    training = Training(need, steps, overlap=lag > 0)
    if trained_by:
        sample_s = trained_by / (1 - trained_by) * generation_s * workers / batch
        share = training_share(workers, batch, mean_s, longest_s, lag, sample_s)
        assert isclose(share, trained_by), f"{share:.3f} of the workers should train, not {trained_by}"
        bound_s = proposition_2_s(workers, batch, mean_s, longest_s, lag, sample_s)
        training = Training(need, steps, batch * sample_s / (trained_by * workers), overlap=lag > 0)
        run = Simulation(world, config, training).run()
    check(run, world, training)
    seconds = (run.steps[-1].taken - run.steps[SKIPPED - 1].taken) / (steps - SKIPPED)
    row = {
        "proposition": 2 if trained_by else 1,
        "lag": lag,
        "slots": 8 * slots,
        "group_size": group_size,
        "step_s": seconds,
        "bound_s": bound_s,
        "stale_wait_s": run.stale_wait_s / steps,
        "cancelled": run.count("cancelled"),
        "skipped": skipped(run),
    }
    assert row["skipped"] or seconds <= bound_s * ROUNDING, f"{row} is above its bound"
    return row


def measure_propositions() -> dict[str, Any]:
    """Times and bounds over lags and slots, how many were asserted and why the others were not, and the efficiency of
    saturated async."""
    worlds = ((0, 4, 1), (0, 32, 8), (1, 4, 1), (1, 16, 8), (2, 16, 1), (4, 16, 8))
    rows = [
        proposed(*world, trained_by) for world in worlds for trained_by in (0.0, 0.25) if world[0] or not trained_by
    ]
    asserted = Counter(f"proposition {row['proposition']}" for row in rows if not row["skipped"])
    assert len(asserted) == 2, f"only {dict(asserted)} was asserted"
    counts = {"asserted": dict(asserted), "skipped": dict(Counter(row["skipped"] for row in rows if row["skipped"]))}
    return {"bench": "flash.propositions"} | counts | {"rows": rows, "saturated": saturated()}


def saturated() -> list[dict[str, Any]]:
    """Efficiency where generation is the bottleneck and the slots are no more than work / longest."""
    rows = []
    for lag, tail in ((1, "lognormal"), (2, "lognormal"), (1, "pareto")):
        lengths = replace(LONG, law=tail, shape=1.2 if tail == "pareto" else 1.0)
        world, training = World(8, 8, lengths), Training(128, 16, 1.0, overlap=True)
        run = Simulation(world, policy(8, max_staleness=lag), training).run()
        check(run, world, training)
        most_slots = 128 * 8 * (sum(run.lengths) / len(run.lengths)) / max(run.lengths)
        assert most_slots >= 64, f"64 slots are more than work / longest = {most_slots:.0f}"
        share = steady_efficiency(run, world, training, SKIPPED)
        useful = sum(step.kept_tokens for step in run.steps) / run.steps[-1].executed
        rows.append({"lag": lag, "tail": tail, "slots": 64, "work / longest": most_slots, "efficiency": share})
        rows[-1] |= {"cancelled": run.count("cancelled"), "trained_share": useful}
        assert share >= 0.95, f"{rows[-1]} is less than .95"
    return rows
