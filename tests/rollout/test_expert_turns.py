"""Which turns an expert plays: a function of run seed, sample and turn."""

from __future__ import annotations

from hpcrl.config.imitation import ImitationConfig
from hpcrl.rollout.expert_turns import expert_seed, expert_share
from hpcrl.rollout.types import GREEDY_MEMBER, make_sample_id, validation_uid

SAMPLES = [make_sample_id(uid, 0, member) for uid in range(50) for member in range(4)]


def played(config: ImitationConfig, seed: int = 0) -> list[tuple[int, int]]:
    return [(s, t) for s in SAMPLES for t in range(5) if expert_seed(config, seed, s, t) is not None]


def test_the_share_of_turns_is_the_probability() -> None:
    quarter = ImitationConfig(expert_turns=0.25)
    turns = played(quarter)
    assert abs(len(turns) / 1000 - 0.25) < 0.05
    assert turns == played(quarter) != played(quarter, seed=1)
    assert {*turns} < {*played(ImitationConfig(expert_turns=0.5))}, "a larger share adds turns"
    assert len(played(ImitationConfig(expert_turns=1.0))) == 1000 and not played(ImitationConfig())
    members = [[t for s, t in turns if s == sample] for sample in SAMPLES[:4]]
    assert any(members[0] != other for other in members), "members of a group differ"
    seeds = {expert_seed(quarter, 0, s, t) for s, t in turns}
    assert len(seeds) == len(turns) and all(0 <= seed < 1 << 63 for seed in seeds if seed is not None)


def test_validation_and_greedy_baselines_are_the_policys_alone() -> None:
    config = ImitationConfig(expert_turns=1.0)
    for sample in (make_sample_id(validation_uid(1, 3), 0, 0), make_sample_id(3, 0, GREEDY_MEMBER)):
        assert expert_seed(config, 0, sample, 0) is None
    assert expert_seed(config, 0, make_sample_id(3, 1, 0), 0) is not None, "a restarted sample"


def test_the_share_falls_linearly_with_the_prompts() -> None:
    config = ImitationConfig(expert_turns=0.8, expert_decay_prompts=40)
    assert [expert_share(config, uid) for uid in (0, 10, 20, 40, 1000)] == [0.8, 0.8 * 0.75, 0.4, 0.0, 0.0]
    early = sum(sample < make_sample_id(20, 0, 0) for sample, _ in played(config))
    late = sum(sample >= make_sample_id(40, 0, 0) for sample, _ in played(config))
    assert abs(early / (20 * 4 * 5) - 0.61) < 0.07 and late == 0
