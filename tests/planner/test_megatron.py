"""Megatron ranks: numbers worked out by hand for Qwen3-235B-A22B on 256 GPUs, and Megatron-Core's own layer counts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.engines.train.megatron import spec
from hpcrl.engines.train.megatron.activations import megatron_activations
from hpcrl.engines.train.megatron.memory import (
    megatron_parts,
    micro_batches_in_flight,
    num_micro_batches,
    rank_numbers,
    stage_parameters,
    stage_parts,
)
from hpcrl.engines.train.megatron.parallel import split_layers
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.models.families import read_shape
from hpcrl.models.shape import ModelShape
from hpcrl.planner.activations import Tokens
from hpcrl.planner.generator import rollout_transfer_parts
from hpcrl.planner.trainer import checkpoint_bytes, critic_shape
from tests.planner.models import PUBLISHED
from tests.planner.published import WELL_KNOWN
from tests.planner.test_parallel import COUNTED, LARGEST, run_of

FIRST, LAST = spec.ENDS
SIZES = MegatronConfig(**LARGEST)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_shape(PUBLISHED["Qwen3-235B-A22B"][0])


def by_name(config: Config, shape: ModelShape, stage: int) -> dict[str, int]:
    return {part.name: part.num_bytes for part in stage_parts(config, shape, 256)[stage]}


def test_bytes_of_an_inner_stage_by_hand(shape: ModelShape) -> None:
    """TP4 PP8 VPP6 EP8 on 256 GPUs: 8 copies of the model, 4 of each expert.

    A layer on a rank: q 4096 x 8192 and o as much, k and v 4096 x 512, all over 4; norms 2 x 4096 and 2 x 128 and the
    router 128 x 4096 whole; 128 / 8 = 16 experts of 3 x 4096 x 1536. An inner stage has 12 layers.
    """
    dense = 12 * ((2 * 4096 * 8192 + 2 * 4096 * 512) // 4 + 2 * 4096 + 2 * 128 + 128 * 4096)
    experts = 12 * 16 * 3 * 4096 * 1536
    assert (dense, experts) == (220_302_336, 3_623_878_656) == rank_numbers(shape, SIZES)[3]
    parts = by_name(run_of(256, **LARGEST), shape, 3)
    assert parts["weights"] == 7_688_361_984  # bf16
    assert parts["gradients"] == 15_376_723_968  # fp32
    assert parts["optimizer"] == 12 * (220_302_336 // 8 + 3_623_878_656 // 4) == 11_202_089_472
    assert parts["logits"] == 0


def test_bytes_of_the_first_and_the_last_stage_by_hand(shape: ModelShape) -> None:
    """11 layers each; the vocabulary padded to 152064 rows over 4 ranks; the last one has the final norm too."""
    dense, experts = 11 * 18_358_528, 11 * 16 * 3 * 4096 * 1536
    assert rank_numbers(shape, SIZES)[0] == (dense + 152_064 * 4096 // 4, experts)
    assert rank_numbers(shape, SIZES)[7] == (dense + 152_064 * 4096 // 4 + 4096, experts)


def test_ranks_of_a_model_copy_hold_every_parameter_once(shape: ModelShape) -> None:
    """Over tensor and expert ranks: unsharded parameters are on each of 4 ranks, so the sum is the model plus three
    further copies of these."""
    stages = rank_numbers(shape, SIZES)
    whole = sum(parameter.size for parameter in shape.parameters if parameter.split == "whole")
    padding = 2 * (152_064 - 151_936) * 4096
    total = sum(4 * dense + 8 * experts for dense, experts in stages)
    assert total == shape.num_parameters + 3 * whole + padding


def test_a_tied_head_is_a_second_embedding_on_the_last_stage() -> None:
    shape = read_shape(PUBLISHED["Qwen2.5-0.5B"][0])
    first, last = (dense for dense, _ in rank_numbers(shape, MegatronConfig(pipeline_parallel=2)))
    assert last - first == shape.hidden_size  # the final norm
    assert rank_numbers(shape, MegatronConfig())[0][0] == shape.num_parameters  # 1187 x 128 rows: no padding


def test_a_critics_last_stage_has_one_row_instead_of_a_vocabulary() -> None:
    shape = read_shape(PUBLISHED["Qwen2.5-0.5B"][0])  # tied
    critic, sizes = critic_shape(Config(), shape), MegatronConfig(pipeline_parallel=2)
    policy, found = (rank_numbers(which, sizes) for which in (shape, critic))
    assert found[0] == policy[0]
    assert policy[1][0] - found[1][0] == 1187 * 128 * shape.hidden_size - (shape.hidden_size + 1)


def test_no_rank_copies_all_weights_to_send_them(shape: ModelShape) -> None:
    """On a trainer rank two steps of 256 MiB; on a generator rank of eight an eighth of that, and the largest tensor,
    gate and up of the 128 experts of a layer, 2 x 1536 x 4096 each in bf16. Nothing in host memory."""
    config = run_of(256, generator=8, **LARGEST)
    config = config.model_copy(update={"generator": config.generator.model_copy(update={"dtype": "bfloat16"})})
    parts = rollout_transfer_parts(config, RoleLayout.from_config(config), shape, ("trainer", "generator"))
    assert [(part.role, part.num_bytes, part.on_host) for part in parts] == [
        ("trainer", 2 * (256 << 20), False),
        ("generator", 2 * (32 << 20) + 2 * 128 * 3072 * 4096, False),
    ]


def test_the_stages_together_send_every_parameter_once(shape: ModelShape) -> None:
    names = [p.name for stage in stage_parameters(shape, SIZES) for p in stage]
    assert len(names) == len(set(names)) == len(shape.parameters)


def test_activations_by_hand(shape: ModelShape) -> None:
    """Bytes a token of a layer, bf16, 4 ranks, sequence parallel: two norms in and out 4 x 4096 x 2 / 4; q, k, v, and
    the output of attention 2 x (8192 + 512) x 2 / 4, its log-sum 4 x 64 / 4, q and k before their norm 8704 x 2 / 4;
    each of 8 experts its input, gate, up and product (4096 + 3 x 1536) x 2 and two positions, over 4 ranks; router
    scores twice in fp32."""
    token = 8192 + 8704 + 64 + 4352 + (8 * ((4096 + 3 * 1536) * 2 + 16) + 2 * 4 * 128) // 4
    assert token == 56_416
    tokens = Tokens(18_432, 18_432, 18_432)
    assert megatron_activations(shape, SIZES, tokens, [0, 1], 2) == (2 * 18_432 * token, 0)
    full = SIZES.model_copy(update={"recompute": "full"})
    assert megatron_activations(shape, full, tokens, [0, 1], 2) == (2 * 18_432 * 4096 * 2 // 4, 18_432 * token)


def test_micro_batches_in_flight_by_stage() -> None:
    plain = MegatronConfig(pipeline_parallel=8)
    assert [micro_batches_in_flight(plain, stage, 64) for stage in (0, 3, 7)] == [8, 5, 1]
    assert micro_batches_in_flight(plain, 0, 4) == 4
    assert [micro_batches_in_flight(SIZES, stage, 64) for stage in (0, 7)] == [2 * 7 + 5 * 8 + 1, 5 * 8 + 1]
    assert micro_batches_in_flight(SIZES, 0, 8) == 48  # all chunks of all micro-batches


def test_numbers_of_micro_batches_are_multiples_of_the_stages(shape: ModelShape) -> None:
    """128 prompts x 8 / 8 copies = 128 samples of 1280 tokens, 163840 tokens in micro-batches of 16384: 10, so 16."""
    assert num_micro_batches(run_of(256, **LARGEST), 256) == 16
    assert num_micro_batches(run_of(256, **LARGEST | {"virtual_pipeline": 1, "pipeline_parallel": 8}), 256) == 10


def test_the_stage_with_the_most_memory_counts(shape: ModelShape) -> None:
    config = run_of(256, **LARGEST)
    totals = [sum(part.num_bytes for part in parts) for parts in stage_parts(config, shape, 256)]
    assert sum(part.num_bytes for part in megatron_parts(config, shape, 256)) == max(totals) > min(totals)


def test_bytes_of_a_checkpoint_by_hand(shape: ModelShape) -> None:
    """bf16 weights, an fp32 master copy and two moments."""
    assert checkpoint_bytes(run_of(256, **LARGEST), shape) == 14 * 235_093_634_560


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed (extra: megatron)")
@pytest.mark.parametrize(
    ("layers", "change"),
    [
        (94, LARGEST),
        (94, {"pipeline_parallel": 4, **COUNTED}),
        (32, {"pipeline_parallel": 4, "virtual_pipeline": 2}),
        (31, {"pipeline_parallel": 2, "virtual_pipeline": 4, "account_for_loss_in_pipeline_split": True}),
        (15, {"pipeline_parallel": 4, "account_for_embedding_in_pipeline_split": True}),
        (14, {"pipeline_parallel": 4, FIRST: 2}),
        (14, {"pipeline_parallel": 4, LAST: 5}),
        (26, {"pipeline_parallel": 4, "virtual_pipeline": 2, FIRST: 4, LAST: 6}),
        (6, {"pipeline_parallel": 2, "virtual_pipeline": 2, FIRST: 2}),
        (5, {"pipeline_parallel": 2, FIRST: 2, LAST: 3}),
    ],
)
def test_layers_are_split_like_megatron_core_splits_them(layers: int, change: dict[str, Any]) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    sizes = MegatronConfig(**change)
    chunks = sizes.virtual_pipeline
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=sizes.pipeline_parallel,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **{key: getattr(sizes, key) for key in (*spec.COUNTED, *spec.ENDS)},
        pipeline_dtype="bf16",
    )
    stages = split_layers(layers, sizes)
    assert stages is not None
    for number, stage in enumerate(stages):
        for chunk, own in enumerate(stage):
            virtual = chunk if chunks > 1 else None
            count = get_num_layers_to_build(config, virtual, number)
            start = get_transformer_layer_offset(config, virtual, number)
            assert own == tuple(range(start, start + count))


@pytest.mark.slow
def test_numbers_of_a_rank_with_gated_delta_rules_by_hand() -> None:
    """Qwen3-Next-80B-A3B on 2 tensor-parallel x 2 expert-parallel ranks. A mixer on a rank: 8 key heads with 16 value
    heads, so a projection of 2 x 8 x 128 + 2 x 16 x 128 + 2 x 16 rows, a convolution of 4 numbers for 2 x 8 x 128 + 16
    x 128 channels, two numbers a value head, the output's matrix; and the norm of 128 numbers, whole."""
    shape = read_shape(WELL_KNOWN["Qwen3-Next-80B-A3B"].config)
    rows = 2 * 8 * 128 + 16 * 128
    mixer = 2048 * (rows + 16 * 128 + 2 * 16) + 4 * rows + 2 * 16 + 16 * 128 * 2048 + 128
    attention = 2048 * (2 * 8 * 256 + 2 * 256) + 8 * 256 * 2048 + 2 * 256
    every = 2 * 2048 + 512 * 2048 + 3 * 256 * 2048 + 2048  # norms, router, a shared expert and its gate
    vocabulary = 2 * 2048 * 151_936 // 2 + 2048 + 2 * 2048 * 64  # padded to 152064 rows
    dense = 36 * mixer + 12 * attention + 48 * every + vocabulary
    sizes = MegatronConfig(tensor_parallel=2, sequence_parallel=True, expert_parallel=2)
    assert rank_numbers(shape, sizes) == [(dense, 48 * 256 * 3 * 2048 * 512)]
