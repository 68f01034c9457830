"""Teachers beside router replay: their routers choose the experts, whatever the generator chose for the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.controller.teacher_client import widths_of
from hpcrl.messaging.messages import Teach
from hpcrl.rollout.batch import Batch
from hpcrl.spec.trajectory import FIELDS
from hpcrl.workers.teacher import TeacherRole
from hpcrl.workers.trainer import TrainerRole
from tests.engines.worlds import EXPERTS, make_batch, make_model_folder

pytestmark = pytest.mark.numerics

TEMPERATURE, K, PLAN = 0.7, 5, [[0, 3], [1, 2]]
NUM_EXPERTS, NONE = EXPERTS["qwen3_moe"]["num_experts"], 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder("qwen3_moe", tmp_path_factory.mktemp("moe") / "model", norm_topk_prob=True)


@pytest.fixture
def make(make_teaching: Any, folder: Path) -> Any:
    def role(kind: Any, teacher: dict[str, Any], **trainer: Any) -> Any:
        return make_teaching(kind, folder, TEMPERATURE, teacher=teacher, trainer={"router_replay": True, **trainer})

    return role


def routed() -> Batch:
    """Rows with experts for every response token that the model's routers would seldom choose."""
    known, rng = FIELDS.pop("routes"), np.random.default_rng(0)
    batch = make_batch([9, 12, 7, 10])
    FIELDS["routes"] = known
    routes = np.stack([rng.permutation(NUM_EXPERTS)[:2] for _ in range(2 * batch.num_tokens)]).astype(np.uint8)
    batch.routes = torch.from_numpy(routes.reshape(-1, 4)).masked_fill(~batch.loss_mask[:, None], NONE)
    return batch.check()


def teach(role: Any, form: str) -> Batch:
    """Some rows with the teacher's fields of this form; with `sampled` the log-probs, with `top_k` the K best."""
    config = role._worker.config
    teacher = config.teacher.model_copy(update={"form": form, "top_k": K})
    role._worker.config = config.model_copy(update={"teacher": teacher})
    batch = role._worker.batches[4] = routed()
    role.handlers()[Teach](Teach(4, widths_of(role._worker.config), PLAN), 1)
    return batch.check()


def log_softmaxes(folder: Path, batch: Batch) -> Tensor:
    """[M, V] before each response token, from transformers, whose routers choose."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for tokens, mask in zip(
        *(values.split(batch.lengths.tolist()) for values in (batch.token_ids, batch.loss_mask)), strict=True
    ):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        found.append((logits / TEMPERATURE).log_softmax(-1)[mask[1:]])
    return torch.cat(found)


def check(role: Any, folder: Path) -> None:
    """What the teacher tells is what its own routers give."""
    batch = teach(role, "sampled")
    log_p = log_softmaxes(folder, batch)
    wanted = log_p.gather(1, batch.token_ids[batch.loss_mask][:, None])[:, 0]
    torch.testing.assert_close(batch.teacher_logprobs[batch.loss_mask], wanted, rtol=0, atol=2e-5)
    best = teach(role, "top_k").columns["teacher_topk_logprobs"][batch.loss_mask]
    torch.testing.assert_close(best, log_p.topk(K).values, rtol=0, atol=2e-5)


def test_a_copy_of_the_policy_routes_itself(make: Any, folder: Path) -> None:
    """It has the policy's own weights, so only routes could make a difference."""
    check(make(TeacherRole, {"source": "policy", "sync_every": 2}), folder)


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("megatron", marks=pytest.mark.soak)])
def test_the_trainers_engine_replays_for_the_policy_alone(make: Any, folder: Path, engine: str) -> None:
    """Its base teaches; before and after, the policy, whose adapters are zero, has the generator's experts."""
    role = make(TrainerRole, {"source": "base"}, engine=engine, lora={"rank": 2})
    batch = routed()
    before = role.engine.logprobs(batch, PLAN, TEMPERATURE)
    check(role, folder)
    free = teach(role, "sampled").teacher_logprobs
    assert (before - free).abs().max() > 0.05, "these routes matter"
    assert torch.equal(role.engine.logprobs(batch, PLAN, TEMPERATURE), before), "the routers replay again"
