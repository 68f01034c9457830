"""Tasks of a sandboxed child: run a program, call a function, serve functions to tests, run tests, execute a command.

A child gets its task as JSON from a pipe that only the client writes, after it is confined. File descriptors: 0 to 2 as
usual, RESULT for the result of a call and the verdict of tests, CHANNEL between tests and the code they test.

Tests and the code they test are two processes: expected values never enter the code's process, which sends back only
built-in values (hpcrl.sandbox.wire).
"""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib.util
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcrl.sandbox.free_names import free_names, load, of_library
from hpcrl.sandbox.pytest_form import CannotJudge, run_all
from hpcrl.sandbox.wire import decode, encode

RESULT, CHANNEL = 3, 4
MAX_LINE = 16 << 20
SOLUTION = "solution"
SPECIAL = (
    *("__truediv__", "__fspath__", "__enter__", "__len__", "__iter__", "__next__", "__getitem__", "__contains__"),
    *("__str__", "__repr__", "__eq__", "__lt__"),
)
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that an interpreter ignores, so they become exceptions."""
MISSING = "there is no "
FOLDER = "hpcrl_temporary_folder"
"""Name in the code's module of the function that creates a folder for tests, which the code's process can read."""
MAX_KINDS = 20
"""Maximum number of an exception's types, its own and its bases, that are considered."""


def perform(task: Mapping[str, Any]) -> int:
    """Execute the task; returns the exit code, unless the task ends or replaces the process."""
    kind = task["kind"]
    if kind == "execute":
        for name, text in task["files"].items():
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        os.execve(task["command"][0], task["command"], dict(os.environ))
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
    if kind == "tests":
        return _test(task)
    return _ended(lambda: _PYTHON[kind](task))


def _stream(number: int) -> io.TextIOWrapper:
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    buffered = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
    errors = "backslashreplace" if number == 2 else "surrogateescape"
    return io.TextIOWrapper(buffered, "utf-8", errors=errors, line_buffering=number == 2)


def _ended(work: Any) -> int:
    """Call `work` and finish as an interpreter does; returns the exit code."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    return code & 0xFF


def _load(code: str, name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, f"{SOLUTION}.py", "exec"), module.__dict__)
    return module


def _program(task: Mapping[str, Any]) -> None:
    sys.argv = [f"{SOLUTION}.py"]
    _load(task["code"], "__main__")


def _call(task: Mapping[str, Any]) -> None:
    """Call a function, or a method of the class Solution, and write its result."""
    module = _load(task["code"], SOLUTION)
    place = module if hasattr(module, task["name"]) or not hasattr(module, "Solution") else module.Solution()
    arguments, named = decode(task["arguments"].encode())
    _write(RESULT, encode(getattr(place, task["name"])(*arguments, **named), _as_list))


def _as_list(value: Any) -> Any:
    """Iterators, ranges and views of dictionaries as lists."""
    if hasattr(value, "__next__") or isinstance(value, range) or type(value).__name__.startswith("dict_"):
        return json.loads(encode(list(itertools.islice(value, MAX_LINE)), _as_list))
    raise TypeError(f"{type(value).__name__} is not a built-in value")


def _serve(task: Mapping[str, Any]) -> None:
    """Answer the tests' requests about the code's names and about objects that are not built-in values."""
    module = _load(task["code"], SOLUTION)
    setattr(module, FOLDER, lambda: Path(tempfile.mkdtemp()))
    objects: list[Any] = [module]

    def known(value: Any) -> Any:
        objects.append(value)
        reference = {"object": len(objects) - 1}
        return reference | {"raises": _kinds(value)} if _is_exception(value) else reference

    def object_of(found: Any) -> Any:
        return objects[found["object"]]

    with open(CHANNEL, "rb", closefd=False) as requests:
        for line in requests:
            name, number, arguments, named = decode(line, object_of)
            try:
                value = objects[number]
                if name is not None:
                    value = _attribute(value, name)
                if arguments is not None:
                    value = value(*arguments, **named)
                answer = encode([True, value, arguments], known)
            except Exception as error:
                answer = encode([False, _kinds(type(error)), [str(error)[:1000], error]], known)
            _write(CHANNEL, answer)


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _kinds(kind: type) -> list[str]:
    """The full names of an exception's type and of its bases, down to Exception."""
    kinds = [one for one in kind.__mro__ if issubclass(one, Exception)]
    return [f"{one.__module__}.{one.__qualname__}" for one in kinds]


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, ModuleType) and not hasattr(value, name):
        raise NameError(MISSING + name)
    return getattr(value, name)


def _write(place: int, data: bytes) -> None:
    while data:
        data = data[os.write(place, data) :]


class RemoteError(Exception):
    """An exception of the code under test whose type is not built in, or the base of such a type's image in the tests'
    process. It has the attributes of the exception in the code's process."""

    _remote: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._remote is None or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._remote, name)


class ChannelEnded(BaseException):
    """The code's process has ended, or sent an invalid answer. A test's `except Exception` does not catch it."""


