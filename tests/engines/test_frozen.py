"""Frozen parameters (trainer.freeze): parts of vision-language models, layers, embeddings and routers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from hpcrl.config import TrainerConfig, parse
from hpcrl.config.abilities import check_parts
from hpcrl.config.reading import ConfigError
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.families import read_shape
from hpcrl.planner.adapters import check_frozen, frozen
from hpcrl.planner.trainer import checkpoint_bytes, trainer_parts
from hpcrl.spec.weight_layout import TensorShards, keepable
from tests.checkpoint.writing import write_files
from tests.engines.test_images_on_ranks import STEPS, WEIGHTED, batch_for, engine_of, part_of, stepped, zero_of
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, run_ranks
from tests.vlm import make_vlm

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("qwen3_vl", tmp_path_factory.mktemp("vlm") / "qwen3_vl")


def part(name: str) -> str:
    return "merger" if "merger" in name else "vision" if "visual" in name else "decoder"


def frozen_engine(folder: Path, *parts: str, **keys: Any) -> FSDP2Engine:
    return engine_of(folder, freeze=list(parts), **STEPS, **keys)


@pytest.mark.parametrize("parts", [("vision",), ("merger",), ("vision", "merger")], ids="+".join)
def test_only_other_parts_are_trained(parts: tuple[str, ...], folder: Path, world_of_one: None) -> None:
    engine, whole = frozen_engine(folder, *parts), batch_for(folder)
    assert all(held.frozen == (part(held.name) in parts) for held in engine.weight_layout())
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    after = stepped(engine, whole)
    assert after.keys() == before.keys()
    changed = {part(name) for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"vision", "merger", "decoder"} - set(parts)
    trained = [p for name, p in engine.model.named_parameters() if part(name) not in parts]
    assert engine.optimizer is not None and set(engine.optimizer.state) == set(trained)
    assert engine.config_summary()["num_trained"] == sum(p.numel() for p in trained) < engine.num_parameters
    engine.accumulate(*part_of(engine, whole), WEIGHTED, norms_of(whole))
    assert all((p.grad is None) == (part(name) in parts) for name, p in engine.model.named_parameters())


def test_a_frozen_tower_keeps_no_activations(folder: Path, world_of_one: None) -> None:
    for parts, kept in ((), (True, True)), (("vision",), (False, True)), (("vision", "merger"), (False, False)):
        engine = frozen_engine(folder, *parts)
        visual: Any = engine.model.hf.model.visual
        seen: list[Tensor] = []
        for module in (visual.blocks[1], visual.merger):
            module.register_forward_hook(lambda _, given, output, seen=seen: seen.append(output))
        engine.accumulate(*part_of(engine, whole := batch_for(folder)), WEIGHTED, norms_of(whole))
        assert tuple(output.requires_grad for output in seen[:2]) == kept


def _resumed(folder: Path, scratch: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    """Of each engine: weights after two and four steps, and after two steps, a resume and two more."""
    found = {}
    whole = batch_for(folder)
    fsdp2.SMALL_MODEL_BYTES = 0
    for name in ("fsdp2", "deepspeed"):

        def engine(name: str = name) -> Any:
            if name == "deepspeed":
                return zero_of(folder, 3, freeze=["vision"], **STEPS)
            return frozen_engine(folder, "vision")

        first, state = engine(), scratch / name
        assert all(held.frozen == (part(held.name) == "vision") for held in first.weight_layout())
        state.mkdir(exist_ok=True)
        half = stepped(first, whole)
        write_files(state, first.snapshot())
        torch.distributed.barrier()
        end, second = stepped(first, whole), engine()
        assert second.load(state) == []
        found[name] = half, end, stepped(second, whole)
    return found


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_and_resume(folder: Path, tmp_path: Path, world_of_one: None) -> None:
    engine, whole = frozen_engine(folder, "vision"), batch_for(folder)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    want = stepped(engine, whole)
    for results in run_ranks(2, _resumed, folder, tmp_path):
        for name, (half, end, again) in results.items():
            assert max(float((half[key] - want[key]).abs().max()) for key in want) < 2e-6, name
            assert all(torch.equal(half[key], before[key]) for key in want if part(key) == "vision"), name
            assert end.keys() == again.keys() and all(torch.equal(end[key], again[key]) for key in end), name
            assert not torch.equal(end["lm_head.weight"], half["lm_head.weight"])
    other = frozen_engine(folder, "vision")
    other.load(tmp_path / "deepspeed")  # which has fsdp2's names, also of frozen weights
    assert max(float((tensor - want[name]).abs().max()) for name, tensor in other.named_weights()) < 2e-6


VISION = {"model": {"tiny": {"architecture": "qwen2_5_vl"}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"trainer": {"freeze": ["tower"]}, **VISION}, "expected vision, merger, embeddings, router or a pattern of "),
        ({"trainer": {"freeze": ["vision"]}}, "trainer.freeze: qwen2 has no vision; leave it out"),
        (
            {"trainer": {"freeze": ["vision"], "lora": {"rank": 4}}, **VISION},
            "trainer.freeze: trainer.lora freezes all of the model's own weights; leave it out",
        ),
        (
            {"trainer": {"freeze": ["router"], "engine": "megatron", "megatron": {"aux_loss": 0.1}}},
            "trainer.megatron.aux_loss: 0.1 trains routers, and trainer.freeze has router; use 0",
        ),
        (
            {"trainer": {"freeze": ["router"], "fsdp2": {"expert_bias_rate": 0.001}}},
            "trainer.fsdp2.expert_bias_rate: 0.001 trains routers, and trainer.freeze has router; use 0",
        ),
        (
            {"trainer": {"lora": {"rank": 4}, "engine": "deepspeed", "deepspeed": {"z_loss": 0.1}}},
            "trainer.deepspeed.z_loss: 0.1 trains routers, and trainer.lora freezes them; use 0",
        ),
    ],
)
def test_invalid_parts_are_refused_before_the_start(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert any(expected in line for line in caught.value.problems), caught.value.problems


def test_a_critic_is_trained_whole() -> None:
    config = parse({"trainer": {"freeze": ["vision"]}, "algorithm": {"advantage_estimator": "gae"}, **VISION})
    assert config.trainer.freeze == ["vision"] and config.of_critic().trainer.freeze == []
    assert not list(check_parts(config, {"model_type": "gemma3", "vision_config": {"depth": 2}}))


def test_an_engine_refuses_a_part_that_its_model_lacks(tmp_path: Path, world_of_one: None) -> None:
    text = make_model_folder("qwen2", tmp_path / "text")
    with pytest.raises(ValueError, match=r"trainer\.freeze: qwen2 has no part merger; leave it out"):
        frozen_engine(text, "merger")


LENGTHS = (9, 21, 4, 14, 6)
TEXT = {
    "layers": ("qwen3_moe", ["model.layers.0.*"]),
    "embeddings": ("qwen2", ["embeddings"]),
    "untied": ("qwen3", ["embeddings", "lm_head.weight"]),
    "router": ("qwen3_moe", ["router"]),
    "queries": ("llama", ["*.self_attn.q_proj.*", "model.layers.1.*norm.weight"]),
    "biased router": ("deepseek_v3", ["router", "*.shared_experts.*"]),
}
CHANGES = {"untied": {"tie_word_embeddings": False}}


WORDS = {
    "embeddings": "embed_tokens",
    "router": r"mlp\.gate\.",
    "*.self_attn.*_proj.*": r"self_attn\..*_proj\.",
    "model.layers.1.*norm.weight": r"layers\.1\..*norm\.weight",
}
"""Regular expressions of the same meaning."""


def by_hand(name: str, entries: Sequence[str]) -> bool:
    return any(re.search(WORDS.get(entry, entry.replace("*", "")), name) for entry in entries)


def text_engine(folder: Path, entries: Sequence[str], **keys: Any) -> FSDP2Engine:
    config = TrainerConfig(**STEPS, freeze=list(entries), logits_chunk_tokens=8)
    return FSDP2Engine(config, folder, own=FSDP2Config(**keys), dtype=torch.float32, total_steps=10)


def zero_engine(folder: Path, entries: Sequence[str], stage: int) -> Any:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine
    from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig

    config = TrainerConfig(**STEPS, freeze=list(entries), logits_chunk_tokens=8)
    return ZeroEngine(config, folder, zero=DeepSpeedConfig(zero_stage=stage), dtype=torch.float32, total_steps=10)


@pytest.mark.parametrize("case", TEXT)
def test_frozen_layers_embeddings_and_routers_do_not_change(case: str, tmp_path: Path, world_of_one: None) -> None:
    """Frozen parameters have no gradients and no moments; the gradients of all others are as without frozen ones."""
    family, entries = TEXT[case]
    folder, whole = make_model_folder(family, tmp_path / "model", **CHANGES.get(case, {})), make_batch(LENGTHS)
    engine, full = text_engine(folder, entries), text_engine(folder, [])
    names = [name for name, _ in engine.model.hf.named_parameters()]
    still = {name for name in names if by_hand(name, entries)}
    assert 0 < len(still) < len(names)
    assert {held.name for held in engine.weight_layout() if held.frozen} == still
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    config = parse({"trainer": {"freeze": entries}})
    assert {p.name for p in frozen(config, shape).parameters if not p.name.endswith("correction_bias")} == still
    assert not list(check_frozen(config, shape))
    gradients = []
    for each in (engine, full):
        each.accumulate(*part_of(each, whole), Weighted(), norms_of(whole))
        gradients.append({name: p.grad for name, p in each.model.hf.named_parameters() if p.grad is not None})
        each.discard_gradients()
    mine, theirs = gradients
    assert mine.keys() == theirs.keys() - still
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-4, atol=1e-6) for name in mine)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    after = stepped(engine, whole)
    assert {name for name in names if not torch.equal(after[name], before[name])} == set(names) - still
    assert engine.optimizer is not None and len(engine.optimizer.state) == len(names) - len(still)
    engine.export_hf(tmp_path / "out")
    assert {n: t.shape for n, t in text_engine(tmp_path / "out", entries).named_weights()} == {
        n: t.shape for n, t in after.items()
    }


def _frozen_on_ranks(folders: dict[str, Path], by_layer: bool) -> dict[str, dict[str, Tensor]]:
    if by_layer:
        fsdp2.SMALL_MODEL_BYTES = 0
    found, whole = {}, make_batch(LENGTHS)
    for case, folder in folders.items():
        entries = TEXT[case][1]
        found[f"fsdp2 {case}"] = stepped(text_engine(folder, entries, activation_checkpointing=by_layer), whole)
        for stage in (3,) if by_layer else (1, 2):
            found[f"{stage} {case}"] = stepped(zero_engine(folder, entries, stage), whole)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_two_ranks_with_frozen_layers_take_the_steps_of_one(by_layer: bool, tmp_path: Path, world_of_one: None) -> None:
    cases = ("layers", "embeddings", "queries")
    folders = {case: make_model_folder(TEXT[case][0], tmp_path / case) for case in cases}
    whole, want = make_batch(LENGTHS), {}
    for case in cases:
        engine = text_engine(folders[case], TEXT[case][1])
        want[case] = stepped(engine, whole)
    for results in run_ranks(2, _frozen_on_ranks, folders, by_layer):
        for name, after in results.items():
            wanted = want[name.partition(" ")[2]]
            assert max(float((after[key] - wanted[key]).abs().max()) for key in wanted) < 2e-6, name


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        (["model.layer.*"], "trainer.freeze: qwen2 has no parameter named model.layer.*; its last one is "),
        (["router"], "trainer.freeze: qwen2 has no part router; leave it out"),
        (["model.layers.*", "embeddings", "*norm*"], "is all of qwen2; leave something to train"),
        (["lm_head.*"], "trainer.freeze: qwen2 has no parameter named lm_head.*"),
    ],
)
def test_entries_that_select_nothing_or_all_are_refused(
    freeze: list[str], expected: str, tmp_path: Path, world_of_one: None
) -> None:
    """By the plan before the start, and by the engine before it reads weights."""
    folder = make_model_folder("qwen2", tmp_path / "model")
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    [problem] = check_frozen(parse({"trainer": {"freeze": freeze}}), shape)
    assert expected in problem.text
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape(expected)):
        text_engine(folder, freeze)


def test_generators_keep_only_matrices_that_they_cannot_join_with_trained_ones() -> None:
    at = "model.layers.{}.{}"
    frozen_names = ["model.embed_tokens.weight", *(at.format(0, name) for name in ("self_attn.q_proj.weight",))]
    frozen_names += [at.format(1, name) for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight")]
    others = [at.format(0, "self_attn.k_proj.weight"), at.format(0, "input_layernorm.weight"), "model.norm.weight"]
    layout = [
        msgspec.structs.replace(TensorShards.unsharded(name, "float32", (2,), [0]), frozen=name in frozen_names)
        for name in (*frozen_names, *others)
    ]
    assert keepable(layout) == set(frozen_names) - {at.format(0, "self_attn.q_proj.weight")}


def megatron_engine(folder: Path, entries: Sequence[str], **keys: Any) -> Any:
    from hpcrl.engines.train.megatron.engine import MegatronEngine
    from hpcrl.engines.train.megatron.spec import MegatronConfig

    config = TrainerConfig(engine="megatron", **STEPS, freeze=list(entries), logits_chunk_tokens=8)
    return MegatronEngine(config, folder, own=MegatronConfig(**keys), total_steps=10)


MEGATRON = {
    "layers": {"recompute": "full"},
    "embeddings": {"recompute": "full", "distributed_optimizer": False},
    "router": {},
    "attention": {},
}
ATTENTION = ["*.self_attn.*_proj.*"]


def _megatron_steps(folders: dict[str, Path], scratch: Path, more: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The weights after two steps, as far as this rank publishes them; a resumed engine takes the same steps."""
    found, whole = {}, make_batch(LENGTHS)
    for case, folder in folders.items():
        entries = TEXT[case][1] if case in TEXT else ATTENTION
        first = megatron_engine(folder, entries, **MEGATRON[case] | more)
        state = scratch / case
        state.mkdir(exist_ok=True)
        found[case] = stepped(first, whole)
        write_files(state, first.snapshot())
        torch.distributed.barrier()
        second = megatron_engine(folder, entries, **MEGATRON[case] | more)
        assert second.load(state) == []
        again, more_steps = stepped(second, whole), stepped(first, whole)
        assert all(torch.equal(again[name], more_steps[name]) for name in again)
        assert all(
            held.frozen == by_hand(held.name, entries) for held in first.weight_layout() if "bias" not in held.name
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 2}], ids=str
)
def test_megatron_takes_the_steps_of_fsdp2(more: dict[str, Any], world_of_one: None, tmp_path: Path) -> None:
    cases = ["embeddings", "attention"] if more else list(MEGATRON)
    folders = {case: make_model_folder(TEXT.get(case, ("qwen3",))[0], tmp_path / f"model {case}") for case in cases}
    want = {}
    for case in cases:
        own = text_engine(folders[case], TEXT[case][1] if case in TEXT else ATTENTION)
        want[case] = stepped(own, make_batch(LENGTHS))
    for results in run_ranks(2, _megatron_steps, folders, tmp_path, more):
        for case, found in results.items():
            assert found and max(float((found[name] - want[case][name]).abs().max()) for name in found) < 5e-6, case


