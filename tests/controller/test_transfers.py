"""Messages about transfers stay small at any scale, and the parts add up to the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import pytest

from hpcrl.comm.transfer import from_ragged
from hpcrl.controller import transfers
from hpcrl.controller.batches import moves
from hpcrl.controller.transfers import rollout_transfers, token_transfers
from hpcrl.messaging.messages import Move, SendTokens, TransferRollouts
from hpcrl.rewards.reward import MAX_TOKEN_REWARDS
from hpcrl.rollout.types import TOKEN_REWARD, Sizes, make_sample_id

LIMIT = 1 << 20
FIELDS = ["token_ids", "loss_mask", "gen_logprobs", "versions", "turn_ids", "gen_logprobs_behaviour", "status"]


def sizes_of(parts: Iterable[Mapping[int, TransferRollouts | SendTokens]]) -> list[int]:
    return [len(msgspec.msgpack.encode(command)) for part in parts for command in part.values()]


def world(num_samples: int, generators: list[int], trainers: list[int]) -> tuple[list[Move], dict]:
    """Every sample moves from a random generator rank to a random trainer rank."""
    rng = np.random.default_rng(0)
    uids = rng.integers(1 << 38, 1 << 39, num_samples).tolist()  # the largest that occur
    samples = [make_sample_id(uid, 9, i % 16) for i, uid in enumerate(uids)]
    homes = dict(zip(samples, rng.choice(generators, num_samples).tolist(), strict=True))
    rows: dict[int, list[int]] = {rank: [] for rank in trainers}
    for sample, rank in zip(samples, rng.choice(trainers, num_samples).tolist(), strict=True):
        rows[rank].append(sample)
    lengths = dict.fromkeys(samples, Sizes(131_000, 100, 600_000))
    scored = {sample: {"rewards": 0.5, "scores": 1.0, "turn_rewards": ()} for sample in samples}
    return moves(homes, rows, lengths, readers=trainers), scored


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [512, 2, 1])
def test_no_message_is_large_at_200000_samples(ranks: int) -> None:
    trainers = list(range(1, 1 + max(1, ranks // 2)))
    generators = list(range(1 + ranks // 2, 1 + max(1, ranks)))
    table, scored = world(200_000, generators, trainers)
    sizes = sizes_of(rollout_transfers(1, "rollout", table, trainers, scored, FIELDS))
    assert max(sizes) < LIMIT
    assert sum(sizes) < 11 << 20  # through rank 0: 2 x 19 + 10 bytes per sample and the moves' heads
    tokens = [Move(move.source, move.dest, move.samples, move.lengths) for move in table]
    fields = sizes_of(token_transfers(1, "rollout", "ref_logprobs", tokens, {*trainers, *generators}))
    assert max(fields) < LIMIT and sum(fields) < 8 << 20
    # One message to all, as large as the step, could not even be sent.
    whole = TransferRollouts(1, "rollout", table, FIELDS, dict.fromkeys(("rewards", "scores"), b"\0" * 800_000), True)
    assert len(msgspec.msgpack.encode(whole)) > 4 << 20


def test_transfer_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PART_SAMPLES", 7)
    rows = {1: list(range(30)), 2: [30], 3: []}
    homes = {sample: 4 if sample % 3 else 1 for sample in range(31)}
    table = moves(homes, rows, {sample: Sizes(sample + 1, 1) for sample in range(31)})
    scored = {sample: {"rewards": sample / 8, "scores": -sample / 8, "turn_rewards": ()} for sample in range(31)}
    parts = list(rollout_transfers(1, "rollout", table, rows.keys(), scored, FIELDS))
    assert len(parts) == 5
    got: dict[int, dict[int, tuple[int, float, float]]] = {rank: {} for rank in rows}
    for part in parts:
        assert sorted(part) == [1, 2, 3, 4]
        for rank, command in part.items():
            assert command.forms == (part is parts[-1] and rank in rows)
            assert all(rank in (move.source, move.dest) for move in command.moves)
            assert sum(len(move.samples) for move in command.moves) <= 7
            for move in command.moves:  # both sides get the same
                assert move in part[move.source].moves and move in part[move.dest].moves
            own = [move for move in command.moves if move.dest == rank]
            keys = [pair for move in own for pair in zip(move.samples, move.lengths, strict=True)]
            values = (np.frombuffer(command.scored[name], np.float32).tolist() for name in ("rewards", "scores"))
            for (sample, length), reward, score in zip(keys, *values, strict=True):
                got[rank][sample] = (length, reward, score)
    assert got == {rank: {s: (s + 1, s / 8, -s / 8) for s in samples} for rank, samples in rows.items()}


def test_ranks_without_samples_get_a_message_too() -> None:
    [part] = rollout_transfers(1, "rollout", [], [1, 2], {}, FIELDS)
    assert {rank: (command.moves, command.forms) for rank, command in part.items()} == {1: ([], True), 2: ([], True)}
    [transfer] = token_transfers(1, "rollout", "ref_logprobs", [], [1, 2])
    assert sorted(transfer) == [1, 2]


def test_rewards_of_many_turns_are_sent_in_more_parts() -> None:
    table, scored = world(20_000, [1], [2])
    for sample in scored:
        scored[sample]["turn_rewards"] = (0.25,) * 50
    parts = list(rollout_transfers(1, "rollout", table, [2], scored, FIELDS))
    assert len(parts) > 4 and max(sizes_of(parts)) < LIMIT
    got = [from_ragged(part[2].scored["turn_rewards"], len(part[2].moves[0].samples), "f4") for part in parts]
    assert sum(len(row) for rows in got for row in rows) == 50 * 20_000


def test_token_rewards_are_sent_if_any_sample_has_them() -> None:
    table, scored = world(4_000, [1], [2])
    [part] = rollout_transfers(1, "rollout", table, [2], scored, FIELDS)
    assert "token_rewards" not in part[2].scored
    most = np.array([(place, 0.5) for place in range(MAX_TOKEN_REWARDS)], dtype=TOKEN_REWARD).tobytes()
    for sample in list(scored)[::2]:
        scored[sample]["token_rewards"] = most
    parts = list(rollout_transfers(1, "rollout", table, [2], scored, FIELDS))
    assert len(parts) > 4 and max(sizes_of(parts)) < LIMIT
    got = {}
    for part in parts:
        samples = part[2].moves[0].samples
        rows = from_ragged(part[2].scored["token_rewards"], len(samples), TOKEN_REWARD)
        got |= {sample: row.tobytes() for sample, row in zip(samples, rows, strict=True)}
    assert got == {sample: scored[sample].get("token_rewards", b"") for sample in scored}
