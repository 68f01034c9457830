"""ZeroEngine where it differs from FSDP2Engine: clipping, bfloat16, frozen models, checkpoints of other stages and
ranks."""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TrainerConfig, parse
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.metrics.stats import Stats
from hpcrl.planner.memory import may_share_device
from hpcrl.rollout.batch import Batch, Norms
from tests.checkpoint.writing import write_files
from tests.engines.moving import Left
from tests.engines.worlds import (
    Weighted,
    make_batch,
    make_model_folder,
    norms_of,
    run_ranks,
    transformers_results,
    worst_difference,
)

if TYPE_CHECKING:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14, 5, 17)
TEMPERATURE = 0.7
PLAN = [[0, 1, 2], [3, 4], [5]]
OFFLOAD = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2_offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"zero_stage": 3, **OFFLOAD},
}
every_case = pytest.mark.parametrize("case", CASES)


class Infinite(Objective):
    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        return outputs.logprobs.sum() * math.inf, {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An odd vocabulary and width, so that ranks hold unequal parts."""
    shape = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "vocab_size": 101}
    return make_model_folder("qwen2", tmp_path_factory.mktemp("model") / "qwen2", **shape)


def make_engine(folder: Path, case: str, trainable: bool = True, dtype: str = "float32", **config: Any) -> ZeroEngine:
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    keys = CASES[case] | {key: config.pop(key) for key in DeepSpeedConfig.model_fields if key in config}
    return ZeroEngine(
        TrainerConfig(**{"lr": 1e-3, "logits_chunk_tokens": 8} | config),
        folder,
        zero=DeepSpeedConfig(**keys),
        dtype=getattr(torch, dtype),
        total_steps=10,
        trainable=trainable,
    )


def gradients_of(engine: ZeroEngine, batch: Batch) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_grad  # after the engine, which keeps it from importing mlflow

    engine.accumulate(batch, PLAN, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    found = {name: safe_get_full_grad(p).float().clone() for name, p in engine.module.hf.named_parameters()}
    engine.discard_gradients()
    return found


@pytest.mark.slow
@every_case
def test_clipped_adamw_step_by_hand(case: str, folder: Path, world_of_one: None) -> None:
    """With eps far above the gradient, Adam's first step is lr * g / (|g| + eps): the clipped gradient shows. A step
    that was skipped before has no effect."""
    batch, limit = make_batch(LENGTHS), 0.01
    engine = make_engine(folder, case, max_grad_norm=limit, eps=1.0, weight_decay=0.5, lr=0.1)
    before = dict(engine.named_weights())
    _, gradients = transformers_results(folder, batch, TEMPERATURE)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    assert norm > 10 * limit
    stats = engine.train_step(batch, PLAN, Infinite(), norms_of(batch))
    assert stats["actor/skipped_update"].total == 1 and engine.optimizer_step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    stats = engine.train_step(batch, PLAN, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    assert stats["actor/grad_norm"].total == pytest.approx(norm, rel=1e-5)
    for name, tensor in engine.named_weights():
        clipped = gradients[name] * (limit / norm)
        decay = 0.5 if tensor.ndim == 2 else 0.0
        expected = before[name] * (1 - 0.1 * decay) - 0.1 * clipped / (clipped.abs() + 1.0)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@every_case
def test_bfloat16_keeps_float32_weights(case: str, folder: Path, world_of_one: None) -> None:
    """The optimizer's weights are those on disk, not rounded; gradients of micro-batches are summed in float32."""
    batch = make_batch(LENGTHS)
    origin = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    engine = make_engine(folder, case, param_dtype="bfloat16")
    assert all(torch.equal(tensor, origin[name]) for name, tensor in engine.named_weights())
    sent = dict(engine.named_weights(dict.fromkeys(engine.weights.names, torch.bfloat16)))
    assert all(torch.equal(tensor, origin[name].bfloat16()) for name, tensor in sent.items())
    own = FSDP2Engine(
        TrainerConfig(lr=1e-3, logits_chunk_tokens=8, param_dtype="bfloat16"),
        folder,
        dtype=torch.float32,
        total_steps=10,
    )
    want = own.train_step(batch, PLAN, Weighted(TEMPERATURE), norms_of(batch))
    stats = engine.train_step(batch, PLAN, Weighted(TEMPERATURE), norms_of(batch))
    assert stats["actor/grad_norm"].total == pytest.approx(want["actor/grad_norm"].total, rel=1e-3)
    assert stats["actor/logprob"].total == pytest.approx(want["actor/logprob"].total, rel=1e-3)
    moved = {name: tensor - origin[name] for name, tensor in engine.named_weights()}
    assert all(0 < change.abs().max() <= 1.1e-3 for change in moved.values())  # below the precision of bfloat16
    assert engine.train_step(batch, PLAN, Infinite(), norms_of(batch))["actor/skipped_update"].total == 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"packing": "off"}], ids=str)
