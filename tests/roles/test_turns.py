"""Which memory moves when, on a rank that trains and generates."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import parse
from hpcrl.control.messages import (
    Admit,
    Burst,
    Export,
    Forget,
    Logprobs,
    Pull,
    Sampling,
    TrainCritic,
    TrainStep,
    Values,
)
from hpcrl.planner.host import takes_turns
from hpcrl.roles.turns import Turns

MANY = {"max_slots": 1 << 22}
SAMPLING = Sampling(4, 1.0, 1.0, 0, 0.0, [])


class Recorder:
    """Engines that note what they are asked to do; a sleeping generator refuses to decode as a real one does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.running = 0

    def offload(self, weights: bool = True) -> None:
        self.calls.append("offload all" if weights else "offload state")

    def onload(self) -> None:
        self.calls.append("onload")

    def sleep(self) -> None:
        assert not self.running
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def progress(self) -> dict[int, int]:
        return dict.fromkeys(range(self.running), 0)


STEP: list[Any] = [
    Pull(1, [0]),
    Admit([], [], SAMPLING),
    Burst(4, [], []),
    Burst(4, [], []),
    Forget([]),
    Logprobs(1, "trainer", "old_logprobs", []),
    TrainStep(1, [], 1.0, 1.0),
    TrainStep(1, [], 1.0, 1.0),
    Pull(2, [0]),
    Export("folder"),
]


def turns_of(engine: Recorder, *roles: str) -> Turns:
    return Turns({role: SimpleNamespace(engine=engine) for role in roles})  # type: ignore[misc]


def test_memory_moves_once_for_each_turn() -> None:
    engine = Recorder()
    turns = turns_of(engine, "trainer", "generator")
    for command in STEP:
        turns.enter(command)
    assert engine.calls == [
        *("offload state", "offload all", "sleep", "onload"),
        *("offload state", "wake", "sleep", "onload"),
    ]


def test_a_generator_with_unfinished_responses_stays_awake() -> None:
    engine = Recorder()
    engine.running = 1
    turns = turns_of(engine, "trainer", "generator")
    for command in STEP:
        turns.enter(command)
    assert engine.calls == ["offload state", "offload all", "onload", "offload state", "onload"]


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_other_engines_move_with_the_trainer_and_away_while_weights_are_published(role: str) -> None:
    trainer, other, generator = Recorder(), Recorder(), Recorder()
    engines = {"trainer": trainer, role: other, "generator": generator}
    turns = Turns({role: SimpleNamespace(engine=engine) for role, engine in engines.items()})  # type: ignore[misc]
    for command in [*STEP[:6], Values(1, []), TrainCritic(1, [], 1.0, 1.0), TrainStep(1, [], 1.0, 1.0), STEP[8]]:
        turns.enter(command)
    assert trainer.calls == ["offload state", "offload all", "onload", "offload state"]
    assert other.calls == ["offload all", "offload all", "onload", "offload all"]
    assert generator.calls == ["sleep", "wake"]


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_rank_with_one_role_keeps_everything(role: str) -> None:
    engine = Recorder()
    turns = turns_of(engine, role)
    for command in STEP:
        turns.enter(command)
    assert engine.calls == []


@pytest.mark.parametrize(
    ("changes", "shared", "expected"),
    [
        ({}, True, False),  # CPUs
        ({"layout": {"offload": "always"}}, True, True),
        ({"layout": {"offload": "always"}}, False, False),
        ({"layout": {"offload": "always"}, "rollout": {"max_lag": 1}}, True, False),
        ({"cluster": {"device": "cuda"}}, True, False),  # fits any card
        ({"cluster": {"device": "cuda"}, "generator": MANY}, True, True),
        (
            {"cluster": {"device": "cuda"}, "generator": MANY, "layout": {"offload": "never"}},
            True,
            False,
        ),
    ],
    ids=str,
)
def test_when_ranks_take_turns(changes: dict[str, Any], shared: bool, expected: bool) -> None:
    generator = (1, 2) if shared else (3,)
    ranks = {"controller": (0,), "trainer": (1, 2), "generator": generator, "reference": (), "reward": (), "env": ()}
    assert takes_turns(parse(changes), RoleLayout(MappingProxyType(ranks), 4)) == expected
