"""The plan of FSDP2 ranks against tensors of the real engine, on one rank and on two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import parse
from hpcrl.engines import blocked_attention
from hpcrl.engines.train.fsdp2 import engine, gathered, logits, packed_attention
from hpcrl.engines.train.fsdp2 import memory as fsdp2
from hpcrl.engines.train.fsdp2.exchange import Axis
from hpcrl.engines.train.fsdp2.row_mixers import mixers_of
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.fsdp2.tensor_parallel import TensorParallel
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.models.from_transformers import empty_model, source_of
from hpcrl.models.shape import ModelShape
from hpcrl.planner import activations, layer_memory
from hpcrl.planner.activations import Tokens, fsdp2_activations, unmeasured
from hpcrl.planner.layer_memory import LayerMemory, measured_layers
from hpcrl.planner.traffic import StepWork
from hpcrl.planner.trainer import (
    checkpoint_bytes,
    critic_checkpoint_bytes,
    critic_parts,
    reference_parts,
    train_plan,
    trainer_parts,
)
from tests.engines.architectures import make_folder, tiny_config
from tests.engines.mtp_reference import folder_with_mtp
from tests.engines.worlds import FAMILIES, make_model_folder, run_ranks
from tests.planner.measuring import held_bytes, make_engine, saved_bytes, step_peak
from tests.planner.models import PUBLISHED, published
from tests.planner.published import WELL_KNOWN


def shape_of(folder: Path) -> ModelShape:
    return read_shape(inspect_model(folder).config)


def planned_parts(folder: Path, dtype: str, num_ranks: int, **changes: Any) -> dict[str, int]:
    own = {key: changes.pop(key) for key in FSDP2Config.model_fields if key in changes}
    model = {"dtype": dtype, "path": str(folder), "mtp": changes.pop("mtp", "keep")}
    config = parse({"model": model, "trainer": {"param_dtype": dtype, "fsdp2": own} | changes})
    parts = trainer_parts(config, shape_of(folder), num_ranks)
    names = ("weights", "optimizer", "gradients")
    return {name: next(p.num_bytes for p in parts if p.name == name and "update" in p.during) for name in names}


def test_planned_constants_match_the_engine() -> None:
    assert engine.SMALL_MODEL_BYTES == gathered.SMALL_MODEL_BYTES and logits.BLOCK_NUMBERS == activations.LOGITS_BLOCK
    assert blocked_attention.QUERY_BLOCK == activations.QUERY_BLOCK
    assert blocked_attention.SINK_COLUMNS == layer_memory.SINK_COLUMNS
    assert packed_attention.MAX_MASKED == activations.MASKED_PAIRS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_holds_exactly_the_planned_bytes(family: str, dtype: str, tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder(family, tmp_path / family, tie_word_embeddings=family != "llama")
    held = held_bytes(folder, dtype)
    del held["snapshot"]
    assert held == planned_parts(folder, dtype, 1)
    assert held != planned_parts(folder, dtype, 2)  # negative control


def test_adapters_and_frozen_weights_are_planned(tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen3", tmp_path / "model")
    changes: dict[str, Any] = {"param_dtype": "bfloat16", "lora": {"rank": 3, "target_modules": ["q_proj", "up_proj"]}}
    held = held_bytes(folder, "float32", **changes)
    del held["snapshot"]
    planned = planned_parts(folder, "float32", 1, **changes)
    assert held == planned
    whole = planned_parts(folder, "float32", 1, param_dtype="bfloat16")
    assert planned["weights"] < 0.7 * whole["weights"] and planned["optimizer"] < 0.2 * whole["optimizer"]


SPLITS = ({"tensor_parallel": 2}, {"context_parallel": 2}, {"replicas": 2})
APART = {"expert_parallel": 2}
NUM_ROWS, LENGTH = 4, 48


def planned_activations(folder: Path, **own: int) -> int:
    """Bytes kept of one micro-batch on one rank."""
    section, shape = FSDP2Config(**own), shape_of(folder)
    tokens = Tokens(NUM_ROWS * LENGTH, NUM_ROWS * (LENGTH - 1), LENGTH).shared(section.ranks_of_a_row)
    others = fsdp2.of_other_ranks(section, shape, tokens, 4, shape.num_layers)
    return fsdp2_activations(shape, tokens, 4, False) + others


def _held_by_splits(folder: Path, split: Path, splits: Sequence[dict[str, int]]) -> dict[str, dict[str, int]]:
    results = {"": held_bytes(folder, "float32")}
    for own in splits:
        results[str(own)] = held_bytes(split, "float32", **own)
        del results[str(own)]["snapshot"]  # ranks with equal parts share the writing
        results[str(own)]["saved"] = saved_bytes(make_engine(split, **own), NUM_ROWS, LENGTH)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_two_ranks_hold_exactly_the_planned_bytes(family: str, tmp_path: Path) -> None:
    """An odd vocabulary and three key heads of width 9, so that blocks of rows are uneven."""
    changes = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "vocab_size": 101}
    folder = make_model_folder(family, tmp_path / family, num_experts=5, **changes)
    split = make_model_folder(family, tmp_path / "split", vocab_size=101, **WIDTHS)
    shape = shape_of(folder)
    splits = (*SPLITS, APART) if family == "qwen3_moe" else SPLITS
    held = run_ranks(2, _held_by_splits, folder, split, splits)
    for own in splits:
        saved = sum(result[str(own)].pop("saved") for result in held) / 2  # a rank's experts may be chosen more often
        assert held[0][str(own)] == planned_parts(split, "float32", 2, **own)
        assert saved == pytest.approx(planned_activations(split, **own), rel=0.1)
    assert planned_parts(split, "float32", 2, replicas=2) != planned_parts(split, "float32", 2)  # negative control
    assert planned_activations(split, context_parallel=2) < 0.6 * planned_activations(split)  # as above
    first, second = (result[""] for result in held)
    written = first.pop("snapshot") + second.pop("snapshot")
    assert first == planned_parts(folder, "float32", 2)
    assert second["weights"] == 4 * fsdp2.shard_size(shape, 2, rank=1) < first["weights"]
    assert first["weights"] + second["weights"] == 4 * shape.num_parameters
    planned = checkpoint_bytes(parse({}), shape)
    header = 2048  # each tensor of each rank is an archive of its own
    assert planned <= written <= planned + header * 2 * 4 * len(shape.parameters)


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "falcon_h1", "lfm2", "jamba"])
def test_recurrent_mixers_are_planned_whole_on_tensor_parallel_ranks(family: str) -> None:
    content = tiny_config(family).to_dict()
    planned = fsdp2.shape_of_rank(FSDP2Config(tensor_parallel=2), read_shape(content))
    hf = empty_model(source_of(content))
    mixers = tuple(f"{name}." for name in mixers_of(hf))
    TensorParallel(hf, Axis(size=2))
    held = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    parts = {parameter.name: parameter.shape for parameter in planned.parameters if parameter.name in held}
    assert mixers and parts == {name: held[name] for name in parts} and parts.keys() == held.keys()


WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 24}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_activations_are_within_a_tenth_of_the_plan(
    family: str, compute: str, checkpointing: bool, tmp_path: Path, world_of_one: None
) -> None:
    window = {"sliding_window": 4096} if family == "gemma2" else {}
    folder = make_model_folder(family, tmp_path / family, num_hidden_layers=3, **WIDTHS, **window)
    shape, tokens = shape_of(folder), Tokens(4 * 48, 4 * 47, 48)
    trainer = make_engine(folder, param_dtype=compute, activation_checkpointing=checkpointing)
    saved = saved_bytes(trainer, 4, 48)
    num_bytes = 4 if compute == "float32" else 2
    planned = fsdp2_activations(shape, tokens, num_bytes, checkpointing)
    if checkpointing:
        # The hooks do not see the cosines and sines that each layer is called with.
        planned -= 2 * tokens.total * shape.head_dim * num_bytes
    assert saved == pytest.approx(planned, rel=0.1)


def test_the_tolerance_detects_a_longer_sequence(tmp_path: Path, world_of_one: None) -> None:
    """Negative control: the tolerance of a tenth detects a fifth more tokens."""
    folder = make_model_folder("qwen3", tmp_path / "qwen3", **WIDTHS)
    saved = saved_bytes(make_engine(folder), 4, 60)
    assert saved != pytest.approx(fsdp2_activations(shape_of(folder), Tokens(192, 188, 48), 4, False), rel=0.1)


TALL: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}


def planned_peak(folder: Path, num_ranks: int, num_rows: int, length: int, **trainer: Any) -> int:
    """Most bytes of a train step beyond weights and optimizer."""
    own, mtp = {key: trainer.pop(key) for key in FSDP2Config.model_fields if key in trainer}, trainer.pop("mtp", "keep")
    settings = {"logits_chunk_tokens": 16, "max_tokens_per_micro_batch": num_rows * length, "fsdp2": own, **trainer}
    rollout = {"max_new_tokens": length - 1, "num_prompts": num_ranks, "group_size": 2 * num_rows}
    model = {"path": str(folder), "mtp": mtp}
    config = parse({"model": model, "trainer": settings, "rollout": rollout, "data": {"max_prompt_tokens": 1}})
    parts = trainer_parts(config, shape_of(folder), num_ranks)
    phases = ("train", "update")
    return max(sum(p.num_bytes for p in parts if phase in p.during and set(p.during) <= {*phases}) for phase in phases)


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True], ids=["gathered", "layer by layer"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_checkpointing": True},
        {"param_dtype": "bfloat16", "activation_checkpointing": True},
        {"param_dtype": "bfloat16", "head_dtype": "float32"},
    ],
    ids=str,
)
def test_a_step_needs_no_more_memory_than_planned(
    settings: dict[str, Any], large: bool, tmp_path: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder("qwen3", tmp_path / "qwen3", vocab_size=1000, **TALL)
    for module in (engine, gathered):
        monkeypatch.setattr(module, "SMALL_MODEL_BYTES", 0 if large else 4 << 30)
    peak = step_peak(folder, tmp_path, large, 8, 64, **settings)
    assert 1.0 <= planned_peak(folder, 1, 8, 64, **settings) / peak <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True], ids=["gathered", "layer by layer"])
@pytest.mark.parametrize("length", [4, 64])
def test_a_step_on_two_ranks_needs_no_more_memory_than_planned(
    length: int, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak depends on timing here: each of gloo's two threads may still hold its last collective, at most a
    gathered layer and its copy."""
    folder = make_model_folder("qwen3", tmp_path / "qwen3", vocab_size=1000, **TALL)
    peaks = run_ranks(2, step_peak, folder, tmp_path, large, 8, length)
    monkeypatch.setattr(gathered, "SMALL_MODEL_BYTES", 0 if large else 4 << 30)
    planned = planned_peak(folder, 2, 8, length)
    held = 2 * 2 * 4 * sum(parameter.size for parameter in shape_of(folder).of_layer(0)) * large
    assert max(peaks) <= planned + held and planned / max(peaks) <= (1.4 if length == 4 else 1.1)


