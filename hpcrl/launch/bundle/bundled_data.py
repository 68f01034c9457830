"""The files of data.train, data.val and imitation.data, with the images of their rows, and their places in a bundle."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.data import READERS, parse_row, read_splits
from hpcrl.data.places import find_rows
from hpcrl.data.tasks import is_generated
from hpcrl.launch.bundle.layout import DATA, ConfigKey, put, texts
from hpcrl.launch.data_summary import find_vision
from hpcrl.spec.benchmarks import BENCHMARKS, benchmark_name

STATES = ("state.json", "dataset_info.json")
"""Files of datasets.save_to_disk besides the rows."""


@dataclass
class BundledData:
    """`files` maps paths in the bundle to files; `paths` are the places of values that are paths in the bundle."""

    files: dict[str, Path] = field(default_factory=dict)
    paths: list[ConfigKey] = field(default_factory=list)
    _roots: dict[Path, str] = field(default_factory=dict)

    def add(self, data: dict[str, Any], key: ConfigKey) -> None:
        """Add the files of the sources at `key` of a configuration, whose values become paths in the bundle. ValueError
        names the key of a source that cannot be read."""
        given: Any = data
        for part in key:
            given = given[part]
        if given is None:
            return
        if isinstance(given, str) and not is_generated(given) and benchmark_name(given):
            given = [given]  # needs options
            put(data, key, given)
        for at, source in [(key, given)] if isinstance(given, str) else [((*key, n), s) for n, s in enumerate(given)]:
            try:
                self._add(data, at, source)
            except ValueError as error:
                raise ValueError(f"{'.'.join(map(str, key))}: {error}") from error

    def _add(self, data: dict[str, Any], at: ConfigKey, source: str | dict[str, Any]) -> None:
        own: dict[str, Any] = source if isinstance(source, dict) else {"path": source}
        path = str(own["path"])
        if is_generated(path):
            return
        if name := benchmark_name(path):
            options = dict(own.get("options") or {})
            file = str(options.get("file") or BENCHMARKS[name].file)
            options["file"] = self._add_files(file)
            put(data, at, own | {"options": options})
            self.paths.append((*at, "options", "file"))
            return
        where = (*at, "path") if isinstance(source, dict) else at
        put(data, where, self._add_files(path))
        self.paths.append(where)

    def _add_files(self, given: str) -> str:
        """Add a source's files; returns the path in the bundle by which the source is found."""
        found = find_rows(given)
        if isinstance(found, Path):
            folder = self._folder_of(found.parent)
            self.files[f"{folder}/{found.name}"] = found
            return f"{folder}/{found.name}"
        root, rest = _root_of(given, found)
        folder = self._folder_of(root)
        states = [path.with_name(name) for path in found[:1] for name in STATES]
        for path in (*found, *(state for state in states if state.is_file())):
            self.files[f"{folder}/{path.relative_to(root).as_posix()}"] = path
        return f"{folder}/{rest}" if rest else folder

    def _folder_of(self, root: Path) -> str:
        return self._roots.setdefault(root.absolute(), f"{DATA}/{len(self._roots)}")

    def add_images(self, config: Config) -> None:
        """Add the image files that rows name. ValueError for an image that a bundle cannot hold at its place."""
        if find_vision(config) is None:
            return
        read = READERS[config.row_kind]
        rows, _ = read_splits(
            config.data, config.seed, read_train=read, read_val=read if config.validates_rows else parse_row
        )
        for found in rows.values():
            start = 0
            for table in found.tables:
                indices = range(len(table)) if table.fixed_domain is None else range(0)
                for index in (index for index in indices if start + index not in found.unusable):
                    images = [image.path for image in found.row(start + index).images if image.content is None]
                    written = {text.removeprefix("file://") for _, text in texts(table.row(index))} if images else set()
                    for image in images:
                        self._add_image(image, found.where(start + index), str(image) in written)
                start += len(table)

    def _add_image(self, image: Path, where: str, absolute: bool) -> None:
        inside = ((root, folder) for root, folder in self._roots.items() if image.absolute().is_relative_to(root))
        root, folder = next(inside, (None, ""))
        if root is None or absolute or ".." in image.absolute().relative_to(root).parts:
            why = "is given by its full path" if absolute else "is outside the folder of the rows"
            raise ValueError(
                f"{where}: the image {image} {why}; give a path relative to the file of the rows, inside it"
            )
        self.files[f"{folder}/{image.absolute().relative_to(root).as_posix()}"] = image


def _root_of(given: str, found: list[Path]) -> tuple[Path, str]:
    """(folder that holds all files of a source, the rest of the source's path)."""
    if not glob.has_magic(given):  # a folder
        folder = Path(given).expanduser()
        return (folder if folder.is_dir() else _common(found)), ""
    before = list(_before_magic(Path(given).expanduser()))
    root, rest = Path(*before), "/".join(Path(given).expanduser().parts[len(before) :])
    if all(path.is_relative_to(root) for path in found):
        return root, rest
    snapshot = next(at for at in found[0].parents if at.parent.name == "snapshots")  # ORG/NAME/PATTERN of the hub
    return snapshot, "/".join(Path(given).parts[2:])


def _before_magic(path: Path) -> Iterator[str]:
    for part in path.parts:
        if glob.has_magic(part):
            return
        yield part


def _common(found: list[Path]) -> Path:
    first = found[0].parent
    return next(at for at in (first, *first.parents) if all(path.is_relative_to(at) for path in found))
