"""Ranks of every role: the three layouts, unneeded roles, and impossible layouts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.cluster.layout import RoleLayout, check_layout
from hpcrl.config import Config, ConfigError, load, parse
from hpcrl.controller.main import _survivable
from hpcrl.spec.tables import ROLES

KL = "algorithm.kl_loss_coef=.1"


def layout(*words: str) -> RoleLayout:
    return RoleLayout.from_config(load(words))


def test_single_is_one_rank_with_every_role() -> None:
    asks = ["+reward.a={name: judge, options: {judges: {own: {role: judge}}}}", "+reward.b={name: reward_model}"]
    paths = ["judge.path=/models/judge", "reward_model.path=/models/scores"]
    made = layout("layout=single", "env=scripted", "algorithm=ppo", KL, *asks, *paths)
    assert made.world_size == 1 and {role for role in ROLES if made.ranks[role] != (0,)} == {"teacher"}
    assert made.roles_of(0) == ("controller", *(role for role in ROLES if role != "teacher"))
    assert made.replicas == ((0,),)
    taught = layout("layout=single", "pipeline=distill", "model.path=a", "teacher.path=b")
    assert taught.roles_of(0) == ("controller", "trainer", "generator", "teacher", "reward")


def test_colocated_is_a_controller_and_two_workers() -> None:
    made = layout("layout=colocated", "env=scripted", "algorithm=ppo", KL)
    assert made.world_size == 3
    assert made.roles_of(0) == ("controller",)
    lacking = ("teacher", "judge", "reward_model")  # no reward asks the latter
    assert made.roles_of(1) == made.roles_of(2) == tuple(role for role in ROLES if role not in lacking)
    assert made.replicas == ((1,), (2,))


def test_disaggregated_is_ten_ranks() -> None:
    made = layout("layout=disaggregated", "env=scripted", "algorithm=ppo", KL)
    expected = {
        "controller": (0,),
        "trainer": (1, 2),
        "generator": (3, 4),
        "reference": (5,),
        "teacher": (),
        "critic": (6, 7),
        "judge": (),
        "reward_model": (),
        "reward": (8,),
        "env": (9,),
    }
    assert dict(made.ranks) == expected and made.world_size == 10
    assert [made.roles_of(rank) for rank in (0, 4, 9)] == [("controller",), ("generator",), ("env",)]


def test_unneeded_roles_take_no_ranks() -> None:
    made = layout("layout=disaggregated")
    assert made.world_size == 6
    assert (made.ranks["reference"], made.ranks["env"], made.ranks["reward"]) == ((), (), (5,))
    training_only = layout("layout=disaggregated", "pipeline=sft")
    assert training_only.world_size == 3 and training_only.replicas == ()
    evaluating = layout("layout=disaggregated", "pipeline=sft", "data.val=task:sort_digits")
    assert evaluating.world_size == 6 and evaluating.ranks["generator"] == (3, 4)
    assert layout("layout=disaggregated", "pipeline=sft", "data.val=task:sort_digits", "eval_every=0").world_size == 3
    assert layout("algorithm.kl_reward_coef=.1").ranks["reference"] == (1, 2)


def test_a_debug_run_takes_only_the_ranks_of_its_half() -> None:
    words = ("layout=disaggregated", KL, "env=scripted")
    training = layout(*words, "debug=train_only", "load_rollouts=runs/demo")
    assert (training.ranks["trainer"], training.ranks["reference"], training.world_size) == ((1, 2), (3,), 4)
    evaluating = layout(*words, "debug=train_only", "load_rollouts=runs/demo", "data.val=task:sort_digits")
    assert evaluating.world_size == layout(*words).world_size == layout(*words, "debug=fake").world_size == 8
    generating = layout(*words, "debug=rollout_only")
    assert (generating.ranks["trainer"], generating.ranks["reference"], generating.world_size) == ((1, 2), (), 7)


def test_a_role_may_take_the_first_ranks_of_another_and_chains_are_followed() -> None:
    made = layout("layout.trainer.num_ranks=4", "layout.generator.num_ranks=3", "layout.reward.colocate_with=generator")
    assert (made.ranks["generator"], made.ranks["reward"]) == ((1, 2, 3), (1, 2, 3))


def test_domains_may_have_their_own_reward_ranks_and_the_others_share_the_rest() -> None:
    words = ("layout=disaggregated", "layout.reward.num_ranks=5", "layout.reward.domains={code:2,essays:1}")
    made = layout(*words)
    assert made.ranks["reward"] == (5, 6, 7, 8, 9)
    assert [made.scorers_of(name) for name in ("code", "essays", "maths")] == [(5, 6), (7,), (8, 9)]
    assert [made.domain_of(rank) for rank in made.ranks["reward"]] == ["code", "code", "essays", None, None]
    assert layout("layout=disaggregated").scorers_of("maths") == (5,)
    config = load(words)
    expected = {(5,): True, (5, 6): False, (7,): False, (8,): True, (8, 9): False, (8, 5): True}
    assert {lost: _survivable(config, made, lost[-1], lost) for lost in expected} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["layout.trainer.colocate_with=reward"],
            "layout.trainer.colocate_with: the roles share ranks in a cycle: trainer -> reward -> trainer",
        ),
        (["layout.generator.num_ranks=3"], "layout.generator.num_ranks: 3 ranks of trainer requested, which has 2"),
        (["layout.generator.colocate_with=env"], "layout.generator.colocate_with: this run has no env"),
        (["layout.trainer.num_ranks=null"], "layout.trainer: has no ranks; give num_ranks or colocate_with"),
        (["layout.generator.tensor_parallel=2"], "layout.generator.tensor_parallel: 2, but the native engine has no"),
        (
            ["layout.trainer.tensor_parallel=2"],
            "layout.trainer.tensor_parallel: 2, but the ranks of trainer are split by the keys of their engine",
        ),
        (["layout.reward.tensor_parallel=2"], "layout.reward.tensor_parallel: 2, but a reward rank holds no model"),
        (["layout.reward.min_ranks=3"], "layout.reward.min_ranks: 3 is more than the 2 ranks of reward"),
        (
            ["layout.reward.domains={code:1,maths:2}"],
            "layout.reward.domains: 1 + 2 ranks of domains, and reward has 2 (layout.reward.num_ranks)",
        ),
        (
            ["layout.reward.domains={code:1}", "layout.reward.min_ranks=2"],
            "layout.reward.min_ranks: 2 is more than the 1 ranks of domain code",
        ),
        (
            [KL, "layout.reference.num_ranks=1"],
            "layout.reference: ranks 1 overlap with ranks 1-2 of trainer; give reference all of these ranks",
        ),
        (
            ["layout=disaggregated", "layout.reward={colocate_with:controller}"],
            "layout.reward: shares rank 0 with the controller in a world of 5 ranks",
        ),
    ],
)
def test_impossible_layouts_are_refused_with_their_numbers(words: list[str], expected: str) -> None:
    config = load(words)
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(config)
    assert any(problem.startswith(expected) for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout.min_replicas=9"], "rollout.min_replicas: 9, but layout.generator gives 2 replicas"),
        (
            ["rollout.extra_members=3", "generator.max_num_seqs=2", "layout=disaggregated"],
            "rollout.extra_members: a prompt has 11 responses, but 2 replicas get at most 8 concurrent responses",
        ),
        (
            ["generator.max_requests=3"],
            "generator.max_requests: 3: a prompt has 8 responses, but 2 replicas get at most 6 concurrent responses",
        ),
        (
            ["rollout.extra_prompts=1000", "generator.max_num_seqs=4"],
            "rollout.extra_prompts: 1000 redundant prompts have 8000 responses, but 2 replicas get at most 16",
        ),
    ],
)
def test_replicas_that_the_engine_cannot_run_are_refused(words: list[str], expected: str) -> None:
    (problem,) = check_layout(load(words))
    assert problem.text.startswith(expected)


def test_problems_of_all_roles_are_reported_together() -> None:
    config = load(
        ["layout.generator.tensor_parallel=2", "layout.reward.colocate_with=env", "layout.trainer.num_ranks=null"]
    )
    assert len(check_layout(config)) == 3


role = st.fixed_dictionaries(
    {
        "num_ranks": st.none() | st.integers(1, 4),
        "colocate_with": st.none() | st.sampled_from(["controller", *ROLES]),
        "min_ranks": st.integers(1, 3),
    }
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({name: role for name in ROLES}), st.booleans(), st.booleans())
def test_every_layout_is_either_refused_or_consistent(roles: dict, has_env: bool, has_kl: bool) -> None:
    config: Config = parse(
        {
            "layout": roles,
            "env": {"default": {"name": "scripted"}} if has_env else None,
            "algorithm": {"advantage_estimator": "grpo", "kl_loss_coef": 0.1 if has_kl else 0.0},
        }
    )
    if check_layout(config):
        return
    made = RoleLayout.from_config(config)
    used = {rank for ranks in made.ranks.values() for rank in ranks}
    assert used == set(range(made.world_size))  # every rank has a role
    assert bool(made.ranks["env"]) == has_env and bool(made.ranks["reference"]) == has_kl
    assert sum(map(len, made.replicas)) == len(made.ranks["generator"]) > 0
    for name in ROLES:
        ranks, spec = made.ranks[name], getattr(config.layout, name)
        assert ranks == tuple(sorted(set(ranks)))
        if ranks and spec.num_ranks is not None:
            assert len(ranks) == spec.num_ranks
        if ranks and spec.colocate_with is not None:
            assert set(ranks) <= set(made.ranks[spec.colocate_with])