@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_other_forward_settings_give_the_same_gradients(
    case: str, settings: dict[str, Any], folder: Path, world_of_one: None
) -> None:
    batch = make_batch(LENGTHS)
    logprobs, gradients = transformers_results(folder, batch, TEMPERATURE)
    engine = make_engine(folder, case, **settings)
    for _ in range(2):
        assert worst_difference(gradients_of(engine, batch), gradients) < 1e-5
        assert (engine.logprobs(batch, PLAN, TEMPERATURE) - logprobs).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["zero1", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_engine_computes_log_probs_without_an_optimizer(
    case: str, dtype: str, folder: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(LENGTHS)
    engine = make_engine(folder, case, trainable=False, dtype=dtype, param_dtype=dtype)
    want, _ = transformers_results(folder, batch, TEMPERATURE)
    got = engine.logprobs(batch, PLAN, TEMPERATURE)
    assert (got - want).abs().max() < (1e-5 if dtype == "float32" else 0.5)
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())
    assert all(tensor.dtype == getattr(torch, dtype) for _, tensor in engine.named_weights())
    from hpcrl.engines.train.deepspeed import state_memory

    left = _take_turns(monkeypatch)
    turns = state_memory.HostOffload(engine.module, getattr(engine.model, "optimizer", None), None, torch.device("cpu"))
    for turn in (lambda: turns.offload(weights=True), turns.onload):
        turn()
        assert left.overwrite() >= engine.num_parameters * getattr(torch, dtype).itemsize
    assert torch.equal(engine.logprobs(batch, PLAN, TEMPERATURE), got)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_in_one_line(folder: Path, world_of_one: None, tmp_path: Path) -> None:
    engine = make_engine(folder, "zero3")
    with pytest.raises(ValueError, match=r"no trainer\.json"):
        engine.load(tmp_path)
    write_files(tmp_path, engine.snapshot())
    shorter = make_engine(make_model_folder("qwen2", tmp_path / "shorter", num_hidden_layers=1), "zero3")
    with pytest.raises(ValueError, match=r"of another model: it has 12 tensors .*model\.layers\.1\.in"):
        shorter.load(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="cannot be read") as error:
        engine.load(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"zero_stage": 2, "offload_parameters": "cpu"},
            "offload_parameters: ZeRO-2 does not divide parameters; set zero",
        ),
        (
            {"options": {"gradient_clipping": 1}},
            "options: gradient_clipping is set by hpcrl; set trainer.m",
        ),
        (
            {"options": {"zero_optimization": {"stage": 1}}},
            "options: zero_optimization.stage is .* trainer.deepspeed.zero",
        ),
        ({"options": {"zero_optimization": 3}}, "options: zero_optimization is a section of keys, not 3"),
        ({"attention": "flash"}, "attention: flash needs GPUs"),
        ({"offload_optimizer": "nvme"}, "nvme_path: goes together with offload_optimizer=nvme"),
        ({"nvme_path": "/scratch"}, "nvme_path: goes together with offload_optimizer=nvme"),
        ({"offload_optimizer": "nvme", "nvme_path": "here"}, "nvme_path: a folder of each node .* not 'here'"),
        ({"zero_stage": 2, "offload_parameters": "nvme", "nvme_path": "/x"}, "offload_parameters: ZeRO-2 does not"),
    ],
)
def test_impossible_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.deepspeed.{message}"):
        parse({"trainer": {"engine": "deepspeed", "deepspeed": section}})


