"""How layers are assigned to stages, and every size that a model or its ranks do not allow."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, ConfigError, parse
from hpcrl.engines.train.megatron.parallel import Degrees, _experts, padded_vocabulary, split_layers
from hpcrl.engines.train.megatron.spec import ENDS, MegatronConfig
from hpcrl.models.families import read_shape
from hpcrl.planner.memory import check_sizes
from tests.planner.models import PUBLISHED, published
from tests.planner.published import WELL_KNOWN

FIRST, LAST = ENDS
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
LARGEST: dict[str, Any] = {
    "tensor_parallel": 4,
    "sequence_parallel": True,
    "pipeline_parallel": 8,
    "virtual_pipeline": 6,
    "expert_parallel": 8,
    **COUNTED,
}


def run_of(ranks: int = 256, generator: int = 1, num_prompts: int = 128, **megatron: Any) -> Config:
    layout = {"trainer": {"num_ranks": ranks}, "generator": {"colocate_with": "trainer", "tensor_parallel": generator}}
    return parse(
        {
            "trainer": {"engine": "megatron", "megatron": megatron, "param_dtype": "bfloat16"},
            "generator": {"engine": "vllm"},
            "layout": layout,
            "rollout": {"num_prompts": num_prompts},
        }
    )


def problems(config: Config, model: str) -> list[str]:
    try:
        layout = RoleLayout.from_config(config)
    except ConfigError as error:
        return error.problems
    return [problem.text for problem in check_sizes(config, layout, read_shape(PUBLISHED[model][0]))]


def test_94_layers_with_embedding_and_loss_split_over_eight_stages_of_six_chunks() -> None:
    """Two layers in each of 48 chunks; the first and the last chunk have one less for the embedding and the loss."""
    stages = split_layers(94, MegatronConfig(**LARGEST))
    assert stages is not None
    assert [[len(chunk) for chunk in stage] for stage in stages] == [
        [1, 2, 2, 2, 2, 2],
        *([[2] * 6] * 6),
        [2, 2, 2, 2, 2, 1],
    ]
    assert stages[0] == ((0,), (15, 16), (31, 32), (47, 48), (63, 64), (79, 80))
    assert stages[7] == ((13, 14), (29, 30), (45, 46), (61, 62), (77, 78), (93,))
    assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(range(94))


@pytest.mark.parametrize(
    ("layers", "sizes", "counts"),
    [
        (28, {}, [28]),
        (28, {"pipeline_parallel": 4}, [7, 7, 7, 7]),
        (94, {"pipeline_parallel": 4, **COUNTED}, [23, 24, 24, 23]),
        (31, {"pipeline_parallel": 4, "account_for_loss_in_pipeline_split": True}, [8, 8, 8, 7]),
        (94, {"pipeline_parallel": 8}, None),
        (94, {"pipeline_parallel": 8, "virtual_pipeline": 5, **COUNTED}, None),
        (4, {"pipeline_parallel": 3, "virtual_pipeline": 2, **COUNTED}, [1, 2, 1]),
        (14, {"pipeline_parallel": 4, FIRST: 2}, [2, 4, 4, 4]),
        (14, {"pipeline_parallel": 4, FIRST: 3, LAST: 1}, [3, 5, 5, 1]),
        (5, {"pipeline_parallel": 2, FIRST: 2, LAST: 3}, [2, 3]),
        (5, {"pipeline_parallel": 2, FIRST: 2, LAST: 2}, None),
        (2, {"pipeline_parallel": 3, FIRST: 1, LAST: 1}, None),
        (14, {"pipeline_parallel": 4, "virtual_pipeline": 2, FIRST: 2}, [2, 4, 4, 4]),
        (14, {"pipeline_parallel": 4, "virtual_pipeline": 2, FIRST: 5}, None),
    ],
)
def test_number_of_layers_of_each_stage(layers: int, sizes: dict[str, Any], counts: list[int] | None) -> None:
    stages = split_layers(layers, MegatronConfig(**sizes))
    assert counts == (None if stages is None else [sum(map(len, stage)) for stage in stages])


def test_number_of_ranks_of_each_kind() -> None:
    assert Degrees.of(MegatronConfig(**LARGEST), 256) == Degrees(data=8, expert_data=4, optimizer=8)
    context = MegatronConfig(tensor_parallel=2, context_parallel=4)
    assert Degrees.of(context, 16) == Degrees(data=2, expert_data=16, optimizer=8)
    assert padded_vocabulary(151936, MegatronConfig(**LARGEST)) == 152064  # 297 x 512


@pytest.mark.parametrize(
    ("model", "ranks", "change"),
    [
        ("Qwen3-235B-A22B", 256, LARGEST),
        ("Qwen3-30B-A3B", 32, {"tensor_parallel": 4, "sequence_parallel": True, "expert_parallel": 8}),
        ("Qwen2.5-7B", 8, {"tensor_parallel": 4, "pipeline_parallel": 2}),
        ("Qwen2.5-7B", 8, {"context_parallel": 8}),
    ],
)
def test_valid_sizes_have_no_problem(model: str, ranks: int, change: dict[str, Any]) -> None:
    assert problems(run_of(ranks, **change), model) == []


@pytest.mark.parametrize(
    ("model", "ranks", "change", "said"),
    [
        ("Qwen2.5-7B", 12, {"tensor_parallel": 4, "pipeline_parallel": 2}, "= 8 ranks hold the model, and the layout"),
        ("Qwen2.5-7B", 8, {"tensor_parallel": 8}, "8 does not divide the 28 attention heads"),
        ("Qwen3-8B", 48, {"tensor_parallel": 16, "pipeline_parallel": 3}, None),
        ("Llama-3-8B", 12, {"tensor_parallel": 3}, "3 neither divides the 8 key and value heads"),
        ("Qwen2.5-7B", 2, {"sequence_parallel": True}, "tensor_parallel is 1"),
        ("Qwen2.5-7B", 8, {"expert_parallel": 2}, "qwen2 has no experts"),
        ("Qwen2.5-7B", 8, {"expert_tensor_parallel": 2}, "qwen2 has no experts"),
        ("Qwen2.5-7B", 8, {"aux_loss": 0.01}, "aux_loss: 0.01, but qwen2 has no experts; use 0"),
        ("Qwen2.5-7B", 8, {"z_loss": 0.01}, "z_loss: 0.01, but qwen2 has no experts; use 0"),
        ("Qwen3-30B-A3B", 8, {"expert_bias_rate": 0.001}, "0.001, but the routers of qwen3_moe have no bias"),
        ("Qwen3-30B-A3B", 8, {"tensor_parallel": 4}, "only with sequence_parallel=true"),
        ("Qwen3-30B-A3B", 24, {"expert_parallel": 24}, "24 does not divide the 128 experts"),
        ("Qwen3-30B-A3B", 5, {"expert_tensor_parallel": 5}, "5 does not divide the experts' width 768"),
        ("Qwen3-235B-A22B", 256, LARGEST | {"expert_parallel": 64}, "x pipeline 8 = 512 ranks hold all experts"),
        ("Qwen3-235B-A22B", 256, LARGEST | {"virtual_pipeline": 5}, "= 96 do not divide over 8 stages x 5 chunks = 40"),
        ("Qwen3-235B-A22B", 8, {"pipeline_parallel": 8}, "account_for_embedding_in_pipeline_split=true"),
        ("Qwen2.5-7B", 8, {"pipeline_parallel": 4, FIRST: 8}, f"; {FIRST}=7 divides"),
        (
            "Qwen2.5-7B",
            8,
            {"pipeline_parallel": 2, FIRST: 9, LAST: 9},
            f"28 layers with {FIRST}=9 and {LAST}=9 do not divide over 0 other",
        ),
        ("Qwen2.5-7B", 8, {"virtual_pipeline": 2}, "2 chunks need pipeline_parallel above 1"),
    ],
)
def test_invalid_sizes_are_refused(model: str, ranks: int, change: dict[str, Any], said: str | None) -> None:
    found = problems(run_of(ranks, **change), model)
    if said is None:
        assert found == []
    else:
        assert any(said in text for text in found), found
        assert all(text.startswith("trainer.megatron.") for text in found)


def test_biases_and_shared_experts_limit_the_split() -> None:
    sinks, shared = (read_shape(published(family, 64, 2, 4, 2, 96, 128)) for family in ("gpt_oss", "glm4_moe"))
    found = [problem.text for problem in _experts(MegatronConfig(expert_tensor_parallel=2), sinks)]
    assert found == ["trainer.megatron.expert_tensor_parallel: 2, but the experts of gpt_oss have biases; use 1"]
    own = MegatronConfig(tensor_parallel=3, sequence_parallel=True, expert_bias_rate=0.001)
    found = [problem.text for problem in _experts(own, shared)]
    assert found == ["trainer.megatron.tensor_parallel: 3 does not divide the shared experts' width 1408"]


def test_delayed_parameter_gathering_requires_its_preconditions() -> None:
    for lacking in ({}, {"overlap_gradients": True, "distributed_optimizer": False}):
        with pytest.raises(ConfigError, match="overlap_parameters: true needs overlap_gradients=true and distributed"):
            run_of(8, overlap_parameters=True, **lacking)
    assert run_of(8, overlap_parameters=True, overlap_gradients=True)


@pytest.mark.parametrize("key", ENDS)
def test_uneven_end_stages_need_several_stages_and_exclude_counting_ends_as_layers(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{key}: 2 layers of one stage, but there is only one; set pipeline_parallel"
    ):
        run_of(8, **{key: 2})
    with pytest.raises(
        ConfigError, match=f"{key}: 2 cannot be combined with account_for_embedding_in_pipeline_split=true"
    ):
        run_of(8, pipeline_parallel=4, **{key: 2}, **COUNTED)
    assert run_of(8, pipeline_parallel=4, **{key: 2})


@pytest.mark.parametrize(("layers", "embedding", "loss"), [(30, True, True), (31, True, False), (32, False, False)])
def test_advice_on_counting_ends_as_layers_is_a_setting_that_divides(layers: int, embedding: bool, loss: bool) -> None:
    """Over 4 stages; the configured setting counts one layer too many."""
    given = {"pipeline_parallel": 4, "account_for_loss_in_pipeline_split": True}
    if layers == 31:  # embedding and loss count the same, and the embedding is tried first
        given["account_for_embedding_in_pipeline_split"] = True
    shape = read_shape(PUBLISHED["Qwen2.5-7B"][0] | {"num_hidden_layers": layers})
    config = run_of(8, **given)
    (problem,) = check_sizes(config, RoleLayout.from_config(config), shape)
    advice = {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
    said = " ".join(f"{key}={'true' if value else 'false'}" for key, value in advice.items())
    assert problem.text.endswith(f"; {said} divides")
    assert split_layers(layers, MegatronConfig(**given | advice)) is not None


def test_the_advised_number_of_chunks_is_the_nearest_that_divides() -> None:
    """12, 13 or 14 layers over 2 stages x 5 chunks do not divide; 12 do with 1, 2, 3 or 6 chunks."""
    shape = read_shape(PUBLISHED["Qwen2.5-7B"][0] | {"num_hidden_layers": 12})
    config = run_of(8, pipeline_parallel=2, virtual_pipeline=5)
    (problem,) = check_sizes(config, RoleLayout.from_config(config), shape)
    assert problem.text.endswith("2 stages x 5 chunks = 10; virtual_pipeline=6 divides")


def test_too_few_samples_for_the_ranks_are_refused() -> None:
    """512 data parallel ranks and 128 responses; 8 data parallel ranks with 2 responses each and chunks of 8."""
    few = problems(run_of(512, num_prompts=16), "Qwen2.5-7B")
    assert "an optimizer step has 128 samples, fewer than the 512 data parallel ranks" in few[0]
    assert problems(run_of(512, num_prompts=64), "Qwen2.5-7B") == [], "one sample for each rank"
    few = problems(run_of(256, num_prompts=2, **LARGEST), "Qwen3-235B-A22B")
    assert "make at most 2; use virtual_pipeline=1 or larger batches" in few[0]
    assert problems(run_of(256, num_prompts=8, **LARGEST), "Qwen3-235B-A22B") == []


@pytest.mark.parametrize(
    ("model", "tensor", "said"),
    [
        ("Qwen3-235B-A22B", 8, None),  # 4 key and value heads, each on two ranks
        ("Qwen2.5-7B", 7, "7 neither divides the 4 key and value heads nor"),
        ("Qwen2.5-7B", 8, "8 does not divide the 28 attention heads"),
        ("Qwen3-30B-A3B", 28, "28 does not divide the 768 numbers of an expert's width"),
    ],
)
def test_tensor_parallel_sizes_of_generators_are_checked(model: str, tensor: int, said: str | None) -> None:
    config = run_of(tensor, generator=tensor)
    found = [text for text in problems(config, model) if text.startswith("layout.generator.tensor_parallel")]
    assert (found == []) if said is None else any(said in text for text in found), found


def test_a_generator_with_more_ranks_than_experts_is_refused() -> None:
    """vLLM refuses it on the ranks (models/qwen3_moe.py)."""
    config = run_of(8, generator=8)
    for experts, found in (
        (8, []),
        (4, ["layout.generator.tensor_parallel: 8 is more than the 4 experts of the model"]),
    ):
        shape = read_shape(PUBLISHED["Qwen3-30B-A3B"][0] | {"num_experts": experts})
        told = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
        assert [text for text in told if "generator" in text] == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "pipeline_parallel": 2}, []),
        (
            {"context_parallel": 2},
            ["context_parallel: 2, but a state of qwen3_next passes from token to token; use 1, or trainer.engine"],
        ),
        (
            {"tensor_parallel": 4, "sequence_parallel": True},
            ["tensor_parallel: 4 is above the 2 key and value heads of the gated attention"],
        ),
    ],
)
def test_sizes_of_a_gated_delta_rule_are_checked(change: dict[str, Any], said: list[str]) -> None:
    config = run_of(8, **change)
    shape = read_shape(WELL_KNOWN["Qwen3-Next-80B-A3B"].config)
    told = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
    assert len(told) == len(said) and all(text in each for text, each in zip(said, told, strict=True)), told


@pytest.mark.slow
def test_key_heads_of_a_gated_delta_rule_divide() -> None:
    shape = read_shape(
        WELL_KNOWN["Qwen3-Next-80B-A3B"].config | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    )
    config = run_of(2, tensor_parallel=2, sequence_parallel=True)
    told = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
    assert told == ["trainer.megatron.tensor_parallel: 2 does not divide the 1 key heads of the delta rule"]