def test_the_plan_says_when_formulas_stand_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({})
    shape = read_shape(published("seed_oss", 5120, 1, 80, 8, 27648, 155136, head_dim=128))
    monkeypatch.setattr(activations, "measured_layers", lambda *_: (LayerMemory(1, 0, 2, 1, ()),))
    assert list(unmeasured(config, shape)) == []
    monkeypatch.setattr(activations, "measured_layers", lambda *_: ())
    ((_, text),) = unmeasured(config, shape)
    assert text == "note: layers of seed_oss did not run on the meta device; memory is that of Llama-like layers"
    assert list(unmeasured(config, read_shape(PUBLISHED["Llama-3-8B"][0]))) == []  # which has formulas of its own


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, marks=pytest.mark.soak),
        pytest.param("qwen2_moe", True, marks=pytest.mark.soak),
    ],
)
def test_a_step_of_a_measured_family_needs_no_more_memory_than_planned(
    family: str, checkpointing: bool, tmp_path: Path, world_of_one: None
) -> None:
    """Families without formulas: their layers' memory is measured on the meta device."""
    folder = make_folder(family, tmp_path / family)
    shape, own = shape_of(folder), {"activation_checkpointing": checkpointing}
    assert len(measured_layers(shape.source, 64, "float32")) == shape.num_layers  # type: ignore[arg-type]
    peak = step_peak(folder, tmp_path, False, 8, 64, **own)
    assert 1.0 <= planned_peak(folder, 1, 8, 64, **own) / peak <= 1.1


