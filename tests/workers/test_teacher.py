"""The teacher role: its engine's answers in every form, and tokens that its vocabulary lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TinyModel, parse
from hpcrl.controller.teacher_client import widths_of
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.messaging.messages import Teach
from hpcrl.rollout.batch import Batch
from hpcrl.spec.trajectory import FIELDS, Field, Level, Origin, declare
from hpcrl.workers.rank_loop import Worker
from hpcrl.workers.teacher import UNKNOWN, TeacherRole
from tests.dist.conftest import Threads
from tests.engines.worlds import make_batch
from tests.workers.conftest import LAYOUT

EPOCHS = itertools.count()
TEACHER = TinyModel(hidden_size=24, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, vocab_size=290)


@pytest.fixture
def role(threads: Threads, model_folder: Path, tmp_path: Path) -> Iterator[TeacherRole]:
    make_tiny_model(TEACHER, tmp_path / "teacher")
    settings = {
        "pipeline": "distill",
        "model": {"path": str(model_folder)},
        "teacher": {"path": str(tmp_path / "teacher")},
        "rollout": {"temperature": 0.5},
    }
    layout = RoleLayout(MappingProxyType({**LAYOUT, "teacher": (2,)}), 3)
    worker = Worker(threads.worlds[2], parse(settings), layout, model_folder, model_folder.parent)
    worker.world.default_group("training", [2], next(EPOCHS))
    yield TeacherRole(worker)
    dist.destroy_process_group()


def teach(role: TeacherRole, batch: Batch) -> Batch:
    role._worker.batches[4] = batch
    rows = [[row] for row in range(batch.num_sequences)]
    role.handlers()[Teach](Teach(4, widths_of(role._worker.config), rows), 1)
    return batch


def test_a_token_that_the_teacher_lacks_gets_a_finite_log_prob(role: TeacherRole) -> None:
    batch = make_batch([6, 7])
    batch.token_ids = batch.token_ids % 200
    index = batch.loss_mask.nonzero()[-1, 0]  # the last token, on which no other depends
    whole = teach(role, batch).teacher_logprobs
    assert whole is not None and (whole[batch.loss_mask] < 0).all() and not whole[~batch.loss_mask].any()
    batch.token_ids = batch.token_ids.clone()
    batch.token_ids[index] = 290
    drawn = batch.token_ids.clone()
    padded = teach(role, batch).teacher_logprobs
    assert padded is not None and padded[index] == UNKNOWN and torch.equal(batch.token_ids, drawn)
    others = torch.arange(batch.num_tokens) != index
    assert torch.equal(padded[others], whole[others])


class Engine:
    """Answers with its arguments."""

    def top_k(self, batch: Batch, micro_batches: Any, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        assert micro_batches == [[0], [1]]
        values = torch.full((batch.num_tokens, k), temperature)
        return torch.full((batch.num_tokens, k), k, dtype=torch.int32), values

    def final_states(self, batch: Batch, micro_batches: Any) -> Tensor:
        return torch.full((batch.num_tokens, 24), 3.0)


@pytest.mark.parametrize(("form", "fields"), [("top_k", 2), ("full", 1)])
def test_every_form_is_one_command(role: TeacherRole, form: str, fields: int) -> None:
    declared = dict(FIELDS)
    for name, dtype in (("topk_ids", "int32"), ("topk_logprobs", "float32"), ("states", "float32")):
        if f"teacher_{name}" not in declared:
            about = "of a teacher"
            declare(Field(f"teacher_{name}", dtype, Level.TOKEN, Origin.TRAINING, about, optional=True, any_width=True))
    worker = cast(Any, role._worker)
    changes = {"form": form, "top_k": 3}
    worker.config = worker.config.model_copy(update={"teacher": worker.config.teacher.model_copy(update=changes)})
    role.engine = cast(Any, Engine())
    batch = teach(role, make_batch([6, 7])).check()
    added = [name for name in batch.columns if name.startswith("teacher_")]
    assert len(added) == fields
    if form == "top_k":
        assert batch.columns["teacher_topk_ids"].tolist() == [[3] * 3] * 13
        assert batch.columns["teacher_topk_logprobs"].tolist() == [[0.5] * 3] * 13
    else:
        assert batch.columns["teacher_states"].tolist() == [[3.0] * 24] * 13
    for name in FIELDS.keys() - declared.keys():
        del FIELDS[name]
