"""Encodes values that leave a sandboxed process: only built-in types, as one line of JSON, so none of the sender's code
runs in the reading process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_EXACT = 1 << 53
Other = Callable[[Any], Any]


def _none(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not a built-in value")


def encode(value: Any, other: Other = _none) -> bytes:
    """The line for a value. `other` converts values of all types except built-in types and numpy's to JSON objects.
    Subclasses are sent as their built-in type. TypeError, ValueError or RecursionError if a value cannot be sent."""
    return json.dumps(pack(value, other), allow_nan=False).encode() + b"\n"


def decode(line: bytes, other: Other = _none, hashed: bool = True) -> Any:
    """The inverse of encode(); no code of the sender runs. With hashed=False, dictionaries, sets and frozensets become
    Unhashed, so a sender cannot slow this down with keys of equal hashes. ValueError, TypeError, OverflowError or
    RecursionError if the line is invalid."""
    return unpack(json.loads(line, parse_constant=_refuse), other, hashed)


@dataclass(frozen=True, eq=False)
class Unhashed:
    """A dictionary's pairs, or a set's members, without hashing the keys."""

    kind: str
    parts: list[Any]


def pack(value: Any, other: Other = _none) -> Any:
    """The value as JSON types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -MAX_EXACT < value < MAX_EXACT else {"int": hex(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return {"complex": [str(value.real), str(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[pack(key, other), pack(own, other)] for key, own in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            parts = [pack(part, other) for part in value]
            return parts if kind is list else {kind.__name__: parts}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), other)
    return other(value)


def unpack(found: Any, other: Other = _none, hashed: bool = True) -> Any:
    """The inverse of pack(); see decode()."""
    if isinstance(found, list):
        return [unpack(part, other, hashed) for part in found]
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        return other(found)
    ((kind, inside),) = found.items()
    if kind == "int":
        return int(inside, 16)
    if kind == "float":
        return float(inside)
    if kind == "complex":
        return complex(*map(float, inside))
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "dict":
        pairs = [(unpack(key, other, hashed), unpack(own, other, hashed)) for key, own in inside]
        return dict(pairs) if hashed else Unhashed(kind, pairs)
    if kind in ("tuple", "set", "frozenset"):
        parts = [unpack(part, other, hashed) for part in inside]
        if kind != "tuple" and not hashed:
            return Unhashed(kind, parts)
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](parts)
    return other(found)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a valid JSON value")
