"""A row's test cases for the code reward, in the forms of common data sets."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from hpcrl.rewards.grading.extract import CLOSED_BLOCK, json_of
from hpcrl.sandbox.free_names import defined_names, free_names, judged_by_code, of_library

Style = Literal["assert", "check", "pytest"]

_MARKER = re.compile(r"<\|[^|>\n]*\|>(?:[a-z]+\n)?")
FORMS = (
    "a list of cases {stdin, stdout}, {call, args, returns}, {assert}, {check, entry_point}, {pytest} or {text}; "
    "{inputs, outputs} with optionally fn_name; or the columns test and entry_point, or test_list"
)


@dataclass(frozen=True)
class Program:
    """A program that reads `stdin` must print `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Call:
    """The function `name` must return `returns`."""

    name: str
    arguments: Sequence[Any]
    named: Mapping[str, Any]
    returns: Any


@dataclass(frozen=True)
class Suite:
    """Test code that must not fail. `setup` is code that runs before the tests and before the response's code."""

    style: Style
    source: str
    setup: str = ""
    entry_point: str = ""


@dataclass(frozen=True)
class Text:
    """The code itself must be this text."""

    text: str


Case = Program | Call | Suite | Text


def cases_of(answer: Any, columns: Mapping[str, Any], prompt: str = "") -> list[Case]:
    """A row's cases, at least one. `prompt` may contain code to continue. ValueError describes the problem."""
    found = json_of(answer)
    if isinstance(found, Mapping) and "inputs" not in found:
        found = [found]
    if isinstance(found, Mapping):
        cases = _pairs(found)
    elif isinstance(found, list):
        cases = [_case(entry, f"case {number}") for number, entry in enumerate(found, 1)]
    elif "test" in columns and "entry_point" in columns:
        cases = [_check(columns["test"], columns["entry_point"], columns.get("setup"), prompt, "column test")]
    elif "test_list" in columns:
        cases = list(_asserts(columns))
    elif "inputs" in columns:
        cases = _pairs({key: columns[key] for key in ("inputs", "outputs", "fn_name") if key in columns})
    else:
        raise ValueError(f"no test cases: expected {FORMS}")
    if not cases:
        raise ValueError("no test cases: the list is empty")
    return cases


def _case(entry: Any, where: str) -> Case:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {type(entry).__name__}, expected an object")
    for kind, (needed, optional) in _KEYS.items():
        if kind in entry:
            wrong = [key for key in entry if key not in (*needed, *optional)]
            missing = [key for key in needed if key not in entry]
            if wrong or missing:
                told = f"has no {missing[0]}" if missing else f"has the unknown key {wrong[0]}"
                raise ValueError(f"{where} ({kind}) {told}; its keys are {', '.join((*needed, *optional))}")
            return _made(kind, entry, where)
    raise ValueError(f"{where} has none of {', '.join(_KEYS)}; there is: {', '.join(map(str, entry)) or 'nothing'}")


_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stdin": (("stdin", "stdout"), ()),
    "call": (("call", "returns"), ("args", "kwargs")),
    "assert": (("assert",), ("setup", "entry_point")),
    "check": (("check", "entry_point"), ("setup",)),
    "pytest": (("pytest",), ("setup",)),
    "text": (("text",), ()),
}
"""Kind, which is also its identifying key -> required and optional keys."""


def _made(kind: str, entry: Mapping[str, Any], where: str) -> Case:
    if kind == "stdin":
        return Program(_text(entry["stdin"], f"{where}: stdin"), _text(entry["stdout"], f"{where}: stdout"))
    if kind == "call":
        arguments, named = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(arguments, list) or not isinstance(named, Mapping):
            raise ValueError(f"{where}: args must be a list and kwargs an object")
        return Call(_name(entry["call"], f"{where}: call"), arguments, named, entry["returns"])
    if kind == "text":
        return Text(_text(entry["text"], f"{where}: text"))
    if kind == "check":
        return _check(entry["check"], entry["entry_point"], entry.get("setup"), "", where)
    source = _python(entry[kind], f"{where}: {kind}")
    setup = _python(entry.get("setup", ""), f"{where}: setup")
    if kind == "assert":
        return _asserted(source, setup, where, entry.get("entry_point"))
    for problem in _unsupported(ast.parse(source)):
        raise ValueError(f"{where}: {problem}")
    return Suite("pytest", source, setup)


def _check(source: Any, entry_point: Any, setup: Any, prompt: str, where: str) -> Case:
    source, name = _python(source, where), _name(entry_point, "entry_point")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in ast.parse(source).body):
        raise ValueError(f"{where} has no function check(candidate)")
    return Suite("check", source, _python(setup, "setup") if setup is not None else setup_of(prompt, name), name)


def _asserts(columns: Mapping[str, Any]) -> Iterator[Case]:
    """The cases in MBPP's columns."""
    tests, setup = columns["test_list"], columns.get("test_setup_code") or ""
    imports = columns.get("test_imports") or []
    if not isinstance(tests, list) or not isinstance(imports, list):
        raise ValueError("the columns test_list and test_imports must be lists of code")
    setup = _python("\n".join([*map(str, imports), str(setup)]), "columns test_imports and test_setup_code")
    for number, source in enumerate(tests, 1):
        where = f"test_list[{number - 1}]"
        yield _asserted(_python(source, where), setup, where, columns.get("entry_point"))


def _asserted(source: str, setup: str, where: str, entry_point: Any) -> Case:
    tree = ast.parse(source)
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError(f"{where} has no assert statement: {source[:40]!r}")
    free = free_names(tree, defined_names(ast.parse(setup)))
    library = of_library(tree, free, str(entry_point or ""))
    if judged := judged_by_code(tree, free, library):
        raise ValueError(
            f"{where} lets {judged[0]} check the result of {judged[1]}, but the response would define both: "
            f"define {judged[0]} in the setup, or compare with ==: {source[:60]!r}"
        )
    if entry_point is not None:
        return Suite("assert", source, setup, _name(entry_point, f"{where}: entry_point"))
    names = _tested_built_ins(tree, ast.parse(setup))
    if len(names) > 1:
        raise ValueError(
            f"{where} calls only built-in functions ({', '.join(names)}): set entry_point to the function that the "
            f"response defines: {source[:60]!r}"
        )
    return Suite("assert", source, setup, "".join(names))


def _tested_built_ins(test: ast.Module, setup: ast.Module) -> list[str]:
    """The built-in functions that a test calls, if it uses no other name: the response then defines one of them. All
    other tests use Python's own, which a response's code must not replace."""
    nodes = list(ast.walk(test))
    if any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes):
        return []
    given = defined_names(test) | defined_names(setup)
    used = [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in given]
    if not all(hasattr(builtins, name) for name in used):
        return []
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return sorted(called - given)


def _pairs(found: Mapping[str, Any]) -> list[Case]:
    """The cases of {inputs, outputs}; with fn_name, calls of a function (APPS, TACO, LiveCodeBench)."""
    inputs, outputs, name = found["inputs"], found.get("outputs"), found.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs must be lists of one length")
    if name is None:
        places = [(f"inputs[{n}]", f"outputs[{n}]") for n in range(len(inputs))]
        pairs = zip(places, inputs, outputs, strict=True)
        return [Program(_text(given, at[0]), _text(wanted, at[1])) for at, given, wanted in pairs]
    name = _name(name, "fn_name")
    return [_called(name, *pair, f"inputs[{n}]") for n, pair in enumerate(zip(inputs, outputs, strict=True))]


def _called(name: str, arguments: Any, returns: Any, where: str) -> Case:
    if isinstance(arguments, str):  # a line of JSON for each argument, and the result as JSON
        try:
            arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
            returns = json.loads(returns) if isinstance(returns, str) else returns
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: each line must be the JSON of an argument: {error}") from error
    if not isinstance(arguments, list):
        raise ValueError(f"{where} must be a list of arguments")
    return Call(name, arguments, {}, returns)


def _text(value: Any, where: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, not {type(value).__name__}")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"{where}={value!r} is not the name of a function")
    return value


def _python(value: Any, where: str) -> str:
    text = _text(value, where)
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is not Python: {error}") from error
    return text


def _unsupported(tree: ast.Module) -> Iterator[str]:
    """Features of pytest that the sandbox's test runner does not support."""
    uses = any(isinstance(node, ast.Import) and node.names[0].name == "pytest" for node in ast.walk(tree))
    if uses and find_spec("pytest") is None:
        yield "imports pytest, which is not installed"
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            count += 1
            given = {name for decorator in node.decorator_list for name in _parametrised(decorator)}
            names = [argument.arg for argument in node.args.args if argument.arg not in ("self", *given)]
            if names:
                yield f"{node.name} needs the fixture {names[0]}; fixtures are not supported"
    if not count:
        yield "has no function whose name begins with test"


def _parametrised(decorator: ast.expr) -> Iterator[str]:
    """The argument names of pytest.mark.parametrize."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.parametrize") and decorator.args:
        for node in ast.walk(decorator.args[0]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from node.value.replace(" ", "").split(",")


def setup_of(prompt: str, entry_point: str) -> str:
    """The Python of a prompt that begins the function `entry_point`: the whole prompt, a block of it, or its part
    between the markers of a chat template; empty without one."""
    texts: list[str] = [prompt, *CLOSED_BLOCK.findall(prompt), *_MARKER.split(prompt)]
    for text in texts:
        if definition(text, entry_point) is not None:
            return text
    return ""


def definition(code: str, name: str) -> ast.stmt | None:
    """The top-level statement that defines a function or a name; None without one, or if the code is not Python."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in reversed(body):
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in names:
            return node
    return None


def completed(code: str, setup: str, name: str) -> str:
    """The setup followed by the code; if the code defines `name`, without the setup's own beginning of it."""
    begun = definition(setup, name) if name else None
    if begun is None or definition(code, name) is None:
        return f"{setup}\n{code}" if setup and not setup.endswith("\n") else setup + code
    lines = setup.split("\n")
    before = lines[: begun.lineno - 1 - len(getattr(begun, "decorator_list", []))]
    return "\n".join([*before, *lines[begun.end_lineno :], code])
