"""Tiny models load in transformers, encode any text, and are the same for the same spec."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hpcrl.config import TinyModel
from hpcrl.data.templates import CHATML
from hpcrl.engines.tiny import make_tiny_model, make_tokenizer

ARCHITECTURES = [
    name
    for name in get_args(TinyModel.model_fields["architecture"].annotation)
    if not TinyModel(architecture=name).takes_images
]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_every_architecture(tmp_path: Path, architecture: str):
    spec = TinyModel(architecture=architecture, hidden_size=32, vocab_size=300)
    make_tiny_model(spec, tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    generation = GenerationConfig.from_pretrained(tmp_path / "m")
    assert model.config.model_type == architecture and model.dtype == torch.float32
    assert len(tokenizer) <= model.config.vocab_size == 300
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == generation.eos_token_id == model.config.eos_token_id == end
    assert tokenizer.chat_template.strip() == CHATML.strip()

    ids = tokenizer("sort: 4 1 3", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 300) and bool(torch.isfinite(logits).all())

    for text in ("1234 + 56\n", "漢字 😀 \x00\t\r\n", "Ünïcode — “quotes”", "<|im_start|>user\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("1234").input_ids) == 4
    assert tokenizer("<|im_start|>user\n<|im_end|>").input_ids[0] == 1


def test_equal_specs_give_equal_files_and_another_seed_other_weights(tmp_path: Path):
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(TinyModel(hidden_size=16, num_heads=2, seed=seed), tmp_path / name)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random state was changed"
    (tmp_path / "a" / "probe").touch()
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1, "others may read some files only"
    (tmp_path / "a" / "probe").unlink()
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"], "a partial folder was left behind"


def test_frequent_words_of_the_corpus_become_tokens():
    call = '<tool_call>{"name": "guess"}</tool_call>'
    tokenizer = make_tokenizer(400, [call])
    words = ["<tool", "_call", '>{"', "name", '":', ' "', "guess", '"}</', "tool", "_call", ">"]
    ids = tokenizer.encode(call).ids
    assert [tokenizer.decode([token]) for token in ids] == words
    assert len(make_tokenizer(400).encode(call).ids) > 3 * len(words)
    assert len(tokenizer.encode("sort: 3 1 2").ids) == len(make_tokenizer(400).encode("sort: 3 1 2").ids)


def test_an_existing_model_is_not_overwritten(tmp_path: Path):
    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), tmp_path / "m")
    before = digests(tmp_path / "m")
    make_tiny_model(TinyModel(hidden_size=32), tmp_path / "m")
    assert digests(tmp_path / "m") == before


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"hidden_size": 60, "num_heads": 8}, "hidden_size=60 must be a multiple"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
    ],
)
def test_impossible_specs_are_named(tmp_path: Path, numbers: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_tiny_model(TinyModel(**numbers), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
