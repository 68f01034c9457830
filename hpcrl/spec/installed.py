"""Names in the source of an installed package, read without importing it: engine packages take seconds to import, and
their import may need a GPU, which the login node lacks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from hpcrl.spec.extras import version_of
from hpcrl.spec.problems import Problem, dotted


def folder_of(package: str) -> Path | None:
    """The folder of an installed package; None without one."""
    found = find_spec(package)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


@functools.cache
def fields(package: str, pattern: str, owner: str | None = None) -> frozenset[str]:
    """The annotated names in all classes of the package's files, or in classes named `owner`; empty if the package is
    not installed or its source is not as expected."""
    folder = folder_of(package)
    return frozenset(
        statement.target.id
        for file in (folder.glob(pattern) if folder else ())
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and owner in (None, node.name)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


@functools.cache
def table_keys(package: str, file: str, tables: tuple[str, ...]) -> frozenset[str]:
    """String keys of these dicts in the package's file; empty if it is not installed or its source is unexpected."""
    folder = folder_of(package)
    if folder is None or not (folder / file).is_file():
        return frozenset()
    return frozenset(
        key.value
        for node in ast.parse((folder / file).read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id in tables for target in node.targets)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def unknown_options(
    path: tuple[str, ...], given: Mapping[str, object], known: Collection[str], package: str, what: str
) -> Iterator[Problem]:
    """A problem for each given option that is not `known`; none if `known` is empty."""
    for name in sorted(given.keys() - set(known)) if known else ():
        near = get_close_matches(name, sorted(known), n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        text = f"{name} is not among the arguments of {what} {version_of(package)}{hint}"
        yield Problem(path, f"{dotted(path)}: {text}")