def _take_turns(monkeypatch: pytest.MonkeyPatch) -> Left:
    return Left(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("zero1", "bfloat16"),
        ("zero2", "float32"),
        ("zero3", "float32"),
        ("zero3", "bfloat16"),
        ("zero3_offload", "bfloat16"),
    ],
)
def test_offloading_for_a_generator_changes_nothing(
    case: str, dtype: str, folder: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing has to move: here all memory moves to other memory, and the old memory is overwritten. A tensor
    that still used it would make the results NaN."""
    from hpcrl.engines.train.deepspeed import state_memory

    left = _take_turns(monkeypatch)
    batch = make_batch(LENGTHS)
    stays, moves = (make_engine(folder, case, param_dtype=dtype) for _ in range(2))
    turns, moved = (
        state_memory.HostOffload(moves.module, moves.model.optimizer, moves.optimizer, torch.device("cpu")),
        [],
    )
    for _ in range(2):
        for engine in (stays, moves):
            engine.train_step(batch, PLAN, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
        turns.offload(weights=False)
        moved.append(left.overwrite())
        published = dict(stays.named_weights())
        assert all(torch.equal(tensor, published[name]) for name, tensor in moves.named_weights())
        turns.offload(weights=True)
        moved.append(left.overwrite())
        if case == "zero3":
            assert not any(b.untyped_storage().nbytes() for b in turns._gradient_buffers())
        _same_state(moves, stays)  # the state for a checkpoint
        turns.onload()
        moved.append(left.overwrite())
        assert torch.equal(moves.logprobs(batch, PLAN, TEMPERATURE), stays.logprobs(batch, PLAN, TEMPERATURE))
    numbers = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    own_masters = dtype == "bfloat16" or case != "zero3"  # ZeRO-3 in float32 updates the weights of the computation
    assert moved[0] >= (8 + 4 * own_masters) * numbers
    assert moved[1] >= (2 if dtype == "bfloat16" else 4) * numbers
    assert moved[2] == moved[0] + moved[1] and moved[3:] == moved[:3]
    _same_state(moves, stays)


def _same_state(engine: ZeroEngine, other: ZeroEngine) -> None:
    from hpcrl.engines.train.deepspeed import zero

    for mine, others in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        for (key, values), (_, wanted) in zip(zero.state_of(mine), zero.state_of(others), strict=True):
            assert torch.equal(values, wanted), key


def test_offloading_for_a_generator_is_planned() -> None:
    ranks = {"trainer": {"num_ranks": 2}, "generator": {"colocate_with": "trainer"}}
    for max_staleness, may in ((0, True), (1, False)):
        sections = {"trainer": {"engine": "deepspeed"}, "rollout": {"max_staleness": max_staleness}}
        config = parse({**sections, "layout": {**ranks, "offload": "always"}, "generator": {"engine": "vllm"}})
        assert may_share_device(config, RoleLayout.from_config(config)) == may


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), [("zero2_offload", "float32"), ("zero3_offload", "bfloat16")])
def test_optimizer_state_on_disk_equals_state_in_memory(
    case: str, dtype: str, folder: Path, world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also from a checkpoint; the files have no names and, after a step, occupy no process memory."""
    monkeypatch.setattr("hpcrl.engines.train.deepspeed.local_disk.IN_MEMORY", ())  # on any file system for tests
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    files = {key: "nvme" for key in OFFLOAD if key in CASES[case]} | {"nvme_path": "$NODE_DISK"}
    batch = make_batch(LENGTHS)
    first, second, other = (make_engine(folder, case, param_dtype=dtype, **keys) for keys in (files, files, {}))
    assert list((tmp_path / "disk").iterdir()) == []
    for engine in (first, other):
        engine.train_step(batch, PLAN, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    resident = _pages(tmp_path / "disk")
    numbers, one = first.num_parameters, {"float32": 4, "bfloat16": 2}[dtype]
    assert sum(size for size, _ in resident) >= 2 * numbers * (12 + one * (case == "zero3_offload"))  # of two engines
    assert sum(size for _, size in resident) < sum(size for size, _ in resident) / 2 + 1  # the second took no step
    write_files(tmp_path, first.snapshot())
    assert second.load(tmp_path) == []
    for engine in (first, second, other):
        engine.train_step(batch, PLAN, Weighted(TEMPERATURE, entropy=True), norms_of(batch))
    assert not any(size for _, size in _pages(tmp_path / "disk"))
    _same_state(first, other)
    _same_state(second, other)


def test_offloaded_files_need_no_file_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen model has a file per parameter, and a process often may open 1024."""
    from hpcrl.engines.train.deepspeed import local_disk

    monkeypatch.setattr(local_disk, "IN_MEMORY", ())
    disk, before = local_disk.LocalDisk(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    tensors = [disk.zeros_like(torch.empty(3)) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before and list(tmp_path.iterdir()) == []
    for number, tensor in enumerate(tensors):
        tensor += number
    disk.release()
    assert [tensor.tolist() for tensor in tensors] == [[number] * 3 for number in range(20)]


def _pages(folder: Path) -> list[tuple[int, int]]:
    """Bytes, and resident bytes, of this process's mappings of files in the folder."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f" {folder}/" in line
        elif inside and line.startswith(("Size:", "Rss:")):
            found.append(int(line.split()[1]) * 1024)
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_an_unusable_offload_folder_is_refused(
    folder: Path, world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message_for(path: str) -> str:
        with pytest.raises(ValueError, match=r"trainer.deepspeed.nvme_path=") as error:
            make_engine(folder, "zero3_offload", offload_optimizer="nvme", nvme_path=path)
        return str(error.value)

    assert "there is no such folder on " in message_for(f"{tmp_path}/none")
    assert "there is no such folder on " in message_for("$NOT_SET/x")
    assert "/dev/shm is tmpfs, whose files are in host memory" in message_for("/dev/shm")
    monkeypatch.setattr("hpcrl.engines.train.deepspeed.local_disk.IN_MEMORY", ())
    assert "cannot be written" in message_for("/proc")

    def full(file: int, first: int, size: int) -> None:
        if size > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(file, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert re.search(r"no file of 0\.0 GB can be made, only [0-9.]+ GB are free$", message_for(str(tmp_path)))


def test_configured_options_reach_deepspeed(folder: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}.items():  # under mpirun
        monkeypatch.setenv(name, value)
    engine = make_engine(folder, "zero2", options={"zero_optimization": {"reduce_bucket_size": 128}})
    assert engine.model.optimizer.reduce_bucket_size == 128
    _, gradients = transformers_results(folder, make_batch(LENGTHS), TEMPERATURE)
    assert worst_difference(gradients_of(engine, make_batch(LENGTHS)), gradients) < 1e-5


# ---- two ranks


def _step(engine: FSDP2Engine) -> None:
    whole = make_batch(LENGTHS)
    mine = whole.select(list(range(dist.get_rank(), len(LENGTHS), dist.get_world_size())))
    engine.train_step(mine, [list(range(mine.num_sequences))], Weighted(TEMPERATURE, entropy=True), norms_of(whole))


def _plain(folder: Path) -> FSDP2Engine:
    return FSDP2Engine(TrainerConfig(lr=1e-3, logits_chunk_tokens=8), folder, dtype=torch.float32, total_steps=10)


def _two_ranks(folder: Path, scratch: Path) -> dict[str, Any]:
    """Each engine takes two steps from the checkpoint of the previous engine."""
    engines = {case: make_engine(folder, case) for case in ("zero1", "zero3", "zero3_offload", "zero2")}
    results: dict[str, Any] = {}
    engine = _plain(folder)
    _step(engine)
    for name, following in [*engines.items(), ("fsdp2", _plain(folder))]:
        saved = scratch / name
        if dist.get_rank() == 0:
            saved.mkdir()
        dist.barrier()
        write_files(saved, engine.snapshot())
        dist.barrier()
        results[f"{name}/warnings"] = following.load(saved)
        saved_weights = dict(engine.named_weights())
        results[f"{name}/same"] = all(torch.equal(saved_weights[n], t) for n, t in following.named_weights())
        results[f"{name}/step"] = following.optimizer_step
        engine = following
        _step(engine)
        results[name] = dict(engine.named_weights())
    return results


@pytest.mark.slow
def test_zero_stages_and_fsdp2_resume_each_others_checkpoints(folder: Path, tmp_path: Path, world_of_one: None) -> None:
    """Five steps, each by a different engine from the previous engine's checkpoint, on two ranks; then on one."""
    results = run_ranks(2, _two_ranks, folder, tmp_path)
    names = ["zero1", "zero3", "zero3_offload", "zero2", "fsdp2"]
    for result in results:
        assert [result[f"{name}/step"] for name in names] == [1, 2, 3, 4, 5]
        assert all(result[f"{name}/same"] and result[f"{name}/warnings"] == [] for name in names)
    # The moments were saved too: a single engine that takes all steps ends with the same weights.
    alone = _plain(folder)
    for step in range(6):
        _step(alone)
        if step:
            want = dict(alone.named_weights())
            for name, tensor in results[0][names[step - 1]].items():
                close = (tensor - want[name]).abs() < 1e-5
                assert close.float().mean() > 0.98, (names[step - 1], name)
    engine = make_engine(folder, "zero3")
    assert "written by 2 trainer ranks, now there are 1" in engine.load(tmp_path / "zero2")[0]
    assert engine.optimizer_step == 4
