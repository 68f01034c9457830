"""Rollout transfer and log-probs between ranks, in parts, to ranks with and without rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hpcrl.comm.transfer import TransferGroup
from hpcrl.controller import transfers
from hpcrl.controller.batches import moves
from hpcrl.controller.transfers import rollout_transfers, token_transfers
from hpcrl.messaging.messages import TransferRollouts
from hpcrl.rollout.types import TOKEN_REWARD, Sizes, make_sample_id
from hpcrl.spec.trajectory import FIELDS as DECLARED
from hpcrl.spec.trajectory import TEXT, Field, Level, Origin, declare
from hpcrl.workers.exchange import Exchange
from hpcrl.workers.rank_loop import Worker
from tests.dist.conftest import Threads
from tests.workers.conftest import Stage

SAMPLES = [make_sample_id(uid, 0, member) for uid in range(4) for member in range(2)]
FIELDS = ["token_ids", "loss_mask", "gen_logprobs", "versions", "turn_ids", "status", "wide"]
LENGTHS = {sample: 2 + i for i, sample in enumerate(SAMPLES)}


def said(sample: int) -> str:
    return "é" * (SAMPLES.index(sample) % 3)


def pick(samples: list[int]) -> dict[str, list[np.ndarray]]:
    """Values that identify their rows and positions."""

    texts = [said(sample).encode() for sample in samples]

    def fill(value: Any, dtype: str) -> list[np.ndarray]:
        return [np.full(LENGTHS[s], value(s), dtype=dtype) for s in samples]

    return {
        "token_ids": fill(SAMPLES.index, "i4"),
        "loss_mask": [np.arange(LENGTHS[s]) > 0 for s in samples],
        "gen_logprobs": fill(lambda s: -SAMPLES.index(s), "f4"),
        "versions": fill(lambda s: 6, "i4"),
        "turn_ids": [np.arange(LENGTHS[s], dtype="i4") > 1 for s in samples],  # two turns, from the third token on
        TEXT: [np.frombuffer(text, np.uint8) for text in texts],
        "status": [np.zeros(1, dtype=np.int8) for _ in samples],
        "wide": [np.full((LENGTHS[s], 3), [SAMPLES.index(s), 7, -1], dtype=np.int16) for s in samples],
    }


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    declare(Field("wide", "int16", Level.TOKEN, Origin.GENERATOR, "three numbers per token", width=3))
    about = "numbers of a pass"
    declare(Field("pairs_of_numbers", "int32", Level.TOKEN, Origin.TRAINING, about, optional=True, any_width=True))
    yield
    del DECLARED["wide"], DECLARED["pairs_of_numbers"]


@pytest.fixture(scope="module")
def workers(threads: Threads, stage: Stage) -> list[Worker]:
    made = [stage.worker(rank, {}) for rank in range(3)]
    made[0].roles["generator"] = cast(Any, SimpleNamespace(pick=pick))
    groups = threads.every(lambda rank: threads.worlds[rank].group("rollout", (0, 1, 2), 0))
    for worker, group in zip(made, groups, strict=True):
        worker.transfer_groups["rollout"] = TransferGroup(group, (0, 1, 2))
    return made


def test_tokens_beyond_max_staleness_are_refused(threads: Threads, workers: list[Worker]) -> None:
    sizes = {sample: Sizes(length, length - 1) for sample, length in LENGTHS.items()}
    rows, exchanges = {0: SAMPLES, 1: [], 2: []}, [Exchange(worker) for worker in workers]
    scored = {sample: {"rewards": 0.0, "scores": 0.0, "turn_rewards": ()} for sample in SAMPLES}
    between = moves(dict.fromkeys(SAMPLES, 0), rows, sizes)
    (commands,) = rollout_transfers(8, "rollout", between, rows, scored, FIELDS)

    def carry_out(rank: int) -> str:
        try:
            exchanges[rank].handlers()[TransferRollouts](commands[rank], 1)
        except RuntimeError as error:
            return str(error)
        return ""

    assert threads.every(carry_out) == ["step 8 got a token of weights 6; rollout.max_staleness allows 7", "", ""]


def test_a_field_undeclared_at_its_destination_is_refused(threads: Threads, workers: list[Worker]) -> None:
    command = TransferRollouts(9, "rollout", [], ["token_ids", "entropies"], {}, False)
    with pytest.raises(ValueError, match="fields entropies are sent to a rank that has not declared them"):
        Exchange(workers[1]).handlers()[TransferRollouts](command, 1)


@pytest.mark.parametrize("part_samples", [100, 5], ids=["whole", "in parts"])
@pytest.mark.parametrize("trained", [{1: SAMPLES, 2: []}, {1: SAMPLES[:3], 2: SAMPLES[3:]}], ids=["one idle", "both"])
def test_transferred_batches_and_fields_arrive(
    threads: Threads,
    workers: list[Worker],
    monkeypatch: pytest.MonkeyPatch,
    trained: dict[int, list[int]],
    part_samples: int,
) -> None:
    """Rank 0 generates and is the reference, ranks 1 and 2 train."""
    monkeypatch.setattr(transfers, "PART_SAMPLES", part_samples)
    rows = {0: SAMPLES, **trained}
    sizes = {sample: Sizes(length, length - 1) for sample, length in LENGTHS.items()}
    scored = {
        sample: {"rewards": float(i), "scores": i / 2, "turn_rewards": (0.5, i - 0.5) if i % 2 else ()}
        for i, sample in enumerate(SAMPLES)
    }
    scored[SAMPLES[3]]["token_rewards"] = np.array([(1, 0.125)], dtype=TOKEN_REWARD).tobytes()
    exchanges = [Exchange(worker) for worker in workers]

    def carry_out(parts: Any) -> None:
        for part in parts:
            threads.every(lambda rank, part=part: exchanges[rank].handlers()[type(part[rank])](part[rank], 1))

    sizes = {sample: Sizes(length, length - 1, len(said(sample).encode())) for sample, length in LENGTHS.items()}
    between = moves(dict.fromkeys(SAMPLES, 0), rows, sizes, readers=trained)
    for worker in workers:
        worker.roles.pop("trainer", None)  # exchanges between trainers need their default group
    carry_out(rollout_transfers(7, "rollout", between, rows, scored, FIELDS))
    assert not any(exchange._shares for exchange in exchanges)
    for rank, samples in rows.items():
        batch = workers[rank].batches[7]
        assert batch.sample_ids.tolist() == samples
        assert batch.token_ids.tolist() == [SAMPLES.index(s) for s in samples for _ in range(LENGTHS[s])]
        assert batch.wide.tolist() == [[SAMPLES.index(s), 7, -1] for s in samples for _ in range(LENGTHS[s])]
        assert torch.equal(batch.on_policy, batch.loss_mask) and (not samples or batch.on_policy.any())  # weights 6
        assert batch.rewards.tolist() == [scored[s]["rewards"] for s in samples]
        assert batch.scores.tolist() == [scored[s]["scores"] for s in samples]
        assert batch.texts == ({"messages": [said(s) for s in samples]} if rank in trained or not samples else {})
        rewards = batch.turn_rewards.split(batch.cu_turns.diff().tolist())
        for sample, turns in zip(samples, rewards, strict=True):
            place, count = SAMPLES.index(sample), 2 if LENGTHS[sample] > 2 else 1
            given = [0.5, place - 0.5] if place % 2 else [0.0] * (count - 1) + [place]
            assert turns.tolist() == given[:count]
            ends = {1: given[0]} | ({LENGTHS[sample] - 1: given[1]} if count == 2 else {})
            if sample == SAMPLES[3]:  # a part of its second turn
                ends |= {2: 0.125, LENGTHS[sample] - 1: given[1] - 0.125}
            start = batch.cu_seqlens[samples.index(sample)]
            tokens = batch.token_rewards[start : start + LENGTHS[sample]].tolist()
            assert tokens == [ends.get(token, 0.0) for token in range(LENGTHS[sample])]
        assert batch.group_ids.tolist() == [SAMPLES.index(s) // 2 for s in samples]

    for rank in (1, 2):
        workers[rank].roles["trainer"] = cast(Any, object())
    source = workers[0].batches[7]
    source.ref_logprobs = -source.token_ids.float()
    carry_out(
        token_transfers(7, "rollout", "ref_logprobs", moves(dict.fromkeys(SAMPLES, 0), trained, sizes), {0, *trained})
    )
    back = moves(dict.fromkeys(SAMPLES, 0), trained, sizes)
    source.pairs_of_numbers = torch.stack([source.token_ids, -source.token_ids], 1).int()
    carry_out(token_transfers(7, "rollout", "pairs_of_numbers", back, {0, *trained}, width=2))
    source.wide = -source.wide
    carry_out(token_transfers(7, "rollout", "wide", back, {0, *trained}))
    for rank in trained:
        batch = workers[rank].batches[7]
        trained_only = batch.token_ids * batch.loss_mask  # what training computes is not sent for other tokens
        assert batch.ref_logprobs is not None and torch.equal(batch.ref_logprobs, -trained_only.float())
        expected = torch.stack([trained_only, -trained_only], 1).int()
        assert batch.pairs_of_numbers.dtype == torch.int32 and torch.equal(batch.pairs_of_numbers, expected)
        assert torch.equal(batch.wide[:, 0], -batch.token_ids.short()) and (batch.wide[:, 1] == -7).all()
        batch.check()
