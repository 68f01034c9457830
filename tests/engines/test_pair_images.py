"""Pairs and labelled answers with images: losses and gradients are those of transformers, whose own processor and chat
template make each sequence's inputs from the files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.algorithms.pairs.objective import CHOSEN_TOKENS, KL, LabelledObjective, PairObjective
from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.config import DataConfig
from hpcrl.data import sft_rows
from hpcrl.data.answers import SFTRows
from hpcrl.data.chat import bind
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.models.families import vision_of
from hpcrl.rollout.batch import Batch
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.kinds import RowKind
from hpcrl.spec.media import ImageSpan
from hpcrl.workers.trainer import batch_of_rows
from tests.contracts.train.fsdp2 import gradients
from tests.engines.test_images import engine_of
from tests.engines.worlds import norms_of, worst_difference
from tests.vlm import PAD, make_vlm

pytestmark = pytest.mark.numerics

BETA, WEIGHT = 0.5, 0.3


class Pair(NamedTuple):
    images: list[str]
    text: str
    answers: tuple[str, str]


PAIRS = [
    Pair(["a.png"], "what?", ("red square", "blue")),
    Pair(["b.png"], "what?", ("red square", "green one")),  # the tokens of the first pair's prompt, of another image
    Pair(["b.png", "a.png"], "which?", ("the first", "none of both")),
    Pair([], "no image", ("text only", "text")),
]
SIZES = {"a.png": (90, 60), "b.png": (60, 90)}
"""Width and height, which the processor changes to multiples of 28."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Policy and reference."""
    at = tmp_path_factory.mktemp("vlm")
    return make_vlm("qwen2_5_vl", at / "policy"), make_vlm("qwen2_5_vl", at / "reference", std=0.1)


