"""Composes command-line arguments into a plain dict with Hydra's compose API, and records the source of every value.

Groups go through Hydra's defaults list. Values are then applied one by one, with Hydra's own grammar, so a bad value
does not hide the next. Hydra changes no folder and writes nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any, ClassVar

from hpcrl.config.config_file import ConfigFile, as_text, read_config_file
from hpcrl.config.folders import FOLDERS, check_folders, conf_dirs, conf_file, groups, read_yaml, shown, stamp
from hpcrl.spec.problems import PLACEHOLDER, ConfigError, Path, Problem, dotted, shortened

PRIMARY = "hpcrl"
AS_TYPED = re.compile(
    r"\+{0,2}(run_name|cluster\.(?:components\.\w+\.)?"
    r"(?:account|constraint|exclude|partition|qos|reservation|switches|time))=(?!null$)([^'\"$].*)"
)
"""Keys whose value is used as typed, since Hydra's grammar would change it: a run_name such as 12e4567 (a commit),
sbatch values such as low,high, n[1-4] or 60."""


UNKNOWN_OPTION = "unknown option; settings are written key=value, --help shows them"
OPTIONS = {
    **dict.fromkeys(("--config-dir", "-cd", "--config-path", "-cp"), "no such option; name the folder in HPCRL_CONF"),
    **dict.fromkeys(("--config-name", "-cn"), "no such option; --config FILE takes a file of yours"),
}
"""Options of Hydra's own command line -> what to do here."""


@dataclass(frozen=True)
class Override:
    """One value from the command line. `text` is the argument as typed; `delete` is true for `~key`."""

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
    experiment: str = ""
    """The name after experiment=, even if there is no such experiment."""
    file: ConfigFile | None = None
    """The file of --config."""

    def source(self, path: Path) -> str:
        """The source of the value at `path`: the override as typed, the --config file's line, or the conf file; empty
        for a default."""
        for override in reversed(self.overrides):
            shared = min(len(override.path), len(path))
            if shared and override.path[:shared] == path[:shared]:
                return f"override {override.text!r}"
        if self.file is not None and path[:1] not in [(group,) for group in self.chosen]:
            return self.file.source(path)
        names = [(f"experiment/{name}.yaml", path) for name in _with_bases(self.choices.get("experiment"))]
        names += [
            (f"{group}/{option}.yaml", path[1:]) for group, option in self.choices.items() if path[:1] == (group,)
        ]
        return next((shown(conf_file(name)) for name, inner in names if _holds(read_yaml(name), inner)), "")

    def given(self) -> dict[Path, bool]:
        """Explicitly set keys: path -> True if set on the command line, False if in the --config file or the experiment
        file. A stored configuration contains every key, so its keys do not count."""
        keys: dict[Path, bool] = {}
        if self.file is not None and not self.file.of_run:
            keys |= dict.fromkeys(leaves(self.file.data), False)
        if name := self.choices.get("experiment"):
            keys |= dict.fromkeys(leaves(read_yaml(f"experiment/{name}.yaml")), False)
        for override in self.overrides:
            for leaf in leaves(override.value) if isinstance(override.value, Mapping) else [()]:
                keys[override.path + leaf] = True
        return {path: by_hand for path, by_hand in keys.items() if path[0] != "defaults"}


def compose(arguments: Sequence[str]) -> Composition:
    """Compose the arguments of a command line (`--config FILE`, `group=option`, `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`).
    ConfigError if the file cannot be read."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path, arguments = split_file(arguments)
    result = Composition(file=read_config_file(path) if path is not None else None)
    if result.file is None or not result.file.of_run:  # a job on another machine needs no such folders
        check_folders()
    _parse(arguments, result)
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
    except OmegaConfBaseException:
        result.data = _resolve(config, (), result.problems)
    return result


def _resolve(config: Any, at: Path, problems: list[Problem]) -> dict[str, Any]:
    """The resolved values. An interpolation that fails is omitted and reported as a problem."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    data: dict[str, Any] = {}
    for key in config:
        path = (*at, key)
        try:
            value = config[key]
            whole = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
            data[key] = _resolve(value, path, problems) if OmegaConf.is_dict(value) else whole
        except MissingMandatoryValue:
            data[key] = "???"
        except OmegaConfBaseException as error:
            why = _first_line(error).partition(" full_key")[0]
            problems.append(Problem(path, f"{dotted(path)}: {why}; as text, ${{ is written \\${{"))
    return data


