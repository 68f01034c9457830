"""The contract of every engine. A module `KIND/NAME.py` beside the tests builds the engine of that name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hpcrl.spec.kinds import Spec


def factories(kind: str, engines: Mapping[str, Spec]) -> tuple[dict[str, Any], list[str]]:
    """The `factory` of each available engine's module, by name; and the modules that still have to be written."""
    found: dict[str, Any] = {}
    missing: list[str] = []
    for name in engines:
        module = f"{__name__}.{kind}.{name}"
        if find_spec(module) is not None and hasattr(import_module(module), "factory"):
            found[name] = import_module(module).factory
        else:
            missing.append(f"write {module.replace('.', '/')}.py with `factory`, as its neighbours have it")
    return found, missing
