"""Which steps are profiled, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.controller.profiles import StepProfiler
from hpcrl.messaging.messages import Done, Profile


class FakeController:
    """Answers every command of rank 1 with the same text."""

    command_s = 9.0

    def __init__(self) -> None:
        self.called: list[tuple[list[int], Profile]] = []

    def call(self, commands: dict[int, Profile], more_s: float) -> dict[int, Done]:
        assert more_s == self.command_s
        self.called.append((list(commands), commands[1]))
        return {rank: Done(1, texts=["no GPU"] if rank == 1 else []) for rank in commands}

    def describe(self, rank: int) -> str:
        return f"rank {rank}"


def test_only_chosen_steps_after_a_resume_are_profiled_and_each_text_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller: Any = FakeController()
    profiler = StepProfiler(controller, [2, 3, 5], [1, 4], first_step=3)
    for step in range(4, 7):
        profiler.begin(step)
        profiler.end(step)
    assert controller.called == [([1, 4], Profile(5, begins=True)), ([1, 4], Profile(5, begins=False))]
    assert [record.getMessage() for record in caplog.records] == [
        "profile.steps: no profile of steps 2, 3: the run continues after step 3",
        "profile of rank 1: no GPU",
    ]
    controller.called.clear()
    StepProfiler(controller, [], [1], first_step=0).begin(1)
    assert not controller.called
