"""The engines of reward models: scores and gradients of transformers' models for sequence classification, exports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hpcrl.algorithms.bradley_terry import BradleyTerry
from hpcrl.config import TinyModel, TrainerConfig
from hpcrl.convert.__main__ import main as convert
from hpcrl.data.dialogue_tokens import padding_token, scored_index
from hpcrl.engines.scalar import ScalarModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.engines.train.fsdp2.critic import FSDP2Scorer
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from tests.checkpoint.writing import write_files
from tests.engines.test_scalar import make_reward_model
from tests.engines.worlds import process_group, run_ranks, worst_difference

pytestmark = pytest.mark.numerics

LENGTHS = (9, 12, 5, 14, 6, 8)
MARGINS = (0.3, 0.0, -0.2)
PADDING = 0


def dialogues() -> list[list[int]]:
    """Three pairs with a common beginning each; the last dialogue ends with the padding token, which has no score."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]
    for chosen, rejected in zip(found[::2], found[1::2], strict=True):
        rejected[:4] = chosen[:4]
    return [*found[:-1], [*found[-1], PADDING]]


def pairs(rows: list[int] | None = None) -> Batch:
    """The dialogues as hpcrl.data.head_rows prepares them."""
    samples, targets = [], []
    for number, ids in enumerate(dialogues()):
        count = scored_index(ids, PADDING) + 1
        mask = np.arange(count + 1) == count
        zeros = np.zeros(count + 1, np.float32)
        tokens = np.array([*ids[:count], PADDING], np.int32)
        fields: dict[str, Any] = {"token_ids": tokens, "loss_mask": mask, "gen_logprobs": zeros}
        whole = zeros.astype(np.int32)
        samples.append(Sample(number, FinishReason.STOP, **fields, versions=whole - 1, turn_ids=whole - 1 + mask))
        targets.append(mask * MARGINS[number // 2])
    batch = batch_from_samples(samples, [number // 2 for number in range(len(samples))])
    batch.chosen = torch.arange(len(samples)) % 2 == 0
    batch.targets = torch.from_numpy(np.concatenate(targets)).float()
    return batch if rows is None else batch.select(rows)


NORMS = Norms(6.0, 6.0)
OBJECTIVE = BradleyTerry(center_coef=0.1)


def make_scorer(folder: Path, labels: Sequence[str] = (), **own: Any) -> FSDP2Scorer:
    trainer = TrainerConfig(lr=0.02, max_grad_norm=100.0)
    return FSDP2Scorer(trainer, folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=8, labels=labels)


def of_transformers(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Scores and gradients of TRL's loss, with right padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    found = dialogues()
    width = max(map(len, found))
    padded = torch.tensor([ids + [PADDING] * (width - len(ids)) for ids in found])
    scores = model(padded, attention_mask=(torch.arange(width) < torch.tensor([[len(ids)] for ids in found]))).logits
    chosen, rejected = scores[::2, 0], scores[1::2, 0]
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - torch.tensor(MARGINS)).mean()
    (loss + 0.1 * (chosen + rejected).square().mean()).backward()
    return scores[:, 0].tolist(), {name: p.grad for name, p in model.named_parameters()}


def scores_of(engine: Any, batch: Batch) -> list[float]:
    values = engine.values(batch, [list(range(batch.num_sequences))])
    assert not values[~batch.loss_mask].any()
    return values[batch.loss_mask].tolist()


def gradients(engine: FSDP2Scorer, batch: Batch, plan: list[list[int]]) -> dict[str, Tensor]:
    engine.accumulate(batch, plan, OBJECTIVE, NORMS)
    found = {}
    for name, p in engine.model.named_parameters():
        full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name.removeprefix("hf.")] = full.float().clone()
    engine.discard_gradients()
    return found


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_scores_and_gradients_match_transformers(architecture: str, tmp_path: Path) -> None:
    folder, batch = make_reward_model(tmp_path / "model", architecture=architecture), pairs()
    scores, expected = of_transformers(folder)
    role = ScalarModel(folder, dtype=torch.float32, device="cpu", max_batch_tokens=64)
    assert role.scores(dialogues()) == pytest.approx(scores, abs=1e-5) and max(scores) - min(scores) > 0.1
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_scorer(folder)
        assert scores_of(engine, batch) == pytest.approx(scores, abs=1e-5)
        for plan in ([[0, 1, 2, 3, 4, 5]], [[2, 3], [], [0, 1, 4, 5]]):
            assert worst_difference(gradients(engine, batch, plan), expected) < 1e-5


def test_an_export_scores_equally_in_the_role_and_transformers_and_can_be_started_from(tmp_path: Path) -> None:
    """From a language model, whose new head is zero."""
    base, batch, plan = tmp_path / "base", pairs(), [[0, 1, 2, 3, 4, 5]]
    make_tiny_model(TinyModel(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64), base)
    assert padding_token(AutoTokenizer.from_pretrained(base)) == PADDING
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_scorer(base)
        assert scores_of(engine, batch) == [0.0] * 6
        losses = [engine.train_step(batch, plan, OBJECTIVE, NORMS)["rm/loss"] for _ in range(6)]
        assert losses[-1].total < 0.7 * losses[0].total
        scores = scores_of(engine, batch)
        engine.export_hf(tmp_path / "hf")
        (saved := tmp_path / "checkpoint").mkdir()
        write_files(saved, engine.snapshot())
        assert scores_of(make_scorer(tmp_path / "hf"), batch) == scores
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    told = config.architectures, config.num_labels, config.pad_token_id
    assert told == (["Qwen2ForSequenceClassification"], 1, PADDING)
    assert of_transformers(tmp_path / "hf")[0] == pytest.approx(scores, abs=1e-5)
    role = ScalarModel(tmp_path / "hf", dtype=torch.float32, device="cpu", max_batch_tokens=4096)
    assert role.scores(dialogues()) == pytest.approx(scores, abs=1e-5)
    words = ["--checkpoint", str(saved), "--model", str(base), "--output", str(tmp_path / "converted"), "--verify"]
    assert convert(words) == 0
    assert of_transformers(tmp_path / "converted")[0] == of_transformers(tmp_path / "hf")[0]


def _on_ranks(folder: Path, own: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    width = own.get("context_parallel", 1)
    groups, mine = dist.get_world_size() // width, dist.get_rank() // width
    rows = [row for row in range(6) if (row // 2) % groups == mine]
    batch, engine = pairs(rows), make_scorer(folder, **own)
    plan = [list(range(len(rows))), []]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(zip(rows, scores_of(engine, batch), strict=True)))
    scores = {row: score for part in found for row, score in part.items()}
    return [scores[row] for row in range(6)], gradients(engine, batch, plan)


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"context_parallel": 2}], ids=str)
def test_two_ranks_match_one(own: dict[str, int], tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model")
    scores, expected = of_transformers(folder)
    for found, gradient in run_ranks(2, _on_ranks, folder, own):
        assert found == pytest.approx(scores, abs=1e-5) and worst_difference(gradient, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_other_engines_train_export_and_save_the_same_model(engine: str, tmp_path: Path) -> None:
    folder, batch, plan = make_reward_model(tmp_path / "model"), pairs(), [[2, 3], [0, 1, 4, 5]]
    with process_group(0, 1, str(tmp_path / "world")):
        ours, theirs = make_scorer(folder), make_engine(engine, folder)
        assert scores_of(theirs, batch) == pytest.approx(scores_of(ours, batch), abs=1e-5)
        for _ in range(2):
            stats = [one.train_step(batch, plan, OBJECTIVE, NORMS) for one in (ours, theirs)]
            assert stats[1]["rm/loss"].total == pytest.approx(stats[0]["rm/loss"].total, abs=1e-4)
            assert stats[1]["actor/grad_norm"].total == pytest.approx(stats[0]["actor/grad_norm"].total, rel=1e-4)
        scores = scores_of(theirs, batch)
        theirs.export_hf(tmp_path / "hf")
        (saved := tmp_path / "checkpoint").mkdir()
        write_files(saved, theirs.snapshot())
        ours.load(saved)
        assert scores_of(ours, batch) == pytest.approx(scores, abs=1e-5) and ours.optimizer_step == 2
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    told = config.architectures, config.num_labels, config.pad_token_id
    assert told == (["Qwen2ForSequenceClassification"], 1, PADDING)
    assert of_transformers(tmp_path / "hf")[0] == pytest.approx(scores, abs=2e-5)
    if engine == "megatron":
        words = ["--checkpoint", str(saved), "--model", str(folder), "--output", str(tmp_path / "converted")]
        assert convert(words) == 0
        assert of_transformers(tmp_path / "converted")[0] == of_transformers(tmp_path / "hf")[0]


def make_engine(engine: str, folder: Path, **more: Any) -> Any:
    """The reward model's engine of this name."""
    if engine == "fsdp2":
        return make_scorer(folder, **more)
    trainer = TrainerConfig(lr=0.02, max_grad_norm=100.0, engine=engine)
    if engine == "megatron":
        from hpcrl.engines.train.megatron.critic import MegatronScorer
        from hpcrl.engines.train.megatron.spec import MegatronConfig

        return MegatronScorer(trainer, folder, own=MegatronConfig(), total_steps=8, **more)
    from hpcrl.engines.train.deepspeed.critic import ZeroScorer
    from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig

    own = DeepSpeedConfig(zero_stage=2)
    return ZeroScorer(trainer, folder, zero=own, dtype=torch.float32, total_steps=8, **more)