def rows_of(folder: Path, model: Path, kind: RowKind) -> SFTRows:
    """The rows of PAIRS in TRL's form."""
    for seed, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    lines = [
        {
            "images": pair.images,
            "prompt": [{"role": "user", "content": content_of(pair)}],
            **{
                name: [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
                for name, answer in zip(("chosen", "rejected"), pair.answers, strict=True)
            },
        }
        for pair in PAIRS
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = bind(AutoTokenizer.from_pretrained(model), {}, vision_of(model))
    return sft_rows(DataConfig(train=str(folder / "pairs.jsonl")), "train", tokenizer, kind=kind)


def content_of(pair: Pair) -> list[dict[str, str]]:
    return [{"type": "image"}] * len(pair.images) + [{"type": "text", "text": pair.text}]


def by_transformers(model: Any, folder: Path, files: Path, pair: Pair, answer: str) -> Tensor:
    """The sum of an answer's log-probs, with its end token."""
    tokenizer, given = AutoTokenizer.from_pretrained(folder), dict[str, Any]()
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": content_of(pair)}], add_generation_prompt=True, return_dict=False
    )
    if pair.images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        given = dict(processor(images=[Image.open(files / name) for name in pair.images], return_tensors="pt"))
        counts = iter((given["image_grid_thw"].prod(1) // 4).tolist())
        ids = [token for part in ids for token in [part] * (next(counts) if part == PAD else 1)]
    ended = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([ids + ended])
    if pair.images:
        given["mm_token_type_ids"] = (tokens == PAD).int()
    logits = model(input_ids=tokens, use_cache=False, **given).logits[0, len(ids) - 1 : -1]
    model.model.rope_deltas = None
    return logits.log_softmax(-1).gather(1, tokens[0, len(ids) :, None]).sum()


def sums(folder: Path, files: Path) -> tuple[Any, Tensor]:
    """A model of transformers, and its log-probs of the chosen and the rejected answer of each pair in turn."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    asked = [(pair, answer) for pair in PAIRS for answer in pair.answers]
    return model, torch.stack([by_transformers(model, folder, files, pair, answer) for pair, answer in asked])


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def with_reference(batch: Batch, reference: Path) -> Batch:
    batch.ref_logprobs = engine_of(reference).logprobs(batch, [[*range(batch.num_sequences)]], 1.0)
    return batch.check()


def images_in(batch: Batch) -> list[list[ImageSpan]]:
    """The images of each sequence."""
    assert batch.images is not None
    starts = batch.cu("images").tolist()
    return [image_spans(batch.images[first:last].numpy()) for first, last in pairwise(starts)]


def test_loss_and_gradient_of_dpo_in_every_division_equal_transformers(
    models: tuple[Path, Path], tmp_path: Path, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, reference = models
    rows = rows_of(tmp_path, policy, "pairs")
    model, logps = sums(policy, tmp_path)
    with torch.no_grad():
        _, referred = sums(reference, tmp_path)
    ratios, count = logps - referred, sum(len(pair.answers[0]) + 1 for pair in PAIRS)
    wanted = -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean() - WEIGHT * logps[::2].sum() / count
    wanted.backward()
    assert ratios.std() > 0.5

    objective = PairObjective(DPOConfig(beta=BETA, sft_weight=WEIGHT))
    objective.coefficients = {CHOSEN_TOKENS: float(count)}
    batch = with_reference(batch_of_rows(rows, range(8)), reference)
    engine, seen = engine_of(policy, packing="require"), list[Any]()
    share = fsdp2.share_prefixes
    monkeypatch.setattr(fsdp2, "share_prefixes", lambda *given: seen.append(share(*given)) or seen[-1])
    for plan in ([[2, 3], [], [6, 7, 0, 1], [4, 5]], [[*range(8)]]):
        seen.clear()
        got = gradients(engine, batch, plan, objective, norms_of(batch))
        assert worst_difference(got, gradients_of(model)) < 1e-4, plan
    # The whole prompt is computed once for both answers (the last ones both begin with "text"), and so is b.png, which
    # begins two prompts; the equal tokens of a.png, which ends one of them and begins another, are not shared.
    assert [rows.sequences(n)[0].loss_mask.index(True) for n in range(4)] == [32, 32, 41, 27]
    assert seen[0].skipped == [0, 32, 7, 32, 14, 41, 6, 27 + 4], "7 tokens are before an image, and 7 are b.png's"
    stats = engine.train_step(batch, plan, objective, norms_of(batch))
    assert stats["loss"].total / stats["loss"].count == pytest.approx(wanted.item(), rel=1e-5)
    assert stats["logps/rejected"].total / 4 == pytest.approx(logps[1::2].mean().item(), rel=1e-5)


def test_kto_and_its_prompts_with_other_answers_equal_transformers(
    models: tuple[Path, Path], tmp_path: Path, world_of_one: None
) -> None:
    policy, reference = models
    rows = rows_of(tmp_path, policy, "labelled")
    others = [(n - 2) % 8 for n in range(8)]  # the answer of the row before
    mixed = [(pair, PAIRS[n - 1].answers[part]) for n, pair in enumerate(PAIRS) for part in (0, 1)]
    model, logps = sums(policy, tmp_path)
    with torch.no_grad():
        other, referred = sums(reference, tmp_path)
        terms = [
            by_transformers(model, policy, tmp_path, *each) - by_transformers(other, reference, tmp_path, *each)
            for each in mixed
        ]
    kl = max(0.0, float(torch.stack(terms).mean()))
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    wanted = (1 - torch.sigmoid(BETA * signs * (logps - referred - kl))).mean()
    wanted.backward()

    plan, objective = [[5, 0, 3], [1, 2, 7], [4, 6]], LabelledObjective(DPOConfig(loss="kto", beta=BETA))
    engine = engine_of(policy, packing="require")
    with_others = with_reference(batch_of_rows(rows, range(8), others, max_tokens=4096), reference)
    ratios = engine.logprobs(with_others, plan, 1.0) - with_others.ref_logprobs
    assert max(0.0, float(ratios[with_others.loss_mask].sum()) / 8) == pytest.approx(kl, abs=1e-4)
    assert [len(spans) for spans in images_in(with_others)] == [1, 1, 1, 1, 2, 2, 0, 0], "those of the prompts"
    objective.coefficients = {KL: kl}
    batch = with_reference(batch_of_rows(rows, range(8)), reference)
    assert worst_difference(gradients(engine, batch, plan, objective, norms_of(batch)), gradients_of(model)) < 1e-4
    stats = engine.train_step(batch, plan, objective, norms_of(batch))
    assert stats["loss"].total / stats["loss"].count == pytest.approx(wanted.item(), rel=1e-5)
