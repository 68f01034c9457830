"""hpcrl with the chat templates of published models: all of tests/templates."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.data.chat import encode, render
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.workers.observations import check_continues, encode_observation
from tests.templates import FOLDER, TABLE, tokenizer_of

LICENCES = {"Apache-2.0", "MIT", "LicenseRef-MIT-modified"}


def test_every_template_has_a_source_and_a_suitable_licence() -> None:
    assert len(TABLE) >= 40
    assert {file.stem for file in FOLDER.glob("*.jinja")} == set(TABLE)
    for published in TABLE.values():
        assert published.licence in LICENCES and published.model and published.source
        assert published.eos and set(published.ends) <= set(published.special), published.name


@pytest.mark.parametrize("name", TABLE)
def test_a_question_is_rendered_with_the_models_control_tokens(name: str) -> None:
    tokenizer = tokenizer_of(name)
    text = render(tokenizer, [{"role": "user", "content": "7 and 8?"}], None)
    ids = encode(tokenizer, text)
    assert "7 and 8?" in text and tokenizer.decode(ids) == text
    control = [tokenizer.convert_tokens_to_ids(token) for token in TABLE[name].special]
    assert set(control) & set(ids) and tokenizer.unk_token_id not in control


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds one.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
    },
}
NO_CALLS = {"granite-3.3", "phi-3", "phi-3.5", "qwen2.5-vl", "rwkv-world", "smollm3", "smolvlm"}
"""Templates that leave calls of tools out."""
UNSAFE = {"kimi-k2", "kimi-k2-thinking"}
"""As llama.cpp has changed them, they call methods that Jinja's sandbox refuses, where there are calls."""
REWRITTEN: dict[str, tuple[set[int], set[int]]] = {
    # Reasoning that the prompt begins is omitted in earlier turns, or in turns before the last question.
    **dict.fromkeys(
        ("apriel-1.6", "deepseek-v3.2", "gemma-4-interleaved", "glm-4.7-flash", "minimax-m2", "qwq"), (set(), set())
    ),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "step-3.5-flash"), (set(), {1, 3})),
    "gemma-4": (set(), {3, 5}),
    "deepseek-r1": (set(), set()),
    # Also, it closes the list of results where no call follows.
    **dict.fromkeys(("deepseek-r1-distill", "deepseek-v3"), (set(), {5})),
    "apertus": ({1, 3, 5}, {1}),
    # Tools stand before the last question.
    **dict.fromkeys(("mistral-nemo", "mistral-small-3.2"), ({1, 3, 5}, {1, 3})),
}
"""Template -> the turns of TALK and WORK after whose observation it writes earlier messages as before."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": number}}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": f"call0000{number}", "function": function}],
    }


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": text}


TALK = [user("one?"), answer("first"), user("two?"), answer("second"), user("three?"), answer("third"), user("four?")]
WORK = [user("one?"), call(1), result(1, "2"), call(2), result(2, "3"), answer("third"), user("four?")]


@pytest.mark.parametrize("dialogue", [TALK, WORK], ids=["talk", "work"])
@pytest.mark.parametrize("name", TABLE)
def test_three_turns_have_the_tokens_of_the_complete_dialogue(name: str, dialogue: list[dict[str, Any]]) -> None:
    """Each turn as the template writes it, with what follows an observation, is the template's text of all messages."""
    tokenizer, tools = tokenizer_of(name), [TOOL] if dialogue is WORK else None
    if dialogue is WORK and name in NO_CALLS | UNSAFE:
        with pytest.raises(TemplateRefusal, match="its output contains no tool calls"):
            render(tokenizer, dialogue, tools)
        return
    ends = tokenizer.convert_tokens_to_ids(list(TABLE[name].ends))
    exact = []
    for turn in (1, 3, 5):
        before, after = (render(tokenizer, dialogue[:n], tools) for n in (turn, turn + 2))
        for end in ends:
            between = encode_observation(tokenizer, dialogue[turn + 1 : turn + 2], end, tools).token_ids.tolist()
            ids = encode(tokenizer, after)
            assert between
            written = ids[len(encode(tokenizer, before)) : -len(between)]
            kept = after.startswith(before) and [*encode(tokenizer, before), *written, *between] == ids
            if kept and (written[-1] == end or name == "rwkv-world"):
                exact.append(turn)
                break
    assert set(exact) == REWRITTEN.get(name, ({1, 3, 5}, {1, 3, 5}))[dialogue is WORK]