def split_file(arguments: Sequence[str]) -> tuple[FilePath | None, list[str]]:
    """The FILE of `--config FILE` or `--config=FILE`, and the other arguments. ConfigError if there are two, or none
    after --config."""
    files, rest, left = [], [], iter(arguments)
    for word in left:
        name, given, path = word.partition("=")
        if name != "--config":
            rest.append(word)
        elif path := path if given else next(left, ""):
            files.append(FilePath(path).expanduser())
        else:
            raise ConfigError(["--config: the file is missing; write --config FILE"])
    if len(files) > 1:
        raise ConfigError(
            [f"--config: {' and '.join(map(str, files))}; give one file, and additional values as key=value"]
        )
    return (files[0] if files else None), rest


def _with_bases(experiment: str | None) -> Iterator[str]:
    """An experiment, the experiments of its defaults list, and so on recursively, nearest first."""
    if experiment is not None:
        yield experiment
        for entry in reversed(read_yaml(f"experiment/{experiment}.yaml").get("defaults", [])):
            if isinstance(entry, str) and entry != "_self_":
                yield from _with_bases(entry)


def _parse(arguments: Sequence[str], result: Composition) -> None:
    """Sort the arguments into choices of groups and values; any other argument becomes a problem."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    known, parser = groups(), OverridesParser.create()
    for word in arguments:
        if word.startswith("-"):
            _refuse(result, word, OPTIONS.get(word.partition("=")[0], UNKNOWN_OPTION))
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
            if PLACEHOLDER.search(text):  # the value is reported, as for readable ones
                result.overrides.append(Override(tuple(name.split(".")), word, text))
                continue
            _refuse(result, word, f"cannot be read ({_first_line(error)}); quote special characters: 'key=\"value\"'")
            continue
        key, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            _refuse(result, word, "several values; write a list as key=[a,b], or give -m to run each value")
        elif key in known and not override.is_delete() and isinstance(value, str | int):
            if key == "experiment" and re.fullmatch(r"[\w.-]+", str(value)):
                result.experiment = str(value)
            if key == "experiment" and result.file is not None:
                _refuse(result, word, f"--config {result.file.path} replaces an experiment; give one of them")
            elif str(value) in known[key]:
                result.choices[key] = str(value)
            elif key == "experiment" and re.search(r"/|\.ya?ml$", str(value)):
                _refuse(result, word, f"an experiment is chosen by name; a file is given as --config {value}", (key,))
            else:
                _refuse(result, word, f"no such {key}; there are: {_options(key, str(value))}", (key,))
        elif key in known and isinstance(value, Mapping) and not override.is_delete() and key == "experiment":
            _refuse(result, word, "an experiment is chosen by name", (key,))
        else:
            path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
            result.overrides.append(Override(path, word, value, override.is_delete()))


def _compose_groups(result: Composition) -> Any:
    """Hydra's composition of the chosen groups. With a file of --config: the file's values, except groups set on the
    command line, which replace its sections. A conf file that cannot be composed is a problem."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    listed = {key for entry in read_yaml(f"{PRIMARY}.yaml")["defaults"] if isinstance(entry, dict) for key in entry}
    result.chosen = tuple(result.choices)
    arguments = [("" if group in listed else "+") + f"{group}={option}" for group, option in result.choices.items()]
    if result.file is not None:
        arguments += [f"~{group}" for group in sorted(listed - result.choices.keys())]
    try:
        folders = conf_dirs()
        files = [path for folder in folders for group in sorted(groups()) for path in (folder / group).rglob("*.yaml")]
        stamps = tuple((path, stamp(path)) for path in files)
        data, choices = _of_hydra(tuple(folders), tuple(arguments), stamps)
        composed: Any = OmegaConf.create(data)
        if result.file is not None:
            composed = OmegaConf.merge(as_text(_of_file(result.file, result)), composed)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        result.problems.append(Problem((), _of_conf(error, result.choices.get("experiment"))))
        return OmegaConf.create({})
    result.choices = dict(choices)
    return composed


