"""What a rank sends in an optimizer step, by hand: 64 tokens of each data parallel rank in two micro-batches.

The dense model: an embedding of 100 x 32; two layers with q and o of 32 x 32, k and v of 16 x 32, biases of 32 and 2 x
16, three matrices of 48 x 32 and two norms of 32, together 7,808; a last norm of 32. In total 18,848 numbers or 75,392
bytes. States of all tokens: 64 x 32 x 4 = 8,192 bytes.
"""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, parse
from hpcrl.engines.train.deepspeed.traffic import step_traffic as zero_traffic
from hpcrl.engines.train.fsdp2.traffic import step_traffic as fsdp2_traffic
from hpcrl.launch.resources import step_rows
from hpcrl.models.families import read_shape
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.planner.traffic import Sent, StepWork, total_bytes
from hpcrl.planner.trainer import train_plan

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
DENSE = read_shape({"model_type": "qwen2", **SIZES})
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURE = read_shape({"model_type": "qwen3_moe", **SIZES, **EXPERTS})
WORK = StepWork(num_tokens=64, num_micro_batches=2)
ALL = 75_392
STATES = 8_192


def config_of(engine: str, num_ranks: int, dtype: str = "float32", **keys: Any) -> Config:
    trainer = {"engine": engine, "param_dtype": dtype, engine: keys}
    return parse({"trainer": trainer, "layout": {"trainer": {"num_ranks": num_ranks}}})


def sent(engine: str, num_ranks: int, shape: ModelShape = DENSE, **keys: Any) -> dict[tuple[str, str], int]:
    """(what, collective) -> bytes."""
    config = config_of(engine, num_ranks, **keys)
    return summed(train_plan(config).step_traffic(config, shape, num_ranks, WORK))


