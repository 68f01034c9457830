"""FSDP2Engine on one and two ranks against transformers, and with different splits of the same work."""

from __future__ import annotations

import errno
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.controller.balance import balance, micro_batches
from hpcrl.engines import varlen
from hpcrl.engines.train.fsdp2 import checkpoint, model, probe
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.fsdp2.weights import full_tensor
from hpcrl.engines.train.training_engine import check_segments
from hpcrl.rollout.batch import Batch
from hpcrl.system.files import is_storage_error
from tests.checkpoint.writing import write_files
from tests.engines.architectures import make_folder
from tests.engines.worlds import (
    FAMILIES,
    Weighted,
    by_steps,
    make_batch,
    make_model_folder,
    norms_of,
    run_ranks,
    transformers_results,
    worst_difference,
)

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14, 5, 17)
TEMPERATURE = 0.7
ONE = [list(range(len(LENGTHS)))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model_folder(family, root / family) for family in FAMILIES}


def engine(folder: Path, **config: Any) -> FSDP2Engine:
    trainable = config.pop("trainable", True)
    own = FSDP2Config(**{key: config.pop(key) for key in FSDP2Config.model_fields if key in config})
    return FSDP2Engine(
        TrainerConfig(**{"lr": 1e-3, "logits_chunk_tokens": 8} | config),
        folder,
        own=own,
        dtype=torch.float32,
        total_steps=10,
        trainable=trainable,
    )