def _of_conf(error: Exception, experiment: str | None) -> str:
    """Text of a Hydra error, with the file and the remedy."""
    text, known = _first_line(error), groups()
    missing = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if missing is not None and missing[1] in known and experiment is not None:
        said = f"{missing[1]}: {missing[2]}: no such {missing[1]}; there are: {_options(missing[1], missing[2])}"
        return f"{shown(conf_file(f'experiment/{experiment}.yaml'))}, or an experiment in its defaults list: {said}"
    place = re.match(r"In '([^']+)': ", text)
    hint = ""
    if "Could not override" in text and "@experiment." in text:
        hint = " The file must begin with the line # @package _global_"
    elif wrong := re.search(r"Could not override 'experiment/(\w+)[@']", text):
        hint = f" Write override /{wrong[1]}, with the slash"
    return f"{shown(conf_file(f'{place[1]}.yaml')) if place else 'conf/'}: {text}{hint}"


def _of_file(file: ConfigFile, result: Composition) -> dict[str, Any]:
    """The values of a file of --config, without sections of groups set on the command line. If the command line gives
    run_name or run_dir, a stored configuration starts a new run, without the old run's folder and how it resumes."""
    left_out = set(result.chosen)
    if file.of_run:
        left_out.add("dry_run")
        if file.data.get("resume") == "fresh":  # has taken effect
            left_out.add("resume")
        if any(override.path in (("run_name",), ("run_dir",)) for override in result.overrides):
            left_out |= {"run_dir", "resume", "resume_from", "resume_reason"}
    for group in groups().keys() & file.data.keys() - left_out:
        if isinstance(option := file.data[group], str):
            text = f"{group}: a section of keys, not the name of an option; on the command line give {group}={option}"
            result.problems.append(Problem((group,), text))
            left_out.add(group)
    return {key: value for key, value in file.data.items() if key not in left_out}


@functools.lru_cache  # takes a tenth of a second; a sweep's points differ in values more than in groups
def _of_hydra(
    folders: tuple[FilePath, ...], arguments: tuple[str, ...], stamps: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values, with interpolations unresolved, and the option of each group; callers must not change them."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    built_in, *_further_folders().folders = folders
    try:
        with initialize_config_dir(str(built_in), version_base="1.3"):
            config = hydra_compose(PRIMARY, overrides=list(arguments), return_hydra_config=True)
    finally:
        _further_folders().folders = []
    runtime = config.hydra.runtime.choices
    choices = {group: runtime[group] for group in runtime if "/" not in group and runtime[group] is not None}
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config, False)
    del config["hydra"]
    return OmegaConf.to_container(config, resolve=False), choices  # type: ignore[return-value]


@functools.cache
def _further_folders() -> Any:
    """Hydra's plug-in that searches `folders`, the last one first, before the folder that is passed to Hydra."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class FurtherFolders(SearchPathPlugin):
        folders: ClassVar[list[FilePath]] = []

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            before = "main"  # Hydra's name of the folder that is passed to it
            for folder in self.folders:
                search_path.prepend(str(folder), f"file://{folder}", before)
                before = str(folder)

    Plugins.instance().register(FurtherFolders)
    return FurtherFolders


def _delete(config: Any, path: Path) -> None:
    """Remove a value, so its default applies again. An unset key is unchanged."""
    for part in path[:-1]:
        config = config[part] if config is not None and part in config else None
    if config is not None and path[-1] in config:
        del config[path[-1]]


def _refuse(result: Composition, word: str, text: str, path: Path = ()) -> None:
    result.problems.append(Problem((), f"{shortened(word)}: {text}", (path,)))


def _options(group: str, wrong: str) -> str:
    """The options of a group, the searched folders, and the most similar option to a wrong name."""
    options, places = groups()[group], [shown(folder / group) for folder in conf_dirs()]
    hint = _suggest(wrong, options)
    searched = f" (in {', '.join(places)})" if len(places) > 1 else ""
    if not searched and not hint:
        searched = f" ({FOLDERS} and ./conf have no config groups)"
    return ", ".join(options) + searched + hint


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
