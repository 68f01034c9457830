"""Values of a metric over a run's steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Points = tuple[list[int], list[float]]
"""Steps, and their values."""
MAX_DOMAINS = 8
_OF_DOMAIN = re.compile(r"val/(?!sampled/)(.+)/score")


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    """A metric's values in rows of metrics.jsonl."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def validated_domains(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """The validation scores of each domain, in the order of their names; empty for more than MAX_DOMAINS, which no
    plot can show."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {match[1]: curve(rows, name) for name in sorted(names) if (match := _OF_DOMAIN.fullmatch(name))}
    return found if len(found) <= MAX_DOMAINS else {}
