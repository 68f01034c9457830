"""Reward models with several heads: values and gradients of transformers' regression, in every engine; exports with the
heads' names, which the role combines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from hpcrl.algorithms.score_regression import ScoreRegression
from hpcrl.convert.__main__ import main as convert
from hpcrl.engines.scalar import ScalarModel
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch, Norms
from tests.checkpoint.writing import write_files
from tests.engines.test_scalar import make_reward_model
from tests.engines.test_scorer import PADDING, dialogues, make_engine, pairs
from tests.engines.worlds import process_group, worst_difference

pytestmark = pytest.mark.numerics

HEADS = ("helpfulness", "correctness", "verbosity")
WEIGHTS = {"helpfulness": 0.65, "verbosity": -0.4}
NORMS = Norms(6.0, 6.0)


def scored() -> Batch:
    """The dialogues of test_scorer, with a score for each head."""
    batch = pairs()
    batch.chosen = None
    batch.targets = torch.zeros(batch.num_tokens, len(HEADS))
    batch.targets[batch.loss_mask] = torch.arange(18.0).view(6, 3) / 9 - 1
    return batch


def of_transformers(folder: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The heads' values [6, heads], and transformers' own loss with its gradients."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    found = dialogues()
    width = max(map(len, found))
    padded = torch.tensor([ids + [PADDING] * (width - len(ids)) for ids in found])
    mask = torch.arange(width) < torch.tensor([[len(ids)] for ids in found])
    batch = scored()
    assert batch.targets is not None
    result = model(padded, attention_mask=mask.long(), labels=batch.targets[batch.loss_mask])
    result.loss.backward()
    return result.logits.detach(), result.loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def values_of(engine: Any, batch: Batch) -> Tensor:
    values: Tensor = engine.values(batch, [[4, 5], [0, 1, 2, 3]])
    assert values.shape == (batch.num_tokens, len(HEADS)) and not values[~batch.loss_mask].any()
    return values[batch.loss_mask]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "megatron"])
def test_heads_match_transformers_and_are_combined(engine: str, tmp_path: Path) -> None:
    batch, plan, objective = scored(), [[2, 3], [], [0, 1, 4, 5]], ScoreRegression(HEADS)
    start = make_reward_model(tmp_path / "model")
    hf = AutoModelForSequenceClassification.from_pretrained(start, num_labels=3, ignore_mismatched_sizes=True)
    torch.nn.init.normal_(hf.score.weight)
    hf.config.id2label, hf.config.label2id = dict(enumerate(HEADS)), {name: n for n, name in enumerate(HEADS)}
    hf.config.problem_type = "regression"
    hf.save_pretrained(start)
    wanted, loss, gradients = of_transformers(start)
    with process_group(0, 1, str(tmp_path / "world")):
        made = make_engine(engine, start, labels=HEADS)
        torch.testing.assert_close(values_of(made, batch), wanted, rtol=0, atol=2e-5)
        if engine == "fsdp2":
            made.accumulate(batch, plan, objective, NORMS)
            mine = {name.removeprefix("hf."): p.grad.clone() for name, p in made.model.named_parameters()}
            assert worst_difference(mine, gradients) < 1e-5
            made.discard_gradients()
        stats = flatten(made.train_step(batch, plan, objective, NORMS))
        assert stats["rm/loss"] == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item()
        assert stats["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert stats["rm/error"] == pytest.approx(sum(stats[f"rm/error/{name}"] for name in HEADS) / 3)
        trained = values_of(made, batch)
        assert (trained - wanted).abs().max() > 1e-2
        made.export_hf(tmp_path / "hf")
        (saved := tmp_path / "checkpoint").mkdir()
        write_files(saved, made.snapshot())
        made.train_step(batch, plan, objective, NORMS)
        made.load(saved)
        torch.testing.assert_close(values_of(made, batch), trained, rtol=0, atol=1e-6)

    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.num_labels, list(config.id2label.values()), config.pad_token_id) == (3, list(HEADS), PADDING)
    exported, _, _ = of_transformers(tmp_path / "hf")
    torch.testing.assert_close(exported, trained, rtol=0, atol=2e-5)
    role = ScalarModel(tmp_path / "hf", dtype=torch.float32, device="cpu", max_batch_tokens=64, weights=WEIGHTS)
    assert role.labels == list(HEADS)
    expected = 0.65 * exported[:, 0] - 0.4 * exported[:, 2]
    assert role.scores(dialogues()) == pytest.approx(expected.tolist(), abs=1e-5)
    words = ["--checkpoint", str(saved), "--model", str(start), "--output", str(tmp_path / "converted")]
    assert convert(words) == 0
    assert torch.equal(of_transformers(tmp_path / "converted")[0], exported)


def test_heads_that_cannot_be_combined_are_refused(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.id2label = dict(enumerate(HEADS))
    config.save_pretrained(folder)
    for weights, text in (
        ({}, r"has 3 heads \(helpfulness, correctness, verbosity\); give .*head_weights=\{helpfulness: 1\}"),
        ({"coherence": 1.0}, "has no head coherence of reward_model.head_weights; its heads are helpfulness, corr"),
    ):
        with pytest.raises(ValueError, match=rf"^reward_model.path: {folder} {text}"):
            ScalarModel(folder, dtype=torch.float32, device="cpu", max_batch_tokens=64, weights=weights)
