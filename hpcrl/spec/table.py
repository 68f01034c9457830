"""Tables of names and specifications, one for each kind of part."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

GROUP = "hpcrl.plugins"
"""Entry-point group of installed packages that add entries. An entry point names a mapping of kind -> name -> path,
with the kinds of hpcrl.spec.tables; it is read at every start, so its module imports nothing heavy."""

S = TypeVar("S")


class SpecError(ValueError):
    """A name does not lead to a specification; the message lists the existing names."""


class SpecTable(Generic[S]):
    """The table of one kind: name -> specification. `module:NAME` finds a specification outside the table."""

    def __init__(self, kind: str, specification: type[S], entries: Mapping[str, str]):
        """`entries` maps names to `module:NAME` of torch-free specifications, in the order in which help lists them."""
        self.kind = kind
        self._specification, self._entries = specification, dict(entries)
        self._found: dict[str, S] = {}  # a plan looks up entries thousands of times

    @functools.cached_property
    def paths(self) -> dict[str, str]:
        """Name -> path, including installed packages. Errors of a package are reported, and the entry is ignored."""
        paths = dict(self._entries)
        for entry, added in _packages().items():
            for name, path in added.get(self.kind, {}).items():
                if paths.setdefault(name, path) != path:
                    leave_out(f"the {self.kind} {name} of {entry.value}", f"there is another, {paths[name]}")
        return paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __getitem__(self, name: str) -> S:
        """The specification. SpecError if the name is unknown or its path does not lead to a specification."""
        if name in self._found:
            return self._found[name]
        path = name if ":" in name else self.paths.get(name)
        if path is None:
            near = get_close_matches(name, self.paths, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"there is no {self.kind} {name}; there are {', '.join(self.paths)}{hint}")
        found = load(path, f"{self.kind} {name}")
        if not isinstance(found, self._specification):
            kind = self._specification.__name__
            raise SpecError(f"{self.kind} {name}: {path} is not a {kind} but {type(found).__name__}")
        return self._found.setdefault(name, found)

    def items(self) -> Iterator[tuple[str, S]]:
        """Every listed name and its specification, without entries of installed packages that cannot be loaded."""
        return iter(self._loaded.items())

    @functools.cached_property
    def _loaded(self) -> dict[str, S]:
        found = {}
        for name in self.paths:
            try:
                found[name] = self[name]
            except SpecError as error:
                if name in self._entries:
                    raise
                leave_out(f"the {self.kind} {name}", str(error))
        return found


def load(path: str, what: str) -> Any:
    """The object named by `module:NAME`. SpecError says why `what` is not available."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # code of an installed package may raise any exception, or exit
        raise SpecError(f"{what}: {path} cannot be loaded: {type(error).__name__}: {error}") from error


@functools.cache
def _packages() -> dict[EntryPoint, Mapping[str, Mapping[str, str]]]:
    """The entries of every installed package, cached because searching all packages takes several milliseconds."""
    return {entry: _added(entry) for entry in entry_points(group=GROUP)}


def _added(entry: EntryPoint) -> Mapping[str, Mapping[str, str]]:
    """The entries of an installed package."""
    try:
        found = load(entry.value, "it")
        if not isinstance(found, Mapping) or not all(isinstance(names, Mapping) for names in found.values()):
            raise SpecError(f"{entry.value} is not a mapping of kind -> name -> path")
    except SpecError as error:
        leave_out(f"the entry point {entry.name} of {GROUP}", str(error))
        return {}
    return found


@functools.lru_cache
def leave_out(what: str, why: str) -> None:
    """Report once per process that a package's entry is ignored; the rest of hpcrl works without it."""
    print(f"hpcrl: {what} is ignored: {why}", file=sys.stderr)