@pytest.mark.slow
def test_megatron_refuses_parts_of_its_tensors(tmp_path: Path) -> None:
    folder = make_model_folder("qwen3", tmp_path / "model")
    for entries, expected in (
        (["*.q_proj.*"], "q_proj.weight, .*v_proj.weight are one tensor in Megatron-Core; freeze all of them or none"),
        (["*.p_proj.*"], "qwen3 has no parameter named"),
    ):
        for results in run_ranks(1, _refused_by_megatron, folder, entries):
            assert re.search(expected, results), results


def _refused_by_megatron(folder: Path, entries: list[str]) -> str:
    try:
        megatron_engine(folder, entries)
    except ValueError as error:
        return str(error)
    return ""


def test_the_megatron_plan_counts_frozen_parameters_as_weights_only(tmp_path: Path) -> None:
    folder = make_model_folder("qwen2", tmp_path / "model")
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    engine = {"engine": "megatron", "megatron": {"distributed_optimizer": False}}
    found = []
    for entries in ([], ["model.layers.*"]):
        config = parse({"trainer": {**engine, "freeze": entries}})
        parts = {part.name: part.num_bytes for part in trainer_parts(config, shape, 1)}
        found.append((parts["weights"], parts["gradients"], parts["optimizer"], checkpoint_bytes(config, shape)))
    whole, some = found
    layers = sum(parameter.size for parameter in shape.parameters if parameter.layer is not None)
    assert [before - after for before, after in zip(whole, some, strict=True)] == [
        0,
        4 * layers,
        8 * layers,
        8 * layers,
    ]
