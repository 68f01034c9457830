"""A folder's chat template as a launch renders it, and properties derived from it, compared with transformers for all
published templates of tests/templates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.data.chat import bind, end_ids, end_of_turn, plain, render
from hpcrl.data.templates import read_template, tiny_template
from tests.templates import TABLE, tokenizer_of

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": "ä", "b": 1}}}
USER = {"role": "user", "content": "2+2 <b>?"}
DIALOGUES: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "user": ([USER], None),
    "system": ([{"role": "system", "content": "S"}, USER], None),
    "two users": ([USER, USER], None),
    "answered": ([USER, {"role": "assistant", "content": "4"}, USER], None),
    "tools": ([USER], [TOOL]),
    "call": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
        [TOOL],
    ),
}


def outcome(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, **variables: Any) -> str:
    """The rendered text, or the template's error."""
    try:
        return plain(render(tokenizer, messages, tools, **variables))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", TABLE)
def test_a_folder_is_rendered_as_by_transformers(tmp_path: Path, name: str):
    tokenizer = tokenizer_of(name)
    tokenizer.save_pretrained(tmp_path)
    folder = read_template(tmp_path)
    assert folder.eos_token == tokenizer.eos_token
    assert {n: token.content for n, token in folder.added_tokens_decoder.items()} == {
        n: token.content for n, token in tokenizer.added_tokens_decoder.items()
    }
    for messages, tools in DIALOGUES.values():
        for variables in ({}, {"enable_thinking": False}):
            assert outcome(folder, messages, tools, **variables) == outcome(tokenizer, messages, tools, **variables)
    assert end_of_turn(folder) == end_of_turn(tokenizer)


@pytest.mark.parametrize("name", TABLE)
def test_the_end_of_a_turn_is_an_end_token_of_the_model(name: str):
    published, end = TABLE[name], end_of_turn(tokenizer_of(name))
    assert end is None or end in (*published.ends, published.eos)


def test_a_base_model_also_stops_at_the_end_token_of_its_template():
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer.convert_ids_to_tokens(end_ids(tokenizer)) == ["<|endoftext|>", "<|im_end|>"]
    tokenizer.chat_template = None
    end_of_turn.cache_clear()
    assert tokenizer.convert_ids_to_tokens(end_ids(tokenizer)) == ["<|endoftext|>"]


def test_a_template_that_concatenates_arguments_gets_them_as_text():
    """DeepSeek's templates add the arguments to a text: as an object they raise TypeError."""
    tokenizer = tokenizer_of("deepseek-r1")
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = outcome(tokenizer, [USER, turn, {"role": "tool", "content": "4"}], None)
    assert json.dumps(CALL["function"]["arguments"], ensure_ascii=False) in text
    assert "{'a'" not in text


def test_configured_variables_reach_every_rendering():
    tokenizer = tokenizer_of("qwen3")
    thinks = render(tokenizer, [USER], None)
    assert render(bind(tokenizer, {"enable_thinking": False}), [USER], None) != thinks
    assert render(tokenizer, [USER], None, enable_thinking=True) == thinks, "a row's own variables win"


def test_the_tiny_model_has_the_template_of_a_launch(tokenizer: Any):
    for messages, tools in DIALOGUES.values():
        assert outcome(tiny_template(), messages, tools) == outcome(tokenizer, messages, tools)
    assert end_ids(tokenizer) == (tokenizer.eos_token_id,) and end_of_turn(tiny_template()) == tokenizer.eos_token


def test_a_missing_or_broken_template_is_reported(tmp_path: Path):
    assert read_template(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}", "eos_token": {"content": "</s>"}}')
    with pytest.raises(ValueError, match=f"^the chat template of {tmp_path} is not valid: Expected an expression"):
        read_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}{{ mood }}")
    found = read_template(tmp_path)
    assert outcome(found, [USER], None, mood="!") == "2+2 <b>?</s>!" and "mood" in found.variables()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        read_template(tmp_path)


def test_reading_a_template_imports_no_transformers(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code = (
        "import sys; from pathlib import Path; from hpcrl.data.templates import read_template\n"
        f"assert read_template(Path({str(tmp_path)!r})).apply_chat_template([{{'content': 'x'}}]) == 'x'\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
