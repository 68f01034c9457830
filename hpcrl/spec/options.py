"""The free `options` of a task or reward, typed by a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from hpcrl.spec.fields import Section

Options = TypeVar("Options", bound=Section)


def read_options(schema: type[Options], options: Mapping[str, Any]) -> Options:
    """The options as an object of the schema. ValueError lists all problems in one line."""
    try:
        return schema(**options)
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            name = ".".join(map(str, detail["loc"]))
            if detail["type"] == "extra_forbidden":
                problems.append(f"there is no option {name!r} (there are: {', '.join(schema.model_fields) or 'none'})")
            else:
                text = _told(detail)
                problems.append(f"{name}: {text}" if name else text)
        raise ValueError("; ".join(problems)) from error


def _told(detail: Any) -> str:
    """The problem of an option, in the section's own words if the section checks it."""
    if detail["type"] == "missing":
        return "missing"
    if detail["type"] == "value_error":
        return str(detail["msg"].removeprefix("Value error, "))
    given = repr(detail["input"])
    return f"{detail['msg']}, got {given if len(given) <= 60 else given[:57] + '...'}"
