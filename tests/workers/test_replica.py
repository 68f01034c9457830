"""A replica of two ranks: only the first answers, the other does the same work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.engines.gen.native.engine import make
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.messaging import messages as m
from hpcrl.rollout.types import make_sample_id
from hpcrl.spec.trajectory import Level, Origin, fields_of
from hpcrl.system.clock import UNCOUNTED
from hpcrl.workers.generator import GeneratorRole
from tests.e2e.split_engine import SplitEngine
from tests.workers.conftest import Stage
from tests.workers.test_generator import META, SAMPLING, SETTINGS

RANKS = (1, 2)
LAYOUT = {"controller": (0,), "trainer": (), "generator": RANKS, "reference": (), "reward": (0,), "env": (0,)}
PLAYED, REFUSED, PLAIN = (make_sample_id(uid, 0, 0) for uid in (1, 2, 3))
PROMPTS = {1: ("d", [5, 6, 7]), 2: ("plain", [5, 10**6]), 3: ("plain", [8, 9])}


class Replica:
    """The generator roles of both ranks, whose engines compare their calls, and a thread for each."""

    def __init__(self, stage: Stage, model_folder: Path):
        def build(rank: int) -> GeneratorRole:
            worker = stage.worker(rank, SETTINGS)
            worker.layout = RoleLayout(MappingProxyType(LAYOUT), 3, generator_tensor_parallel=2)
            role = GeneratorRole(worker)
            role.engine.load_weights(read_safetensors(model_folder), version=0)
            return role

        self._threads = ThreadPoolExecutor(2)
        self.roles = list(self._threads.map(build, RANKS))

    def tell(self, command: m.Command) -> list[Any]:
        """Both ranks' answers to a command that they get at the same time."""
        return list(self._threads.map(lambda role: role.handlers()[type(command)](command, 1), self.roles))

    def each(self, act: Callable[[int], Any]) -> list[BaseException | None]:
        """Errors of the threads when the ranks act, by their index in the replica."""
        return [done.exception() for done in [self._threads.submit(act, at) for at in range(2)]]

    def same(self, samples: list[int]) -> bool:
        """Whether both ranks have the same of these samples."""
        names = [field.name for field in fields_of(Origin.GENERATOR, Level.TOKEN) if not field.optional]
        first, other = ([role.samples[sample].held for sample in samples] for role in self.roles)
        return all(
            a.messages == b.messages and all(np.array_equal(a.columns[name], b.columns[name]) for name in names)
            for a, b in zip(first, other, strict=True)
        )


@pytest.fixture(scope="module")
def replica(stage: Stage, model_folder: Path) -> Replica:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcrl.engines.gen.native.engine.make", lambda *given: SplitEngine(make(*given), given[3]))
        return Replica(stage, model_folder)


def test_only_the_first_rank_answers_and_the_others_do_the_same(stage: Stage, replica: Replica) -> None:
    first, other = replica.roles
    payloads = [
        m.PromptPayload(uid, domain, np.array(ids, dtype=np.int32).tobytes(), META)
        for uid, (domain, ids) in PROMPTS.items()
    ]
    replica.tell(m.Admit(payloads, [(sample, 3) for sample in (PLAYED, REFUSED, PLAIN)], SAMPLING))
    [refused] = [result for event in stage.heard() for result in event.samples]
    assert refused.sample == REFUSED and "outside the vocabulary" in refused.error
    done, silent = replica.tell(m.DecodeChunk(8, [0], [0]))
    assert silent == m.Done(1)
    assert sorted(end.sample for end in done.finished) == [REFUSED, PLAIN]
    assert [end.sample for end in done.turns] == [PLAYED]
    assert [(turn.sample, turn.starts_episode, turn.reply_to) for turn in stage.mail(0, m.Turn)] == [(PLAYED, True, 1)]
    assert [response.sample for response in stage.mail(0, m.Response)] == [PLAIN]
    for observation, said in (([], b"[]"), ([9, 9], b'[{"role": "user", "content": "again"}]')):
        # It reaches only the first rank, which broadcasts it.
        stage.send(0, 1, [m.EnvObservation(PLAYED, np.array(observation, dtype=np.int32).tobytes(), said)])
        replica.tell(m.Admit([], [(PLAYED, 3)], SAMPLING))
        done, silent = replica.tell(m.DecodeChunk(8, [0], [0]))
        assert [end.sample for end in done.turns] == [PLAYED] and silent == m.Done(1)
        assert [turn.sample for turn in stage.mail(0, m.Turn)] == [PLAYED]
    assert other.samples[PLAYED].held.turn_ids[-1] == 1 and not first._observations and not other._observations
    assert replica.same([PLAYED, PLAIN])
    done, silent = replica.tell(m.AbortSamples([PLAYED, REFUSED]))
    assert isinstance(done, m.DecodeChunkDone) and silent == m.Done(1)
    assert [(turn.sample, turn.reason) for turn in stage.mail(0, m.Turn)] == [(PLAYED, "abort")]
    replica.tell(m.DropSamples([PLAIN]))
    assert not first.samples and not other.samples and not stage.heard()


def test_an_observation_broadcast_early_is_kept(stage: Stage, replica: Replica) -> None:
    """The first rank may be ahead: here it has admitted the next turn before the other rank has the sample."""
    first, other = replica.roles
    sample = make_sample_id(7, 0, 0)
    payload = m.PromptPayload(7, "d", np.array([5, 6], dtype=np.int32).tobytes(), META)
    commands = [
        m.Admit([payload], [(sample, 3)], SAMPLING),
        m.DecodeChunk(1, [0], [0]),
        m.Admit([], [(sample, 3)], SAMPLING),
    ]
    stage.send(0, 1, [m.EnvObservation(sample, np.array([7, 8, 9], dtype=np.int32).tobytes())])
    for role in (first, other):
        engine, role.engine = role.engine, role.engine._whole
        for command in commands:
            role.handlers()[type(command)](command, 1)
        role.engine = engine
    assert other.samples[sample].held.token_ids.tolist() == [7, 8, 9] and replica.same([sample])
    replica.tell(m.AbortSamples([sample]))


def test_ranks_that_diverge_are_noticed(replica: Replica) -> None:
    """The tests here and of whole runs rely on this comparison; a job suspended during it does not fail."""
    assert all(role.engine._replica.group.options._timeout == UNCOUNTED for role in replica.roles)
    steps = [role.engine.step for role in replica.roles]
    for error in replica.each(lambda rank: steps[rank](4 + rank)):
        assert isinstance(error, RuntimeError) and "differ in step" in str(error)
