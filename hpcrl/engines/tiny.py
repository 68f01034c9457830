"""Tiny models in HF layout with seeded random weights, and a byte-level BPE tokenizer trained on the text below, for
demos, tests and dry runs without a network."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)

from hpcrl.config import TinyModel
from hpcrl.config.model import MIN_VOCABULARY
from hpcrl.data.templates import CHATML, CHATML_WITH_IMAGES, END, IMAGE_TOKENS, PAD, START
from hpcrl.engines.hf_folder import save_model
from hpcrl.models.vision import CLIP_MEAN, CLIP_STD, TINY
from hpcrl.system.files import give_usual_modes

SPECIAL_TOKENS = (PAD, START, END)
assert 256 + len(SPECIAL_TOKENS) == MIN_VOCABULARY  # every byte has a token, so any text can be encoded

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": TINY.patch,
    "merge_size": TINY.merge,
    "temporal_patch_size": TINY.frames,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "size": {"shortest_edge": TINY.min_pixels, "longest_edge": TINY.max_pixels},
}

# Digits are split one by one, as in Qwen2; a word includes the space before it.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Words of chat roles and built-in tasks come first and often, so even the smallest vocabulary contains them.
OFTEN = 64
CORPUS = ("user\nassistant\nsystem\nsort: 3 1 2\nadd: 12 + 7\n",) * OFTEN + (
    "The answer is \\boxed{42}. So the final answer is 42.\n#### 42\n",
    "Natalia sold 48 clips in April, and then she sold half as many clips in May. How many did she sell in total?",
    "How much does each of them have left after the first day? How many more are there than there were before?",
    "First, we find the number of hours she worked. Then we multiply it by the price per hour to get the total cost.",
    "There are 5 boxes with 12 apples in each box, so there are 5 * 12 = <<5*12=60>>60 apples in all the boxes.",
    "A train travels at 60 miles per hour for 3 hours, which is a distance of 60 * 3 = 180 miles.",
    "Let x be the number of students in the class. The sum of the numbers is 100, the difference is 20.",
    "He has $20 and spends $5 every week on food. After 3 weeks he will have $20 - $15 = $5 left over for the other.",
    "<think>\nWait, that is not right. Let me think about this step by step and check the result again.\n</think>\n",
    "Write a function that returns the sorted list of the numbers. def solve(values): return sorted(values)\n",
    "What is the capital of this country, and what was the name of the person who would have been there with them?",
)


def make_tiny_model(spec: TinyModel, folder: Path) -> None:
    """Write model, tokenizer (ChatML) and generation config to `folder`, which appears complete or not at all. Equal
    specs give equal files; an existing model is kept. ValueError if the spec's numbers do not make a model."""
    if (folder / "config.json").exists():
        return
    check_spec(spec)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        tokenizer = make_tokenizer(spec.vocab_size, spec.corpus, spec.takes_images)
        _write_tokenizer(tokenizer, spec, partial)
        _write_model(spec, tokenizer, partial)
        give_usual_modes(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # otherwise another process has made this model first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_spec(spec: TinyModel) -> None:
    """ValueError if the numbers of `spec` do not fit together."""
    if spec.hidden_size % (2 * spec.num_heads):
        raise ValueError(
            f"model.tiny.hidden_size={spec.hidden_size} must be a multiple of 2 x num_heads ({spec.num_heads}): "
            "heads of an even width"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(
            f"model.tiny.num_heads={spec.num_heads} must be a multiple of num_kv_heads={spec.num_kv_heads}"
        )


def make_tokenizer(vocab_size: int, corpus: Sequence[str] = (), images: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens; special tokens have the ids 0, 1 and 2, tokens of
    images the next ids. `corpus` has texts of the task, which are weighted like the built-in tasks' texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *(IMAGE_TOKENS if images else ())],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([*CORPUS, *list(corpus) * OFTEN], trainer)
    return tokenizer


def _write_tokenizer(tokenizer: Tokenizer, spec: TinyModel, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [START, *(IMAGE_TOKENS if spec.takes_images else ())],
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
        "chat_template": CHATML_WITH_IMAGES if spec.takes_images else CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_model(spec: TinyModel, tokenizer: Tokenizer, folder: Path) -> None:
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        auto: Any = AutoModelForImageTextToText if spec.takes_images else AutoModelForCausalLM
        model = auto.from_config(_model_config(spec, ids), dtype=torch.float32)
    model.generation_config = GenerationConfig(**ids)
    save_model(model, folder)
    if spec.takes_images:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")


def _model_config(spec: TinyModel, ids: dict[str, Any]) -> PreTrainedConfig:
    keys = spec.hf_config() | ids
    if spec.takes_images:
        keys["text_config"] |= ids
        keys |= {"vision_start_token_id": 3, "image_token_id": 4, "vision_end_token_id": 5}
    return AutoConfig.for_model(**keys)
