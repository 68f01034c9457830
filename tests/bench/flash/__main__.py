"""ROLL Flash's figures with the production scheduler in virtual time. Prints one JSON line per setting.

    python -m tests.bench.flash [--only NAME ...] [--decode native|flat] [--plots FOLDER]

A line has the published figure, ours at the most plausible point, where the published one is reached, and the whole
surface. Every run asserts its lower bound; see tests/bench/flash/bounds.py.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.flash import scenarios, settings
from tests.bench.flash.plots import draw
from tests.bench.flash.propositions import measure_propositions
from tests.bench.flash.replicas import measure_replicas
from tests.bench.flash.scenarios import SCENARIOS, Point, Scenario
from tests.bench.flash.settings import Lengths, World
from tests.bench.machine import tell

CHECKS = {"propositions": measure_propositions, "replicas": measure_replicas}
NAMES = [*CHECKS, *SCENARIOS]


def report(name: str, scenario: Scenario, points: list[Point]) -> dict[str, Any]:
    """What is said of a setting."""
    plausible = [p for p in points if scenario.plausible.items() <= p.items()]
    assert len(plausible) == 1, f"{name}: {len(plausible)} points are like {scenario.plausible}"
    reached = [p for p in points if p["speedup"] >= scenario.published]
    return {
        "bench": f"flash.{name}",
        "about": scenario.about,
        "published": scenario.published,
        "plausible": plausible[0],
        "best": max(points, key=lambda p: p["speedup"]),
        "reached_at": [{key: p[key] for key in (*scenario.plausible, "speedup")} for p in reached],
        "points": len(points),
        "surface": points,
    }


def fixed(decode: str) -> dict[str, Any]:
    """What shapes a surface besides its axes."""
    world = World(1, 1, Lengths())
    return {
        "decode": {"law": decode, "a_s": settings.A_S, "b_s": settings.A_S * settings.B_OVER_A[decode]},
        "tails": {name: asdict(lengths) for name, lengths in scenarios.TAILS.items()},
        "turn": asdict(scenarios.TURN),
        "stragglers": {name: {"slow": slow, "hung": hung} for name, (slow, hung) in scenarios.STRAGGLERS.items()},
        "slow_factor": settings.Latency(0).slow_factor,
        "hung_after_s": scenarios.HUNG_AFTER_S,
        "reward": asdict(world.reward),
        "decode_chunk_tokens": world.decode_chunk_tokens,
        "requests_per_slot": world.requests_per_slot,
        "batch_rollout_share": scenarios.ROLLOUT_SHARE,
        "devices": scenarios.DEVICES,
    }


def rounded(value: Any) -> Any:
    """Floats to four digits, in whatever is nested."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--decode", choices=settings.B_OVER_A, default="native")
    parser.add_argument("--plots", type=Path, help="folder for one picture per setting")
    options = parser.parse_args()
    for name in options.only:
        start = time.process_time()
        if name in CHECKS:
            line = CHECKS[name]()
        else:
            points = list(SCENARIOS[name].points(options.decode))
            line = report(name, SCENARIOS[name], points) | fixed(options.decode)
            if options.plots is not None:
                draw(options.plots, name, SCENARIOS[name], points)
        tell(rounded(line | {"cpu_s": time.process_time() - start}))


if __name__ == "__main__":
    main()
