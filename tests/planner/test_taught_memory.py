"""The plan of what a teacher gives, against the real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, parse
from hpcrl.planner.activations import Tokens
from hpcrl.planner.memory import memory
from hpcrl.planner.taught_memory import divergence_bytes
from hpcrl.planner.trainer import trainer_parts
from hpcrl.rollout.batch import Batch
from hpcrl.spec.divergence import Divergence
from tests.engines.test_teaching import Distilling
from tests.engines.worlds import make_batch, make_model_folder, norms_of
from tests.planner.measuring import least_peak_bytes, make_engine
from tests.planner.test_fsdp2 import TALL, shape_of

ROWS, LENGTH, VOCAB, WIDTH, K = 4, 32, 4000, 120, 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Student and teacher."""
    at = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB}
    return make_model_folder("qwen3", at / "student", **TALL | {"vocab_size": VOCAB}), make_model_folder(
        "qwen2", at / "teacher", **sizes
    )


def config_of(folders: tuple[Path, Path], **changes: Any) -> Config:
    own = {
        "pipeline": "distill",
        "model": {"path": str(folders[0])},
        "trainer": {"logits_chunk_tokens": 64, "max_tokens_per_micro_batch": ROWS * LENGTH},
        "rollout": {"max_new_tokens": LENGTH - 1, "num_prompts": 1, "group_size": 2 * ROWS},
        "data": {"max_prompt_tokens": 1, "train": "task:add"},
    }
    return parse(own | changes)


def with_taught(form: str) -> Batch:
    batch = make_batch([LENGTH] * 2 * ROWS, num_prompt_tokens=1)
    if form == "full":
        batch.teacher_states = torch.randn(batch.num_tokens, WIDTH)
    if form == "top_k":
        batch.teacher_topk_ids = torch.arange(K, dtype=torch.int32).expand(batch.num_tokens, K)
        batch.teacher_topk_logprobs = torch.full((batch.num_tokens, K), -5.0)
    return batch


@pytest.mark.parametrize(("form", "several"), [("top_k", False), ("full", False), ("full", True)])
def test_a_step_with_a_divergence_needs_no_more_memory_than_planned(
    form: Any, several: bool, folders: tuple[Path, Path], tmp_path: Path, world_of_one: None
) -> None:
    engine = make_engine(folders[0], logits_chunk_tokens=64)
    head = TeacherHead(torch.randn(VOCAB, WIDTH)) if form == "full" else None
    objective, batch = Distilling(Divergence(form, 0.5, K, 1.0), head), with_taught(form)
    if several:
        objective.further_heads = (TeacherHead(torch.randn(VOCAB, WIDTH)),)
        batch.teachers = (torch.arange(batch.num_sequences) % 2).int()
    args = batch, [[*range(ROWS)], [*range(ROWS, 2 * ROWS)]], objective, norms_of(batch)
    engine.train_step(*args)
    peak = least_peak_bytes(lambda: engine.train_step(*args), tmp_path / "trace.json")
    given = {"paths": {"a": str(folders[1]), "b": str(folders[0])}} if several else {"path": str(folders[1])}
    teacher = given | {"form": form, "top_k": K}
    parts = trainer_parts(config_of(folders, teacher=teacher), shape_of(folders[0]), 1)
    phases = ("train", "update")
    planned = max(sum(p.num_bytes for p in parts if phase in p.during and {*p.during} <= {*phases}) for phase in phases)
    assert 1.0 <= planned / peak <= 1.15


def test_fields_and_head_are_on_the_ranks_that_hold_them(folders: tuple[Path, Path]) -> None:
    def sizes(**changes: Any) -> dict[tuple[str, str], tuple[int, bool]]:
        teacher = {"path": str(folders[1]), "form": "full"} | changes.pop("teacher", {})
        config = config_of(folders, teacher=teacher, **changes)
        kinds = memory(config, RoleLayout.from_config(config), shape_of(folders[0]))
        return {
            (p.role, p.name): (p.num_bytes, p.on_host) for kind in kinds for p in kind.parts if "teacher's" in p.name
        }

    apart = {"trainer": {"num_ranks": 2}, "teacher": {"colocate_with": None, "num_ranks": 1}}
    rows = 2 * ROWS * LENGTH
    assert sizes(layout=apart) == {
        ("trainer", "teacher's head"): (4 * VOCAB * WIDTH, False),
        ("trainer", "teacher's fields"): (2 * rows // 2 * 4 * WIDTH, True),
        ("teacher", "teacher's fields"): (2 * rows * 4 * WIDTH, True),
    }
    assert [*sizes(layout={"trainer": {"num_ranks": 1}})] == [
        ("trainer", name) for name in ("teacher's head", "teacher's fields")
    ]
    of_top_k = sizes(teacher={"form": "top_k", "top_k": 5}, layout=apart)
    assert of_top_k[("trainer", "teacher's fields")] == (rows * 8 * 5, True) and len(of_top_k) == 2


def test_ranks_that_divide_the_vocabulary_divide_the_second_chunk(folders: tuple[Path, Path]) -> None:
    config, shape = config_of(folders, teacher={"path": str(folders[1]), "form": "full"}), shape_of(folders[0])
    sizes = [replace(shape, vocab_size=size) for size in (VOCAB, VOCAB // 2)]
    whole, half = (divergence_bytes(config, size, Tokens(128, 128, 32), 4)[0] for size in sizes)
    assert whole - half == 3 * 64 * VOCAB // 2 * 4, "the teacher's logits, and two more tensors of their size"
