"""Configurations in separate files: stored by runs, or given as `--config FILE`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from hpcrl.config.renamed_keys import arguments_with_new_names, with_new_names
from hpcrl.spec.problems import ConfigError, Path

WORDS = "# words: "
"""Start of the first line of a stored file: the arguments that made the configuration, as JSON."""
OWNERS = "owners"
"""A folder next to every run's configuration, also in versions that did not store the arguments."""
FLOAT = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+")
"""Numbers in Hydra's files that YAML 1.1 reads as text, such as 1e-6."""


@dataclass(frozen=True)
class ConfigFile:
    """A complete or partial configuration in a file. Values have no interpolations: `${` is text.

    Attributes:
        of_run: whether a run stored it.
        arguments: those that made a stored configuration; None if they are not known.
    """

    path: FilePath
    data: dict[str, Any] = field(default_factory=dict)
    of_run: bool = False
    arguments: tuple[str, ...] | None = None

    def source(self, path: Path) -> str:
        """File and line of the value at `path`, or of the nearest section above it; empty if neither is in the file."""
        line = 0
        try:
            node = yaml.compose(self.path.read_text(), yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError):  # changed since it was read
            return str(self.path)
        for part in path:
            entries = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in entries if key.value == str(part)), None)
            else:
                found = (entries[part], entries[part]) if isinstance(part, int) and part < len(entries) else None
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return f"{self.path}, line {line}" if line else ""


def read_config_file(path: FilePath) -> ConfigFile:
    """The configuration in a file. ConfigError if the file cannot be read, or is an experiment for Hydra."""
    from omegaconf._utils import get_yaml_loader  # reads 1e-6 as a number, as in the files of conf/

    try:
        text = path.read_text()
        data = yaml.load(text, Loader=get_yaml_loader())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"--config {path}: cannot be read: {' '.join(str(error).split())}"]) from error
    if not isinstance(data, dict) or not data:
        raise ConfigError([f"--config {path}: expected a configuration, keys with their values"])
    if "defaults" in data:
        name = path.stem
        raise ConfigError(
            [
                f"--config {path}: a file with `defaults` chooses groups, and is an experiment: put it into "
                f"conf/experiment/{name}.yaml of this folder, with the line `# @package _global_`, and give "
                f"+experiment={name}"
            ]
        )
    of_run = text.startswith(WORDS) or (path.parent / OWNERS).is_dir()
    return ConfigFile(path, with_new_names(data) if of_run else data, of_run, arguments_in(text))


def arguments_in(text: str) -> tuple[str, ...] | None:
    """The arguments in the first line of a stored configuration; None if they are not known."""
    first = text.partition("\n")[0]
    if not first.startswith(WORDS):
        return None
    try:
        arguments = json.loads(first.removeprefix(WORDS))
    except ValueError:
        return None
    known = isinstance(arguments, list) and all(isinstance(word, str) for word in arguments)
    return arguments_with_new_names(arguments) if known else None


def write_config(config: Mapping[str, Any], arguments: Sequence[str] | None) -> bytes:
    """The file content of this configuration for read_config_file(), with the arguments that made it, if known."""
    head = f"{WORDS}{json.dumps(None if arguments is None else list(arguments))}\n"
    return (head + yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False)).encode()


def as_text(value: Any) -> Any:
    """Plain data in which OmegaConf finds no interpolations."""
    if isinstance(value, Mapping):
        return {key: as_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_text(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e5, which Hydra's loader would read as numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))
