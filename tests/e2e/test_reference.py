"""A reference different from the policy, and a reference in a pipeline outside RL: its log-probs match transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.anchored_loss import SEEN
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS, WORDS

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

SFT = [
    "pipeline=tests.e2e.anchored_sft:SPEC",
    "data.max_prompt_tokens=64",
    "trainer.max_tokens_per_micro_batch=64",
    "trainer.lr=1e-3",
    "max_steps=2",
    "save_every=1",
]
APART = ["layout=disaggregated", "layout.trainer.num_ranks=2", "layout.reference.num_ranks=3"]
APART += ["layout.reference.colocate_with=null"]
LORA = ["trainer.lora.rank=4", "trainer.lora.alpha=8"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a larger model of another family with the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "other"
    sizes = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 80}
    make_tiny_model(TinyModel(architecture="llama", initializer_range=0.2, seed=7, **sizes), folder)
    return folder


def logprobs(folder: Path, token_ids: Tensor, starts: Tensor, temperature: float = 1.0) -> Tensor:
    """float32 [T]: transformers' log-prob of every token after those of its row before it; 0 for the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for row in token_ids.long().tensor_split(starts[1:-1]):
        with torch.no_grad():
            log_p = model(input_ids=row[None]).logits[0, :-1].div(temperature).log_softmax(-1)
        rows += [torch.zeros(1), log_p.gather(1, row[1:, None])[:, 0]]
    return torch.cat(rows)


def train(run: Path, seen: Path, model: Path, data: Path, *words: str) -> list[dict[str, Any]]:
    """The loss's inputs in a run, by micro-batch, without empty micro-batches."""
    seen.mkdir()
    start = Start(run, [f"model.path={model}", f"data.train={data}", *SFT, *words], {SEEN: str(seen)})
    assert start.wait(200) == ExitCode.DONE, start.text
    found = [torch.load(file) for file in seen.iterdir()]
    return [each for each in found if len(each["ids"])]


def check(found: list[dict[str, Any]], model: Path, num_rows: int) -> None:
    """The loss read this model's log-probs for this many rows; all ranks that work on the same rows read them."""
    assert len({row for each in found for row in each["ids"].tolist()}) == num_rows
    for each in found:
        expected = logprobs(model, each["tokens"], each["starts"])[each["mask"]]
        assert len(expected) and torch.allclose(each["reference"], expected, rtol=0, atol=LOGPROBS)


@pytest.mark.parametrize(
    ("words", "num_ranks", "has_path"),
    [
        (["layout=colocated"], 3, True),
        pytest.param(APART, 6, True, marks=pytest.mark.soak),
        # The third of the reference ranks has no row.
        ([*APART, "own.batch_size=2"], 6, True),
        # Two ranks work on the same rows: one group of trainers, two of the reference.
        ([*APART, "layout.reference.num_ranks=4", "trainer.fsdp2.context_parallel=2"], 7, True),
        pytest.param(["layout=single"], 1, False, marks=pytest.mark.soak),
        (["layout=single", *LORA], 1, False),
        (["layout=single", *LORA], 1, True),
    ],
    ids=["colocated", "apart", "fewer rows than ranks", "groups", "own model", "adapters", "adapters, path"],
)
def test_a_pipeline_outside_rl_reads_reference_log_probs(
    tmp_path: Path, digit_model: Path, digit_data: Path, other: Path, words: list[str], num_ranks: int, has_path: bool
) -> None:
    model, run = other if has_path else digit_model, tmp_path / "run"
    given = [*words, f"reference.path={other}"] if has_path else words
    found = train(run, tmp_path / "seen", digit_model, digit_data, *given)
    assert len(list((run / "logs" / "attempt_0001").glob("rank_*.log"))) == num_ranks
    check(found, model, num_rows=4 if "own.batch_size=2" in words else 16)
    first, second = read_metrics(run)
    # The policy starts equal to the reference and differs after the first step.
    assert (abs(first["sft/kl"] or 0.0) < 1e-6) == (not has_path) and (second["sft/kl"] or 0.0) > 1e-5


def test_a_resumed_run_keeps_its_reference(tmp_path: Path, digit_model: Path, digit_data: Path, other: Path) -> None:
    run, words = tmp_path / "run", [*APART, f"reference.path={other}"]
    train(run, tmp_path / "first", digit_model, digit_data, *words, "max_steps=1")
    check(train(run, tmp_path / "second", digit_model, digit_data, *words), other, num_rows=8)
    for attempt in json.loads((run / "facts.json").read_text())["attempts"]:
        models = attempt["models"]
        assert (models["model.path"]["hidden_size"], models["reference.path"]["hidden_size"]) == (32, 48)
    words = [f"model.path={digit_model}", f"data.train={digit_data}", *SFT, *words, "max_steps=3"]
    start = Start(run, [*words, f"reference.path={digit_model}"])
    assert start.wait() == ExitCode.BAD_INPUT, start.text
    assert f'reference.path: "{other}" -> "{digit_model}"' in start.text


def test_kl_terms_use_the_configured_reference_model(
    tmp_path: Path, digit_model: Path, digit_data: Path, other: Path
) -> None:
    words = [f"model.path={digit_model}", f"data.train={digit_data}", "layout=colocated", *WORDS]
    start = Start(tmp_path / "run", [*words, f"reference.path={other}", "max_steps=1"])
    assert start.wait(200) == ExitCode.DONE, start.text
    batch = RolloutReader(tmp_path / "run").batch(1)
    mask = batch.loss_mask
    policy, reference = (logprobs(path, batch.token_ids, batch.cu_seqlens)[mask] for path in (digit_model, other))
    assert torch.allclose(batch.old_logprobs[mask], policy, rtol=0, atol=LOGPROBS)
    assert torch.allclose(batch.ref_logprobs[mask], reference, rtol=0, atol=LOGPROBS)
    ratio = reference - policy
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["step"] == 1]
    assert row["critic/kl"] == pytest.approx(float((ratio.exp() - 1 - ratio).mean()), rel=1e-4)
    assert row["critic/kl"] > 0.1, "the models differ"
