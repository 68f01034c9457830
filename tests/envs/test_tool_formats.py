"""Tool formats: derived from a chat template, and parsing of well-formed, odd and hostile text."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvConfig
from hpcrl.config import parse as parse_config
from hpcrl.data.templates import FolderTemplate
from hpcrl.envs.factory import check_env, validate_envs
from hpcrl.envs.tool_formats.deriving import TOOLS, derive
from hpcrl.envs.tool_formats.reading import Parsed, typed
from hpcrl.envs.tool_formats.table import FORMATS
from tests.templates import TABLE

UNREADABLE, NO_CALLS, UNRENDERABLE = "in an unknown format", "renders no calls", "cannot be rendered"
DERIVED = {
    "apertus": UNREADABLE,
    "apriel-1.5": "apriel",  # which looked like hermes
    "apriel-1.6": "apriel",
    "bielik-3": "hermes",
    "deepseek-r1": UNRENDERABLE,
    "deepseek-v3.2": "deepseek_v3_2",
    "deepseek-v4": "deepseek_v4",
    "devstral-2507": "mistral",
    "functionary-3.1": UNREADABLE,
    "functionary-3.2": UNREADABLE,
    "gemma-4": "gemma4",
    "gemma-4-interleaved": "gemma4",
    "gemma-4-later": "gemma4",
    "gigachat-3": "llama3_json",
    "gigachat-3.1": "llama3_json",
    "glm-4.5": "glm4",
    "glm-4.6": "glm4",
    "glm-4.7-flash": "glm4",
    "gpt-oss": "harmony",
    "granite-3.3": NO_CALLS,
    "granite-4.0": "hermes",
    "granite-4.1": "hermes",
    "kimi-k2": UNRENDERABLE,  # its template calls list.append, which the sandbox of transformers forbids
    "kimi-k2-thinking": UNRENDERABLE,
    "laguna-xs.2": "glm4",
    "ling-3": "glm4",
    "mimo-vl": "hermes",
    "minicpm-5": UNREADABLE,
    "minimax-m1": "apriel",
    "minimax-m2": "minimax_m2",
    "ministral-3": "mistral",
    "mistral-nemo": "mistral",
    "mistral-small-3.2": "mistral",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-coder": "qwen3_coder",
    "qwen3-instruct-2507": "hermes",
    "qwen3-training": "hermes",
    "qwen3-vl": "hermes",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "qwq": "hermes",
    "seed-oss": "seed_oss",
    "step-3.5-flash": "qwen3_coder",
}
"""What published templates lead to: a format, or the reason of a refusal. Others show no tools, which are described in
the first prompt in the form of Hermes."""


@pytest.mark.parametrize("name", TABLE)
def test_the_format_is_derived_from_a_published_template(name: str) -> None:
    expected = DERIVED.get(name, "hermes")
    if expected in FORMATS.paths:
        assert derive(TABLE[name].template) == expected
    else:
        with pytest.raises(ValueError, match=f"^format: the model's chat template .*{expected}"):
            derive(TABLE[name].template)


COMMAND_R7B = """\
{% for tool in tools or [] %}{"name": "{{ tool.function.name }}", "parameters": {}}{% endfor %}
{%- for message in messages %}<|START_OF_TURN_TOKEN|>{{ message.role }}{{ message.content }}
{%- if message.tool_calls %}<|START_ACTION|>[
{%- for call in message.tool_calls %}
{%- set f = call.function %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- if not loop.last %},{% endif %}{% endfor %}
]<|END_ACTION|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"""
"""With the structure of Command R7B's, which was taken for llama3_json because it shows tools so."""
KIMI_K2 = """\
{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content or '' }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>{% for call in message.tool_calls -%}
<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
DEEPSEEK_V3 = """\
{{ tools | tojson if tools }}{% for message in messages %}<｜{{ message.role }}｜>{{ message.content or '' }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\n' + '```json' + '\n' +
    call['function']['arguments'] + '\n' + '```' + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}
{%- endfor %}"""
"""As DeepSeek V3's, which takes arguments as text only."""
DEEPSEEK_V3_1 = """\
{{ tools | tojson if tools }}{% for message in messages %}<｜{{ message.role }}｜>{{ message.content or '' }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] +
    '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}"""
LLAMA3 = """\
{{ tools | tojson if tools }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ message.content }}{% endif %}
{%- endfor %}"""
ONE_KEY = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
LISTS = f"""\
{ONE_KEY}{{% if loop.first %}}OPEN[{{% endif %}}{{{{ c.function | tojson }}}}
{{{{- ']CLOSE' if loop.last else ', ' }}}}{{% endfor %}}{{% endfor %}}"""
"""A template of a JSON list between two marks."""


def lists(opens: str, closes: str) -> str:
    return LISTS.replace("OPEN", opens).replace("CLOSE", closes)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (COMMAND_R7B, "cohere"),
        (KIMI_K2, "kimi_k2"),
        (DEEPSEEK_V3, "deepseek_v3"),
        (DEEPSEEK_V3_1, "deepseek_v3_1"),
        (LLAMA3, "llama3_json"),
        (lists("<TOOLCALL>", "</TOOLCALL>"), "nemotron"),
        (lists("<|tool_call|>", ""), "granite"),
        (lists("functools", ""), "phi4_mini"),
        ("{{ messages[0].content }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_format_is_derived_from_other_templates(template: str, expected: str) -> None:
    assert derive(template) == expected


def test_a_template_that_drops_content_is_refused_with_its_rendering() -> None:
    strings_only = (
        ONE_KEY
        + "<tool_call>{{ {'name': c.function.name, 'arguments': {}} | tojson }}</tool_call>{% endfor %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"in an unknown format, as .*probe_first") as refused:
        derive(strings_only)
    assert "set the format that the model writes (hermes, qwen3_coder, glm4" in str(refused.value) and "\n" not in str(
        refused.value
    )


def test_a_configured_format_is_checked_against_the_template() -> None:
    hermes = TABLE["qwen2.5"].template
    assert derive(hermes, "hermes") == "hermes"
    with pytest.raises(
        ValueError, match=r"format: mistral does not read .*probe_first.*; it reads no call; use format=auto"
    ):
        derive(hermes, "mistral")
    with pytest.raises(
        ValueError, match=r"format: hermes does not read .*<function=probe_first>.*there is no valid JSON"
    ):
        derive(TABLE["qwen3-coder"].template, "hermes")
    assert derive(TABLE["granite-3.3"].template, "granite") == "granite", "nothing to compare with"
    assert derive(TABLE["kimi-k2"].template, "kimi_k2") == "kimi_k2"
    assert derive(DEEPSEEK_V3_1, "deepseek_v3_1") == "deepseek_v3_1"


def test_a_refusal_at_the_start_of_an_env_rank_names_the_option() -> None:
    config = EnvConfig(name="tools", options={"tools": ["calculator"]})
    with pytest.raises(ValueError, match=r"^env\.maths\.options\.format: the model's chat template shows tools but"):
        check_env(config, "maths", TABLE["granite-3.3"].template)
    check_env(config, "maths", TABLE["qwen3"].template)
    named = EnvConfig(name="tools", options={"tools": ["calculator"], "format": "mistral"})
    with pytest.raises(ValueError, match=r"^env\.maths\.options\.format: mistral does not read"):
        check_env(named, "maths", TABLE["qwen3"].template)


def test_a_refusal_comes_before_the_start_if_the_model_folder_exists(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TABLE["granite-3.3"].template)

    def problems(model: dict[str, Any], **options: Any) -> list[str]:
        env = {"default": {"name": "tools", "options": {"tools": ["calculator"], **options}}}
        return validate_envs(parse_config({"env": env, "model": model}), {})

    [line] = problems({"path": str(tmp_path)})
    assert line.startswith("env.default.options.format: the model's chat template shows tools but renders no calls")
    assert problems({"path": str(tmp_path)}, format="granite") == problems({"path": str(tmp_path / "none")}) == []
    assert problems({}) == [], "the tiny model's"
    assert problems({}, format="glm4")[0].startswith("env.default.options.format: glm4 does not read")


def parse(format_name: str, text: str, tools: list[dict[str, Any]] | None = None) -> Parsed:
    return FORMATS[format_name].parse(text, TOOLS if tools is None else tools)


READABLE = [name for name, expected in DERIVED.items() if expected in FORMATS.paths]
PIECES = [*"abc XYZ0123", *"\"'\\{}[]<>&/:,;=|%", "\n", "\t", "ü", "日", "🙂", "</", "<|", "```", "null", "true"]
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "integer"} | {
    list: "array",
    dict: "object",
}


@pytest.mark.parametrize("name", READABLE)
def test_any_arguments_round_trip_through_a_published_template(name: str) -> None:
    rng = random.Random(f"{name}/arguments")
    template = FolderTemplate(TABLE[name].template, {"bos_token": "<s>", "eos_token": "</s>"})
    asked = [{"role": "user", "content": "0ASKED0"}]
    for _ in range(10):
        arguments = {f"key{number}": _value(rng) for number in range(rng.randint(0, 4))}
        properties = {key: {"type": KINDS[type(value)], "description": "d"} for key, value in arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": []}
        tools = [{"type": "function", "function": {"name": "probe", "description": "d", "parameters": parameters}}]
        call = {"type": "function", "id": "call00000", "function": {"name": "probe", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = template.apply_chat_template([*asked, said], tools).rpartition("0ASKED0")[2]
        [found] = parse(DERIVED[name], text, tools).calls
        assert (found.name, found.problem) == ("probe", "")
        assert json.dumps(found.arguments, sort_keys=True) == json.dumps(arguments, sort_keys=True), text


def _value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8 if depth < 3 else 6):
        case 0:
            return rng.randint(-(10**6), 10**18)
        case 1:
            return rng.choice([0.5, -2.25, 1e-7, 1e22, 3.0])
        case 2:
            return rng.choice([True, False, None])
        case 6:
            return [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        case 7:
            return {f"key{number}": _value(rng, depth + 1) for number in range(rng.randint(0, 3))}
    return "".join(rng.choices(PIECES, k=rng.randint(0, 12)))


A, B = {"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}
LLAMA_A, LLAMA_B = '{"name": "f", "parameters": {"x": 1}}', '{"type": "function", "name": "g", "parameters": {}}'
TYPED = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}},
        },
    }
]
QWEN_A = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
DSML = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>'
KIMI_A = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
DEEPSEEK_A = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'
CALL_A = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
READ = [
    ("hermes", f"First\n<tool_call>\n{json.dumps(A)}\n</tool_call>\n<tool_call>{json.dumps(B)}</tool_call>", "fg"),
    ("hermes", f"<tool_call>{json.dumps(A)}", "f"),  # the stop string itself is not in the text
    ("hermes", json.dumps(A), ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "f"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1, "code": "a\nb"}}</tool_call>', "f"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1, "s": "</tool_call>"}}</tool_call>', "f"),
    ("llama3_json", LLAMA_A, "f"),
    ("llama3_json", f" <|python_tag|>{LLAMA_A}; {LLAMA_B}", "fg"),
    ("llama3_json", f"I would call {LLAMA_A} and then {LLAMA_B}.", "fg"),
    ("llama3_json", f"Here: [{LLAMA_A}, {LLAMA_B}]", "fg"),
    ("llama3_json", '{"answer": 4}', ""),
    ("llama3_json", 'The answer is {"name": "Ada", "born": 1815}', ""),
    ("mistral", f"[TOOL_CALLS] {json.dumps([A, B])}", "fg"),
    ("mistral", f" {json.dumps([A])}", "f"),  # as an expert writes it
    ("mistral", "[1, 2]", ""),
    ("mistral", 'So: [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}', "fg"),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', "f"),
    ("qwen3_coder", f"I look.\n<tool_call>\n{QWEN_A}\n</tool_call>", "f"),
    ("qwen3_coder", f"<tool_call>\n{QWEN_A}\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>", "fg"),
    ("qwen3_coder", QWEN_A, "f"),  # models leave the outer mark out
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>", "f"),
    (
        "glm4",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><tool_call>g</tool_call>",
        "fg",
    ),
    ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI_A}<|tool_calls_section_end|>", "f"),
    ("kimi_k2", KIMI_A.replace("functions.", ""), "f"),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{DEEPSEEK_A}\n{DEEPSEEK_A}<｜tool▁calls▁end｜>", "ff"),
    ("deepseek_v3_1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>', "f"),
    ("deepseek_v3_2", f"<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>", "f"),
    ("deepseek_v4", f"<｜DSML｜tool_calls>\n{DSML}\n</｜DSML｜tool_calls>", "f"),
    ("harmony", CALL_A, "f"),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "f"),
    ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL_A}", "f"),
    ("harmony", "<|channel|>final<|message|>4<|return|>", ""),
    ("gemma4", '<|tool_call>call:f{x:1,s:<|"|>a, {b}<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>', "fg"),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>\n</minimax:tool_call>',
        "f",
    ),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>", "f"),
    ("nemotron", f"<TOOLCALL>{json.dumps([A, B])}</TOOLCALL>", "fg"),
    ("granite", f"<|tool_call|>{json.dumps([A, B])}", "fg"),
    ("apriel", f"<tool_calls>\n{json.dumps(A)}\n{json.dumps(B)}\n</tool_calls>", "fg"),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>', "f"),
    ("phi4_mini", f"functools{json.dumps([A, B])}", "fg"),
]


