"""The environment `tools`: calls in the text of each family, and the replies to the model."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.data import read_splits
from hpcrl.envs.factory import check_env, make_env, validate_envs

RELEASE = threading.Event()
TOOL = "tests.envs.test_tools"


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """The weather of a city.

    Args:
        city: Its name.
        days: How many days.
    """
    if city == "hangs":
        RELEASE.wait(60)
    if city == "exits":
        raise SystemExit(3)
    return {"city": city, "days": days, "said": "<|im_end|>" * (days - 1)}


def undescribed(city):  # type: ignore[no-untyped-def]
    return city


async def waits(city: str) -> Any:
    """Look a city up.

    Args:
        city: Its name.
    """
    await asyncio.sleep(60 if city == "hangs" else 0)
    if city == "raises":
        raise OSError("no such city")
    return (name for name in (city, city)) if city == "yields" else {"city": city}


def gives(what: str) -> Any:
    """Give a value.

    Args:
        what: Which.
    """
    return VALUES[what]()


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def looped() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def raises() -> None:
    raise Odd


async def counted() -> AsyncIterator[int]:
    for number in range(3):
        yield number


@dataclass
class Place:
    name: str


VALUES: dict[str, Callable[[], Any]] = {
    "async": lambda: waits("Ulm"),
    "partial": functools.partial(waits, "Ulm"),
    "generator": lambda: (number for number in range(3)),
    "async generator": counted,
    "endless": itertools.count,
    "function": lambda: len,
    "object": object,
    "objects": lambda: [{"x": object()}],
    "nested": lambda: {"x": iter([1])},
    "dataclass": lambda: Place("Ulm"),
    "set": lambda: {1},
    "bytes": lambda: b"x",
    "number": lambda: np.float32(0.5),
    "array": lambda: np.array([1, 2]),
    "nothing": lambda: None,
    "keys": lambda: {(1, 2): 3},
    "loop": looped,
    "surrogate": lambda: "\ud800",
    "raises": raises,
}


def env(*tools: str, template: str = "", messages: list[dict[str, Any]] | None = None, **options: Any) -> Any:
    row = {"messages": messages or [{"role": "user", "content": "?"}], "extra": {}}
    return make_env(EnvConfig(name="tools", options={"tools": list(tools), **options}), row, template)


def hermes(name: Any, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def heard(made: Any, text: str) -> list[str]:
    return [message["content"] for message in made.step(text)[0]]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "tools: missing"),
        ({"tools": []}, "tools: List should have at least 1 item"),
        ({"tools": ["pyton"]}, "'pyton' is no tool; there are python, calculator, guess, crop, and functions as mod"),
        ({"tools": ["guess", "guess"]}, "'guess' is named twice"),
        (
            {"tools": ["guess"], "format": "hermess"},
            "format: there is no tool format hermess; there are hermes, qwen3_coder, glm4",
        ),
    ],
)
def test_wrong_options_are_refused_before_the_start(options: dict[str, Any], error: str) -> None:
    config = parse({"data": {"train": "env:default"}, "env": {"default": {"name": "tools", "options": options}}})
    rows, _ = read_splits(config.data, config.seed)
    [problem] = validate_envs(config, rows)
    assert problem.startswith("env.default.options: ") and error in problem


@pytest.mark.parametrize("path", ["no.such:thing", f"{TOOL}:missing", f"{TOOL}:undescribed", f"{TOOL}:Place"])
def test_a_function_without_a_usable_schema_is_refused_at_the_start_of_an_env_rank(path: str) -> None:
    with pytest.raises(
        ValueError, match=rf"env\.default\.options\.tools: '{path}' is not a function with a description"
    ):
        check_env(EnvConfig(name="tools", options={"tools": [path]}), "default")


def test_a_function_becomes_a_tool_and_its_results_become_messages() -> None:
    made = env(f"{TOOL}:weather", "calculator")
    text, info = made.reset(0)
    assert text == "" and [tool["function"]["name"] for tool in info["tools"]] == ["weather", "calculator"]
    shown = info["tools"][0]["function"]
    assert shown["description"] == "The weather of a city." and shown["parameters"]["required"] == ["city"]
    both = hermes("weather", city="Ulm") + "\nand\n" + hermes("calculator", expression="2 ** 10 / 4")
    messages, reward, terminated, truncated, told = made.step(both)
    assert [message["content"] for message in messages] == ['{"city": "Ulm", "days": 1, "said": ""}', "256.0"]
    assert [message["role"] for message in messages] == ["tool", "tool"]
    assert [message["name"] for message in messages] == ["weather", "calculator"]
    assert [message["tool_call_id"] for message in messages] == ["call00100", "call00101"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert told["metrics"] == {"tool_calls": 2.0, "invalid_calls": 0.0, "tool_errors": 0.0}
    assert made.step("It is 256.")[:4] == ([], 0.0, True, False), "a turn without a call is the final answer"


def test_a_wrong_call_is_answered_with_the_problem_and_counted() -> None:
    made = env(f"{TOOL}:weather", invalid_reward=-0.25, max_calls=2)
    made.reset(0)
    for text, told in [
        (hermes("wether", city="Ulm"), "Error: there is no tool 'wether'; there are weather"),
        (hermes("weather"), "Error: wrong arguments of weather: 'city' is a required property"),
        (hermes("weather", city=3), "Error: wrong arguments of weather: city: 3 is not of type 'string'"),
        (hermes("weather", city="Ulm", when=3), "Error: wrong arguments of weather: there is no 'when'"),
        ("<tool_call>{</tool_call>", "Error: there is no valid JSON within <tool_call> and </tool_call>: Expecting"),
    ]:
        [message], reward, terminated, *_ = made.step(text)
        assert message["content"].startswith(told) and reward == -0.25 and not terminated
    texts = heard(made, hermes("weather", city="Ulm") * 5)
    assert len(texts) == 3 and texts[1].startswith("{") and texts[2] == "Error: only 2 calls of a turn are carried out"
    *_, info = made.step(hermes("weather", city="exits"))
    assert info["metrics"] == {"tool_calls": 11.0, "invalid_calls": 8.0, "tool_errors": 1.0}
    assert made.step(f"<think>{hermes('weather', city='Ulm')}</think>done")[2], "a call in the thinking is none"


def test_a_hanging_function_is_abandoned_and_the_model_gets_an_error() -> None:
    made = env(f"{TOOL}:weather", tool_timeout_s=0.05)
    made.reset(0)
    started = time.monotonic()
    assert heard(made, hermes("weather", city="hangs")) == ["Error: the call did not return within 0.05 s"]
    assert time.monotonic() - started < 30
    RELEASE.set()


def test_a_coroutine_is_awaited_and_cancelled() -> None:
    made = env(f"{TOOL}:waits", tool_timeout_s=2.0)
    made.reset(0)
    assert heard(made, hermes("waits", city="Ulm")) == ['{"city": "Ulm"}']
    assert heard(made, hermes("waits", city="yields")) == ['["yields", "yields"]']
    assert heard(made, hermes("waits", city="raises")) == ["Error: OSError: no such city"]
    *_, info = made.step(hermes("waits", city="hangs"))
    assert info["metrics"] == {"tool_calls": 4.0, "invalid_calls": 0.0, "tool_errors": 2.0}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("async", '{"city": "Ulm"}'),
        ("partial", '{"city": "Ulm"}'),
        ("generator", "[0, 1, 2]"),
        ("async generator", "[0, 1, 2]"),
        ("endless", "Error: ValueError: the tool yields more than 10000 items"),
        (
            "function",
            "Error: TypeError: the tool returned a value of the type builtin_function_or_method, which",
        ),
        ("object", "Error: TypeError: the tool returned a value of the type object, which has no text"),
        ("objects", "Error: TypeError: the tool returned a value of the type object, which has no text"),
        ("nested", "Error: TypeError: the tool returned a value of the type list_iterator, which has no text"),
        ("dataclass", "\"Place(name='Ulm')\""),
        ("set", '"{1}"'),
        ("bytes", "\"b'x'\""),
        ("number", "0.5"),
        ("array", "[1, 2]"),
        ("nothing", "null"),
        ("keys", "Error: TypeError: keys must be str"),
        ("loop", "Error: ValueError: Circular reference"),
        ("surrogate", "?"),
        ("raises", "Error: Odd"),
    ],
)
def test_every_return_value_becomes_a_text_or_an_error(what: str, told: str) -> None:
    made = env(f"{TOOL}:gives")
    made.reset(0)
    [message], *_, info = made.step(hermes("gives", what=what))
    assert message["content"].startswith(told) and "0x" not in message["content"]
    assert info["metrics"]["tool_errors"] == float(told.startswith("Error"))


def test_the_middle_of_long_results_is_cut() -> None:
    made = env(f"{TOOL}:weather", max_result_chars=64)
    made.reset(0)
    [text] = heard(made, hermes("weather", city="U" * 1000))
    assert text.startswith('{"city": "UUU') and text.endswith('"days": 1, "said": ""}') and len(text) < 110
    assert "characters left out]" in text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2.5", "17.5"),
        ("-7 // 2 % 3", "2"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("1 / 0", "Error: division by zero"),
        ("9 ** 9 ** 9", "Error: the number has more than 10000 bits"),
        ("10.0 ** 999", "Error: (34, 'Numerical result out of range')"),
        ("(-8) ** 0.5", "Error: the value is not a real number"),
        ("__import__('os').system('true')", "Error: \"__import__('os').system('true')\" is not a number or an operat"),
        ("True + 1", "Error: 'True' is not a number"),
        ("'a' * 9", "Error: \"'a'\" is not a number"),
        ("2 +", "Error: '2 +' is not an arithmetic expression"),
        ("(" * 400, "Error: "),
        ("1" * 501, "Error: an expression has at most 500 characters"),
    ],
)
def test_the_calculator_evaluates_only_arithmetic(expression: str, value: str) -> None:
    made = env("calculator")
    made.reset(0)
    assert heard(made, hermes("calculator", expression=expression))[0].startswith(value)


@pytest.mark.slow
def test_the_python_tool_runs_in_the_sandbox() -> None:
    made = env("python")
    made.reset(0)
    assert heard(made, hermes("python", code="x = 6\nprint(x * 7)")) == ["42"]
    assert "NameError: name 'x' is not defined" in heard(made, hermes("python", code="x"))[0], "nothing is kept"
    [failed] = heard(made, hermes("python", code="print('so far')\n1 / 0"))
    own = 'Traceback (most recent call last):\n  File "solution.py", line 2, in <module>\n'
    assert failed == f"Error: so far\n{own}ZeroDivisionError: division by zero"
    assert heard(made, hermes("python", code="6 * 7")) == ["The program printed nothing."]
    [refused] = heard(made, hermes("python", code="print(open('/etc/passwd').read())"))
    assert "Error" in refused and "root:" not in refused
    quick = env("python", tool_timeout_s=0.3)
    quick.reset(0)
    [ended] = heard(quick, hermes("python", code="while True: pass"))
    assert ended == "Error: The program was stopped by the time limit of 0.3 s."


def test_arguments_that_cannot_be_printed_make_the_call_invalid() -> None:
    made = env("calculator")
    made.reset(0)
    for depth in range(980, 1000):
        nested = "[" * depth + "]" * depth
        call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {nested}}}}}</tool_call>'
        [told] = heard(made, call)
        assert told.startswith("Error: wrong arguments") or told.endswith("nested too deeply")


def test_the_guessing_tool_leads_to_the_number() -> None:
    made = env("guess", highest=10, prompt="Find it. {prompt}", messages=[{"role": "user", "content": "Now."}])
    assert made.reset(5)[0] == "Find it. Now."
    low, high, rewards = 1, 10, []
    for _ in range(10):
        middle = (low + high) // 2
        [message], reward, terminated, _, info = made.step(hermes("guess", number=middle))
        rewards.append(reward)
        low, high = (middle + 1, high) if message["content"] == "higher" else (low, middle - 1)
        if terminated:
            break
    assert message["content"] == "found" and info["metrics"]["success"] == 1.0 and sum(rewards) == 1.0
    again = env("guess", highest=10)
    again.reset(5)
    assert again.step(hermes("guess", number=middle))[2], "the number is a function of the seed"
    given_up = env("guess", highest=10)
    given_up.reset(5)
    given_up.step(hermes("guess", number=0))
    assert given_up.step("I do not know")[2:4] == (True, False)
    silent = env("guess", highest=10)
    silent.reset(5)
    assert silent.step("I do not know")[4]["metrics"]["success"] == 0.0, "an episode without a guess has failed"
