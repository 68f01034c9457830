"""Problems of a configuration, which are collected to show the user all of them at once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""The place of a value: section, key, ... (list positions as numbers)."""

PLACEHOLDER = re.compile(
    r"\?\?\?|(?<![a-z0-9])CHANGE_?ME(?![a-z0-9])|(?<![^\s='\":,;])/path/to\b|^<[\w .-]*>$", re.IGNORECASE
)
"""Common placeholders for missing values; /path/to at the beginning of a path only, CHANGE_ME as a word."""


def dotted(path: Path) -> str:
    """A path in the syntax of the command line."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True)
class Problem:
    """One line for the user about the value at `path` (empty: no single value), and the other keys that it involves."""

    path: Path
    text: str
    involves: tuple[Path, ...] = ()

    def touches(self, paths: Iterable[Path]) -> bool:
        """Whether one of these paths is above, at or below a key of this problem."""
        mine = (self.path, *self.involves)
        return any(a[: len(b)] == b[: len(a)] for a in mine for b in paths if a and b)


def engine_problem(at: Path, key: str, text: str, *others: str) -> Problem:
    """A problem of a key in a training engine's section `at`. Other keys, the model or the ranks may solve it too."""
    involved = tuple((*at, other) for other in others)
    return Problem((*at, key), f"{dotted(at)}.{key}: {text}", (*involved, ("model",), ("layout", "trainer")))


class ConfigError(ValueError):
    """All problems of a configuration; `problems` has one line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def shortened(text: str, most: int = 120) -> str:
    """A text for one line: its beginning, if it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
