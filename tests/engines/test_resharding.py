"""What a trainer saves is what any other number of ranks loads: weights and moments in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.runtime.balance import balance
from tests.checkpoint.writing import write_files
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group, run_ranks

LENGTHS = (11, 7, 9, 14, 5, 8, 6, 10)


def _engine(model: Path) -> FSDP2Engine:
    return FSDP2Engine(TrainerConfig(lr=1e-2), model, dtype=torch.float32, total_steps=10)


def _train(engine: FSDP2Engine) -> None:
    whole, size = make_batch(LENGTHS), dist.get_world_size()
    mine = whole.select(balance(LENGTHS, size)[dist.get_rank()])
    engine.train_step(mine, [list(range(mine.num_sequences))], Weighted(), norms_of(whole))


def _save_new(model: Path, target: Path) -> None:
    """A run of two steps; the second snapshot goes where the first was."""
    engine = _engine(model)
    for number in range(2):
        _train(engine)
        files = engine.snapshot()
        if number == 1:
            write_files(target, files)


def _save_loaded(model: Path, source: Path, target: Path) -> tuple[int, list[str], dict[str, Tensor]]:
    engine = _engine(model)
    warnings = engine.load(source)
    write_files(target, engine.snapshot())
    weights = dict(engine.named_weights())
    _train(engine)  # the state is complete: a step can be made of it
    return engine.optimizer_step, warnings, weights


def full_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as torch's own reader gives them."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_two_ranks_to_one_to_four(tmp_path: Path) -> None:
    model = make_model_folder("qwen2", tmp_path / "model", tie_word_embeddings=False)
    folders = [tmp_path / name for name in ("two", "one", "four")]
    for folder in folders:
        folder.mkdir()
    run_ranks(2, _save_new, model, folders[0])
    saved = full_tensors(folders[0])
    assert {"step", "exp_avg", "exp_avg_sq"} == {n.rsplit(".", 1)[1] for n in saved if n.startswith("optimizer.state.")}
    assert all(value.any() for name, value in saved.items() if "exp_avg" in name)
    assert {int(value) for name, value in saved.items() if name.endswith(".step")} == {2}
    with process_group(0, 1, str(tmp_path / "world")):
        loaded = [_save_loaded(model, folders[0], folders[1])]
    loaded += run_ranks(4, _save_loaded, model, folders[1], folders[2])
    for steps, warnings, weights in loaded:
        assert steps == 3 and "random state is not restored" in warnings[0]
        assert all(torch.equal(value, saved[f"model.hf.{name}"]) for name, value in weights.items())
    assert same(full_tensors(folders[1]), saved) and same(full_tensors(folders[2]), saved)
    name = next(name for name in saved if name.endswith("exp_avg"))
    assert not same(saved | {name: saved[name] + 1e-6}, saved), "the comparison sees nothing"
