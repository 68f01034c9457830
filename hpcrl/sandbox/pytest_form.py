"""Runs tests in the form of pytest and unittest without pytest's own runner: functions and classes, parametrised or
not, fixtures of the module and of its classes, tmp_path, setup and teardown, skips, coroutines."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import itertools
import traceback
import unittest
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

BUILTIN = ("tmp_path", "request")
"""pytest fixtures that tests may use. Others, such as monkeypatch, would have no effect in the code's process."""


class CannotJudge(Exception):
    """The tests' failure is no evidence about the code."""


class _Fixture(NamedTuple):
    function: Callable[..., Any]
    params: tuple[Any, ...]
    automatic: bool
    shared: bool  # by all tests of a file


def run_all(space: Mapping[str, Any], folder: Callable[[], Any]) -> tuple[int, int]:
    """(number of passed tests, number of tests that were not skipped) of a module whose names are `space`. `folder`
    creates a folder for tmp_path. CannotJudge if a test raises it, or requests an unknown fixture."""
    results = []
    with contextlib.ExitStack() as module:
        _call(space.get("setup_module"))
        module.callback(_call, space.get("teardown_module"))
        shared: dict[Any, Any] = {}
        for case in _cases(space):
            results.append(_passes(case, folder, shared, module))
    counted = [result for result in results if result is not None]
    return sum(counted), len(counted)


class _Case(NamedTuple):
    """One run of a test: fixtures fill `names`, parametrize gives `values`, `instance` creates its class's object."""

    function: Callable[..., Any]
    values: Mapping[str, Any]
    fixtures: Mapping[str, _Fixture]
    param: Any = None
    instance: Callable[[], Any] = lambda: None


