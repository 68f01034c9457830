"""Calls as vLLM's parsers read them, names and arguments; where hpcrl reads otherwise, a table says why."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from hpcrl.envs.tool_formats.table import FORMATS

PEERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm4": "glm45",
    "kimi_k2": "kimi_k2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "minimax_m2": "minimax_m2",
    "seed_oss": "seed_oss",
    "granite": "granite",
    "phi4_mini": "phi4_mini_json",
    "llama3_json": "llama3_json",
}
"""vLLM's names. Its parser for gpt-oss works on tokens of a vocabulary that it fetches; those for Command and Nemotron
Nano v2 are not of this kind or not there."""
PROPERTIES = {"x": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("f", PROPERTIES), ("g", {}))
]
SPECIAL = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<seed:think>",
    "</seed:think>",
    "<|tool_call|>",
    "<|tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "｜DSML｜",
]
"""Marks that vLLM's parsers look up in the vocabulary."""


def element(format_name: str, key: str, value: str) -> str:
    """A call of f with one argument, in a format without quotes."""
    text = str(key == "s").lower()
    return {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm4": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n'
        f'<parameter name="{key}">{value}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "seed_oss": f"<seed:tool_call>\n<function=f>\n<parameter={key}>{value}</parameter>\n</function>\n"
        "</seed:tool_call>",
        "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    }[format_name]


def in_json(arguments: str) -> list[tuple[str, str]]:
    """Calls with these arguments, in the formats of JSON."""
    call, other = f'{{"name": "f", "arguments": {arguments}}}', f'{{"arguments": {arguments}, "name": "g"}}'
    llama = call.replace("arguments", "parameters")
    kimi = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    deepseek = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    fenced = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    return [
        ("hermes", f"Sure.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{other}</tool_call>"),
        ("llama3_json", llama),
        ("llama3_json", f"Here is the result: {call} I hope so."),
        ("llama3_json", f"{llama};{call}"),
        ("llama3_json", f"[{llama}, {call}]"),
        ("llama3_json", f"<|python_tag|>{llama}; {call}"),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{arguments}"),
        ("mistral", f"Text [TOOL_CALLS]f{arguments}[TOOL_CALLS]g{arguments}"),
        ("kimi_k2", f"Hm. <|tool_calls_section_begin|>{kimi}{kimi}<|tool_calls_section_end|>"),
        ("deepseek_v3", f"Hm.<｜tool▁calls▁begin｜>{fenced}\n{fenced}<｜tool▁calls▁end｜>"),
        ("deepseek_v3_1", f"Hm.<｜tool▁calls▁begin｜>{deepseek}{deepseek}<｜tool▁calls▁end｜>"),
        ("granite", f"<|tool_call|>[{call}, {other}]"),
        ("granite", f"<tool_call>[{call}]"),
    ]


VALUES = (("x", "1"), ("x", "-7"), ("x", "null"), ("x", "abc"), ("s", "a b"), ("s", ""), ("s", "5"), ("s", "null"))
VALUES += (("s", "a\n\tb\nc"), ("s", '"quoted"'), ("s", "<b> & ü 日本"), ("s", '{"a": 1}'), ("o", '{"a": [1, null]}'))
SAME = [
    *((name, element(name, *value)) for name in ("qwen3_coder", "glm4", "minimax_m2", "seed_oss") for value in VALUES),
    *(
        (name, element(name, *value))
        for name in ("deepseek_v3_2", "deepseek_v4")
        for value in VALUES
        if value[1] != "abc"
    ),
    *(
        case
        for arguments in ("{}", '{"x": 1}', '{"s": "a\\nb \\"c\\" <d> \\u00fc 日本"}')
        for case in in_json(arguments)
    ),
    *in_json('{"o": {"l": [1, [2], {}, 2.5, true], "n": null}}'),
    ("hermes", "plain text"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}'),
    ("llama3_json", '{"answer": 4}'),
    ("llama3_json", 'The answer is {"name": "Ada", "born": 1815}'),
    ("qwen3_coder", "Let me check.\n\n" + element("qwen3_coder", "x", "1") + "\n" + element("qwen3_coder", "x", "2")),
    ("qwen3_coder", "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>1</parameter><parameter=s>a</parameter></function></tool_call>",
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"),
    ("qwen3_coder", element("qwen3_coder", "s", "<function=nested>")),
    ("glm4", "<tool_call>g</tool_call>"),
    ("glm4", "Text.<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
    ("gemma4", '<|tool_call>call:f{x:1,s:<|"|>a "b" \n {c}, d<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>'),
    ("gemma4", "<|tool_call>call:f{x:-1.5}<tool_call|>"),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'),
]
OTHERWISE: list[tuple[str, str, list[tuple[str, dict[str, Any]]], str]] = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>',
        [("f", {"s": "a\nb"})],
        "models write line breaks into strings",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>',
        [("f", {"s": "</tool_call>"})],
        "a mark within a string ends nothing",
    ),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', [("g", {})], "arguments that are left out are none"),
    ("llama3_json", '{"name": "g"}', [("g", {})], "the same"),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}',
        [("f", {"x": 1})],
        "a call in the form of OpenAI's messages",
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]',
        [("f", {"x": 1})],
        "templates of older tokenizers render lists, which vLLM reads with the tokenizer only",
    ),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}", [("g", {})], "vLLM makes the id a part of the name"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>",
        [("f", {"x": 1})],
        "an argument without its end is not lost",
    ),
    (
        "qwen3_coder",
        element("qwen3_coder", "o", "{'a': 1, 'b': None}"),
        [("f", {"o": {"a": 1, "b": None}})],
        "Seed-OSS's template writes objects as Python does",
    ),
    ("qwen3_coder", element("qwen3_coder", "u", "5"), [("f", {"u": 5})], "a value of no declared type is JSON"),
    (
        "kimi_k2",
        '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>',
        [("f", {"x": 1})],
        "the marks of the section may be missing",
    ),
    (
        "deepseek_v3_1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜> {"x": 1} \n<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("f", {"x": 1})],
        "spaces around JSON",
    ),
    (
        "gemma4",
        "<|tool_call>call:f{o:{a:[1,2],b:true,c:null}}<tool_call|>",
        [("f", {"o": {"a": [1, 2], "b": True, "c": None}})],
        "vLLM makes texts of nested numbers",
    ),
    (
        "phi4_mini",
        'functools[{"name": "f", "arguments": {"o": {"l": [1]}}}]',
        [("f", {"o": {"l": [1]}})],
        "a list within the arguments",
    ),
]
"""Format, text, what hpcrl reads, and why not what vLLM does."""


def ours(format_name: str, text: str) -> list[tuple[str, Any]]:
    return [
        (call.name, dict(call.arguments)) for call in FORMATS[format_name].parse(text, TOOLS).calls if not call.problem
    ]


@pytest.mark.slow
def test_calls_are_parsed_like_vllm_parses_them(caplog: pytest.LogCaptureFixture) -> None:
    parsers = pytest.importorskip("vllm.tool_parsers", exc_type=ImportError).ToolParserManager
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from hpcrl.engines.tiny import make_tokenizer

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(259), additional_special_tokens=SPECIAL)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)

    def theirs(format_name: str, text: str) -> list[tuple[str, Any]]:
        parser = parsers.get_tool_parser(PEERS[format_name])(tokenizer, request.tools)
        calls = parser.extract_tool_calls(text, request).tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in calls]

    with caplog.at_level(logging.CRITICAL, "vllm"):
        for format_name, text in SAME:
            assert ours(format_name, text) == theirs(format_name, text), (format_name, text)
        for format_name, text, expected, why in OTHERWISE:
            assert ours(format_name, text) == expected, why
            assert theirs(format_name, text) != expected, f"no longer so: {why}"
    assert {name for name, _ in SAME} == set(PEERS)
