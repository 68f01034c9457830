"""A mixture of experts in a whole run: its routes reach the trainer, the files and a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name
from tests.e2e.program import Start

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
