"""A teacher with its own prompt, and the trainer's engine as a teacher: values equal transformers' of the sequences
that the teacher reads, at the tokens of the student's batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.teacher_client import widths_of
from hpcrl.controller.teacher_prompts import as_read, prompts_of
from hpcrl.messaging.messages import LoadTeacher, LoadTeacherHead, Teach
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.types import Sizes, split_sample_id
from hpcrl.workers.teacher import TeacherRole
from hpcrl.workers.teacher_reading import with_prompts
from hpcrl.workers.trainer import TrainerRole
from tests.engines.worlds import make_batch

pytestmark = pytest.mark.numerics

TEMPERATURE, K = 0.5, 4
PROMPTS = {uid: tuple(range(40 + uid, 40 + 3 * uid + 2)) for uid in range(4)}
LORA = {"trainer": {"lora": {"rank": 2}}}


def student_batch() -> Batch:
    """Prompts of 3 tokens, responses of 3, 5, 1 and 4; the last two belong to one prompt."""
    batch = make_batch([6, 8, 4, 7])
    batch.turn_ids = torch.where(batch.loss_mask, 0, -1).to(torch.int32)
    batch.group_ids = torch.tensor([0, 1, 2, 2])
    return batch


def handle_of(batch: Batch) -> BatchHandle:
    lengths = batch.lengths.tolist()
    ids = [group << 24 | member for group, member in ((0, 0), (1, 0), (2, 0), (2, 1))]
    sizes = {n: Sizes(length, length - 3) for n, length in zip(ids, lengths, strict=True)}
    prompts = {n: split_sample_id(n)[0] for n in ids}
    return BatchHandle(4, 1, sizes, [ids], {2: ids}, prompts=prompts, teacher_prompts=PROMPTS)


@pytest.fixture
def make(make_teaching: Any, model_folder: Path) -> Any:
    def role(kind: Any, **settings: Any) -> Any:
        return make_teaching(kind, model_folder, TEMPERATURE, **settings)

    return role


def teach(role: Any, batch: Batch, in_context: bool = True) -> Batch:
    """As the controller commands it, in two micro-batches."""
    handle = handle_of(batch)
    handle.teacher_prompts = PROMPTS if in_context else {}
    role._worker.batches[4] = batch
    plan = as_read(handle).plan(handle.rows, handle.samples, 20)[2]
    assert len(plan) > 1 and sorted(row for rows in plan for row in rows) == [0, 1, 2, 3]
    prompts = prompts_of(handle, handle.samples)
    role.handlers()[Teach](Teach(4, widths_of(role._worker.config), plan, prompts=prompts), 1)
    return batch.check()


def log_softmaxes(folder: Path, batch: Batch, in_context: bool = True) -> Tensor:
    """[M, V] before each response token, from transformers on the teacher's prompt (or the student's) and response."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for tokens, group in zip(batch.token_ids.split(batch.lengths.tolist()), batch.group_ids.tolist(), strict=True):
        prompt = torch.tensor(PROMPTS[group]) if in_context else tokens[:3]
        with torch.no_grad():
            logits = model(torch.cat([prompt, tokens[3:]])[None]).logits[0]
        found.append((logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1))
    return torch.cat(found)


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-5)


