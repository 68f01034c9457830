"""Which teacher judges which domain: teacher.path for all, or the folders of teacher.paths."""

from __future__ import annotations

import os

from hpcrl.config.teacher import TeacherConfig
from hpcrl.spec.problems import Path

DEFAULT = "default"
PATH, PATHS = ("teacher", "path"), ("teacher", "paths")


def teacher_folders(teacher: TeacherConfig) -> dict[Path, str]:
    """Key -> folder of every teacher, as given; a folder may have several keys. Empty with another source."""
    if teacher.source != "folder":  # a recipe may name folders that the command line replaces
        return {}
    if teacher.path is not None:
        return {PATH: teacher.path}
    return {(*PATHS, domain): folder for domain, folder in teacher.paths.items()}


def keys_of_teachers(teacher: TeacherConfig) -> dict[str, list[Path]]:
    """Folder -> its keys, for all different folders; a teacher's number is its index. Empty if none is given."""
    found: dict[str, tuple[str, list[Path]]] = {}
    for key, folder in teacher_folders(teacher).items():
        found.setdefault(os.path.realpath(folder), (folder, []))[1].append(key)
    return dict(found.values())


def teachers(teacher: TeacherConfig) -> list[str]:
    """The different folders, in the order of their numbers."""
    return list(keys_of_teachers(teacher))


def teacher_of(teacher: TeacherConfig, domain: str) -> int | None:
    """The number of the teacher that judges a domain's rows; None: none does."""
    if teacher.path is not None or not teacher_folders(teacher):
        return 0
    key = (*PATHS, domain if domain in teacher.paths else DEFAULT)
    return next((number for number, keys in enumerate(keys_of_teachers(teacher).values()) if key in keys), None)
