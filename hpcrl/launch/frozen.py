"""A run's configuration is fixed when the run is submitted or first started; later only the command line changes it.

A run folder stores the configuration with the arguments that made it. When the run is launched again, each value comes
from the stored configuration unless the new arguments set a different value than the stored arguments do;
hpcrl.run_folder decides whether that key may change. Later changes of files (conf/, --config) are ignored and reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as member
from pathlib import Path
from typing import Any

from hpcrl.config import Config, ConfigError, LoadedConfig, read, read_data
from hpcrl.config.compose import Composition, Override, split_file
from hpcrl.config.config_file import ConfigFile
from hpcrl.config.renamed_keys import arguments_with_new_names
from hpcrl.launch.hub import find_model
from hpcrl.run_folder import CONFIG, MAY_CHANGE, SLURM, division_keys, stored_config
from hpcrl.run_folder.changes import differences, dotted_leaves, is_below, read_arguments
from hpcrl.run_folder.models import SECTIONS
from hpcrl.spec.problems import dotted

SUBMITTED_CONFIG = f"{SLURM}/submitted.yaml"
"""In a run folder: the configuration that a job of hpcrl.launch starts from, with the arguments that made it."""
OPTIONS_OF_A_LAUNCH = ("dry_run", "resume", "resume_from", "resume_reason")
OF_THE_LAUNCH = (*OPTIONS_OF_A_LAUNCH, "run_dir")
"""Keys that configure the launch, not the run."""
PATHS = tuple(f"{section}.path" for section in SECTIONS)


@dataclass
class LaunchConfig:
    """The configuration of a launch. `arguments` made it, None if unknown; `ignored` has `key: stored -> now` for each
    value that files now set differently than when the run began; `explicit` are the dotted keys that the command line
    gives, None if the configuration was settled before."""

    reading: LoadedConfig
    arguments: tuple[str, ...] | None
    ignored: list[str] = member(default_factory=list)
    explicit: list[str] | None = None


def resolve_config(argv: Sequence[str]) -> LaunchConfig:
    """The configuration of these arguments; if there is a run, its stored one. ConfigError as in read()."""
    reading = read(argv)
    settled = _settled(reading, argv)
    if settled is not None:
        return settled
    found = _with_stored(reading, tuple(word for word in argv if _key(word) not in OPTIONS_OF_A_LAUNCH))
    found.explicit = [dotted(override.path) for override in reading.composition.overrides]
    return found


def _settled(reading: LoadedConfig, argv: Sequence[str]) -> LaunchConfig | None:
    """The configuration if --config names the run's own file."""
    arguments = tuple(word for word in argv if _key(word) not in OPTIONS_OF_A_LAUNCH)
    folder, file = run_folder(reading), reading.composition.file
    if file is not None and file.of_run and _is(folder, file.data.get("run_dir")):
        # The run's stored or submitted configuration, which was settled before.
        further = [word for word in split_file(arguments)[1] if _key(word) != "run_dir"]
        return LaunchConfig(reading, None if file.arguments is None else (*file.arguments, *further))
    return None


def _with_stored(reading: LoadedConfig, arguments: tuple[str, ...]) -> LaunchConfig:
    """The configuration of a command line; if there is a run, its stored one with the changes of the command line."""
    folder = run_folder(reading)
    made, stored = read_arguments(folder), _stored(folder)
    if made is None or stored is None or reading.composition.data.get("resume") == "fresh":
        return LaunchConfig(reading, arguments)
    now = None if reading.problems else reading.config
    if _settings(arguments_with_new_names(arguments)) == _settings(made):
        then, overrides = now, []
    elif now is None:
        return LaunchConfig(reading, arguments)
    else:
        then = _load(made)
        overrides = [override for override in reading.composition.overrides if override.text not in made]
        if then is None:
            return LaunchConfig(reading, arguments)
    return _keep(reading, arguments, folder, stored, then, overrides)