@pytest.mark.parametrize(("format_name", "text", "names"), READ)
def test_calls_are_parsed_in_the_form_of_the_family(format_name: str, text: str, names: str) -> None:
    calls = parse(format_name, text, TYPED).calls
    assert [(call.name, call.problem) for call in calls] == [(name, "") for name in names]
    assert all(call.arguments["x"] == 1 for call in calls if call.name == "f")


THINKING = {"mistral": ("[THINK]", "[/THINK]"), "seed_oss": ("<seed:think>", "</seed:think>")} | {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}


@pytest.mark.parametrize(("format_name", "text", "names"), [case for case in READ if case[2]])
def test_calls_within_reasoning_are_ignored(format_name: str, text: str, names: str) -> None:
    opened, closed = THINKING.get(format_name, ("<think>", "</think>"))
    if format_name == "harmony":
        opened, closed = "<|channel|>analysis<|message|>", "<|end|>"
        text = text.replace("<|channel|>analysis<|message|>Hm.<|end|>", "").replace("<|", "<")
    reasoning = f"{opened}Maybe {text} or not.{closed}"
    final = "<|start|>assistant<|channel|>final<|message|>4" if format_name == "harmony" else "It is 4."
    assert parse(format_name, reasoning + final, TYPED) == Parsed("4" if format_name == "harmony" else "It is 4.")
    assert parse(format_name, reasoning[: -len(closed)], TYPED).calls == (), "the reasoning has no end"
    if format_name != "harmony":
        assert parse(format_name, f"Maybe {text} or not.{closed}It is 4.", TYPED) == Parsed("It is 4."), "of the prompt"
        after = parse(format_name, f"{reasoning}\n{text}", TYPED).calls
        assert after == parse(format_name, text, TYPED).calls or (format_name == "mistral" and text.startswith(" ["))