IN_SWEEP = """
    deepseek_v2 deepseek_v3 ernie4_5_moe falcon_h1 gemma3_text gemma4_text glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
    granitemoehybrid hunyuan_v1_moe lfm2 lfm2_moe llama4_text minimax_m2 nemotron_h olmo3 qwen2_moe qwen3_5_moe_text
    qwen3_5_text qwen3_next seed_oss
"""
SWEPT = product(IN_SWEEP.split(), ("float32", "bfloat16"), (False, True))
"""Families, their dtype, and whether activations are recomputed."""
KNOWN_LOW = {("glm_moe_dsa", "bfloat16", False): 0.995}
"""Least shares of the peak that are planned, where they are below 1. The cause is not known: the peak is in the forward
pass, in fp32 scores of the indexer."""


@pytest.mark.parametrize(
    ("family", "compute", "checkpointing"),
    [
        pytest.param("gemma3_text", "float32", True, marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in SWEPT),
    ],
)
def test_a_step_with_other_attention_or_recurrences_needs_no_more_memory_than_planned(
    family: str, compute: str, checkpointing: bool, tmp_path: Path, world_of_one: None
) -> None:
    """Planned are Gemma 3's norms, scores of latent attention that CPUs keep, copies of rows for recurrences, keys for
    attention sinks, masks, and those gradients of parameters that exist at the layer's peak."""
    own = {"activation_checkpointing": checkpointing, "param_dtype": compute}
    folder = make_folder(family, tmp_path / family)
    peak = step_peak(folder, tmp_path, False, 8, 64, **own)
    least = KNOWN_LOW.get((family, compute, checkpointing), 1.0)
    assert least <= planned_peak(folder, 1, 8, 64, **own) / peak <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["seed_oss", "olmo2"])