BETWEEN = {
    ("gpt-oss", "<|call|>"): (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant',
        "<|start|>user<|message|>no<|end|><|start|>assistant",
    ),
    ("gpt-oss", "<|return|>"): (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant',
        "<|start|>user<|message|>no<|end|><|start|>assistant",
    ),
    ("gemma-4-later", "<|tool_response>"): (
        'response:add{value:<|"|>7<|"|>}<tool_response|>',
        "\n<|turn>user\nno<turn|>\n<|turn>model\n",
    ),
    ("minimax-m2", "[e~["): (
        "\n]~b]tool\n<response>7</response>[e~[\n]~b]ai\n<think>\n",
        "\n]~b]user\nno[e~[\n]~b]ai\n<think>\n",
    ),
    ("deepseek-v3.2", "<｜end▁of▁sentence｜>"): (
        "\n\n<function_results>\n<result>7</result>\n</function_results>\n\n<think></think>",
        "<｜User｜>no<｜Assistant｜><think></think>",
    ),
    ("glm-4.6", "<|observation|>"): (
        "\n<tool_response>\n7\n</tool_response><|assistant|>",
        "<|user|>\nno<|assistant|>",
    ),
    ("phi-3", "<|end|>"): (
        "\n<|user|>\n<tool_response>\n7\n</tool_response><|end|>\n<|assistant|>\n",
        "\n<|user|>\nno<|end|>\n<|assistant|>\n",
    ),
}
"""(Template, end of the turn) -> what follows it, with a result and with a user."""


@pytest.mark.parametrize(("name", "end"), BETWEEN)
def test_text_after_a_turn_matches_the_training_format_of_the_family(name: str, end: str) -> None:
    tokenizer = tokenizer_of(name)
    last = tokenizer.convert_tokens_to_ids(end)
    for observation, expected in zip(([result(1, "7")], [user("no")]), BETWEEN[name, end], strict=True):
        assert tokenizer.decode(encode_observation(tokenizer, observation, last, [TOOL]).token_ids) == expected


@pytest.mark.parametrize(
    ("name", "between"),
    [
        (
            "qwen3",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "gpt-oss",
            '<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant',
        ),
        ("glm-4.6", "<|observation|>\n<tool_response>\n7\n</tool_response><|assistant|>"),
    ],
)
def test_a_call_ended_by_a_stop_string_gets_its_end_token(name: str, between: str) -> None:
    tokenizer = tokenizer_of(name)
    [last] = tokenizer.encode("}", add_special_tokens=False)
    assert tokenizer.decode(encode_observation(tokenizer, [result(1, "7")], last, [TOOL]).token_ids) == between


def test_a_result_containing_the_placeholder_of_a_turn_ends_no_turn() -> None:
    tokenizer = tokenizer_of("qwen3")
    last = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "0CONTENT0 0CONTENT10 <|im_end|>"
    between = encode_observation(tokenizer, [result(1, text)], last, [TOOL]).token_ids
    assert tokenizer.decode(between).startswith(f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response>")
    assert between.tolist().count(last) == 1


@pytest.mark.parametrize("name", TABLE)
def test_system_prompts_and_tools_are_rendered_or_refused(name: str) -> None:
    tokenizer, strict = tokenizer_of(name), {"ministral-3", "mistral-nemo", "mistral-small-3.2"}
    check_continues(tokenizer)
    text = render(tokenizer, [{"role": "system", "content": "You count."}, user("one?")], [TOOL])
    assert all(shown in text for shown in ("You count.", "one?", "Adds one.", "A number."))
    if name in strict:
        with pytest.raises(TemplateRefusal, match=r"refuses the messages: TemplateError: .* roles must alternate"):
            render(tokenizer, [user("one?"), user("two?")], None)
    else:
        assert "one?" in render(tokenizer, [user("one?"), user("two?")], None)
    thinks, not_so = (render(tokenizer, [user("one?")], None, enable_thinking=value) for value in (True, False))
    assert thinks == not_so or "enable_thinking" in TABLE[name].template


def test_a_template_that_cannot_continue_a_dialogue_is_refused_at_the_start() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ raise_exception('one question only') }}{% endif %}"
    with pytest.raises(ValueError, match=r"^model.path: environments need .*: TemplateError: one question only$"):
        check_continues(tokenizer)
