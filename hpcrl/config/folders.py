"""The folders of groups: their list, their contents, and their files' names in messages."""

from __future__ import annotations

import functools
import os
from pathlib import Path as FilePath
from typing import Any

from hpcrl.spec.problems import ConfigError

FOLDERS = "HPCRL_CONF"
"""Environment variable: folders of groups, separated by `:`."""


def conf_dir() -> FilePath:
    """The folder of the Hydra groups: next to the package in a checkout, inside an installed package."""
    package = FilePath(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def conf_dirs() -> list[FilePath]:
    """The folders of groups, of which later ones override earlier ones: the built-in folder, HPCRL_CONF's folders, and
    ./conf if it has groups of these names. Folders that do not exist are omitted."""
    built_in = conf_dir()
    folders = [built_in]
    for folder in (*named_folders(), FilePath("conf").absolute()):
        if _has_groups(folder) and not any(folder.samefile(other) for other in folders):
            folders.append(folder)
    return folders


def named_folders() -> list[FilePath]:
    """The folders that HPCRL_CONF names, whether or not they exist."""
    return [FilePath(path).expanduser().absolute() for path in os.environ.get(FOLDERS, "").split(":") if path]


def check_folders() -> None:
    """ConfigError if HPCRL_CONF names something that is not a folder of groups."""
    known = ", ".join(_groups_of(conf_dir()))
    lines = [
        f"{FOLDERS}: {folder} " + (f"has none of the folders {known}" if folder.exists() else "does not exist")
        for folder in named_folders()
        if not _has_groups(folder)
    ]
    if lines:
        raise ConfigError(lines)


def _has_groups(folder: FilePath) -> bool:
    try:
        return any((folder / group).is_dir() for group in _groups_of(conf_dir()))
    except OSError:  # no permission
        return False


def _groups_of(folder: FilePath) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def groups() -> dict[str, list[str]]:
    """Every group and its options, from all folders."""
    folders = conf_dirs()
    return {
        group: sorted({option for folder in folders for option in options_of(folder, group)})
        for group in _groups_of(folders[0])
    }


def options_of(folder: FilePath, group: str) -> list[str]:
    """The options of a group that are in this folder."""
    return sorted(file.stem for file in (folder / group).glob("*.yaml"))


def conf_file(name: str) -> FilePath:
    """The file `GROUP/OPTION.yaml` in the last folder that has it, or in the built-in folder if none has it."""
    folders = conf_dirs()
    return next((path for folder in reversed(folders) if (path := folder / name).is_file()), folders[0] / name)


def shown(path: FilePath) -> str:
    """The name of a groups' file in messages: from conf/ for built-in files, from ./ below the current folder."""
    if path.is_relative_to(conf_dir()):
        return f"conf/{path.relative_to(conf_dir())}"
    return f"./{path.relative_to(FilePath.cwd())}" if path.is_relative_to(FilePath.cwd()) else str(path)


def read_yaml(name: str) -> dict[str, Any]:
    """Content of a group's file, empty if it is missing or unreadable (Hydra has reported it); callers must not change
    it."""
    path = conf_file(name)
    return _read_yaml(path, stamp(path))


def stamp(path: FilePath) -> tuple[int, int]:
    """A value that changes with the file, for a process that must read it again after an edit."""
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