def _cases(space: Mapping[str, Any]) -> Iterator[_Case]:
    fixtures = _fixtures_of(space)
    for name, value in list(space.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            yield from _of_unittest(value)
        elif name.startswith("test") and inspect.isroutine(value):
            yield from _parametrised(value, _Case(value, {}, fixtures))
        elif name.startswith("Test") and isinstance(value, type):
            inherited = {key: one for base in reversed(value.__mro__) for key, one in vars(base).items()}
            own = fixtures | _fixtures_of(inherited)
            for method in [method for method in dir(value) if method.startswith("test")]:
                function = getattr(value, method)
                yield from _parametrised(function, _Case(function, {}, own, None, value), [value])


def _of_unittest(kind: type[unittest.TestCase]) -> Iterator[_Case]:
    names = unittest.defaultTestLoader.getTestCaseNames(kind)
    for number, name in enumerate(names):

        def run(name: str = name, first: bool = number == 0, last: bool = number == len(names) - 1) -> None:
            if first:
                kind.setUpClass()
            try:
                kind(name).debug()  # raises what the test raises
            finally:
                if last:
                    kind.tearDownClass()

        yield _Case(run, dict.fromkeys(inspect.signature(run).parameters, inspect.Parameter.empty), {})


def _fixtures_of(names: Mapping[str, Any]) -> dict[str, _Fixture]:
    """The fixtures among these values, as pytest's decorator marks them, before and since version 8.4."""
    found = {}
    for name, value in names.items():
        marker = getattr(value, "_fixture_function_marker", None) or getattr(value, "_pytestfixturefunction", None)
        if marker is None or isinstance(value, type):
            continue
        unwrap = getattr(value, "_get_wrapped_function", None)
        function = unwrap() if unwrap is not None else inspect.unwrap(value)
        shared = marker.scope != "function"
        found[marker.name or name] = _Fixture(function, tuple(marker.params or ()), bool(marker.autouse), shared)
    return found


def _parametrised(marked: Any, case: _Case, holders: list[Any] | None = None) -> Iterator[_Case]:
    marks = [mark for holder in [*(holders or []), marked] for mark in getattr(holder, "pytestmark", [])]
    if any(mark.name == "skip" or (mark.name == "skipif" and mark.args and mark.args[0] is True) for mark in marks):
        return
    sets: list[list[dict[str, Any]]] = []
    for mark in marks:
        if mark.name == "parametrize":
            given = [*mark.args, *mark.kwargs.values()]
            names = given[0] if not isinstance(given[0], str) else given[0].replace(" ", "").split(",")
            rows = [_plain(row) for row in given[1]]
            sets.append([dict(zip(names, row if len(names) > 1 else _one(row), strict=True)) for row in rows])
    used = [case.fixtures[name] for name in _needed(case.function, case.fixtures) if case.fixtures[name].params]
    params = used[0].params if used else (None,)
    if len(used) > 1:
        raise CannotJudge("a test with two parametrised fixtures is not supported")
    for param, combination in itertools.product(params, itertools.product(*sets)):
        values = {name: value for part in combination for name, value in part.items()}
        yield case._replace(values=values, param=_one(_plain(param))[0])


def _needed(function: Any, fixtures: Mapping[str, _Fixture]) -> list[str]:
    """The fixtures that a function requests, directly or through other fixtures."""
    found: dict[str, None] = {name: None for name, fixture in fixtures.items() if fixture.automatic}
    waiting = [*found, *inspect.signature(function).parameters]
    while waiting:
        name = waiting.pop()
        if name in fixtures and (name not in found or fixtures[name].automatic):
            found[name] = None
            waiting += [other for other in inspect.signature(fixtures[name].function).parameters if other not in found]
    return [*found]


def _plain(row: Any) -> Any:
    """The values of a pytest.param()."""
    return row.values if type(row).__name__ == "ParameterSet" else row


def _one(row: Any) -> Any:
    return row if isinstance(row, tuple) and len(row) == 1 else (row,)


def _passes(
    case: _Case, folder: Callable[[], Any], shared: dict[Any, Any], module: contextlib.ExitStack
) -> bool | None:
    """Whether a test passes; None if it is skipped."""
    try:
        with contextlib.ExitStack() as own:
            _run(case, folder, shared, module, own)
    except CannotJudge:
        raise
    except BaseException as error:
        # The code's exceptions never arrive as one of these.
        if isinstance(error, unittest.SkipTest) or type(error).__module__ == "_pytest.outcomes":
            return None if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped" else False
        traceback.print_exc()
        return False
    return True


def _run(
    case: _Case,
    folder: Callable[[], Any],
    shared: dict[Any, Any],
    module: contextlib.ExitStack,
    own: contextlib.ExitStack,
) -> None:
    instance, known = case.instance(), {}
    if instance is not None:
        _call(getattr(instance, "setup_method", None))
        own.callback(_call, getattr(instance, "teardown_method", None))

    def filled(function: Callable[..., Any], owner: str) -> Any:
        values = {}
        for number, parameter in enumerate(inspect.signature(function).parameters.values()):
            if parameter.name in case.values:
                values[parameter.name] = case.values[parameter.name]
            elif parameter.name == "self" and number == 0 and instance is not None:
                values["self"] = instance
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                values[parameter.name] = value_of(parameter.name, owner)
        plain = {name: value for name, value in values.items() if value is not inspect.Parameter.empty}
        result = function(**plain)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def value_of(name: str, owner: str) -> Any:
        if name not in known:
            known[name] = _builtin(name, case, folder, owner) if name not in case.fixtures else made(name)
        return known[name]

    def made(name: str) -> Any:
        fixture = case.fixtures[name]
        key = (fixture.function, repr(case.param))
        if fixture.shared and key in shared:
            return shared[key]
        value = filled(fixture.function, name)
        if inspect.isgenerator(value):
            generator, value = value, next(value)
            (module if fixture.shared else own).callback(next, generator, None)
        if fixture.shared:
            shared[key] = value
        return value

    for name, fixture in case.fixtures.items():
        if fixture.automatic:
            value_of(name, name)
    filled(case.function, getattr(case.function, "__name__", "a test"))


def _builtin(name: str, case: _Case, folder: Callable[[], Any], owner: str) -> Any:
    if name == "tmp_path":
        return folder()
    if name == "request":
        return SimpleNamespace(param=case.param)
    raise CannotJudge(f"{owner} requests the fixture {name}, which does not exist")


def _call(function: Any) -> None:
    if function is not None:
        function()


def problem_of_tests(source: str, conftest: str = "") -> str:
    """Why a test file cannot judge code, according to its source; empty if it can. conftest: conftest.py's source."""
    try:
        tree, before = ast.parse(source), ast.parse(conftest)
    except (SyntaxError, ValueError) as error:
        return str(error)
    nodes = [*ast.walk(before), *ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    fixtures = {node.name for node in functions if _is_fixture(node)}
    named = {
        word.value for node in nodes if isinstance(node, ast.Call) for word in ast.walk(node)
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }  # fmt: skip
    words = {part.strip() for text in named for part in text.split(",")}  # names of parametrize, and of fixtures
    for node in functions:
        if not (node.name.startswith("test") or node.name in fixtures):
            continue
        required = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        for argument in [*node.args.posonlyargs, *required]:
            if argument.arg not in {"self", "cls", *BUILTIN, *fixtures, *words}:
                there = ", ".join(sorted({*BUILTIN, *fixtures}))
                return f"{node.name} requests the fixture {argument.arg}; available are {there}"
    if not any(node.name.startswith("test") for node in functions):
        return "it has no test"
    return ""


def _is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
