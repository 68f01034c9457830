"""hpcrl.Generator against transformers.generate, and its refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcrl
from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model

PROMPTS = ["sort: 3 1 2", "add: 12 + 7", "What is the capital of this country?"]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(TinyModel(), path)
    return path


@pytest.fixture(scope="module")
def generator(folder: Path) -> hpcrl.Generator:
    return hpcrl.Generator(folder, max_num_seqs=4)


@pytest.mark.slow
@pytest.mark.numerics
def test_greedy_responses_are_those_of_transformers(folder: Path, generator: hpcrl.Generator) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    mine = generator.generate(PROMPTS, n=2, max_new_tokens=NEW)
    for prompt, (first, second) in zip(PROMPTS, mine, strict=True):
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            whole = model.generate(**ids, do_sample=False, max_new_tokens=NEW)
            logits = model(whole).logits[0, ids["input_ids"].shape[1] - 1 : -1]
        theirs = whole[0, ids["input_ids"].shape[1] :].tolist()
        assert first.token_ids == second.token_ids == theirs
        expected = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(theirs)[:, None])[:, 0]
        np.testing.assert_allclose(first.logprobs, expected.numpy(), atol=1e-4)
        assert first.text == tokenizer.decode(theirs, skip_special_tokens=True)
        assert first.finish_reason == ("stop" if theirs[-1] == tokenizer.eos_token_id else "length")


def test_a_prompt_is_a_user_message(generator: hpcrl.Generator) -> None:
    as_text = generator.generate("sort: 3 1 2", max_new_tokens=4)
    turn = [{"role": "user", "content": "sort: 3 1 2"}]
    assert as_text == generator.generate([turn], max_new_tokens=4) == generator.generate(turn, max_new_tokens=4)
    other = generator.generate([[{"role": "system", "content": "x"}, *turn]], max_new_tokens=4)
    assert other[0][0].logprobs != as_text[0][0].logprobs


def test_samples_depend_on_the_seed_and_not_on_other_prompts(generator: hpcrl.Generator) -> None:
    def texts(prompts: list[str], seed: int) -> list[list[str]]:
        return [
            [r.text for r in row]
            for row in generator.generate(prompts, n=3, temperature=1.0, max_new_tokens=8, seed=seed)
        ]

    both = texts(PROMPTS[:2], 1)
    assert both == texts(PROMPTS[:2], 1) and both[:1] == texts(PROMPTS[:1], 1) and both != texts(PROMPTS[:2], 2)
    assert len({*both[0]}) == 3 and generator.generate([]) == []


def test_stop_strings_end_a_response(generator: hpcrl.Generator) -> None:
    (whole,) = generator.generate("sort: 3 1 2", max_new_tokens=NEW)[0]
    cut = whole.text[len(whole.text) // 2]
    (short,) = generator.generate("sort: 3 1 2", max_new_tokens=NEW, stop=[cut])[0]
    assert short.finish_reason == "stop" and len(short.token_ids) < len(whole.token_ids)


@pytest.mark.parametrize(
    ("prompts", "keys", "text"),
    [
        ("x", {"n": 0}, "n is 0; give 1 to"),
        ("x", {"temperature": -1}, "temperature is -1, 0 (greedy) or more is needed"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0, at least 1 is needed"),
        ("word " * 5000, {}, "exceed the engine's max_length"),
        ([[{"role": "user", "content": 3}]], {}, "prompt 0: "),
        ([["a", "b"]], {}, "prompt 0: "),
        ([[]], {}, "prompt 0: "),
    ],
)
def test_a_wrong_request_is_refused_and_the_next_works(
    generator: hpcrl.Generator, prompts: Any, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        generator.generate(prompts, **keys)
    assert "\n" not in str(error.value)
    assert len(generator.generate("x", max_new_tokens=2)[0][0].token_ids) == 2


def rewrite(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in {} (tokenizer.json)"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (shutil.rmtree, "no folder {}; give one with config.json"),
        (rewrite(model_type="bloom"), "{}: the native engine does not run model_type bloom; use vllm or sglang"),
        (rewrite(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "is not implemented by"),
    ],
)
def test_a_folder_that_cannot_generate_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy)
    with pytest.raises(ValueError, match=re.escape(text.format(copy))) as error:
        hpcrl.Generator(copy)
    assert "\n" not in str(error.value)
