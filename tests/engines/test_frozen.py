"""Frozen parts of vision-language models (trainer.freeze)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.config import parse
from hpcrl.config.abilities import check_parts
from hpcrl.config.reading import ConfigError
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from tests.checkpoint.writing import write_files
from tests.engines.test_images_on_ranks import STEPS, WEIGHTED, batch_for, engine_of, part_of, stepped, zero_of
from tests.engines.worlds import make_model_folder, norms_of, run_ranks
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
        ({"trainer": {"freeze": ["tower"]}, **VISION}, "expected 'vision' or 'merger', got 'tower'"),
        ({"trainer": {"freeze": ["vision"]}}, "trainer.freeze: qwen2 has no vision; leave it out"),
        (
            {"trainer": {"freeze": ["vision"], "lora": {"rank": 4}}, **VISION},
            "trainer.freeze: trainer.lora freezes all of the model's own weights; leave it out",
        ),
        (
            {"trainer": {"freeze": ["merger"], "engine": "megatron"}, **VISION},
            "trainer.freeze: the megatron trainer trains whole models; leave it out, or trainer.engine=fsdp2 or deep",
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
