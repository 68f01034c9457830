"""Composes command-line arguments into a plain dict with Hydra's compose API, and records the source of every value.

Groups go through Hydra's defaults list. Values are applied one by one afterwards, with Hydra's own grammar, so that a
bad value does not hide the next. Hydra changes no folder and writes nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any

from hpcrl.spec.problems import PLACEHOLDER, Path, Problem, dotted

PRIMARY = "config"
AS_TYPED = re.compile(
    r"\+{0,2}(run_name|cluster\.(?:components\.\w+\.)?"
    r"(?:account|constraint|exclude|partition|qos|reservation|switches|time))=(?!null$)([^'\"$].*)"
)
"""Values such as a commit's 12e4567 as run_name, and low,high or n[1-4] or 60 for sbatch, which have another meaning in
Hydra's grammar."""


def conf_dir() -> FilePath:
    """The folder of the Hydra groups: beside the package in a checkout, inside an installed package."""
    package = FilePath(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def groups() -> dict[str, list[str]]:
    """Every group of conf/ and its options."""
    root = conf_dir()
    return {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(root.iterdir()) if d.is_dir()}


@dataclass(frozen=True)
class Override:
    """One value from the command line: `text`: the argument as typed; delete: `~key`."""

    path: Path
    text: str
    value: Any = None
    delete: bool = False


@dataclass
class Composition:
    """The composed values, the selected option of each group, the overrides, and the problems found."""

    data: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    """The groups whose option is from the command line."""
    overrides: list[Override] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def source(self, path: Path) -> str:
        """The source of the value at `path`: the override as typed or the conf file; empty for a default."""
        for override in reversed(self.overrides):
            shared = min(len(override.path), len(path))
            if shared and override.path[:shared] == path[:shared]:
                return f"override {override.text!r}"
        names = [(f"experiment/{name}.yaml", path) for name in _with_bases(self.choices.get("experiment"))]
        names += [
            (f"{group}/{option}.yaml", path[1:]) for group, option in self.choices.items() if path[:1] == (group,)
        ]
        return next((f"conf/{name}" for name, inner in names if _holds(read_yaml(name), inner)), "")

    def given(self) -> dict[Path, bool]:
        """Explicitly set keys: path -> whether on the command line (else in the experiment's file)."""
        keys: dict[Path, bool] = {}
        if name := self.choices.get("experiment"):
            keys |= dict.fromkeys(leaves(read_yaml(f"experiment/{name}.yaml")), False)
        for override in self.overrides:
            for leaf in leaves(override.value) if isinstance(override.value, Mapping) else [()]:
                keys[override.path + leaf] = True
        return {path: by_hand for path, by_hand in keys.items() if path[0] != "defaults"}


def compose(words: Sequence[str]) -> Composition:
    """Compose the arguments of a command line (`group=option`, `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`)."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    result = Composition()
    _parse(words, result)
    config: DictConfig = _compose_groups(result)
    for override in result.overrides:
        try:
            if override.delete:
                _delete(config, override.path)
            else:
                OmegaConf.update(config, dotted(override.path), override.value, merge=True, force_add=True)
        except (OmegaConfBaseException, KeyError, TypeError, ValueError, IndexError) as error:
            result.problems.append(Problem(override.path, f"{dotted(override.path)}: {_first_line(error)}"))
    try:
        result.data = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        result.problems.append(Problem((), _first_line(error)))
        result.data = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return result


def read_yaml(name: str) -> dict[str, Any]:
    """Content of a file of conf/, empty if it is missing or unreadable (which Hydra has reported); to be read only."""
    path = conf_dir() / name
    return _read_yaml(path, _stamp(path))


def _stamp(path: FilePath) -> tuple[int, int]:
    """Changes when the file does; a process may read it again after an edit."""
    try:
        status = path.stat()
    except OSError:
        return 0, -1
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=256)
def _read_yaml(path: FilePath, stamp: tuple[int, int]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}  # type: ignore[return-value]
    except (OSError, YAMLError):
        return {}


def _with_bases(experiment: str | None) -> Iterator[str]:
    """An experiment, the experiments of its defaults list, and theirs in turn: the nearest first."""
    if experiment is not None:
        yield experiment
        for entry in reversed(read_yaml(f"experiment/{experiment}.yaml").get("defaults", [])):
            if isinstance(entry, str) and entry != "_self_":
                yield from _with_bases(entry)


def _parse(words: Sequence[str], result: Composition) -> None:
    """Sort the arguments into choices of groups and values; any other argument becomes a problem."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    known, parser = groups(), OverridesParser.create()
    for word in words:
        if word.startswith("-"):
            _refuse(result, word, "unknown option; settings are written key=value, --help shows them")
            continue
        if "=" not in word and not word.startswith("~"):
            _refuse(
                result, word, "expected key=value" + _suggest(word, [f"+experiment={e}" for e in known["experiment"]])
            )
            continue
        if typed := AS_TYPED.fullmatch(word):
            result.overrides.append(Override(tuple(typed[1].split(".")), word, typed[2]))
            continue
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            name, _, text = word.lstrip("+").partition("=")
            if PLACEHOLDER.search(text):  # reported for the value, as for readable ones
                result.overrides.append(Override(tuple(name.split(".")), word, text))
                continue
            _refuse(result, word, f"cannot be read ({_first_line(error)}); quote special characters: 'key=\"value\"'")
            continue
        key, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            _refuse(result, word, "several values; write a list as key=[a,b], or give -m to run each value")
        elif key in known and not override.is_delete() and isinstance(value, str | int):
            if str(value) in known[key]:
                result.choices[key] = str(value)
            else:
                options = ", ".join(known[key])
                _refuse(result, word, f"no such {key}; there are: {options}{_suggest(str(value), known[key])}", (key,))
        elif key in known and isinstance(value, Mapping) and not override.is_delete() and key == "experiment":
            _refuse(result, word, "an experiment is chosen by name", (key,))
        else:
            path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
            result.overrides.append(Override(path, word, value, override.is_delete()))


def _compose_groups(result: Composition) -> Any:
    """Hydra's composition of the chosen groups. A conf file that cannot be composed is a problem."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    listed = {key for entry in read_yaml(f"{PRIMARY}.yaml")["defaults"] if isinstance(entry, dict) for key in entry}
    result.chosen = tuple(result.choices)
    words = [("" if group in listed else "+") + f"{group}={option}" for group, option in result.choices.items()]
    try:
        folder = conf_dir()
        stamps = tuple((path, _stamp(path)) for path in sorted(folder.rglob("*.yaml")))
        data, choices = _of_hydra(folder, tuple(words), stamps)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        result.problems.append(Problem((), f"conf/: {_first_line(error)}"))
        return OmegaConf.create({})
    result.choices = dict(choices)
    return OmegaConf.create(data)


@functools.lru_cache  # takes a tenth of a second, and the points of a sweep differ in values more than in groups
def _of_hydra(
    folder: FilePath, words: tuple[str, ...], stamps: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values, with interpolations as they are written, and the option of each group; neither is to be changed."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base="1.3"):
        config = hydra_compose(PRIMARY, overrides=list(words), return_hydra_config=True)
    runtime = config.hydra.runtime.choices
    choices = {group: runtime[group] for group in runtime if "/" not in group and runtime[group] is not None}
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config, False)
    del config["hydra"]
    return OmegaConf.to_container(config, resolve=False), choices  # type: ignore[return-value]


def _delete(config: Any, path: Path) -> None:
    """Remove a value, so that the default applies again; an unset key is left unchanged."""
    for part in path[:-1]:
        config = config[part] if config is not None and part in config else None
    if config is not None and path[-1] in config:
        del config[path[-1]]


def _refuse(result: Composition, word: str, text: str, path: Path = ()) -> None:
    result.problems.append(Problem((), f"{word}: {text}", (path,)))


def _suggest(word: str, options: Sequence[str]) -> str:
    near = get_close_matches(word, options, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _first_line(error: Exception) -> str:
    """The first lines of an error, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _holds(data: Any, path: Path) -> bool:
    for part in path:
        if isinstance(data, list):
            data = dict(enumerate(data))
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def leaves(data: Mapping[str, Any], at: Path = ()) -> list[Path]:
    """The paths of all values in nested data; an empty mapping is a value."""
    found: list[Path] = []
    for key, value in data.items():
        found += leaves(value, (*at, key)) if isinstance(value, Mapping) and value else [(*at, key)]
    return found