def perturb(role: Any) -> None:
    """Adapters, which are zero at first, or all weights, change the policy."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in role.engine.model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)


def sampled(log_p: Tensor, batch: Batch) -> Tensor:
    return log_p.gather(1, batch.token_ids[batch.loss_mask][:, None])[:, 0]


def test_a_folder_teaches_in_context(make: Any, model_folder: Path) -> None:
    role = make(TeacherRole, teacher={"path": str(model_folder), "context": "{prompt}"})
    batch = teach(role, student_batch())
    wanted = log_softmaxes(model_folder, batch)
    assert close(batch.teacher_logprobs[batch.loss_mask], sampled(wanted, batch))
    assert not batch.teacher_logprobs[~batch.loss_mask].any()
    assert not close(wanted, log_softmaxes(model_folder, batch, in_context=False))


@pytest.mark.parametrize("form", ["sampled", "top_k", "full"])
def test_the_base_of_adapters_teaches_without_a_copy(make: Any, model_folder: Path, form: str) -> None:
    teacher = {"source": "base", "form": form, "top_k": K, "context": "{prompt}"}
    role = make(TrainerRole, teacher=teacher, **LORA)
    perturb(role)
    batch = teach(role, student_batch())
    log_p, mask = log_softmaxes(model_folder, batch), batch.loss_mask
    if form == "sampled":
        assert close(batch.teacher_logprobs[mask], sampled(log_p, batch))
        adapted = role.engine.logprobs(
            with_prompts(batch, prompts_of(handle_of(batch), [0, 1 << 24, 2 << 24])), [[0]], 1
        )
        assert adapted is not None and adapted.any()
        own = role.engine.logprobs(batch, [[0, 1, 2, 3]], TEMPERATURE)
        base = sampled(log_softmaxes(model_folder, batch, in_context=False), batch)
        assert not close(own[mask], base), "the adapters are on again"
        assert close(teach(role, student_batch(), in_context=False).teacher_logprobs[mask], base)
    elif form == "top_k":
        values, ids = log_p.topk(K)
        assert torch.equal(batch.columns["teacher_topk_ids"][mask].long(), ids)
        assert close(batch.columns["teacher_topk_logprobs"][mask], values)
    else:
        head = role._algorithm.objective.teacher_head
        logits = batch.columns["teacher_states"][mask] @ head.weight.T
        assert close((logits / TEMPERATURE).log_softmax(-1), log_p)


def test_the_policy_teaches_itself_in_context(make: Any, model_folder: Path, tmp_path: Path) -> None:
    role = make(TrainerRole, teacher={"source": "policy", "context": "{prompt}"})
    perturb(role)
    role.engine.export_hf(tmp_path / "now")
    batch = teach(role, student_batch())
    wanted = sampled(log_softmaxes(tmp_path / "now", batch), batch)
    assert close(batch.teacher_logprobs[batch.loss_mask], wanted)
    assert not close(wanted, sampled(log_softmaxes(model_folder, batch), batch))


def test_a_copy_of_the_policy_and_its_head_are_replaced(make: Any, model_folder: Path, tmp_path: Path) -> None:
    teacher = {"source": "policy", "sync_every": 3, "form": "full"}
    trainer = make(TrainerRole, teacher=teacher)
    assert Teach not in trainer.handlers()
    copy = TeacherRole(trainer._worker)
    assert close(copy.engine.model.hf.get_output_embeddings().weight, head_of(trainer)), "of the initial policy"
    perturb(trainer)
    trainer.engine.export_hf(tmp_path / "later")
    copy.handlers()[LoadTeacher](LoadTeacher(str(tmp_path / "later")), 1)
    trainer.handlers()[LoadTeacherHead](LoadTeacherHead(str(tmp_path / "later")), 2)
    batch = teach(copy, student_batch(), in_context=False)
    logits = batch.columns["teacher_states"][batch.loss_mask] @ head_of(trainer).T
    wanted = log_softmaxes(tmp_path / "later", batch, in_context=False)
    assert close((logits / TEMPERATURE).log_softmax(-1), wanted)
    assert not close(wanted, log_softmaxes(model_folder, batch, in_context=False))


def head_of(trainer: TrainerRole) -> Tensor:
    head = trainer._algorithm.objective.teacher_head
    assert head is not None
    return head.weight


def test_a_rank_without_rows_and_responses_without_tokens() -> None:
    handle = handle_of(student_batch())
    batch = student_batch()
    given = prompts_of(handle, handle.samples)
    read = with_prompts(batch, given).check()
    assert read.lengths.tolist() == [2 + 3, 4 + 5, 6 + 1, 6 + 4]
    assert as_read(handle).sizes == {
        n: Sizes(total, size.model)
        for (n, size), total in zip(handle.sizes.items(), read.lengths.tolist(), strict=True)
    }
    first = with_prompts(batch.select([0]), {0: np.array([5, 6], np.int32).tobytes()})
    assert first.token_ids.tolist() == [5, 6, *batch.token_ids[3:6].tolist()] and first.position_ids.tolist() == [
        *range(5)
    ]
    none = with_prompts(batch.select([]), given)
    assert none.num_sequences == 0 and none.num_tokens == 0
