"""Python values as arguments of `python -m hpcrl.launch`: words as typed, keywords as nested keys."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from hpcrl.config.compose import AS_TYPED, compose
from hpcrl.config.folders import groups
from hpcrl.python.parts import path_of

PLAIN = re.compile(r"[A-Za-z_/][\w/.@+-]*", re.ASCII)
"""Texts that Hydra's grammar reads as they are, except the words of VALUES."""
VALUES = ("true", "false", "null", "nan", "inf")
PARTS = {"reward": ("function", "function"), "env": ("class", "class_path")}
"""Section -> the name of a part given by its path, and the key that has the path."""

Given = Callable[..., object] | str
"""A part: a function or class, its path `file.py:name` or `module:name`, or the name of a built-in part."""


def arguments_of(words: Sequence[str], keys: Mapping[str, object]) -> list[str]:
    """The arguments of a run: the keywords as `key=value`, then the words, which override them. ValueError for a value
    that cannot be given.

    A keyword named like a group selects the group's option if its value is text; a mapping has the keys below; `reward`
    and `env` also take a part for all domains, and a mapping of domain to part.
    """
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f"{word!r}: a word is text such as 'trainer.lr=1e-5'; other values are keywords")
        if word.startswith("-") and not word.startswith("--config"):
            raise ValueError(f"{word}: no option for a call from Python; sweeps and --help are of the command line")
    arguments: list[str] = []
    parts: list[tuple[str, str, Given]] = []
    for key, value in keys.items():
        if key in PARTS and _is_part(value):
            parts.append((key, "default", value))
        elif key in PARTS and isinstance(value, Mapping):
            parts += [(key, domain, part) for domain, part in value.items() if _is_part(part)]
            rest = {domain: part for domain, part in value.items() if not _is_part(part)}
            arguments += _words(key, rest) if rest else ()
        elif isinstance(value, str) and key in groups():
            arguments.append(f"{key}={value}")
        else:
            arguments += _words(key, value)
    if parts:
        data = compose([*arguments, *words]).data
        for section, domain, part in parts:
            arguments += _of_part(section, domain, part, data)
    return [*arguments, *words]


def _is_part(value: object) -> TypeGuard[Given]:
    return isinstance(value, str) or callable(value)


def _of_part(section: str, domain: str, part: Given, data: Mapping[str, Any]) -> Iterator[str]:
    """The words for a domain's part. Options that an experiment gives to its own part are dropped."""
    name, key = PARTS[section]
    at = f"{section}.{domain}"
    own = (data.get(section) or {}).get(domain) or {}
    if own.get("options"):
        yield f"~{at}.options"
    if isinstance(part, str) and ":" not in part:
        yield f"{at}.name={_text(part)}"
        return
    yield f"{at}.name={name}"
    yield f"{at}.{key}={_text(part if isinstance(part, str) else path_of(part))}"


def _words(key: str, value: object) -> Iterator[str]:
    """`key=value`, one word for each leaf of a mapping with plain keys."""
    if isinstance(value, Mapping) and value and all(re.fullmatch(r"\w[\w-]*", str(name), re.ASCII) for name in value):
        for name, inner in value.items():
            yield from _words(f"{key}.{name}", inner)
    elif isinstance(value, str) and AS_TYPED.fullmatch(f"{key}={value}"):
        yield f"{key}={value}"
    else:
        yield f"{key}={_value(key, value)}"


def _value(key: str, value: object) -> str:
    """A value in Hydra's grammar. ValueError for a type that configurations do not have."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of numpy or torch
        value = value.item()
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str():
            return _text(value)
        case Mapping():
            return "{" + ",".join(f"{_name(str(k))}:{_value(f'{key}.{k}', v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(_value(key, inner) for inner in value) + "]"
    if callable(value):
        raise ValueError(f"{key}: a function or class is given as reward=... or env=..., or by its path, file.py:name")
    raise ValueError(f"{key}: {type(value).__name__} is no value of a key; give a number, text, list or mapping")


def _text(text: str) -> str:
    """A text, quoted unless plain. Values are literal: `${` does not refer to another key."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if PLAIN.fullmatch(text) and text.lower() not in VALUES:
        return text
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # OmegaConf halves the backslashes before ${
    return QuotedString(literal, Quote.single).with_quotes()


def _name(name: str) -> str:
    """A mapping's key, which the grammar does not quote."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name)