class _Link:
    """The connection for tests' requests."""

    def __init__(self) -> None:
        self._answers = io.BufferedReader(io.FileIO(CHANNEL, "r", closefd=False))
        self._images: dict[str, type[Exception]] = {}  # full name of a code's exception -> its image

    def ask(self, number: int, name: str | None, arguments: tuple[Any, ...] | None, named: Mapping[str, Any]) -> Any:
        """An object, or its attribute `name` if given, and its result if called with arguments. Lists, dictionaries and
        sets among the arguments get the changes that the call makes to them."""
        _write(CHANNEL, encode([name, number, None if arguments is None else list(arguments), dict(named)], _reference))
        try:
            done, value, more = decode(self._answers.readline(MAX_LINE), self._object)
        except Exception as error:
            raise ChannelEnded from error
        if not done:
            kind = self._image(value)
            if issubclass(kind, StopIteration) and name != "__next__":
                raise RuntimeError("the code raised StopIteration")  # a StopIteration would silently end a test's loop
            raised = kind(str(more[0]))
            if isinstance(raised, RemoteError):
                raised._remote = more[1]
            raise raised
        for given, changed in zip(arguments or (), more or (), strict=False):
            if type(given) is type(changed) and isinstance(given, list | dict | set):
                given.clear()
                (given.extend if isinstance(given, list) else given.update)(changed)
        return value

    def _object(self, found: Any) -> Any:
        return self._image(found["raises"]) if "raises" in found else Remote(self, int(found["object"]))

    def _image(self, names: Sequence[str]) -> type[Exception]:
        """The exception type that tests see for an exception of the code, whose type has these names, then its bases'
        names: one of Python's own types itself; for other types a new class derived from the next base's image."""
        for place, name in enumerate(map(str, names[:MAX_KINDS])):
            module, _, own = name.partition(".")
            builtin = getattr(builtins, own, None) if module == "builtins" else None
            if isinstance(builtin, type) and issubclass(builtin, Exception):
                return builtin
            if name not in self._images:
                base = self._image(names[place + 1 :])
                bases = (RemoteError,) if base is Exception else (RemoteError, base)
                bases = (base,) if issubclass(base, RemoteError) else bases
                self._images[name] = type(name.rpartition(".")[2], bases, {})
            return self._images[name]
        return RemoteError


def _reference(value: Any) -> Any:
    if isinstance(value, Remote):
        return {"object": object.__getattribute__(value, "_number")}
    raise Unsendable(f"the test passes {type(value).__name__} to the code")


class Unsendable(CannotJudge):
    """A test passes something that is not a built-in value."""


class Remote:
    """An object in the code's process. It equals no value of the tests."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, link: _Link, number: int):
        self._link, self._number = link, number

    def __getattr__(self, name: str) -> Any:
        return self._link.ask(self._number, name, None, {})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.ask(self._number, None, arguments, named)

    def __exit__(self, *raised: object) -> None:
        self._link.ask(self._number, "__exit__", (None, None, None), {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        return self._number == other._number or self._link.ask(self._number, "__eq__", (other,), {}) is True


def _forwarded(name: str) -> Any:
    return lambda self, *arguments: self._link.ask(self._number, name, arguments, {})


for _name in SPECIAL:
    if _name != "__eq__":
        setattr(Remote, _name, _forwarded(_name))


class _Imported(ModuleType):
    """The code as a module that tests import."""

    def __init__(self, link: _Link):
        super().__init__(SOLUTION)
        self._remote = Remote(link, 0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._remote, name)


def _test(task: Mapping[str, Any]) -> int:
    """Run tests and write {"passed", "total", "problem"}; `problem` is the reason if the tests cannot judge."""
    link = _Link()
    space: dict[str, Any] = {"__name__": "tests"}
    passed, total, problem = 0, 1, ""
    try:
        exec(compile(task["setup"], "setup.py", "exec"), space)
        if task["entry_point"]:  # the setup has only its beginning
            space[task["entry_point"]] = getattr(Remote(link, 0), task["entry_point"])
        tree = ast.parse(task["source"])
        _provide(tree, space, link, task["entry_point"])
        exec(compile(tree, "tests.py", "exec"), space)
        if task["style"] == "pytest":
            own = {name: value for name, value in space.items() if not isinstance(value, Remote)}
            passed, total = run_all(own, getattr(Remote(link, 0), FOLDER))
        else:
            if task["style"] == "check":
                space["check"](space[task["entry_point"]])
            passed = 1
    except CannotJudge as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        if error.name and importlib.util.find_spec(error.name.partition(".")[0]) is None:  # imported by the tests
            problem = f"there is no module {error.name}"
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    _write(RESULT, encode({"passed": passed, "total": total, "problem": problem}))
    return 0


def _provide(tree: ast.Module, space: dict[str, Any], link: _Link, entry_point: str) -> None:
    """Define the names that tests use: from Python's library, else from the code; and provide the code's module under
    any imported name that is not installed."""
    code = Remote(link, 0)
    free = free_names(tree, space)
    library = of_library(tree, free, entry_point)
    for name in free:
        try:
            space[name] = load(library[name]) if name in library else getattr(code, name)
        except NameError:  # a name without a definition, or one that a test function declares global
            continue
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            if "." not in name and name not in sys.modules and importlib.util.find_spec(name) is None:
                sys.modules[name] = _Imported(link)


_PYTHON = {"program": _program, "call": _call, "serve": _serve}
