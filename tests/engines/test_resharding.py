"""Any number of ranks loads what a trainer saved: weights and moments, bit for bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpcrl.config import TrainerConfig
from hpcrl.controller.balance import balance
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from tests.checkpoint.writing import write_files
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group, run_ranks

LENGTHS = (11, 7, 9, 14, 5, 8, 6, 10)


def _engine(model: Path, **own: int) -> FSDP2Engine:
    return FSDP2Engine(TrainerConfig(lr=1e-2), model, own=FSDP2Config(**own), dtype=torch.float32, total_steps=10)


def _train(engine: FSDP2Engine) -> None:
    whole = make_batch(LENGTHS)
    mine = whole.select(balance(LENGTHS, engine.data_parallel_size)[engine.data_parallel_rank])
    engine.train_step(mine, [list(range(mine.num_sequences))], Weighted(), norms_of(whole))


def _save_new(model: Path, target: Path) -> None:
    """A run of two steps; the second snapshot goes where the first was."""
    engine = _engine(model, tensor_parallel=2)
    for number in range(2):
        _train(engine)
        files = engine.snapshot()
        if number == 1:
            write_files(target, files)


def _save_loaded(model: Path, source: Path, target: Path, **own: int) -> tuple[int, list[str], dict[str, Tensor]]:
    engine = _engine(model, **own)
    warnings = engine.load(source)
    write_files(target, engine.snapshot())
    weights = dict(engine.named_weights())
    _train(engine)  # the state is complete: a step can start from it
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


SPLITS: list[dict[str, int]] = [{}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "replicas": 2}]


def _by_four_ranks(model: Path, folders: list[Path]) -> list[Any]:
    """Each split loads and saves the previous split's checkpoint."""
    results = []
    for (source, target), split in zip(pairwise(folders), SPLITS, strict=True):
        results.append(_save_loaded(model, source, target, **split))
        dist.barrier()
    return results


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_move_between_splits(tmp_path: Path) -> None:
    """Parts of matrices on two ranks, one rank, and three splits of four ranks, with parts of 27 rows in two shards."""
    model = make_model_folder("qwen2", tmp_path / "model", tie_word_embeddings=False, intermediate_size=54)
    folders = [tmp_path / name for name in ("two", "one", "four", "parts", "copies")]
    for folder in folders:
        folder.mkdir()
    run_ranks(2, _save_new, model, folders[0])
    saved = full_tensors(folders[0])
    assert {"step", "exp_avg", "exp_avg_sq"} == {n.rsplit(".", 1)[1] for n in saved if n.startswith("optimizer.state.")}
    assert all(value.any() for name, value in saved.items() if "exp_avg" in name)
    assert {int(value) for name, value in saved.items() if name.endswith(".step")} == {2}
    with process_group(0, 1, str(tmp_path / "world")):
        loaded = [_save_loaded(model, folders[0], folders[1])]
    for results in run_ranks(4, _by_four_ranks, model, folders[1:]):
        loaded += results
    for steps, _, weights in loaded:
        assert steps == 3
        assert all(torch.equal(value, saved[f"model.hf.{name}"]) for name, value in weights.items())
    assert all("random state is not restored" in warnings[0] for _, warnings, _ in loaded[:2])
    assert all(same(full_tensors(folder), saved) for folder in folders[1:])
    name = next(name for name in saved if name.endswith("exp_avg"))
    assert not same(saved | {name: saved[name] + 1e-6}, saved), "the comparison sees nothing"