def test_the_final_norms_gradients_are_planned(family: str, tmp_path: Path, world_of_one: None) -> None:
    """In bfloat16, where the head is small, the peak of a step is in the final norm's backward pass."""
    folder = make_folder(family, tmp_path / family)
    peak = step_peak(folder, tmp_path, False, 8, 64, param_dtype="bfloat16")
    assert 1.0 <= planned_peak(folder, 1, 8, 64, param_dtype="bfloat16") / peak <= 1.1


MTP = {"glm4_moe": 1, "deepseek_v3": 3, "qwen3_5_text": 2}


def test_the_mtp_layer_of_deepseek_v3_is_planned() -> None:
    """Its README_WEIGHTS.md: 11.5B parameters beside embedding and head. In a checkpoint with its moments; of the
    policy alone."""
    train, keep = (parse({"model": {"path": "/models/deepseek", "mtp": mtp}}) for mtp in ("train", "keep"))
    shape = read_shape(WELL_KNOWN["DeepSeek-V3"].config)
    added = checkpoint_bytes(train, shape) - checkpoint_bytes(keep, shape)
    assert added / (3 * 4) == pytest.approx(11.5e9, rel=0.01)
    assert critic_checkpoint_bytes(train, shape) == critic_checkpoint_bytes(keep, shape)
    assert reference_parts(train, shape, 64) == reference_parts(keep, shape, 64)
    assert critic_parts(train, shape, 64) == critic_parts(keep, shape, 64)
    with_layer, without = (train_plan(each).step_traffic(each, shape, 64, StepWork(1000, 4)) for each in (train, keep))
    assert sum(sent.num_bytes for sent in with_layer) > 1.01 * sum(sent.num_bytes for sent in without)


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP)
def test_mtp_layers_are_planned_exactly(family: str, tmp_path: Path, world_of_one: None) -> None:
    """Weights, gradients and optimizer, beyond those of the policy."""
    folder = folder_with_mtp(family, tmp_path / family, MTP[family])
    held, planned = (
        [find(folder, "float32", *ranks, mtp=mtp, optimizer="muon") for mtp in ("train", "keep")]
        for find, ranks in ((held_bytes, ()), (planned_parts, (1,)))
    )
    for name in planned[0]:
        assert held[0][name] - held[1][name] == planned[0][name] - planned[1][name] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "large"),
    [
        ("glm4_moe", {"param_dtype": "bfloat16"}, True),
        ("deepseek_v3", {}, False),
        ("qwen3_5_text", {"activation_checkpointing": True}, False),
        pytest.param("glm4_moe", {"activation_checkpointing": True}, False, marks=pytest.mark.soak),
        pytest.param("glm4_moe", {"param_dtype": "bfloat16"}, False, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", {"activation_checkpointing": True}, False, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", {"param_dtype": "bfloat16"}, True, marks=pytest.mark.soak),
        pytest.param("qwen3_5_text", {}, False, marks=pytest.mark.soak),
        pytest.param("qwen3_5_text", {"param_dtype": "bfloat16"}, True, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_step_with_mtp_layers_needs_no_more_memory_than_planned(
    family: str,
    settings: dict[str, Any],
    large: bool,
    tmp_path: Path,
    world_of_one: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 96, "vocab_size": 1000, "moe_intermediate_size": 64}
    folder = folder_with_mtp(family, tmp_path / family, MTP[family], **sizes)
    for module in (engine, gathered):
        monkeypatch.setattr(module, "SMALL_MODEL_BYTES", 0 if large else 4 << 30)
    peak = step_peak(folder, tmp_path, large, 8, 64, mtp="train", **settings)
    assert 1.0 <= planned_peak(folder, 1, 8, 64, mtp="train", **settings) / peak <= 1.1
