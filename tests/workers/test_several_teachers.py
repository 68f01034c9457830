"""A teacher rank with several models: each judges its rows as a rank with only this model would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, TinyModel, parse
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.teacher_client import samples_of_teachers, widths_of
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.messaging.messages import Teach
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.types import Sizes
from hpcrl.workers.rank_loop import Worker
from hpcrl.workers.teacher import TeacherRole
from tests.dist.conftest import Threads
from tests.engines.worlds import make_batch
from tests.workers.conftest import LAYOUT

EPOCHS = itertools.count(100)
Make = Callable[..., TeacherRole]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two teachers of other sizes; `again` is the first by another name."""
    at, sizes = tmp_path_factory.mktemp("teachers"), {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    make_tiny_model(TinyModel(hidden_size=24, intermediate_size=16, vocab_size=330, seed=2, **sizes), at / "math")
    make_tiny_model(TinyModel(hidden_size=16, intermediate_size=24, vocab_size=321, seed=3, **sizes), at / "code")
    (at / "again").symlink_to("math")
    return {name: str(at / name) for name in ("math", "code", "again")}


@pytest.fixture
def make(threads: Threads, model_folder: Path) -> Iterator[Make]:
    layout = RoleLayout(MappingProxyType({**LAYOUT, "teacher": (2,)}), 3)

    def made(**teacher: Any) -> TeacherRole:
        settings = {"pipeline": "distill", "model": {"path": str(model_folder)}, "teacher": teacher}
        worker = Worker(threads.worlds[2], parse(settings), layout, model_folder, model_folder.parent)
        if not dist.is_initialized():
            worker.world.default_group("training", [2], next(EPOCHS))
        return TeacherRole(worker)

    yield made
    dist.destroy_process_group()


def teach(role: TeacherRole, batch: Batch, plans: dict[int, list[list[int]]]) -> Batch:
    role._worker.batches[4] = batch
    for number, rows in plans.items():
        role.handlers()[Teach](Teach(4, widths_of(role._worker.config), rows, number), 1)
    return batch.check()


@pytest.mark.parametrize("form", ["sampled", "top_k", "full"])
def test_each_row_has_what_its_teacher_gives_alone(form: str, make: Make, folders: dict[str, str]) -> None:
    both = make(paths={"math": folders["math"], "code": folders["code"], "more": folders["again"]}, form=form, top_k=5)
    assert len(both.engines) == 2, "math and more have one model"
    rows = {0: [[0], [3, 1]], 1: [[4]]}
    batch = teach(both, make_batch([6, 7, 5, 8, 6]), rows)
    fields = {name: values for name, values in batch.columns.items() if name.startswith("teacher_")}
    assert fields
    for number, name in enumerate(("math", "code")):
        alone = teach(
            make(path=folders[name], form=form, top_k=5), make_batch([6, 7, 5, 8, 6]), {0: [[0, 1], [2, 3, 4]]}
        )
        mine = torch.isin(batch.row_ids, torch.tensor([row for part in rows[number] for row in part]))
        for field, values in fields.items():
            expected = alone.columns[field]
            wide = values[mine, : expected.shape[1]] if values.dim() == 2 else values[mine]
            assert (
                torch.equal(wide, expected[mine])
                if field == "teacher_topk_ids"
                else torch.allclose(wide, expected[mine])
            )
            if form == "full":
                assert values.shape[1] == 24 and not values[mine, expected.shape[1] :].any()
    unjudged = batch.row_ids == 2
    for field, values in fields.items():
        if field == "teacher_topk_ids":
            assert values[unjudged].tolist() == [[0, 1, 2, 3, 4]] * 5
        elif field == "teacher_topk_logprobs":
            assert (values[unjudged].exp().sum(-1) < 1).all()
        else:
            assert not values[unjudged].any()


def test_a_step_without_rows_of_any_teacher_has_its_fields(make: Make, folders: dict[str, str]) -> None:
    batch = teach(make(paths={"math": folders["math"]}, form="top_k", top_k=2), make_batch([6, 7]), {0: []})
    assert batch.teacher_topk_ids is not None and batch.teacher_topk_ids.shape == (13, 2)
    assert batch.teacher_topk_logprobs is not None and batch.teacher_topk_logprobs.tolist() == [[-3.0, -3.0]] * 13


def config_of(paths: dict[str, str], **loss: Any) -> Config:
    return parse({"pipeline": "distill", "model": {"path": "p"}, "teacher": {"paths": paths}, "loss": loss})


def batch_of(**domains: list[int]) -> BatchHandle:
    """A batch of two samples of each prompt 0 to 4; sample = 10 x prompt + member."""
    prompts = {10 * prompt + member: prompt for prompt in range(5) for member in range(2)}
    return BatchHandle(1, 1, dict.fromkeys(prompts, Sizes(4, 2)), [], {}, prompts=prompts, domains=domains)


def test_samples_go_to_the_teacher_of_their_domain() -> None:
    batch = batch_of(math=[0, 3], code=[1], chat=[2, 4])
    several = config_of({"code": "b", "math": "a", "chat": "./a"})
    assert samples_of_teachers(several, batch) == {0: [10, 11], 1: [0, 1, 20, 21, 30, 31, 40, 41]}
    rest = config_of({"code": "b", "default": "a"})
    assert samples_of_teachers(rest, batch) == {0: [10, 11], 1: [0, 1, 20, 21, 30, 31, 40, 41]}
    partly = config_of({"code": "b"}, chat={"divergence": 0, "policy": 1}, math={"divergence": 0, "ce": 1})
    assert samples_of_teachers(partly, batch) == {0: [10, 11]}
    assert samples_of_teachers(partly, batch_of(chat=[0, 1, 2, 3, 4])) == {0: []}
    single = parse({"pipeline": "distill", "model": {"path": "p"}, "teacher": {"path": "a"}})
    assert samples_of_teachers(single, batch) == {0: batch.samples}
    with pytest.raises(ValueError, match=r"^loss.math.divergence: 1, but no teacher judges the domain math"):
        samples_of_teachers(config_of({"code": "b"}), batch)
