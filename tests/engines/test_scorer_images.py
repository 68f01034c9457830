"""Reward models that see images: scores and gradients are those of transformers' models for sequence classification,
whose own processor and chat template make each dialogue's inputs from the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from hpcrl.config import load
from hpcrl.convert.__main__ import main as convert
from hpcrl.data import HeadRows
from hpcrl.data.chat import bind
from hpcrl.models.families import SEEING, SEEING_SCORERS, vision_of
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.workers.trainer import batch_of_rows
from tests.checkpoint.writing import write_files
from tests.contracts.train.fsdp2 import gradients
from tests.engines.test_image_families import picture, seen_in
from tests.engines.test_images_on_ranks import difference
from tests.engines.test_scorer import OBJECTIVE, make_scorer, scores_of
from tests.engines.worlds import process_group
from tests.vlm_families import IDS, SMALL, make_small, own_processor

pytestmark = pytest.mark.numerics

PAIRS = [
    (["a.png"], "what?", ("red square", "blue")),
    (["b.png"], "what?", ("red square", "green one")),
    (["b.png", "a.png"], "which?", ("the first", "none of both")),
    ([], "no image", ("text only", "text")),
]
PLANS = ([[*range(8)]], [[2, 3], [], [6, 7, 0, 1], [4, 5]])
NORMS = Norms(8.0, 8.0)


def rows_of(folder: Path, model: Path) -> HeadRows:
    """The rows of PAIRS, with files of sizes that the model keeps."""
    vision = vision_of(model)
    assert vision is not None
    for seed, (name, size) in enumerate({"a.png": (60, 110), "b.png": (112, 56)}.items()):
        seen_in(model, vision, picture(*size, seed)).save(folder / name)
    lines = [
        {"images": images, "prompt": dialogue(images, text)[:1], "chosen": chosen, "rejected": rejected}
        for images, text, (chosen, rejected) in PAIRS
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load(["pipeline=reward_model", f"data.train={folder}/pairs.jsonl", f"model.path={model}"])
    return HeadRows(config, "train", bind(AutoTokenizer.from_pretrained(model), {}, vision))


def dialogue(images: Sequence[str], text: str, answer: str = "") -> list[dict[str, Any]]:
    content = [part for _ in images for part in ({"type": "text", "text": "this:"}, {"type": "image"})]
    content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def of_transformers(model: Path, family: str, files: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """The scores of all dialogues, and the gradients of TRL's loss."""
    made: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(model), own_processor(family, model)
    scores = []
    for names, question, answers in PAIRS:
        for answer in answers:
            text = tokenizer.apply_chat_template(dialogue(names, question, answer), tokenize=False)
            images = [Image.open(files / name) for name in names]
            given: dict[str, Any] = dict(processor(text=[text], images=images or None, return_tensors="pt"))
            kind = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
            given[kind] = (given["input_ids"] == IDS[SMALL[family].token]).int()
            made.model.rope_deltas = None
            scores.append(made(**given).logits[0, 0])
    found = torch.stack(scores)
    chosen, rejected = found[::2], found[1::2]
    (-logsigmoid(chosen - rejected).mean() + 0.1 * (chosen + rejected).square().mean()).backward()
    return found.detach(), {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


def test_every_class_of_transformers_with_images_is_compared() -> None:
    assert {*SEEING_SCORERS} == {*SEEING} & MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys()


@pytest.mark.parametrize("family", SEEING_SCORERS)
def test_scores_and_gradients_of_dialogues_with_images_equal_transformers(family: str, tmp_path: Path) -> None:
    base = make_small(family, tmp_path / family)
    batch: Batch = batch_of_rows(rows_of(tmp_path, base), range(8))
    with process_group(0, 1, str(tmp_path / "world")):
        engine = make_scorer(base, packing="require")
        assert scores_of(engine, batch) == [0.0] * 8, "a new head"
        torch.nn.init.normal_(engine.model.hf.score.weight, std=0.3)
        scores = scores_of(engine, batch)
        engine.export_hf(tmp_path / "hf")
        wanted, expected = of_transformers(tmp_path / "hf", family, tmp_path)
        assert scores == pytest.approx(wanted.tolist(), abs=2e-5) and wanted.std() > 0.1
        for plan in PLANS:
            got = gradients(engine, batch, plan, OBJECTIVE, NORMS)
            assert difference(got, expected) < 1e-4, plan
        assert scores_of(make_scorer(tmp_path / "hf"), batch) == scores
        (saved := tmp_path / "checkpoint").mkdir()
        write_files(saved, engine.snapshot())
    told = AutoConfig.from_pretrained(tmp_path / "hf")
    assert told.architectures[0].endswith("ForSequenceClassification") and told.num_labels == 1
    words = ["--checkpoint", str(saved), "--model", str(base), "--output", str(tmp_path / "converted"), "--verify"]
    assert convert(words) == 0
    assert of_transformers(tmp_path / "converted", family, tmp_path)[0].tolist() == pytest.approx(scores, abs=2e-5)
