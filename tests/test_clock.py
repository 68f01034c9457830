"""Deadlines do not count the time in which the whole job is suspended."""

from __future__ import annotations

from hpcrl.system.clock import AwakeClock


def test_a_pause_counts_for_at_most_a_quarter_of_the_deadline() -> None:
    host = 1000.0
    clock = AwakeClock(40.0, lambda: host)
    for passed, counted in ((0.5, 0.5), (10.0, 10.5), (10.5, 20.5), (0.0, 20.5), (86400.0, 30.5), (9.0, 39.5)):
        host += passed
        assert clock.now() == counted
