"""Decides which of the names that tests use without defining or importing them come from the code under test.

If a test took `math` or `isclose` from the code, it would pass the expected value to the code, which would then decide
whether its own result is right. So such names come from Python's library.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

ALIASES = {"np": "numpy", "pd": "pandas", "sp": "scipy", "nx": "networkx"}
LIBRARY = (
    *(
        "math",
        "cmath",
        "collections",
        "itertools",
        "functools",
        "heapq",
        "bisect",
        "fractions",
        "decimal",
        "typing",
        "re",
    ),
    *("statistics", "operator", "datetime", "copy", "string", "random"),
)
"""Modules whose names tests often use without an import."""


def defined_names(tree: ast.AST) -> set[str]:
    """The names that a test defines, imports or binds anywhere."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return names | {(alias.asname or alias.name).partition(".")[0] for alias in imports}


def free_names(tree: ast.AST, known: Collection[str] = ()) -> list[str]:
    """The names that a test reads and that neither the test nor Python nor `known` defines, in order of use."""
    given = defined_names(tree) | set(known)
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(used) if name not in given and not hasattr(builtins, name)]


def of_library(tree: ast.AST, free: Collection[str], entry_point: str = "") -> dict[str, tuple[str, str]]:
    """Free names that come from a module -> (module, attribute; empty for the module itself). Excludes names that the
    code may define, if there is no other such name."""
    as_value = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    found = {name: place for name in free if name != entry_point and (place := _place(name)) is not None}
    certain = {name: place for name, place in found.items() if not place[1] and name in as_value and name not in called}
    return found if set(free) - set(found) else certain


def _place(name: str) -> tuple[str, str] | None:
    module = ALIASES.get(name, name)
    if module in sys.stdlib_module_names or module in ALIASES.values():
        return (module, "") if find_spec(module) is not None else None
    for module in LIBRARY:
        if not name.startswith("_") and hasattr(importlib.import_module(module), name):
            return module, name
    return None


def load(place: tuple[str, str]) -> Any:
    """The object at a place from of_library()."""
    module = importlib.import_module(place[0])
    return getattr(module, place[1]) if place[1] else module


def judged_by_code(tree: ast.AST, free: Collection[str], library: Mapping[str, Any]) -> tuple[str, str] | None:
    """(outer, inner) of the first `assert outer(... inner(...) ...)` in which both names come from the code, so the
    code decides whether its own result is right. None without one."""
    own = set(free) - set(library)
    for node in ast.walk(tree):
        test = node.test if isinstance(node, ast.Assert) else None
        if (
            isinstance(test, ast.Call)
            and isinstance(test.func, ast.Name)
            and test.func.id in own
            and len(test.args) > 1
        ):
            for inner in ast.walk(ast.Tuple([*test.args], ast.Load())):
                if (
                    isinstance(inner, ast.Call)
                    and isinstance(inner.func, ast.Name)
                    and inner.func.id in own - {test.func.id}
                ):
                    return test.func.id, inner.func.id
    return None
