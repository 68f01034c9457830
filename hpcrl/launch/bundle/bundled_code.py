"""A user's code that a configuration names, with the modules of the user that it imports. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hpcrl.launch.bundle.layout import CODE, MODULES

SKIPPED = ("__pycache__",)


class BundledCode:
    """`files` maps paths in the bundle to files. Modules in the folder of a file.py stay beside it, since hpcrl puts
    this folder on the search path; other modules that are not installed are in MODULES."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self._folders: dict[Path, str] = {}
        self._modules: set[str] = set()

    def add_file(self, file: Path) -> str:
        """The path in the bundle of a file.py, which is added with what it imports."""
        file = file.resolve()
        folder = self._folders.setdefault(file.parent, f"{CODE}/{len(self._folders)}")
        self._add(file, file.parent, folder)
        return f"{folder}/{file.name}"

    def add_module(self, name: str) -> bool:
        """Add the top-level module or package of a dotted name. False if it is installed, or cannot be found."""
        top = name.partition(".")[0]
        if top in self._modules:
            return True
        place = _place_of(top)
        if place is None:
            return False
        self._modules.add(top)
        for file in _files_of(place):
            self._add(file, place.parent, MODULES)
        return True

    def _add(self, file: Path, base: Path, folder: str) -> None:
        path = f"{folder}/{file.relative_to(base).as_posix()}"
        if path in self.files:
            return
        self.files[path] = file
        if file.suffix != ".py":
            return
        for top in _imported(file):
            beside = [base / top, base / f"{top}.py"]
            place = next((each for each in beside if each.is_file() or any(each.glob("*.py"))), None)
            if place is None:
                self.add_module(top)
            else:
                for each in _files_of(place):
                    self._add(each, base, folder)


def _imported(file: Path) -> Iterator[str]:
    """The top-level names that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # a package may hold files for other versions; what a run imports was imported by the checks
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _place_of(top: str) -> Path | None:
    """The file or folder of a top-level module that is not installed."""
    if top == "hpcrl" or top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    origin = places[0] if places else spec.origin
    if origin is None or not (place := Path(origin).resolve()).exists() or _is_installed(place):
        return None
    return place


def _is_installed(place: Path) -> bool:
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")}
    known = any(place.is_relative_to(Path(folder).resolve()) for folder in folders if folder)
    return known or bool({"site-packages", "dist-packages"} & set(place.parts))


def _files_of(place: Path) -> list[Path]:
    """The module's file, or all files of a package's folder, without hidden and compiled ones."""
    if place.is_file():
        return [place]
    inner = (file for file in sorted(place.rglob("*")) if file.is_file())
    return [
        file
        for file in inner
        if not any(part.startswith(".") or part in SKIPPED for part in file.relative_to(place).parts)
    ]
