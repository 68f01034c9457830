"""The meaning of every key: the string below it in the source of its section."""

from __future__ import annotations

import ast
import functools
import inspect
import sys

from pydantic import BaseModel


def meaning(section: type[BaseModel], key: str) -> str:
    """The meaning of a key, from its section or a base class; empty if neither describes it."""
    if text := section.model_fields[key].description:
        return text
    for kind in section.__mro__:
        if text := _strings(kind.__module__).get(kind.__qualname__, {}).get(key):
            return text
    return ""


@functools.cache
def _strings(module: str) -> dict[str, dict[str, str]]:
    """Class -> attribute -> the string below it, for the classes of a module. pydantic can read these strings too, but
    at every import, which takes a fifth of the startup time."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # built in, or without source
        return {}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                at.target.id: inspect.cleandoc(text.value.value)
                for at, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
    return found
