"""Names of one kind of part, and where the specification of each is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

GROUP = "hpcrl.plugins"
"""Entry-point group of installed packages that add entries. An entry point names a mapping of kind -> name -> path, as
TABLES in hpcrl.spec.tables; it is read at every start, so its module imports nothing heavy."""

S = TypeVar("S")


class SpecError(ValueError):
    """There is no specification where a name leads; the message says what there is."""


class Table(Generic[S]):
    """One kind: name -> specification. `module:NAME` finds one that no table lists."""

    def __init__(self, kind: str, specification: type[S], entries: Mapping[str, str]):
        """entries: name -> `module:NAME` of a torch-free specification, in the order in which help lists them."""
        self.kind = kind
        self._specification, self._entries = specification, dict(entries)

    @functools.cached_property
    def paths(self) -> dict[str, str]:
        """Name -> path, installed packages included. SpecError where two entries have the same name."""
        paths = dict(self._entries)
        for entry in plugins():
            for name, path in _added(entry).get(self.kind, {}).items():
                if paths.setdefault(name, path) != path:
                    raise SpecError(f"{entry.value}: there is another {self.kind} {name}, {paths[name]}")
        return paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __getitem__(self, name: str) -> S:
        """The specification. SpecError where there is none of this name, or where its path leads to none."""
        path = name if ":" in name else self.paths.get(name)
        if path is None:
            near = get_close_matches(name, self.paths, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"there is no {self.kind} {name}; there are {', '.join(self.paths)}{hint}")
        found = load(path, f"{self.kind} {name}")
        if not isinstance(found, self._specification):
            kind = self._specification.__name__
            raise SpecError(f"{self.kind} {name}: {path} is no {kind} but {type(found).__name__}")
        return found

    def items(self) -> Iterator[tuple[str, S]]:
        """Every listed name and its specification."""
        for name in self.paths:
            yield name, self[name]


def load(path: str, what: str) -> Any:
    """What `module:NAME` names. SpecError says why `what` is not to be had."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the code of an installed package may raise anything
        raise SpecError(f"{what}: {path} cannot be loaded: {type(error).__name__}: {error}") from error


def plugins() -> list[EntryPoint]:
    """The entry points of installed packages that add entries, by name."""
    return sorted(entry_points(group=GROUP), key=lambda entry: entry.name)


def _added(entry: EntryPoint) -> Mapping[str, Mapping[str, str]]:
    found = load(entry.value, f"entry point {entry.name} of {GROUP}")
    if not isinstance(found, Mapping) or not all(isinstance(names, Mapping) for names in found.values()):
        raise SpecError(f"entry point {entry.name} of {GROUP}: {entry.value} is no mapping of kind -> name -> path")
    return found
