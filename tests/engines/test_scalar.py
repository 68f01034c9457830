"""Reward models: scores as transformers computes them, whatever they are batched with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from hpcrl.config import TinyModel
from hpcrl.engines.scalar import ScalarModel
from hpcrl.engines.tiny import make_tiny_model


def make_reward_model(folder: Path, kind: Any = AutoModelForSequenceClassification, **sizes: Any) -> Path:
    """A tiny reward model with random weights and a tokenizer with a chat template."""
    make_tiny_model(TinyModel(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, **sizes), folder)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(3)
    model = kind.from_config(config)
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    return folder


def sequences(count: int = 12) -> list[list[int]]:
    """Of many lengths; the first three end with padding's token, which transformers passes over."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    found = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
    return [ids + [0] * (place < 3) for place, ids in enumerate(found)]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("most", [64, 4096])
def test_scores_match_transformers(tmp_path: Path, architecture: str, most: int) -> None:
    folder = make_reward_model(tmp_path / "model", architecture=architecture)
    model = ScalarModel(folder, dtype=torch.float32, device="cpu", max_batch_tokens=most)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [theirs(torch.tensor([ids])).logits.item() for ids in sequences()]
    assert model.scores(sequences()) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1 and model.scores([]) == []


def test_an_exported_critic_scores_last_tokens_exactly_with_alone(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", AutoModelForTokenClassification)
    model = ScalarModel(folder, dtype=torch.float32, device="cpu", max_batch_tokens=4096, alone=True)
    theirs = AutoModelForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [theirs(torch.tensor([ids])).logits[0, -1, 0].item() for ids in sequences()]
    found = model.scores(sequences())
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[::-1] == model.scores(sequences()[::-1]) and model.scores(sequences()[4:5]) == found[4:5]


def test_a_model_without_a_scalar_score_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(TinyModel(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64), folder)
    with pytest.raises(ValueError, match=r"is of Qwen2ForCausalLM with 2 label\(s\); a reward model is"):
        ScalarModel(folder, dtype=torch.float32, device="cpu", max_batch_tokens=64)
