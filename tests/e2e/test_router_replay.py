"""A mixture of experts in a whole run: its routes reach the trainer, the files and a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS
from tests.e2e.test_reference import logprobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORDS = """
layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=1
layout.reward.colocate_with=generator layout.reward.num_ranks=null
model.tiny.architecture=qwen3_moe model.tiny.num_experts=8 model.tiny.hidden_size=32 trainer.router_replay=true
data.train=task:sort_digits data.max_prompt_tokens=64 rollout.num_prompts=4 rollout.group_size=2
rollout.max_new_tokens=6 rollout.max_staleness=1 generator.dtype=bfloat16 save_every=1 eval_every=0
""".split()  # noqa: SIM905


def test_routes_are_trained_with_stored_and_restored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for steps in (2, 4):
        start = Start(folder, [*WORDS, f"max_steps={steps}"])
        assert start.wait() == ExitCode.DONE, start.text
        if steps == 2:  # generated ahead
            (held,) = (folder / "checkpoints" / step_name(2)).glob("pending*")
            waiting = load_file(held)
            assert waiting["routes"].shape == (len(waiting["token_ids"]), 4) and (waiting["routes"] < 8).any()
    for step in (1, 4):
        batch = RolloutReader(folder).batch(step)
        assert batch.routes.dtype == torch.uint8 and batch.routes.shape == (
            batch.num_tokens,
            4,
        )  # 2 layers of 2 experts
        assert (batch.routes[batch.loss_mask] < 8).all() and (batch.routes[~batch.loss_mask] == 255).all()


@pytest.mark.soak
@pytest.mark.parametrize("source", ["folder", "base"])
def test_a_teacher_in_the_trainers_process_routes_itself(tmp_path: Path, source: str) -> None:
    """One of the policy's architecture, and the policy without its adapters."""
    sizes = {"architecture": "qwen3_moe", "num_experts": 8, "hidden_size": 32, "initializer_range": 0.2}
    policy, teacher, run = (tmp_path / name for name in ("policy", "teacher", "run"))
    make_tiny_model(TinyModel(**sizes), policy)
    make_tiny_model(TinyModel(**sizes, seed=7), teacher)
    words = [word for word in WORDS if not word.startswith(("layout", "model.tiny"))]
    words += ["layout=single", "pipeline=distill", f"model.path={policy}", "trainer.lr=1e-2", "max_steps=3"]
    given = [f"teacher.path={teacher}"] if source == "folder" else ["teacher.source=base", "trainer.lora.rank=4"]
    start = Start(run, [*words, *given])
    assert start.wait() == ExitCode.DONE, start.text
    batch = RolloutReader(run).batch(3)
    mask = batch.loss_mask
    assert (batch.routes[mask] < 8).all()
    wanted = logprobs(teacher if source == "folder" else policy, batch.token_ids, batch.cu_seqlens)[mask]
    assert torch.allclose(batch.teacher_logprobs[mask], wanted, rtol=0, atol=LOGPROBS)
    assert (batch.gen_logprobs[mask] - wanted).abs().max() > 0.01, "the policy has moved"
