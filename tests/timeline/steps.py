"""Hand-made steps."""

from __future__ import annotations

from hpcrl.timeline.step_file import FORMAT, ClockHeader, RankHeader, Row, StepHeader, StepTimeline

ROLES = (("controller",), ("trainer",), ("generator",), ("generator",), ("reward",))


def make_step(*rows: Row, length: int = 100, step: int = 7, roles: tuple[tuple[str, ...], ...] = ROLES) -> StepTimeline:
    """A step of `length` microseconds."""
    ranks = [RankHeader(rank, "node1", list(names)) for rank, names in enumerate(roles)]
    made = StepTimeline(StepHeader(FORMAT, step, 1.7e9, length / 1e6, True, ranks, {"node1": ClockHeader(0.0, 0.0)}))
    for row in rows:
        made.add(row)
    return made
