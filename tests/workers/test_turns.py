"""Which memory moves when, on a rank that trains and generates."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import parse
from hpcrl.engines.gen.fake_generator.engine import FakeEngine
from hpcrl.engines.train.fake_trainer.engine import FakeTrainEngine
from hpcrl.messaging.messages import (
    Admit,
    BuildGroup,
    BuildRole,
    DecodeChunk,
    DropSamples,
    Export,
    LoadState,
    Logprobs,
    Sampling,
    Teach,
    TrainCritic,
    TrainStep,
    UpdateWeights,
    Values,
)
from hpcrl.planner.memory import shares_device
from hpcrl.workers.rank_loop import leave_default_group
from hpcrl.workers.time_sharing import TimeSharing
from tests.workers.conftest import Stage

MANY = {"max_num_seqs": 1 << 22}
SAMPLING = Sampling(4, 1.0, 1.0, 0, 0.0, [])


class Recorder:
    """Engines that record their calls; a sleeping generator refuses to decode like a real one."""

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
    BuildRole("generator", [0]),
    UpdateWeights(1, [0]),
    Admit([], [], SAMPLING),
    DecodeChunk(4, [], []),
    DecodeChunk(4, [], []),
    DropSamples([]),
    Logprobs(1, "trainer", "old_logprobs", []),
    TrainStep(1, [], 1.0, 1.0),
    TrainStep(1, [], 1.0, 1.0),
    UpdateWeights(2, [0]),
    Export("folder"),
]


def turns_of(engine: Recorder, *roles: str) -> TimeSharing:
    return TimeSharing({role: SimpleNamespace(engine=engine, engines=[engine]) for role in roles})  # type: ignore[misc]


def test_memory_moves_once_per_turn_of_training_or_generation() -> None:
    engine = Recorder()
    turns = turns_of(engine, "trainer", "generator")
    for command in STEP:
        turns.enter(command)
    assert engine.calls == [
        *("offload all", "sleep", "onload"),
        *("offload state", "wake", "offload all", "sleep", "onload"),
        *("offload state", "wake", "sleep", "onload"),
    ]


def test_a_generator_with_unfinished_responses_stays_awake() -> None:
    engine = Recorder()
    engine.running = 1
    turns = turns_of(engine, "trainer", "generator")
    for command in STEP:
        turns.enter(command)
    moved = ["offload state", "offload all", "onload", "offload state", "onload"]
    assert engine.calls == ["offload all", "onload", *moved]


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_other_engines_are_offloaded_with_the_trainer_and_during_publishing(role: str) -> None:
    trainer, other, generator = Recorder(), Recorder(), Recorder()
    engines = {"trainer": trainer, role: other, "generator": generator}
    turns = TimeSharing({role: SimpleNamespace(engine=engine, engines=[engine]) for role, engine in engines.items()})  # type: ignore[misc]
    for command in [*STEP[:7], Values(1, []), TrainCritic(1, [], 1.0, 1.0), TrainStep(1, [], 1.0, 1.0), STEP[9]]:
        turns.enter(command)
    assert trainer.calls == ["offload all", "onload", "offload state", "offload all", "onload", "offload state"]
    assert other.calls == ["offload all", "onload", "offload all", "offload all", "onload", "offload all"]
    assert generator.calls == ["sleep", "wake", "sleep", "wake"]


def test_all_teachers_move_with_the_trainer() -> None:
    trainer, first, second, generator = (Recorder() for _ in range(4))
    held = {"trainer": [trainer], "teacher": [first, second], "generator": [generator]}
    turns = TimeSharing({role: SimpleNamespace(engine=each[0], engines=each) for role, each in held.items()})  # type: ignore[misc]
    for command in [*STEP[:6], Teach(1, {}, [], 1), STEP[7], STEP[9]]:
        turns.enter(command)
    moved = ["offload all", "onload", "offload all", "offload all", "onload", "offload all"]
    assert first.calls == second.calls == moved and trainer.calls[2] == "offload state"


def test_a_checkpoint_is_loaded_while_the_generator_sleeps() -> None:
    engine = Recorder()
    turns = turns_of(engine, "trainer", "generator")
    for command in (STEP[0], BuildGroup("weights", [0]), LoadState("folder"), STEP[1]):
        turns.enter(command)
    assert engine.calls == ["offload all", "sleep", "onload", "offload state", "wake"]


def test_a_generator_that_reads_the_trainers_weights_leaves_them_where_they_are() -> None:
    engine = Recorder()
    roles: Any = {role: SimpleNamespace(engine=engine, engines=[engine]) for role in ("trainer", "generator")}
    TimeSharing(roles, shares_weights=True).enter(STEP[0])
    assert engine.calls == ["offload state"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("offload", ["always", "never"])
def test_a_generator_is_built_on_a_gpu_without_trainers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    calls: list[str] = []

    def noting(kind: type, method: str, name: str) -> None:
        original = getattr(kind, method)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, method, noted)

    for kind, method, name in (
        (FakeTrainEngine, "__init__", "trainer built"),
        (FakeTrainEngine, "offload", "trainer away"),
        (FakeTrainEngine, "onload", "trainer back"),
        (FakeEngine, "__init__", "generator built"),
        (FakeEngine, "sleep", "generator sleeps"),
    ):
        noting(kind, method, name)
    worker = stage.worker(2, {"debug": "fake", "layout": {"offload": offload}})
    try:
        for command in (BuildRole("trainer", [2]), BuildRole("generator", [2]), UpdateWeights(0, [0])):
            stage.command(2, command)
            assert worker.execute_one(10.0)
    finally:
        leave_default_group()
    built = ["trainer built", "trainer away", "generator built", "generator sleeps", "trainer back", "trainer away"]
    assert calls == (built if offload == "always" else ["trainer built", "generator built"])


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_rank_with_one_role_keeps_everything_in_memory(role: str) -> None:
    engine = Recorder()
    turns = turns_of(engine, role)
    for command in STEP[1:]:
        turns.enter(command)
    assert engine.calls == []


@pytest.mark.parametrize(
    ("changes", "shared", "expected"),
    [
        ({}, True, False),  # CPUs
        ({"layout": {"offload": "always"}}, True, True),
        ({"layout": {"offload": "always"}}, False, False),
        ({"layout": {"offload": "always"}, "rollout": {"max_staleness": 1}}, True, False),
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
def test_ranks_take_turns_only_if_memory_is_shared(changes: dict[str, Any], shared: bool, expected: bool) -> None:
    generator = (1, 2) if shared else (3,)
    ranks = {"controller": (0,), "trainer": (1, 2), "generator": generator, "reference": (), "reward": (), "env": ()}
    assert shares_device(parse(changes), RoleLayout(MappingProxyType(ranks), 4)) == expected