def _keep(
    reading: LoadedConfig,
    arguments: tuple[str, ...],
    folder: Path,
    stored: Config,
    then: Config | None,
    overrides: Sequence[Override],
) -> LaunchConfig:
    """The stored configuration, updated with the values that the arguments now change.

    Args:
        then: What the stored arguments yield today; None if they are invalid now and the arguments are unchanged.
        overrides: The new arguments.
    """
    old = stored.model_dump(mode="json")
    composition = Composition(file=ConfigFile(folder / CONFIG, old, of_run=True))
    composition.overrides = [*reading.composition.overrides]
    asked = reading.composition.data
    launch = {"run_dir": str(folder), "dry_run": bool(asked.get("dry_run")), "resume": "auto"}
    launch |= {"resume_from": asked.get("resume_from"), "resume_reason": asked.get("resume_reason", "")}
    if then is None:
        ignored = [f"no longer valid: {' '.join(reading.problems[0].text.split())}"]
        return LaunchConfig(read_data(old | launch, composition), arguments, ignored)
    assert reading.config is not None, "without problems"
    new, base = reading.config.model_dump(mode="json"), then.model_dump(mode="json")
    given = [dotted(override.path) for override in overrides]
    said = {key for key, _ in differences(base, new)}
    leaves = dict(dotted_leaves(old)) | dict(dotted_leaves(new))
    said |= {key for key in leaves if is_below(key, given) or any(is_below(other, [key]) for other in given)}
    changed = [(key, line) for key, line in differences(old, new) if not is_below(key, OF_THE_LAUNCH)]
    changed = [(key, line) for key, line in changed if not _same_model(key, old, new)]
    merged = _merge(old, new, {key for key, _ in changed if key in said})
    ignored = [line for key, line in changed if key not in said]
    return LaunchConfig(read_data(merged | launch, composition), arguments, ignored)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """The old values, with the new values of these keys (dotted keys of leaves)."""
    merged: dict[str, Any] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        key, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if key in keys:
            if name in new:
                merged[name] = after
        elif isinstance(before, Mapping) or (name not in old and isinstance(after, Mapping)):
            inner = _merge(before or {}, after if isinstance(after, Mapping) else {}, keys, f"{key}.")
            if inner or before == {}:
                merged[name] = inner
        elif name in old:
            merged[name] = before
    return merged


def _same_model(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two values of a model's path are its hub name and the folder of that name in the cache."""
    if key not in PATHS:
        return False
    section = key.partition(".")[0]
    try:
        return find_model(str(new[section]["path"]), plan_only=False) == old[section]["path"]
    except ValueError:  # no longer in the cache
        return True


def _load(arguments: Sequence[str]) -> Config | None:
    """The configuration of these arguments; None if they are no longer valid."""
    try:
        reading = read(arguments)
    except ConfigError:
        return None
    return None if reading.problems else reading.config


def _stored(folder: Path) -> Config | None:
    try:
        return stored_config(folder)
    except ConfigError:  # reported where the run folder is checked
        return None


def run_folder(reading: LoadedConfig) -> Path:
    """The run folder of these arguments, even if they yield no valid configuration."""
    if reading.config is not None and ("run_dir",) not in reading.unread:
        return Path(reading.config.run_dir).absolute()
    data = reading.composition.data
    return Path(str(data.get("run_dir") or f"runs/{data.get('run_name')}")).absolute()


def _is(folder: Path, stored: Any) -> bool:
    return isinstance(stored, str) and Path(stored).absolute() == folder


def _settings(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if _key(word) not in OF_THE_LAUNCH]


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def described(ignored: Sequence[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the user about values that files now set differently, which this run ignores."""
    if not ignored:
        return
    yield f"note: changed in files since this run began, and ignored: {'; '.join(ignored)}"
    may_change = (*MAY_CHANGE, *division_keys(config))
    free = [key for line in ignored if is_below(key := line.partition(": ")[0], may_change)]
    if free:
        yield f"      {', '.join(free)} may change in a run: to change it, give it on the command line"
    if len(free) < len(ignored):
        yield "      another run_name or resume=fresh starts a run with the current files"