def gradients_of(trainer: FSDP2Engine, batch: Batch, plan: list[list[int]], whole: Batch) -> dict[str, Tensor]:
    trainer.accumulate(batch, plan, Weighted(TEMPERATURE, entropy=True), norms_of(whole))
    found = {name.removeprefix("hf."): p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    gradients = {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}
    trainer.discard_gradients()
    return gradients


# ---- one rank


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_match_transformers(family: str, folders: dict[str, Path], world_of_one: None) -> None:
    batch = make_batch(LENGTHS)
    want, gradients = transformers_results(folders[family], batch, TEMPERATURE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of the five falls back
        trainer = engine(folders[family], packing="require")
    got = trainer.logprobs(batch, ONE, TEMPERATURE)
    assert (got - want).abs().max() < 1e-5
    assert worst_difference(gradients_of(trainer, batch, ONE, batch), gradients) < 1e-5
    for plan in ([[5, 0], [3], [1, 2, 4]], [[2], [], [1], [0, 3, 4, 5], []]):
        assert (trainer.logprobs(batch, plan, TEMPERATURE) - want).abs().max() < 1e-5
        assert worst_difference(gradients_of(trainer, batch, plan, batch), gradients) < 1e-5
    # The same comparisons must fail when two tokens are swapped or one weight changes.
    swapped = make_batch(LENGTHS)
    swapped.token_ids[[3, 4]] = swapped.token_ids[[4, 3]]
    assert (trainer.logprobs(swapped, ONE, TEMPERATURE) - want).abs().max() > 1e-3
    assert worst_difference(gradients_of(trainer, swapped, ONE, batch), gradients) > 1e-3
    with torch.no_grad():
        trainer.model.get_parameter("hf.model.layers.0.self_attn.v_proj.weight")[0, 0] += 0.1
    assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() > 1e-4


def turns_that_repeat() -> Batch:
    """Rows of several turns, each of which repeats the earlier turns of its row and goes on; all rows begin alike, and
    trained tokens are repeated, too."""
    batch = make_batch([6, 11, 17, 6, 8, 15], num_prompt_tokens=3)
    rows = list(batch.token_ids.split(batch.lengths.tolist()))
    for row in range(1, len(rows)):
        rows[row][: len(rows[row - 1])] = rows[row - 1][: len(rows[row])]
    rows[3][4:] = rows[0][4:].flip(0)
    return by_steps(batch, (2, 1, 3))


def test_common_prefixes_change_neither_log_probs_nor_gradients(
    folders: dict[str, Path], world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, packed = turns_that_repeat(), []
    trainer = engine(folders["qwen3"], packing="require")
    original = trainer.model._states
    monkeypatch.setattr(
        trainer.model, "_states", lambda *given: (packed.append(len(given[2].kept)), original(*given))[1]
    )
    found = []
    for share in (share_prefixes, lambda ids, lengths, _: share_prefixes(ids, lengths, [0] * len(lengths))):
        monkeypatch.setattr(fsdp2, "share_prefixes", share)
        found.append(
            (trainer.logprobs(batch, [[0, 1, 2]], TEMPERATURE), gradients_of(trainer, batch, [[0, 1, 2]], batch))
        )
    assert packed == [28, 28, 63, 63]  # 17 of the first row, and the second's without its first 4
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5
    assert worst_difference(found[0][1], found[1][1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"packing": "off"}, {"activation_checkpointing": True}, {"cpu_offload": True}, {"large": True}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_gives_the_same_gradients(
    change: dict[str, Any], folders: dict[str, Path], world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(LENGTHS)
    _, want = transformers_results(folders["qwen3"], batch, TEMPERATURE)
    if change == {"large": True}:
        monkeypatch.setattr(fsdp2, "SMALL_MODEL_BYTES", 0)
        change = {"activation_checkpointing": True, "cpu_offload": True}
        assert not engine(folders["qwen3"], **change).keep_gathered
    trainer = engine(folders["qwen3"], **change)
    assert trainer.sharded == ("cpu_offload" in change)  # a single rank with nothing to offload has unsharded tensors
    assert worst_difference(gradients_of(trainer, batch, [[0, 1], [2, 3], [4, 5]], batch), want) < 1e-5


def test_rows_outside_the_mini_batch_have_no_effect(folders: dict[str, Path], world_of_one: None) -> None:
    trainer, batch = engine(folders["llama"]), make_batch(LENGTHS)
    part = batch.select([1, 4])
    got = gradients_of(trainer, batch, [[4], [1]], part)
    assert worst_difference(got, gradients_of(trainer, part, [[0, 1]], part)) < 1e-5
    logprobs = trainer.logprobs(batch, [[4], [1]], 1.0).split(batch.lengths.tolist())
    assert [bool(piece.any()) for piece in logprobs] == [False, True, False, False, True, False]
    with pytest.raises(ValueError, match="each once"):
        trainer.logprobs(batch, [[1], [1]], 1.0)


def test_bfloat16_results_are_close_to_float32(folders: dict[str, Path], world_of_one: None) -> None:
    batch = make_batch(LENGTHS)
    want, gradients = transformers_results(folders["qwen2"], batch, TEMPERATURE)
    trainer = engine(folders["qwen2"], param_dtype="bfloat16")
    error = (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs()[batch.loss_mask].mean()
    assert 1e-5 < error < 0.1
    got = gradients_of(trainer, batch, ONE, batch)
    assert all(gradient.dtype == torch.float32 for gradient in got.values())
    assert worst_difference(got, gradients) < 0.2
    assert {tensor.dtype for _, tensor in trainer.named_weights()} == {torch.float32}


def test_gradients_of_bfloat16_weights_are_summed_in_float32(folders: dict[str, Path], world_of_one: None) -> None:
    trainer = FSDP2Engine(TrainerConfig(param_dtype="bfloat16"), folders["llama"], dtype=torch.bfloat16, total_steps=1)
    batch = make_batch(LENGTHS)
    ones = [gradients_of(trainer, batch, [[row]], batch) for row in range(len(LENGTHS))]
    got = gradients_of(trainer, batch, [[row] for row in range(len(LENGTHS))], batch)
    in_bfloat16 = 0
    for name, gradient in got.items():
        parts = [one[name] for one in ones]
        assert torch.equal(gradient, sum(part.float() for part in parts).bfloat16())
        in_bfloat16 += torch.equal(gradient, sum(parts))
    assert in_bfloat16 < len(got)  # negative control


def test_a_model_that_leaks_between_packed_sequences_is_not_packed(
    folders: dict[str, Path], world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing that lets sequences see each other must be noticed, and the fallback must be right."""

    class Blind(probe.PackedLayout):
        def __init__(self, lengths: list[int], device: torch.device, *_: object):
            super().__init__([sum(lengths)], device)

    monkeypatch.setattr(probe, "PackedLayout", Blind)
    with pytest.raises(ValueError, match=r"packing=require, but qwen2 cannot be packed: packed log-probs differ by"):
        engine(folders["qwen2"], packing="require")
    with pytest.warns(UserWarning, match="qwen2 cannot be packed"):
        trainer = engine(folders["qwen2"])
    batch = make_batch(LENGTHS)
    want, gradients = transformers_results(folders["qwen2"], batch, TEMPERATURE)
    assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() < 1e-5
    assert worst_difference(gradients_of(trainer, batch, ONE, batch), gradients) < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_variable_length_kernel_gives_the_same_results(
    family: str, folders: dict[str, Path], world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reference implementation in place of kernels that need a GPU."""
    monkeypatch.setattr(varlen, "KERNELS", {"reference": lambda: varlen.sequence_by_sequence})
    monkeypatch.setattr(varlen, "_suits", lambda sizes: True)
    monkeypatch.setattr(varlen, "find", varlen.find.__wrapped__)  # without a memory
    trainer, batch = engine(folders[family], packing="require", attention="flash"), make_batch(LENGTHS)
    want, gradients = transformers_results(folders[family], batch, TEMPERATURE)
    assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() < 1e-5
    assert worst_difference(gradients_of(trainer, batch, ONE, batch), gradients) < 1e-5


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "has no room for a snapshot"),
        (PermissionError(errno.EPERM, "Operation not permitted"), RuntimeError, "PermissionError: .*not permitted"),
        (TypeError("no such dtype"), RuntimeError, "cannot lay out a snapshot: TypeError: no such dtype"),
    ],
    ids=["full", "forbidden", "a defect"],
)
def test_only_a_lack_of_space_is_reported_as_one(
    error: Exception, kind: type, text: str, tmp_path: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> None:
        raise error

    config = TrainerConfig(logits_chunk_tokens=8)
    folder = make_model_folder("qwen2", tmp_path / "model")
    engine = FSDP2Engine(config, folder, dtype=torch.float32, total_steps=9)
    monkeypatch.setattr(checkpoint, "SharedFile", refuse)
    with pytest.raises(kind, match=f"^trainer rank 0 .*{text}") as caught:
        engine.snapshot()
    assert is_storage_error(caught.value) == (kind is OSError)


def test_activation_checkpointing_leaves_dropout_off(tmp_path: Path, world_of_one: None) -> None:
    """OPT's layers decide by their own training mode about dropout, in both passes."""
    folder = make_model_folder("opt", tmp_path / "opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.3)
    batch = make_batch(LENGTHS)
    kept, again = (engine(folder, activation_checkpointing=on) for on in (False, True))
    assert torch.equal(kept.logprobs(batch, ONE, TEMPERATURE), again.logprobs(batch, ONE, TEMPERATURE))
    want = gradients_of(kept, batch, ONE, batch)
    assert worst_difference(gradients_of(again, batch, ONE, batch), want) < 1e-5
    again.model.hf.train()  # negative control: dropout would show
    assert worst_difference(gradients_of(again, batch, ONE, batch), want) > 1e-2


def test_activation_checkpointing_requires_known_layers(
    folders: dict[str, Path], world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "GradientCheckpointingLayer", torch.nn.Conv2d)
    with pytest.raises(ValueError, match="activation_checkpointing=true: qwen2 has no layers that can be computed"):
        engine(folders["qwen2"], activation_checkpointing=True)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 20,
    "short_factor": [1.0] * 4, "long_factor": [9.0] * 4,
}  # fmt: skip


def test_models_that_rotate_by_the_longest_sequence_are_not_packed(tmp_path: Path, world_of_one: None) -> None:
    """One of the sequences is longer than 20 tokens, none of the probe's is."""
    folder = make_model_folder(
        "phi3", tmp_path / "phi3", max_position_embeddings=40, original_max_position_embeddings=20,
        rope_parameters=LONGROPE, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="packing=require, but phi3 cannot be packed: rope_type=longrope rotates by"):
        engine(folder, packing="require")
    with pytest.warns(UserWarning, match="phi3 cannot be packed .rope_type=longrope"):
        trainer = engine(folder)
    batch = make_batch(LENGTHS)
    want, gradients = transformers_results(folder, batch, TEMPERATURE)
    assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() < 1e-5
    assert worst_difference(gradients_of(trainer, batch, ONE, batch), gradients) < 1e-5
    trainer.model.set_packing(True)  # negative control: packed, short sequences are rotated like the long one
    trainer.packing = True
    assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() > 1e-2


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
LAYERS = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": DYNAMIC}),
        ("gemma3_text", {"rope_parameters": LAYERS, "layer_types": [*LAYERS], "sliding_window": 6}),
    ],
)
def test_dynamic_rotary_embeddings_use_the_length_of_each_sequence(
    family: str, changes: dict[str, Any], tmp_path: Path, world_of_one: None
) -> None:
    """Some sequences longer than the 20 positions of the config follow longer ones. None of the probe's is as long."""
    folder = make_model_folder(family, tmp_path / "model", max_position_embeddings=20, **changes)
    with pytest.warns(UserWarning, match=f"{family} cannot be packed .rope_type=dynamic"):
        trainer = engine(folder)
    batch = make_batch((9, 44, 4, 30, 20, 21))
    want, gradients = transformers_results(folder, batch, TEMPERATURE)
    for _ in range(2):
        assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() < 1e-5
        assert worst_difference(gradients_of(trainer, batch, ONE, batch), gradients) < 1e-5


def test_an_objective_that_compares_rows_requires_packing(folders: dict[str, Path], world_of_one: None) -> None:
    class Pairs(Weighted):
        compares_rows = True

    batch = make_batch(LENGTHS)
    assert "actor/logprob" in engine(folders["qwen2"]).train_step(batch, ONE, Pairs(), norms_of(batch))
    with pytest.raises(ValueError, match="Pairs compares the rows of a micro-batch, and without packing qwen2 is tr"):
        engine(folders["qwen2"], packing="off").train_step(batch, ONE, Pairs(), norms_of(batch))


def test_episodes_by_steps_require_packing(folders: dict[str, Path], world_of_one: None) -> None:
    batch = by_steps(make_batch(LENGTHS), (2, len(LENGTHS) - 2))
    want, gradients = transformers_results(folders["qwen2"], batch, TEMPERATURE)
    trainer = engine(folders["qwen2"])
    check_segments(trainer, by_steps=True)
    assert (trainer.logprobs(batch, [[0], [1]], TEMPERATURE) - want).abs().max() < 1e-5
    assert worst_difference(gradients_of(trainer, batch, [[0, 1]], batch), gradients) < 1e-5
    unpacked = engine(folders["qwen2"], packing="off", trainable=False)
    check_segments(unpacked, by_steps=False)
    with pytest.raises(ValueError, match=r"steps need a trainer that packs .* qwen2 model; .* trainer.fsdp2.packing="):
        check_segments(unpacked, by_steps=True)


def test_gemma2_keeps_its_soft_caps_without_packing(folders: dict[str, Path], world_of_one: None) -> None:
    batch = make_batch(LENGTHS)
    trainer = engine(folders["gemma2"], packing="off", trainable=False)
    assert (
        trainer.logprobs(batch, ONE, TEMPERATURE) - transformers_results(folders["gemma2"], batch, TEMPERATURE)[0]
    ).abs().max() < 1e-5


def test_clipped_adamw_step_by_hand(folders: dict[str, Path], world_of_one: None) -> None:
    """With eps far above the gradient, Adam's first step is lr * g / (|g| + eps): the clipped gradient shows."""
    batch, limit = make_batch(LENGTHS), 0.01
    trainer = engine(folders["qwen2"], max_grad_norm=limit, eps=1.0, weight_decay=0.5, lr=0.1)
    before = dict(trainer.named_weights())
    gradients = gradients_of(trainer, batch, ONE, batch)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    assert norm > 10 * limit
    stats = trainer.train_step(batch, ONE, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    assert stats["actor/grad_norm"].total == pytest.approx(norm, rel=1e-5)
    assert stats["actor/lr"].total == 0.1 and stats["actor/logprob"].count == int(batch.loss_mask.sum())
    for name, tensor in trainer.named_weights():
        clipped = gradients[name] * (limit / norm)
        decay = 0.5 if tensor.ndim == 2 else 0.0
        expected = before[name] * (1 - 0.1 * decay) - 0.1 * clipped / (clipped.abs() + 1.0)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)


def test_weight_names_and_export_match_transformers(
    folders: dict[str, Path], world_of_one: None, tmp_path: Path
) -> None:
    for family in ("qwen3_moe", "gemma2"):
        origin = shutil.copytree(folders[family], tmp_path / family)
        (origin / "tokenizer.json").write_text("{}")
        trainer, batch = engine(origin), make_batch(LENGTHS)
        trainer.train_step(batch, ONE, Weighted(), norms_of(batch))
        weights = dict(trainer.named_weights())
        expected = AutoModelForCausalLM.from_pretrained(origin).state_dict()
        expected.pop("lm_head.weight")  # tied
        assert list(weights) == list(expected)
        assert all(weights[name].shape == expected[name].shape for name in expected)
        trainer.export_hf(tmp_path / f"{family}-out")
        assert (tmp_path / f"{family}-out" / "tokenizer.json").read_text() == "{}"
        assert (tmp_path / f"{family}-out" / "generation_config.json").is_file()
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / f"{family}-out").iterdir()}
        (tmp_path / "probe").touch()
        assert modes == {(tmp_path / "probe").stat().st_mode & 0o777}, "those of any new file"
        want, _ = transformers_results(tmp_path / f"{family}-out", batch, TEMPERATURE)
        assert (trainer.logprobs(batch, ONE, TEMPERATURE) - want).abs().max() < 1e-5
        assert (transformers_results(origin, batch, TEMPERATURE)[0] - want).abs().max() > 1e-4  # the step shows
        names = {
            n for p in (origin, tmp_path / f"{family}-out") for n in [tuple(sorted(load_file(p / "model.safetensors")))]
        }
        assert len(names) == 1  # the export has the family's own tensor names on disk


def test_bad_model_folders_are_one_line(folders: dict[str, Path], world_of_one: None, tmp_path: Path) -> None:
    def broken(change: Callable[[dict[str, Tensor]], Any], name: str) -> Path:
        folder = shutil.copytree(folders["qwen2"], tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    no_weights = shutil.copytree(folders["qwen2"], tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    truncated = shutil.copytree(folders["qwen2"], tmp_path / "truncated")
    (truncated / "model.safetensors").write_bytes((truncated / "model.safetensors").read_bytes()[:5000])
    strange = shutil.copytree(folders["qwen2"], tmp_path / "strange")
    (strange / "config.json").write_text('{"model_type": "no_such_model"}')
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "empty": "no config.json",
        no_weights: "no weights; one of model.safetensors",
        truncated: "weights cannot be read",
        strange: "no_such_model",
        broken(lambda t: t.pop(norm), "missing"): f"the weights lack {norm}",
        broken(lambda t: t.update({query: torch.zeros(3, 5)}), "shape"): rf"{query} has shape \[3, 5\].*\[32, 32\]",
    }
    for folder, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            engine(folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_resume_continues_bit_for_bit(folders: dict[str, Path], world_of_one: None, tmp_path: Path) -> None:
    batch = make_batch(LENGTHS)

    def step(trainer: FSDP2Engine) -> None:
        trainer.train_step(batch, [[0, 1, 2], [3, 4, 5]], Weighted(entropy=True), norms_of(batch))

    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    settings = {"lr_schedule": "linear", "lr_warmup_steps": 3}
    first = engine(folders["qwen2"], **settings)
    step(first)
    step(first)
    write_files(tmp_path, first.snapshot())
    drawn = draws()
    step(first)
    second = engine(folders["qwen2"], **settings)
    assert second.load(tmp_path) == []
    assert second.optimizer_step == 2
    assert draws() == drawn
    step(second)
    for (name, one), (_, other) in zip(first.named_weights(), second.named_weights(), strict=True):
        assert torch.equal(one, other), name
    with pytest.raises(ValueError, match=r"no trainer\.json"):
        second.load(tmp_path.parent)
    shorter = engine(make_model_folder("qwen2", tmp_path / "shorter", num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"of another model: it has 12 tensors .*model\.layers\.1\.in"):
        shorter.load(tmp_path)


# ---- two ranks


def deal(whole: Batch, assignment: list[list[int]], max_tokens: int) -> tuple[Batch, list[list[int]]]:
    """This rank's rows and micro-batches."""
    lengths = whole.lengths.tolist()
    plans = micro_batches([[lengths[row] for row in rows] for rows in assignment], max_tokens)
    return whole.select(assignment[dist.get_rank()]), plans[dist.get_rank()]


def _cases() -> dict[str, tuple[Batch, list[list[int]], int]]:
    """name -> (all rows, rows by rank, tokens per micro-batch)."""
    batch = make_batch(LENGTHS)
    masked = make_batch(LENGTHS)
    masked.loss_mask[masked.row_ids < 3] = False  # rank 0 has rows 0, 1, 2
    giant = make_batch((5, 60, 6, 4))
    return {
        "balanced": (batch, balance(LENGTHS, 2), 25),
        "fewer_rows_than_ranks": (make_batch((11,)), [[], [0]], 25),
        "one_giant": (giant, [[0, 2, 3], [1]], 12),
        "a_rank_all_masked": (masked, [[0, 1, 2], [3, 4, 5]], 25),
    }


def _two_ranks(folders: dict[str, Path], scratch: Path) -> dict[str, Any]:
    """Everything that needs two ranks, in one world: a start costs seconds."""
    results: dict[str, Any] = {}
    for family in ("qwen2", "qwen3_moe"):
        trainer = engine(folders[family])
        for name, (whole, assignment, max_tokens) in _cases().items():
            mine, plan = deal(whole, assignment, max_tokens)
            results[f"{family}/{name}"] = gradients_of(trainer, mine, plan, whole)
            results[f"{family}/{name}/logprobs"] = trainer.logprobs(mine, plan, TEMPERATURE)
    whole, assignment, max_tokens = _cases()["balanced"]
    mine, plan = deal(whole, assignment, max_tokens)
    unpacked = engine(folders["qwen2"], packing="off")
    uneven = whole.select([[0], [1, 2, 3, 4, 5]][dist.get_rank()])
    results["unpacked"] = gradients_of(unpacked, uneven, [list(range(uneven.num_sequences))], whole)
    fsdp2.SMALL_MODEL_BYTES = 0
    results["large"] = gradients_of(engine(folders["qwen2"]), mine, plan, whole)

    trainer = engine(folders["qwen2"])
    results["stats"] = trainer.train_step(mine, plan, Weighted(TEMPERATURE, entropy=True), norms_of(whole))
    write_files(scratch / "two", trainer.snapshot())
    results["saved"] = dict(trainer.named_weights())
    trainer.train_step(mine, plan, Weighted(TEMPERATURE, entropy=True), norms_of(whole))
    results["continued"] = dict(trainer.named_weights())
    again = engine(folders["qwen2"])
    results["warnings"] = [again.load(scratch / "two"), again.load(scratch / "one")]
    results["resharded"] = dict(again.named_weights())
    again.export_hf(scratch / "exported")
    try:
        engine(scratch)
    except ValueError as error:
        results["error"] = str(error)
    return results


@pytest.fixture(scope="module")
def two_ranks(
    folders: dict[str, Path], world_of_one: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    scratch = tmp_path_factory.mktemp("two_ranks")
    for name in ("one", "two"):
        (scratch / name).mkdir()
    trainer, batch = engine(folders["qwen2"]), make_batch(LENGTHS)
    for _ in range(2):
        trainer.train_step(batch, ONE, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    write_files(scratch / "one", trainer.snapshot())
    torch.save(dict(trainer.named_weights()), scratch / "one.pt")
    return scratch, run_ranks(2, _two_ranks, folders, scratch)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("case", ["balanced", "fewer_rows_than_ranks", "one_giant", "a_rank_all_masked"])
def test_two_ranks_match_one(
    family: str, case: str, folders: dict[str, Path], two_ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    whole, assignment, _ = _cases()[case]
    trainer = engine(folders[family])
    everything = [list(range(whole.num_sequences))]
    want = gradients_of(trainer, whole, everything, whole)
    logprobs = trainer.logprobs(whole, everything, TEMPERATURE).split(whole.lengths.tolist())
    for rank, result in enumerate(two_ranks[1]):
        assert worst_difference(result[f"{family}/{case}"], want) < 1e-5
        mine = torch.cat([logprobs[row] for row in assignment[rank]] or [torch.zeros(0)])
        assert (result[f"{family}/{case}/logprobs"] - mine).abs().max() < 1e-5 if len(mine) else not assignment[rank]


@pytest.mark.slow
def test_two_ranks_match_one_without_packing_and_layer_by_layer(
    folders: dict[str, Path], two_ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    batch = make_batch(LENGTHS)
    want = gradients_of(engine(folders["qwen2"]), batch, ONE, batch)
    for result in two_ranks[1]:
        assert worst_difference(result["unpacked"], want) < 1e-5
        assert worst_difference(result["large"], want) < 1e-5


@pytest.mark.slow
def test_step_stats_are_counted_once(folders: dict[str, Path], two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (result["stats"] for result in two_ranks[1])
    batch = make_batch(LENGTHS)
    stats = engine(folders["qwen2"]).train_step(batch, ONE, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    assert first["actor/grad_norm"].total == pytest.approx(stats["actor/grad_norm"].total, rel=1e-5)
    assert "actor/grad_norm" not in second and "actor/lr" not in second
    counted = first["actor/logprob"].count + second["actor/logprob"].count
    assert counted == stats["actor/logprob"].count == int(batch.loss_mask.sum())


@pytest.mark.slow
def test_checkpoints_move_between_one_and_two_ranks(
    folders: dict[str, Path], two_ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    scratch, (first, second) = two_ranks
    assert first["warnings"][0] == [] and "written by 1 trainer ranks, now there are 2" in first["warnings"][1][0]
    for name, want in torch.load(scratch / "one.pt").items():
        assert torch.equal(first["resharded"][name], want) and torch.equal(second["resharded"][name], want), name
    exported = AutoModelForCausalLM.from_pretrained(scratch / "exported").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in first["resharded"].items())

    trainer, batch = engine(folders["qwen2"]), make_batch(LENGTHS)
    assert "written by 2 trainer ranks, now there are 1" in trainer.load(scratch / "two")[0]
    assert trainer.optimizer_step == 1
    for name, tensor in trainer.named_weights():
        assert torch.equal(tensor, first["saved"][name]), name
    # The moments were saved too: the next step equals that of two ranks, unlike a step without moments.
    trainer.train_step(batch, ONE, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    moved = dict(trainer.named_weights())["model.embed_tokens.weight"] - first["saved"]["model.embed_tokens.weight"]
    want = first["continued"]["model.embed_tokens.weight"] - first["saved"]["model.embed_tokens.weight"]
    used = want.abs() > 1e-4
    assert used.any() and ((moved - want)[used].abs() < 1e-5).float().mean() > 0.98


@pytest.mark.slow
def test_a_bad_folder_is_an_error_on_every_rank(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all("no config.json" in result["error"] for result in two_ranks[1])


SHAPES = ((10, 3), (3, 2), (8,), (1, 5), (0, 4), (64, 64))


def _whole_copies() -> dict[str, list[Tensor]]:
    """Copies of sharded tensors, drawn in inference mode; 10 rows leave the last of 4 ranks one, 3 rows none."""
    meshes = {"shards": init_device_mesh("cpu", (4,)), "replicas": init_device_mesh("cpu", (2, 2))}
    copies: dict[str, list[Tensor]] = {}
    for name, mesh in meshes.items():
        placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        sharded = [distribute_tensor(tensor, mesh, placements) for tensor in _tensors()]
        with torch.inference_mode():
            copies[name] = [full_tensor(tensor, torch.bfloat16) for tensor in sharded]
    return copies


def _tensors() -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in SHAPES]


@pytest.mark.slow
def test_tensors_sharded_by_rows_are_gathered_whole() -> None:
    for copies in run_ranks(4, _whole_copies):
        for got in copies.values():
            for tensor, expected in zip(got, _tensors(), strict=True):
                assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected.bfloat16())


def test_parameters_without_gradients_do_not_disturb_sums_of_micro_batches(tmp_path: Path, world_of_one: None) -> None:
    """ERNIE's routers have trained biases that get no gradient; sums are in float32, other gradients in bfloat16."""
    folder, batch = make_folder("ernie4_5_moe", tmp_path / "model"), make_batch([12, 9, 17])
    found = []
    for plan in ([[0, 1, 2]], [[0], [1], [2]]):
        config = TrainerConfig(lr=1e-3, param_dtype="bfloat16")
        trainer = FSDP2Engine(config, folder, dtype=torch.float32, total_steps=10)
        trainer.accumulate(batch, plan, Weighted(), norms_of(batch))
        gradients = {n: p.grad.full_tensor() for n, p in trainer.model.named_parameters() if p.grad is not None}
        found.append(gradients)
    assert found[0].keys() == found[1].keys()
    idle = {name for name, gradient in found[1].items() if not gradient.any()}
    assert idle and all(name.endswith("e_score_correction_bias") for name in idle)
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 0.1 * gradient.norm() + 1e-9, name
