"""Finds a configuration's preset of conf/algorithm/; a preset's name often differs from its algorithm's name."""

from __future__ import annotations

from typing import Any

from hpcrl.config import Config
from hpcrl.config.compose import leaves
from hpcrl.config.folders import conf_file, groups, read_yaml

PACKAGE = "# @package _global_"
"""First line of a preset that sets keys outside its section too."""


def preset_of(config: Config) -> str:
    """The preset that sets the most keys, among the presets whose values the configuration has; empty if there is
    none."""
    data, best, most = config.model_dump(mode="json"), "", 0
    for name in groups()["algorithm"]:
        file = f"algorithm/{name}.yaml"
        content = read_yaml(file)
        is_global = conf_file(file).read_text(errors="replace").startswith(PACKAGE)
        values: dict[str, Any] = content if is_global else {"algorithm": content}
        paths = leaves(values)
        if len(paths) > most and all(_is(_at(values, path), _at(data, path)) for path in paths):
            best, most = name, len(paths)
    return best


def _is(asked: Any, value: Any) -> bool:
    """Whether a preset sets this value; a value that refers to another key counts as equal."""
    return asked == value or (isinstance(asked, str) and "${" in asked)


def _at(data: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data
