"""On-policy distillation: log-probs of a larger teacher match transformers, and a killed teacher loses nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS
from tests.e2e.test_reference import logprobs
from tests.e2e.test_resume import NUM_STEPS, Runs, differences, remains
from tests.engines.test_token_divergence import plain

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


def log_softmaxes(folder: Path, batch: Batch, temperature: float) -> Tensor:
    """float64 [M, V] before each trained token, from transformers."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for tokens, mask in zip(
        *(x.split(batch.lengths.tolist()) for x in (batch.token_ids, batch.loss_mask)), strict=True
    ):
        with torch.no_grad():
            logits = model(tokens[None].long()).logits[0].double()
        found.append((logits[:-1] / temperature).log_softmax(-1)[mask[1:]])
    return torch.cat(found)


def test_a_killed_teacher_rank_ends_the_run_which_resumes(
    tmp_path: Path, digit_model: Path, prompts: Path, teacher: Path
) -> None:
    words = [f"model.path={digit_model}", f"teacher.path={teacher}", f"data.train={prompts}", *WORDS, *APART]
    words += ["rollout.max_staleness=1", "rollout.temperature=0.8", "loss.default.divergence=0.5"]
    run = tmp_path / "run"
    start = Start(run, [*words, "max_steps=40"])
    start.wait_until(lambda: start.step >= 2)
    os.kill(start.ranks[2], signal.SIGKILL)
    assert start.wait() == ExitCode.RANK_KILLED, start.text
    assert "rank 2 (teacher)" in start.text
    reached = read_metrics(run)[-1]["step"]
    start = Start(run, [*words, f"max_steps={reached + 2}"])
    assert start.wait() == ExitCode.DONE, start.text
    rows = {row["step"]: row for row in read_metrics(run)}
    assert sorted(rows) == list(range(reached + 3))
    for step in (1, reached + 2):
        batch = RolloutReader(run).batch(step)
        mask = batch.loss_mask
        expected = logprobs(teacher, batch.token_ids, batch.cu_seqlens, 0.8)[mask]
        assert torch.allclose(batch.teacher_logprobs[mask], expected, rtol=0, atol=LOGPROBS)
        assert torch.equal(batch.divergence_weights, 0.5 * mask) and not batch.policy_weights.any()
        assert not batch.advantages.any()
        assert rows[step]["distill/reverse_kl"] > 1 and rows[step]["time/teacher"] > 0
        assert rows[step]["critic/score/mean"] == 0 and len(batch.sample_ids) == 8
        if step == 1:
            gap = (batch.gen_logprobs - batch.teacher_logprobs)[mask]
            assert rows[step]["distill/reverse_kl"] == pytest.approx(gap.double().mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("full", ["teacher.beta=0.5"]),
        ("top_k", ["teacher.top_k=5", "teacher.engine=fsdp2", "trainer.engine=megatron"]),
    ],
)
def test_a_teacher_apart_tells_two_trainers_about_rollouts_beside_answers(
    tmp_path: Path, digit_model: Path, digit_data: Path, teacher: Path, form: str, more: list[str]
) -> None:
    """The divergence of the rollouts is that of transformers; the ranks of Megatron divide the vocabulary."""
    words = [f"model.path={digit_model}", f"teacher.path={teacher}", f"data.train={digit_data}", *WORDS, *APART, *more]
    words += [f"teacher.form={form}", f"imitation.data={digit_data}", "imitation.num_rows=5", "max_steps=1"]
    words += ["rollout.temperature=0.8", "save_every=0", "layout.trainer.num_ranks=2"]
    words += ["trainer.megatron.tensor_parallel=2"] * (form == "top_k")
    start = Start(tmp_path / "run", words)
    assert start.wait() == ExitCode.DONE, start.text
    row, batch = read_metrics(tmp_path / "run")[1], RolloutReader(tmp_path / "run").batch(1)
    assert len(batch.sample_ids) == 8 and row["imitation/rows"] == 5 and row["loss/ce"] > 0
    log_q, log_p = (log_softmaxes(folder, batch, 0.8) for folder in (digit_model, teacher))
    words_of_both = log_q.shape[1]
    if form == "full":
        wanted = plain(log_q, log_p[:, :words_of_both].log_softmax(-1), 0.5)
    else:
        best, ids = log_p.exp().topk(5)
        known = ids < words_of_both  # other words leave the teacher's softmax
        p = best * known / (1 - (best * ~known).sum(-1, keepdim=True))
        q = log_q.exp().gather(1, ids.clamp(max=words_of_both - 1)) * known
        q, p = (torch.cat([some, 1 - some.sum(-1, keepdim=True)], 1) for some in (q, p))
        wanted = (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(-1)
        assert not known.all()
    assert row["distill/divergence"] == pytest.approx(wanted.mean().item(), rel=1e-4)
    assert row["distill/divergence"] > 0.1


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