def summed(parts: list[Sent]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for part in parts:
        key = part.what, part.collective
        found[key] = found.get(key, 0) + part.num_bytes
    return found


GATHERED, SCATTERED, REDUCED = (
    ("parameters", "all_gather"),
    ("gradients", "reduce_scatter"),
    ("gradients", "all_reduce"),
)


def test_the_model_has_the_size_that_was_counted_by_hand() -> None:
    assert DENSE.num_parameters * 4 == ALL


def test_fsdp2_shards_and_copies() -> None:
    assert sent("fsdp2", 1) == {}
    assert sent("fsdp2", 4) == {GATHERED: ALL * 3 // 4, SCATTERED: ALL * 3 // 4}
    assert sent("fsdp2", 4, dtype="bfloat16") == {GATHERED: ALL * 3 // 8, SCATTERED: ALL * 3 // 4}
    # Two copies: half of the gradients is summed over both.
    assert sent("fsdp2", 4, replicas=2) == {GATHERED: ALL // 2, SCATTERED: ALL // 2, REDUCED: ALL // 2}


def test_fsdp2_gathers_a_large_model_in_each_micro_batch_and_its_layers_twice() -> None:
    found = summed(list(fsdp2_traffic(config_of("fsdp2", 2), DENSE, 2, WORK, at_once=False)))
    outside = (100 * 32 + 32) * 4
    assert found == {GATHERED: 2 * (2 * ALL - outside) // 2, SCATTERED: 2 * ALL // 2}


def test_fsdp2_tensor_parallel_gathers_and_reduces_states_twice_a_layer() -> None:
    """Embedding and norms are whole on both ranks: (100 x 32 + 2 x 64 + 32) x 4 bytes of gradients."""
    exchanged = 2 * 2 * 2 * STATES // 2  # layers, pairs, passes
    assert sent("fsdp2", 2, tensor_parallel=2) == {
        REDUCED: 13_440,
        ("activations", "all_gather"): exchanged,
        ("activations", "reduce_scatter"): exchanged,
    }


def test_fsdp2_context_parallel_exchanges_tokens_for_heads() -> None:
    """q and the result 4 x 8, k and v 2 x 8 numbers of each of a rank's tokens; for 4 ranks k and v are repeated."""
    swapped = ("attention", "all_to_all")
    assert sent("fsdp2", 2, context_parallel=2)[swapped] == 2 * 2 * 32 * (2 * 32 + 2 * 16) * 4 // 2
    assert sent("fsdp2", 4, context_parallel=4)[swapped] == 2 * 2 * 16 * (2 * 32 + 2 * 32) * 4 * 3 // 4
    again = sent("fsdp2", 2, context_parallel=2, activation_checkpointing=True)[swapped]
    assert again == 2 * 3 * 32 * (2 * 32 + 2 * 16) * 4 // 2


def test_fsdp2_sends_tokens_to_experts() -> None:
    """Experts of 2 x 4 x 3 x 24 x 32 = 18,432 numbers, and 3,232 + 2 x (2 x 32 x 32 + 2 x 16 x 32 + 4 x 32 + 2 x 32
    + 2 x 8) = 9,792 others. On two ranks, experts are not gathered, and a token's two experts may be on both: states go
    to both and back, in two layers and two passes."""
    others, experts, routed = 9_792 * 4, 2 * 4 * 3 * 24 * 32 * 4, ("experts", "all_to_all")
    assert MIXTURE.num_parameters * 4 == others + experts
    sent_states = 2 * 2 * 2 * 2 * STATES
    assert sent("fsdp2", 2, MIXTURE, expert_parallel=2) == {
        GATHERED: others // 2,
        SCATTERED: others // 2,
        routed: sent_states // 2,
    }
    found = sent("fsdp2", 4, MIXTURE, expert_parallel=2)
    assert found[GATHERED] == found[SCATTERED] == others * 3 // 4 + experts // 2 // 2
    again = sent("fsdp2", 2, MIXTURE, expert_parallel=2, activation_checkpointing=True)
    assert again[routed] == sent_states * 3 // 2 // 2


def test_zero_reduces_at_the_end_or_in_each_micro_batch() -> None:
    assert sent("deepspeed", 2, zero_stage=1) == {GATHERED: ALL // 2, REDUCED: ALL}
    assert sent("deepspeed", 2, zero_stage=2) == {GATHERED: ALL // 2, REDUCED: 2 * ALL}
    # All parameters are small, and stay gathered.
    assert sent("deepspeed", 2, zero_stage=3) == {GATHERED: ALL // 2, SCATTERED: 2 * ALL // 2}
    config = config_of("deepspeed", 2)
    found = summed(list(zero_traffic(config, DENSE, 2, WORK, stage=3, persistent=160)))
    assert found == {GATHERED: (160 + 2 * 2 * (18_848 - 160)) * 4 // 2, SCATTERED: 2 * ALL // 2}


def test_zero_with_adapters_sends_only_their_gradients() -> None:
    """Rank 2 at q: 2 x 32 + 32 x 2 numbers in each of two layers."""
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    trainer = {"engine": "deepspeed", "param_dtype": "float32", "lora": lora, "deepspeed": {"zero_stage": 1}}
    config = parse({"trainer": trainer, "layout": {"trainer": {"num_ranks": 2}}})
    found = summed(train_plan(config).step_traffic(config, DENSE, 2, WORK))
    assert found == {GATHERED: 256 * 4 // 2, REDUCED: 256 * 4}


def test_megatron_data_parallel_with_and_without_a_distributed_optimizer() -> None:
    """The vocabulary is padded to 128 rows."""
    padded = ALL + 28 * 32 * 4
    assert sent("megatron", 2) == {GATHERED: padded // 2, SCATTERED: padded // 2}
    assert sent("megatron", 2, distributed_optimizer=False) == {REDUCED: padded}


@pytest.mark.parametrize(("recompute", "passes"), [("selective", 2), ("full", 3)])
def test_megatron_tensor_parallel_reduces_states_twice_a_layer_and_at_both_ends(recompute: str, passes: int) -> None:
    keys: dict[str, Any] = {"tensor_parallel": 2, "recompute": recompute}
    sums = passes * 2 * 2 + 2
    assert sent("megatron", 2, **keys) == {("activations", "all_reduce"): sums * STATES}
    assert sent("megatron", 2, sequence_parallel=True, **keys) == {
        ("activations", "all_gather"): (sums + 2 * 2) * STATES // 2,  # inputs again in the backward pass
        ("activations", "reduce_scatter"): sums * STATES // 2,
    }


def test_megatron_stages_send_states_forward_and_gradients_back() -> None:
    """Tied: the gradient of 128 x 32 numbers of the embedding is summed over both stages."""
    embedding = 128 * 32 * 4
    assert sent("megatron", 2, pipeline_parallel=2) == {REDUCED: embedding, ("stages", "send"): STATES}
    four = read_shape({"model_type": "qwen2", **SIZES, "num_hidden_layers": 4})
    keys = {"pipeline_parallel": 2, "virtual_pipeline": 2}
    assert sent("megatron", 2, four, **keys) == {REDUCED: embedding, ("stages", "send"): 3 * STATES}
    untied = read_shape({"model_type": "qwen2", **SIZES, "num_hidden_layers": 4, "tie_word_embeddings": False})
    assert sent("megatron", 4, untied, pipeline_parallel=4) == {("stages", "send"): 2 * STATES}  # an inner stage


def test_megatron_context_parallel_gathers_keys_twice() -> None:
    keys = 64 * 2 * 16 * 4 * 2  # tokens, k and v, their width, layers
    found = sent("megatron", 2, context_parallel=2)
    assert found["attention", "all_gather"] == 2 * keys // 2
    assert found["attention", "reduce_scatter"] == keys // 2


def test_megatron_experts() -> None:
    """Outside of experts 4,096 + 32 + 2 x (4 x 32 x 32 - 1,024 + 16 + 64 + 128) = 10,688 numbers; each of 64 tokens to
    two experts and back, in two layers and two passes."""
    routed = 2 * 2 * 2 * STATES
    assert sent("megatron", 2, MIXTURE, expert_parallel=2) == {
        GATHERED: 2 * 10_688 * 4 // 2,  # once for each of two optimizers
        SCATTERED: 10_688 * 4 // 2,
        ("experts", "all_to_all"): 2 * routed // 2,
    }
    within = sent("megatron", 2, MIXTURE, expert_tensor_parallel=2)
    assert within["experts", "all_gather"] == within["experts", "reduce_scatter"] == 2 * routed // 2
    overlapped = {"overlap_gradients": True, "overlap_parameters": True}
    assert sent("megatron", 2, MIXTURE, expert_parallel=2, **overlapped)[GATHERED] == 10_688 * 4 // 2


def test_gloo_replaces_reduce_scatter() -> None:
    parts = [Sent("gradients", "reduce_scatter", 10), Sent("parameters", "all_gather", 3)]
    assert (total_bytes(parts), total_bytes(parts, gloo=True)) == (13, 23)


def test_work_of_a_step_with_sequences_of_maximum_length() -> None:
    """96 rows of 3,000 tokens over 8 ranks; two fit a micro-batch of 8,000."""
    config = parse(
        {
            "data": {"max_prompt_tokens": 1000},
            "rollout": {"num_prompts": 12, "group_size": 8, "max_new_tokens": 2000},
            "trainer": {"max_tokens_per_micro_batch": 8_000},
        }
    )
    assert StepWork.of(config, 8) == StepWork(12 * 3000, 6)


def test_unknown_traffic_is_not_planned() -> None:
    config = config_of("deepspeed", 2, zero_stage=3, activation_checkpointing=True)
    with pytest.raises(CannotPlanError, match="ZeRO-3"):
        train_plan(config).step_traffic(config, DENSE, 2, WORK)
    assert list(step_rows(config, RoleLayout.from_config(config), DENSE)) == []


def test_the_plan_has_a_row_for_traffic() -> None:
    config = config_of("fsdp2", 2)
    [(label, text)] = step_rows(config, RoleLayout.from_config(config), DENSE)
    assert (label, text) == (
        "step",
        "an optimizer step sends at most 73.6 KiB from each trainer rank to the others (parameters 36.8 KiB, gradients "
        "36.8 KiB): 0.0 s if all of it takes links of 50 GB/s (cluster.link_gb_per_s)",
    )
    alone = config_of("fsdp2", 1)
    assert list(step_rows(alone, RoleLayout.from_config(alone), DENSE)) == []
