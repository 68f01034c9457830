"""Distillation from one teacher for each domain: values and divergences are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_distill import log_softmaxes
from tests.e2e.test_parity import LOGPROBS
from tests.e2e.test_reference import logprobs
from tests.engines.test_token_divergence import plain

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(200)]

DOMAINS = ("math", "code", "chat")
SIZES = {"num_heads": 4, "num_kv_heads": 4, "initializer_range": 0.2}
WORDS = """
pipeline=distill data.max_prompt_tokens=32 rollout.max_new_tokens=4 rollout.num_prompts=9 rollout.group_size=1
rollout.temperature=0.8 trainer.lr=1e-3 generator.max_num_seqs=8 loss.chat.divergence=0 loss.chat.ce=1
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the teachers math and code, of other families, widths and padded vocabularies, and with rows."""
    at = tmp_path_factory.mktemp("teachers")
    math = TinyModel(architecture="llama", hidden_size=48, num_layers=2, vocab_size=384, seed=7, **SIZES)
    make_tiny_model(math, at / "math")
    make_tiny_model(TinyModel(hidden_size=32, num_layers=1, seed=8, **SIZES), at / "code")
    rows = [{"prompt": f"digit {i}", "tag": DOMAINS[i % 3]} for i in range(63)]
    (at / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at


def words_of(teachers: Path, digit_model: Path, *more: str) -> list[str]:
    given = [f"teacher.paths.{name}={teachers / name}" for name in ("math", "code")]
    return [f"model.path={digit_model}", f"data.train={teachers / 'rows.jsonl'}", *given, *WORDS, *more]


def tokens_of(run: Path, step: int) -> tuple[Batch, dict[str, Tensor]]:
    """The step's batch, and for each domain the mask of its trained tokens."""
    reader = RolloutReader(run)
    batch, prompts = reader.batch(step), reader.domains(step)
    own = {name: torch.isin(batch.group_ids, torch.tensor(prompts.get(name, []))) for name in DOMAINS}
    return batch, {name: rows[batch.row_ids] & batch.loss_mask for name, rows in own.items()}


def test_each_domain_is_judged_by_its_teacher_also_after_a_resume(
    tmp_path: Path, digit_model: Path, teachers: Path
) -> None:
    words, run = words_of(teachers, digit_model, "algorithm.num_mini_batches=3", "save_every=1"), tmp_path / "run"
    for steps, layout in ((1, ["layout=single"]), (2, [])):  # the second start resumes, on two ranks
        start = Start(run, [*words, *layout, f"max_steps={steps}"])
        assert start.wait(100) == ExitCode.DONE, start.text
    for step in (1, 2):
        row = read_metrics(run)[step]
        batch, tokens = tokens_of(run, step)
        assert all(mask.any() for mask in tokens.values()), "a step with all domains"
        gaps = []
        for name in ("math", "code"):
            mask = tokens[name]
            expected = logprobs(teachers / name, batch.token_ids, batch.cu_seqlens, 0.8)[mask]
            assert torch.allclose(batch.teacher_logprobs[mask], expected, rtol=0, atol=LOGPROBS)
            assert row[f"domain/{name}/distill/teacher_logprob"] == pytest.approx(expected.mean().item(), rel=1e-4)
            gaps.append((batch.old_logprobs[mask] - expected).double())
            assert row[f"domain/{name}/distill/reverse_kl"] == pytest.approx(gaps[-1].mean().item(), rel=1e-3)
        assert row["distill/reverse_kl"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-3)
        assert not batch.teacher_logprobs[tokens["chat"]].any() and not batch.divergence_weights[tokens["chat"]].any()
        assert "domain/chat/distill/teacher_logprob" not in row and row["loss/ce"] > 0


def test_ranks_that_divide_a_model_compare_each_row_with_its_teachers_whole_vocabulary(
    tmp_path: Path, digit_model: Path, teachers: Path
) -> None:
    more = ["teacher.form=full", "teacher.beta=0.5", "trainer.engine=megatron", "trainer.megatron.tensor_parallel=2"]
    start = Start(tmp_path / "run", [*words_of(teachers, digit_model, *more), "max_steps=1", "save_every=0"])
    assert start.wait(100) == ExitCode.DONE, start.text
    batch, tokens = tokens_of(tmp_path / "run", 1)
    log_q, values = log_softmaxes(digit_model, batch, 0.8), []
    for name in ("math", "code"):
        log_p = log_softmaxes(teachers / name, batch, 0.8)[:, : log_q.shape[1]].log_softmax(-1)
        values.append(plain(log_q, log_p, 0.5)[tokens[name][batch.loss_mask]])
    row = read_metrics(tmp_path / "run")[1]
    assert row["distill/divergence"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    assert abs(values[0].mean() - values[1].mean()) > 1e-3, "the teachers differ"
