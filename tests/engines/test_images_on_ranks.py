"""Images on two ranks, split in every way: log-probs and gradients equal one rank's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.families import vision_of
from hpcrl.rollout.batch import Batch
from tests.contracts.train import deepspeed
from tests.contracts.train.fsdp2 import gradients
from tests.engines.test_image_families import rows_of
from tests.engines.test_images import batch_of
from tests.engines.worlds import Weighted, norms_of, run_ranks, worst_difference
from tests.vlm import make_vlm
from tests.vlm_families import SMALL, make_small

pytestmark = pytest.mark.numerics

FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe")
BOTH_WAYS = ("gemma3", "gemma4_large")
WEIGHTED = Weighted(0.7, entropy=True)
SPLITS: dict[str, dict[str, Any]] = {
    "gathered": {},
    "layer by layer": {"activation_checkpointing": True},
    "context": {"context_parallel": 2},
    "tensor, layer by layer": {"tensor_parallel": 2},
}
STAGES = (1, 2, 3)
STEPS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
"""With this eps, rounding of a gradient near zero does not become a step of full size."""
SHIFTS = "self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_vlm(family, tmp_path_factory.mktemp("vlm") / family) for family in FAMILIES}


def batch_for(folder: Path) -> Batch:
    vision = vision_of(folder)
    assert vision is not None
    return rows_of(folder, vision)[0] if folder.name in SMALL else batch_of(vision)


def engine_of(folder: Path, trainable: bool = True, dtype: str = "float32", **keys: Any) -> FSDP2Engine:
    section = FSDP2Config(**{key: keys.pop(key) for key in FSDP2Config.model_fields if key in keys})
    config = TrainerConfig(param_dtype=dtype, **keys)
    return FSDP2Engine(config, folder, own=section, dtype=torch.float32, total_steps=4, trainable=trainable)


def part_of(engine: FSDP2Engine, whole: Batch) -> tuple[Batch, list[list[int]]]:
    """The rows of this rank and five micro-batches of at most one row. Of two ranks with rows of their own, the second
    has only the row without images."""
    rows = [0, 1, 2, 3, 4]
    if engine.data_parallel_size > 1:
        rows = [4] if engine.data_parallel_rank else rows[:4]
    return whole.select(rows), [[row] if row < len(rows) else [] for row in range(5)]


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """As worst_difference(). The last layer's image features reach no token that follows, and get no gradient. A key's
    bias shifts all scores of a query, so its gradient is rounding."""
    want = {name: gradient for name, gradient in want.items() if not name.endswith(SHIFTS)}
    got = {name: gradient for name, gradient in got.items() if not name.endswith(SHIFTS)}
    idle = {name for name, gradient in want.items() if not gradient.any()}
    assert all("deepstack_merger_list.1" in name for name in idle) and not any(got[name].any() for name in idle)
    assert got.keys() == want.keys()
    return worst_difference(*({name: some[name] for name in want if name not in idle} for some in (got, want)))


def outcome(engine: FSDP2Engine, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    batch, plan = part_of(engine, whole)
    of_engine = gradients if engine.name == "fsdp2" else deepspeed.gradients
    return engine.logprobs(batch, plan, 0.7), of_engine(engine, batch, plan, WEIGHTED, norms_of(whole))


def _split(folders: dict[str, Path], splits: Sequence[str]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for family, folder in folders.items():
        whole = batch_for(folder)
        for name in splits:
            fsdp2.SMALL_MODEL_BYTES = 0 if "layer by layer" in name else 4 << 30
            engine = engine_of(folder, **SPLITS[name])
            assert engine.keep_gathered == ("layer by layer" not in name)
            found[family, name] = outcome(engine, whole)
    return found


def _fsdp2(folders: dict[str, Path]) -> dict[tuple[str, str], Any]:
    found = _split(folders, tuple(SPLITS))
    folder, fsdp2.SMALL_MODEL_BYTES = folders["qwen2_5_vl"], 0
    frozen, half = engine_of(folder, trainable=False), engine_of(folder, dtype="bfloat16")
    share = part_of(frozen, batch_for(folder))
    assert bool(share[0].images.numel()) == (dist.get_rank() == 0)
    found["qwen2_5_vl", "frozen"] = frozen.logprobs(*share, 0.7)
    found["qwen2_5_vl", "bfloat16"] = half.logprobs(*share, 0.7)
    fsdp2.SMALL_MODEL_BYTES = 4 << 30
    return found


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, Path]) -> list[dict[tuple[str, str], Any]]:
    return run_ranks(2, _fsdp2, folders)


def shares(logprobs: Tensor, whole: Batch) -> list[Tensor]:
    """The log-probs of all but the last row, and of the last row."""
    return list(logprobs.split([int(whole.lengths[:4].sum()), int(whole.lengths[4])]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_split_changes_gradients(
    family: str, folders: dict[str, Path], two_ranks: list[dict[tuple[str, str], Any]], world_of_one: None
) -> None:
    whole = batch_for(folders[family])
    logprobs, want = outcome(engine_of(folders[family]), whole)
    for rank, results in enumerate(two_ranks):
        for name in SPLITS:
            got, mine = results[family, name]
            of_rank = logprobs if len(got) == len(logprobs) else shares(logprobs, whole)[rank]
            assert (got - of_rank).abs().max() < 2e-5, name
            assert difference(mine, want) < 1e-5, name


@pytest.mark.slow
def test_no_split_changes_gradients_of_images_seen_in_both_directions(tmp_path: Path, world_of_one: None) -> None:
    folders = {family: make_small(family, tmp_path / family) for family in BOTH_WAYS}
    splits = ("context", "tensor, layer by layer")
    alone = {family: outcome(engine_of(folder), batch_for(folder)) for family, folder in folders.items()}
    for results in run_ranks(2, _split, folders, splits):
        for family, (logprobs, want) in alone.items():
            for name in splits:
                got, mine = results[family, name]
                assert (got - logprobs).abs().max() < 2e-5, (family, name)
                assert difference(mine, want) < 1e-5, (family, name)


@pytest.mark.slow
def test_frozen_models_and_bfloat16_have_the_same_log_probs(
    folders: dict[str, Path], two_ranks: list[dict[tuple[str, str], Any]], world_of_one: None
) -> None:
    folder, plan = folders["qwen2_5_vl"], [[0, 1, 2, 3, 4]]
    whole = batch_for(folder)
    wanted = engine_of(folder).logprobs(whole, plan, 0.7)
    rounded = engine_of(folder, dtype="bfloat16").logprobs(whole, plan, 0.7)
    for rank, results in enumerate(two_ranks):
        share = shares(wanted, whole)[rank]
        assert (results["qwen2_5_vl", "frozen"] - share).abs().max() < 2e-5
        error = (results["qwen2_5_vl", "bfloat16"] - share).abs().mean()
        assert 0 < error < 2 * (rounded - wanted).abs().mean()


def test_recomputed_activations_have_the_same_gradients(folders: dict[str, Path], world_of_one: None) -> None:
    whole = batch_for(folders["qwen2_5_vl"])
    calls = []
    for recompute in (False, True):
        engine = engine_of(folders["qwen2_5_vl"], activation_checkpointing=recompute)
        block: Any = engine.model.hf.model.visual.blocks[0].attn
        count: list[int] = []
        block.register_forward_hook(lambda *_, count=count: count.append(1))
        calls.append((outcome(engine, whole), len(count)))
    (plain, once), (again, twice) = calls
    assert torch.equal(plain[0], again[0]) and difference(again[1], plain[1]) < 1e-6
    assert once == 10 and twice == 15  # five micro-batches: log-probs, forward pass and recomputation


# ---- DeepSpeed


def zero_of(folder: Path, stage: int, recompute: bool = False, **config: Any) -> Any:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    section = DeepSpeedConfig(zero_stage=stage, activation_checkpointing=recompute)
    return ZeroEngine(TrainerConfig(**config), folder, zero=section, dtype=torch.float32, total_steps=4)


def stepped(engine: FSDP2Engine, whole: Batch) -> dict[str, Tensor]:
    """The weights after two steps."""
    batch, plan = part_of(engine, whole)
    for _ in range(2):
        engine.train_step(batch, plan, WEIGHTED, norms_of(whole))
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def _zero(folder: Path) -> dict[int, Any]:
    found: dict[int, Any] = {}
    whole = batch_for(folder)
    for stage in STAGES:
        engine = zero_of(folder, stage, stage == 3, **STEPS)
        found[stage] = *outcome(engine, whole), stepped(engine, whole)
    return found


@pytest.mark.slow
def test_deepspeed_has_the_gradients_and_steps_of_fsdp2(folders: dict[str, Path], world_of_one: None) -> None:
    folder = folders["qwen3_vl_moe"]
    whole, engine = batch_for(folder), engine_of(folder, **STEPS)
    (logprobs, want), weights = outcome(engine, whole), stepped(engine, whole)
    for rank, results in enumerate(run_ranks(2, _zero, folder)):
        for got, mine, changed in results.values():
            assert (got - shares(logprobs, whole)[rank]).abs().max() < 2e-5
            assert difference(mine, want) < 1e-5
            assert max(float((changed[name] - weights[name]).abs().max()) for name in weights) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", BOTH_WAYS)
def test_zero_3_has_the_gradients_of_images_seen_in_both_directions(
    family: str, tmp_path: Path, world_of_one: None
) -> None:
    """One rank, whose parameters are released and gathered as those of several."""
    folder = make_small(family, tmp_path / family)
    whole = batch_for(folder)
    logprobs, want = outcome(engine_of(folder), whole)
    got, mine = outcome(zero_of(folder, 3, recompute=True), whole)
    assert (got - logprobs).abs().max() < 2e-5
    assert difference(mine, want) < 1e-5


@pytest.mark.slow
def test_a_tower_of_sounds_does_not_decay(tmp_path: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no gradients, which ZeRO takes for zeros."""
    sounds = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = SMALL["gemma4"]._replace(config=SMALL["gemma4"].config | {"audio_config": sounds})
    monkeypatch.setitem(SMALL, "gemma4", small)
    engine = zero_of(make_small("gemma4", tmp_path / "gemma4"), 3, lr=1e-2, weight_decay=0.5)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    whole = batch_for(tmp_path / "gemma4")
    engine.train_step(whole, [[0, 1, 2, 3, 4]], WEIGHTED, norms_of(whole))
    kept = {name for name, tensor in engine.named_weights() if torch.equal(tensor, before[name])}
    sound = {name for name in before if name.startswith(("model.audio_tower.", "model.embed_audio."))}
    assert len(sound) > 30 and kept >= sound
    assert not [name for name in kept - sound if name.endswith("_proj.weight")]
