"""The recorded signatures of the real package, and checks of calls against them."""

from __future__ import annotations

import builtins
import functools
import inspect
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

RECORDED = Path(__file__).parent.parent / "signatures.txt"


class _Names(dict[str, Any]):
    """Those of Python, typing and torch; any other name is a type that is not checked."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, getattr(typing, name, Any))


NAMES = _Names(torch=torch, fastapi=SimpleNamespace(Request=Any))


@functools.cache
def recorded() -> dict[str, Any]:
    """The recorded classes by name."""
    text = "from __future__ import annotations\n" + RECORDED.read_text()
    classes: dict[str, Any] = {}
    exec(compile(text, str(RECORDED), "exec"), {"__name__": "recorded"}, classes)
    return classes


def check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. TypeError if the real call does not take them."""
    owner, _, method = name.partition(".")
    function = getattr(recorded()[owner], method)
    bound = inspect.signature(function).bind(None, *args, **kwargs)
    given = dict(list(bound.arguments.items())[1:])
    for parameter, value in given.items():
        _check_type(f"{name}({parameter})", function.__annotations__.get(parameter, "Any"), value)
    return given


def check_fields(owner: str, given: dict[str, Any]) -> None:
    """TypeError if a class cannot be made of these fields."""
    known = recorded()[owner].__annotations__
    if unknown := given.keys() - known.keys():
        raise TypeError(f"{owner}.__init__() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    if missing := {field for field in known if not hasattr(recorded()[owner], field)} - given.keys():
        raise TypeError(f"{owner}.__init__() missing a required argument: {sorted(missing)[0]!r}")
    for field, value in given.items():
        _check_type(f"{owner}.{field}", known[field], value)


def _check_type(where: str, annotation: str, value: Any) -> None:
    try:
        _adapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        raise TypeError(f"{where}: {annotation} is needed, got {type(value).__name__}") from error


@functools.cache
def _adapter(annotation: str) -> TypeAdapter[Any]:
    return TypeAdapter(eval(annotation, {}, NAMES), config=ConfigDict(arbitrary_types_allowed=True))
