"""On-policy distillation: log-probs of a larger teacher match transformers, and a killed teacher loses nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS
from tests.e2e.test_reference import logprobs
from tests.e2e.test_resume import NUM_STEPS, Runs, differences, remains

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

WORDS = """
pipeline=distill data.max_prompt_tokens=32 rollout.max_new_tokens=4 rollout.num_prompts=8
rollout.group_size=1 trainer.lr=1e-3 generator.max_num_seqs=8 save_every=1
""".split()  # noqa: SIM905
APART = "layout.trainer.num_ranks=1 layout.teacher.colocate_with=null layout.teacher.num_ranks=1".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a larger model of another family, with the policy's tokenizer and more rows."""
    folder = tmp_path_factory.mktemp("model") / "teacher"
    sizes = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 80}
    make_tiny_model(TinyModel(architecture="llama", initializer_range=0.2, seed=7, vocab_size=384, **sizes), folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts without answers."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"digit {i}"}) + "\n" for i in range(64)))
    return path


def test_a_killed_teacher_rank_ends_the_run_which_resumes(
    tmp_path: Path, digit_model: Path, prompts: Path, teacher: Path
) -> None:
    words = [f"model.path={digit_model}", f"teacher.path={teacher}", f"data.train={prompts}", *WORDS, *APART]
    words += ["rollout.max_staleness=1", "rollout.temperature=0.8", "loss.default.divergence=0.5"]
    run = tmp_path / "run"
    start = Start(run, [*words, "max_steps=40"])
    start.wait_until(lambda: start.step >= 2)
    os.kill(start.ranks[2], signal.SIGKILL)
    assert start.wait(60) == ExitCode.RANK_KILLED, start.text
    assert "rank 2 (teacher)" in start.text
    reached = read_metrics(run)[-1]["step"]
    start = Start(run, [*words, f"max_steps={reached + 2}"])
    assert start.wait(100) == ExitCode.DONE, start.text
    rows = {row["step"]: row for row in read_metrics(run)}
    assert sorted(rows) == list(range(reached + 3))
    for step in (1, reached + 2):
        batch = RolloutReader(run).batch(step)
        mask = batch.loss_mask
        expected = logprobs(teacher, batch.token_ids, batch.cu_seqlens, 0.8)[mask]
        assert torch.allclose(batch.teacher_logprobs[mask], expected, rtol=0, atol=LOGPROBS)
        gap = (batch.old_logprobs - batch.teacher_logprobs)[mask]
        assert torch.equal(batch.divergence_weights, 0.5 * mask) and not batch.policy_weights.any()
        assert not batch.advantages.any()
        assert rows[step]["distill/reverse_kl"] == pytest.approx(gap.double().mean().item(), rel=1e-5)
        assert rows[step]["distill/reverse_kl"] > 1 and rows[step]["time/teacher"] > 0
        assert rows[step]["critic/score/mean"] == 0 and len(batch.sample_ids) == 8


@pytest.mark.soak
@pytest.mark.parametrize("layout", [["layout=single"], APART], ids=["in turns", "apart"])
def test_a_kill_changes_no_bit(
    tmp_path: Path, digit_model: Path, digit_data: Path, teacher: Path, layout: list[str]
) -> None:
    words = [f"model.path={digit_model}", f"teacher.path={teacher}", f"data.train={digit_data}", *WORDS, *layout]
    words += [f"data.val={digit_data}", "eval_every=3", "eval.num_prompts=4", "reward.default.name=exact_match"]
    words += ["deterministic=true", "check_weights=true", "save_every=2", f"max_steps={NUM_STEPS}"]
    runs = Runs(tmp_path, words)
    whole = remains(runs.finish("undisturbed"))
    start = runs.start("killed")
    start.wait_until(lambda: start.step >= 3)
    start.kill()
    assert differences(remains(runs.finish("killed")), whole) == []
