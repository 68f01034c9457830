"""Which ranks of an engine work on the same rows, hold outputs and publish parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, ConfigError, parse
from hpcrl.models.families import read_shape
from hpcrl.planner.memory import check_sizes
from hpcrl.spec.division import Division
from hpcrl.spec.kinds import TrainEngineSpec
from tests.planner.models import PUBLISHED

PAIRS = Division(((0, 1), (2, 3)), (1, 3), ((0, 2), (1, 3)))


def megatron(num_ranks: int, reference: int | None = None, **sizes: int) -> Config:
    layout: dict[str, Any] = {"trainer": {"num_ranks": num_ranks}}
    algorithm: dict[str, Any] = {"advantage_estimator": "grpo"}
    if reference:
        layout["reference"] = {"num_ranks": reference, "colocate_with": None}
        algorithm["kl_loss_coef"] = 0.1
    return parse({"trainer": {"engine": "megatron", "megatron": sizes}, "layout": layout, "algorithm": algorithm})


def test_recipients_of_commands_and_groups_follow_from_the_division() -> None:
    there = PAIRS.of([4, 5, 8, 9])
    assert (there.ranks, there.leaders, there.outputs) == ((4, 5, 8, 9), (4, 8), (5, 9))
    assert there.replicate({4: "a", 8: "b"}) == {4: "a", 5: "a", 8: "b", 9: "b"}
    assert there.replicate({8: "b"}) == {8: "b", 9: "b"}
    assert (there.group_of(9), there.data_parallel_peers(9), there.data_parallel_peers(4)) == ((8, 9), (5, 9), (4, 8))
    assert there.weights == ((4, 8), (5, 9)) and there.is_split
    whole = Division.unsplit(3)
    assert (whole.leaders, whole.outputs, whole.weights) == ((0, 1, 2), (0, 1, 2), ((0, 1, 2),)) and not whole.is_split
    assert whole.data_parallel_peers(1) == (0, 1, 2) and whole.group_of(1) == (1,)


@pytest.mark.parametrize(
    ("groups", "outputs", "weights"),
    [
        (((0, 1), (2,)), (0, 2), ((0,),)),
        (((0, 1), (1, 2)), (0, 1), ((0,),)),
        (((0, 1), (2, 3)), (2, 0), ((0,),)),
        (((0, 1), (2, 3)), (0,), ((0,),)),
        (((0, 1), (2, 3)), (0, 2), ()),
        (((0, 1), (2, 3)), (0, 2), ((0,), ())),
        (((0, 1), (2, 3)), (0, 2), ((0, 4),)),
        (((0, 1), (2, 3)), (0, 2), ((0, 2), (1, 2))),
    ],
)
def test_a_contradictory_division_is_refused(groups: Any, outputs: Any, weights: Any) -> None:
    with pytest.raises(ValueError, match="division"):
        Division(groups, outputs, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "tensor", "pipeline", "context"),
    [(8, 2, 2, 1), (16, 2, 2, 2), (8, 1, 4, 2), (12, 3, 1, 2), (4, 1, 1, 1)],
)
def test_megatron_divides_as_megatron_core_does(num_ranks: int, tensor: int, pipeline: int, context: int) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "context_parallel": context}
    division = RoleLayout.from_config(megatron(num_ranks, **sizes)).division("trainer")
    data = num_ranks // (tensor * pipeline * context)
    order = parallel_state.RankGenerator(
        tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp", rank_offset=1
    )
    assert sorted(map(sorted, division.groups)) == sorted(map(sorted, order.get_ranks("tp-cp-pp")))
    stages = sorted(map(sorted, order.get_ranks("tp-cp-dp")))
    assert [list(owners) for owners in division.weights] == stages
    assert set(division.outputs) <= set(stages[-1]) and set(division.leaders) <= set(stages[0])


def engine(division: Callable[[Any, int], Division]) -> TrainEngineSpec:
    return TrainEngineSpec(
        about="An engine of an installed package.",
        make="nowhere:make",
        computes=frozenset({"entropy"}),
        division=division,
    )


TWISTED = engine(lambda config, num_ranks: Division(((0, 1), (1, 2)), (0, 1), ((0,),)))
SMALL = engine(lambda config, num_ranks: Division.unsplit(num_ranks - 1))
LARGE = engine(lambda config, num_ranks: Division.unsplit(num_ranks + 1))
FIRST_YIELDS = engine(lambda config, num_ranks: Division((tuple(range(num_ranks)),), (0,), ((0,),)))
RAISING = engine(lambda config, num_ranks: Division.unsplit(num_ranks // 0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TWISTED", ": ValueError: the groups of a division are disjoint"),
        ("SMALL", " divides ranks 0, and trainer has 2"),
        ("LARGE", " divides ranks 0-2, and trainer has 2"),
        ("RAISING", ": ZeroDivisionError: "),
    ],
)
def test_an_impossible_division_by_an_installed_engine_is_one_line(name: str, said: str) -> None:
    path = f"tests.cluster.test_division:{name}"
    with pytest.raises(ConfigError) as told:
        RoleLayout.from_config(parse({"trainer": {"engine": path}}))
    (text,) = told.value.problems
    assert text.startswith(f"layout.trainer: trainer.engine={path}{said}"), text


@pytest.mark.parametrize(("num_generators", "gathered"), [(1, True), (2, False)])
def test_a_rank_that_yields_no_weights_gets_them_from_others(num_generators: int, gathered: bool) -> None:
    layout = {"generator": {"num_ranks": num_generators, "colocate_with": "trainer"}, "trainer": {"num_ranks": 2}}
    config = parse({"trainer": {"engine": "tests.cluster.test_division:FIRST_YIELDS"}, "layout": layout})
    assert RoleLayout.from_config(config).generates_on_trainers == gathered


def test_a_replica_shares_all_of_its_ranks_with_an_engine_or_none() -> None:
    layout = {"generator": {"num_ranks": 2, "tensor_parallel": 2, "colocate_with": None}}
    layout["trainer"] = {"num_ranks": 1, "colocate_with": "generator"}
    with pytest.raises(ConfigError) as told:
        RoleLayout.from_config(parse({"generator": {"engine": "vllm"}, "layout": layout}))
    assert "layout.generator: ranks 1 of a replica are also trainer ranks, its other ranks are not" in str(told.value)


def test_indivisible_sizes_are_reported_with_a_fake_engine_too() -> None:
    config = megatron(2, tensor_parallel=4).model_copy(update={"debug": "fake"})
    shape = read_shape(PUBLISHED["Qwen2.5-7B"][0])
    texts = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
    assert any("= 4 ranks hold the model, and the layout gives 2" in text for text in texts), texts


def test_the_ranks_of_every_role_must_divide() -> None:
    with pytest.raises(ConfigError) as told:
        RoleLayout.from_config(megatron(4, reference=3, tensor_parallel=2))
    (text,) = told.value.problems
    assert text.startswith("trainer.megatron.tensor_parallel: tensor 2 x") and "the layout gives 3, which" in text