def test_a_reasoning_tag_within_an_argument_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "print(\'</think>\') <think>"}}</tool_call>'
    [call] = parse("hermes", text).calls
    assert call.arguments == {"s": "print('</think>') <think>"} and not call.problem
    assert parse("hermes", f"<think>Hm.</think>\n{text}").calls == (call,)


@pytest.mark.parametrize(
    ("format_name", "text", "problem"),
    [
        (
            "hermes",
            "<tool_call>{'name': 'f'}</tool_call>",
            "there is no valid JSON within <tool_call> and </tool_call>",
        ),
        ("hermes", "<tool_call></tool_call>", "there is no valid JSON"),
        ("hermes", '<tool_call>{"name": "f"} {"name": "g"}</tool_call>', "there is more than 1 JSON object within"),
        ("hermes", '<tool_call>["f"]</tool_call>', 'a call must be an object with "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments of 'f' must be an object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "it is nested too deeply"),
        ("hermes", "<tool_call>" + "9" * 5000 + "</tool_call>", "there is no valid JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no number in JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "1e999 is no number in JSON"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "a call must be an object with"),
        ("llama3_json", '{"name": "f", "parameters": {"x": }}', "there is no valid JSON in the response"),
        ("llama3_json", 'Well: {"name": "f", "parameters": {"x": }}', "there is no valid JSON in the response"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}, {"name"', "there is no valid JSON in the list"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x"', "there is no valid JSON in the arguments of 'f'"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nab", "the argument 's' of 'f' has no </parameter>"),
        ("qwen3_coder", '<tool_call>\n<function=f>{"x": 1}</function>', "there is text outside the arguments of 'f'"),
        ("qwen3_coder", "<tool_call>f()</tool_call>", "after <tool_call> there is no call"),
        ("glm4", '<tool_call>{"name": "f"}</tool_call>', "a call must begin with the name of the tool"),
        ("glm4", "<tool_call>f x=1</tool_call>", "there is text outside the arguments of 'f'"),
        ("glm4", "<tool_call>f<arg_key>s</arg_key><arg_value>a", "the argument 's' of 'f' has no </arg_value>"),
        ("kimi_k2", "<|tool_call_begin|>f(1)<|tool_call_end|>", "a call must begin with functions.NAME:NUMBER"),
        ("kimi_k2", KIMI_A.replace("1}", "1} 2"), "there is text after the JSON in the arguments of 'f'"),
        ("deepseek_v3", DEEPSEEK_A.replace("```json", ""), "a call must be function<｜tool▁sep｜>NAME, and"),
        ("deepseek_v3_1", DEEPSEEK_A, "there is no valid JSON in the arguments of 'function'"),
        ("harmony", CALL_A.replace("1}", "1"), "there is no valid JSON in the arguments of 'f'"),
        ("gemma4", '<|tool_call>call:f{s:<|"|>a}<tool_call|>', "has no second"),
        ("gemma4", "<|tool_call>call:f{" + "a:{" * 100_000, "it is nested too deeply"),
        ("gemma4", "<|tool_call>f(1)<tool_call|>", "a call must be call:NAME{...}"),
        ("nemotron", "<TOOLCALL>[</TOOLCALL>", "there is no valid JSON after <TOOLCALL>"),
        ("cohere", '<|START_ACTION|>[{"name": "f"}]', 'a call must be an object with "tool_name" and "parameters"'),
    ],
)
def test_a_malformed_call_has_a_problem(format_name: str, text: str, problem: str) -> None:
    assert any(problem in call.problem for call in parse(format_name, text, TYPED).calls)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        (" a \n", {"type": "string"}, " a \n"),
        ("null", {"type": "string"}, "null"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("{'a': [1, None, True]}", {"type": "object"}, {"a": [1, None, True]}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("five", {"type": "integer"}, "five"),  # which the schema then refuses
        ("5", {}, 5),
        ("five", {}, "five"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("x", None, "x"),
        ("NaN", {"type": "number"}, "NaN"),
        ("{'a': {1, 2}}", {"type": "object"}, "{'a': {1, 2}}"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_an_unquoted_value_gets_the_type_of_its_schema(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("format_name", FORMATS.paths)
def test_a_broken_call_is_parsed_without_an_exception(format_name: str) -> None:
    rng = random.Random(f"{format_name}/broken")
    for text in [text for name, text, _ in READ if name == format_name]:
        for _ in range(100):
            at, length = rng.randrange(len(text)), rng.randint(1, 8)
            wrong = rng.choice(["", text[at : at + 2 * length], *PIECES, "\ud800", "\x00", "</think>", "1e999"])
            for call in parse(format_name, text[:at] + wrong + text[at + length :], TYPED).calls:
                assert call.problem or json.dumps(call.arguments, allow_nan=False)


MARKS = {
    "hermes": ("<tool_call>", "</tool_call>", '{"name":"', "{", "<think>"),
    "qwen3_coder": ("<tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>"),
    "glm4": ("<tool_call>", "f", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "<arg_key>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f:0<|tool_call_argument_begin|>", "{"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json", "```"),
    "deepseek_v3_1": ("<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>", "{", '"', "<｜tool▁call▁end｜>"),
    "deepseek_v3_2": (
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="a" string="true">',
        "</｜DSML｜parameter>",
    ),
    "harmony": ("<|channel|>commentary", " to=functions.f", "<|message|>", "<|start|>", "{", "<|end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "f", "{", '[{"name":"', "["),
    "gemma4": ("<|tool_call>", "call:f{", "a:", '<|"|>', "[", "<tool_call|>"),
    "llama3_json": ('{"name":', '{"name":"f","arguments":', "{", "[", '"', "}", "<|python_tag|>", '{"name":"f"}'),
    "nemotron": ("<TOOLCALL>", "[", "{", '"', "</TOOLCALL>"),
}


@pytest.mark.slow
@pytest.mark.parametrize("format_name", MARKS)
def test_hostile_text_is_parsed_quickly_without_an_exception(format_name: str) -> None:
    import random

    rng, marks = random.Random(7), MARKS[format_name]
    texts = [mark * ((1 << 19) // len(mark)) for mark in (*marks, "<think>", "</think>", " ", "[", "\ud800")]
    texts += [(one + two) * ((1 << 15) // len(one + two)) for one in marks for two in (*marks, "\n", " " * 1000)]
    texts += ["".join(rng.choices([*marks, " ", "\n", "x", "1", ",", "}", "]"], k=20_000)) for _ in range(3)]
    for text in texts:
        started = time.process_time()
        parse(format_name, text, TYPED)
        assert time.process_time() - started < 2, text[:60]
