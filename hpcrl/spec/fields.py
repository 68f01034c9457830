"""The building blocks of configuration sections: bounded numbers, and the section itself."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model


def _not_bool(value: Any) -> Any:
    # pydantic accepts true as 1, so seed=true would pass as a number.
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _import_path(value: str) -> str:
    if not re.fullmatch(r"[^\s:]+:[^\s:]+", value):
        raise ValueError("expected an import path, package.module:NAME or file.py:NAME")
    return value


NUMBER = BeforeValidator(_not_bool)
Positive = Annotated[int, Field(ge=1), NUMBER]
Count = Annotated[int, Field(ge=1, le=1024), NUMBER]
"""Threads or processes of one rank, or ranks of one node."""
Natural = Annotated[int, Field(ge=0), NUMBER]
Float = Annotated[float, NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), NUMBER]
NonNegative = Annotated[float, Field(ge=0), NUMBER]
Seed = Annotated[int, Field(ge=0, lt=1 << 63), NUMBER]
Seconds = Annotated[float, Field(ge=0.01, le=1e7), NUMBER]
"""A deadline: no answer takes less than the minimum, and system calls accept no more than the maximum."""
Share = Annotated[float, Field(ge=0, le=1), NUMBER]
NonEmpty = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""
ImportPath = Annotated[str, AfterValidator(_import_path)]
SandboxLevel = Literal["L0", "L1", "L2", "L3"]
"""Isolation of code in the sandbox (docs/security.md)."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors; numbers given as text are accepted."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        defer_build=True,  # most sections are parts of a section that needs no validators of its parts
    )


S = TypeVar("S", bound=Section)


def with_fields(base: type[S], **fields: Any) -> type[S]:
    """The section with additional or replaced fields, given as to pydantic's create_model()."""
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)
