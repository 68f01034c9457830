"""Names of parts in the configuration (a table's entry, or a specification's path), and the part's own section."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import Spec
from hpcrl.spec.table import SpecError, SpecTable

S = TypeVar("S", bound=Section)
UNAVAILABLE = "unavailable"
"""Type of the error for a part that exists but cannot be used."""


def listed(table: SpecTable[Any], name: str) -> str:
    """The name of a part in the table, or the path of its specification. ValueError for any other name."""
    if name not in list(table) and ":" not in name:
        *others, last = map(repr, table)
        raise PydanticCustomError("literal_error", "{expected}", {"expected": f"{', '.join(others)} or {last}"})
    try:
        table[name]
    except SpecError as error:
        raise PydanticCustomError(UNAVAILABLE, "{why}", {"why": str(error)}) from error
    return name


def once(names: list[str]) -> list[str]:
    """The names. ValueError if one is repeated."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"every name once, {name} is there twice")
    return names


def own_section(at: Section, name: str, spec: Spec, kind: type[S]) -> S:
    """A part's section, which has this type; `at` contains it."""
    section = getattr(at, section_name(name, spec))
    assert isinstance(section, kind), f"the section of {name} is not a {kind.__name__}"
    return section


def section_name(name: str, spec: Spec) -> str:
    """The key of a part's section; for a part named by path, the name in its specification."""
    return spec.section_key or (spec.name if ":" in name else name)
