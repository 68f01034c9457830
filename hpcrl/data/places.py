"""Finds the files of a source: a file, a pattern, a folder of files, a folder of datasets.save_to_disk, or a hub data
set in the local Hugging Face cache. Downloads nothing."""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path
from typing import Any

from hpcrl.config import DataSource
from hpcrl.data.benchmarks import BenchmarkTable
from hpcrl.data.files import FORMATS, ShardedTable, Table, TaskTable, ending, open_file
from hpcrl.data.tasks import Split, is_generated, make_task
from hpcrl.spec.benchmarks import BENCHMARKS, BenchmarkOptions, benchmark_name
from hpcrl.spec.options import read_options

HUB_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:/(.+))?")
"""A hub data set, and a file, folder or pattern in it."""
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that `datasets` writes in addition to the rows."""
NUMBER = re.compile(r"(?<![A-Za-z0-9])(\d+|of|[0-9a-f]*\d[0-9a-f]{3,}|c000)(?![A-Za-z0-9])")
"""The parts in which the names of files that belong together differ: numbers and digests."""
MAX_SEEN = 50_000
MAX_NAMED = 6


def open_table(source: DataSource, seed: int, split: Split) -> Table:
    """The rows of a source. ValueError describes an error of the source as a whole."""
    if is_generated(source.path):
        task = make_task(source.path, source.options, source.size, seed, split)
        task.row(0)  # errors in the options appear in the first row
        return TaskTable(task, source.path, seed, source.options)
    if benchmark := benchmark_name(source.path):
        return _open_benchmark(source, benchmark, split)
    for key in ("size", "options"):
        if getattr(source, key):
            raise ValueError(f"{source.path}: {key} is for generated sources (task:, reasoning_gym:) only")
    return _open_files(source.path)


def _open_files(path: str) -> Table:
    found = find_rows(path)
    tables = [open_file(path) for path in ([found] if isinstance(found, Path) else found)]
    table = tables[0] if len(tables) == 1 else ShardedTable(path, tables)
    if not len(table):
        raise ValueError(f"{path}: holds no rows")
    return table


def _open_benchmark(source: DataSource, name: str, split: Split) -> Table:
    """The rows of a benchmark. ValueError for training on its published file, and how to get it if it is not there."""
    if source.size is not None:
        raise ValueError(
            f"{source.path}: size={source.size} is for generated sources; use eval.sets.{name}.num_prompts"
        )
    try:
        options = read_options(BenchmarkOptions, source.options)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    published = BENCHMARKS[name].file
    if split == "train" and options.file is None:
        raise ValueError(
            f"{source.path}: the test set, which is for data.val; set options.file to train on another file"
        )
    try:
        table = _open_files(options.file or published)
    except NothingThere as error:
        if options.file is not None:
            raise ValueError(f"{source.path}: {error}") from error
        raise ValueError(
            f"{source.path}: {published} is not in the local Hugging Face cache; on a machine with network access, "
            f"run: python -m hpcrl prefetch datasets/{published} (or set options.file to a file of this form)"
        ) from error
    return BenchmarkTable(name, options, table)


def is_missing(source: DataSource) -> bool:
    """Whether the files of a source, unless it is generated, do not exist."""
    if is_generated(source.path):
        return False
    try:
        name = benchmark_name(source.path)
        find_rows(str(source.options.get("file") or BENCHMARKS[name].file) if name else source.path)
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return False


class NothingThere(FileNotFoundError, ValueError):
    """A source that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])


def find_rows(given: str) -> Path | list[Path]:
    """A source's file, or its files in order. ValueError if there are none or the choice is ambiguous; NothingThere if
    the source does not exist."""
    path = Path(given).expanduser()
    try:
        there = path.exists()
    except OSError as error:
        raise ValueError(f"{given}: {error.strerror}") from error
    if there and path.is_dir():
        return _of_folder(path, given)
    if there:
        if not path.is_file():
            raise ValueError(f"{given}: not a regular file")
        return path
    if glob.has_magic(given):
        if files := _matching(path):
            return files
        if (cached := _cached(given)) is None:
            raise NothingThere(f"{given}: no such file")
    elif (cached := _cached(given)) is None:
        raise NothingThere(f"{given}: no such file")
    folder, name, inside = cached
    place = folder / inside if inside else folder
    if place.is_dir():
        return _of_folder(place, given)
    if place.is_file():
        return place
    if files := _matching(place):
        return files
    raise NothingThere(f"{given}: no such file; the cached data set has {_shown(_families(folder), name)}")


def _matching(pattern: Path) -> list[Path]:
    """The files of a pattern, in order."""
    return sorted(path for path in map(Path, glob.glob(str(pattern), recursive=True)) if path.is_file())


def _cached(given: str) -> tuple[Path, str, str] | None:
    """(snapshot, name, rest of the path) of a hub name in the local cache; None if it is not cached or no such name."""
    name = HUB_NAME.fullmatch(given)
    if name is None:
        return None
    from huggingface_hub import snapshot_download  # takes .2 s to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name[1], repo_type="dataset", local_files_only=True)), name[1], name[2] or ""
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _of_folder(folder: Path, given: str) -> list[Path]:
    """A folder's row files: save_to_disk's files in its order, else all files of one kind and split."""
    if (state := folder / "state.json").is_file():
        return _saved_to_disk(state, given)
    if (splits := folder / "dataset_dict.json").is_file():
        names = [str(name) for name in _read_json(splits).get("splits", [])]
        ways = " or ".join(f"{given.rstrip('/')}/{name}" for name in names)
        raise ValueError(f"{given}: holds the splits {', '.join(names)}; give one, {ways}")
    families = _families(folder)
    if not families:
        raise ValueError(f"{given}: a folder without files of rows ({', '.join(FORMATS)})")
    if len(families) > 1:
        raise ValueError(f"{given}: holds several data sets; give one, {_shown(families, given)}")
    return next(iter(families.values()))


def _saved_to_disk(state: Path, given: str) -> list[Path]:
    try:
        names = [entry["filename"] for entry in _read_json(state)["_data_files"]]
        return [state.parent / name for name in names]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{given}: {state.name} is not from datasets.save_to_disk") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _families(folder: Path) -> dict[str, list[Path]]:
    """Pattern -> the files of a folder that belong together: their names differ only in numbers and digests."""
    found: dict[str, list[Path]] = {}
    num_seen = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        num_seen += len(names)
        if num_seen > MAX_SEEN:
            raise ValueError(f"{folder}: holds more than {MAX_SEEN} files; give a pattern, such as {folder}/*.parquet")
        for path in (Path(place, name) for name in sorted(names)):
            if path.name.startswith((".", "_")) or ending(path) not in FORMATS or path.name in NOT_ROWS:
                continue
            pattern = re.sub(r"\*([-_.]\*)+", "*", NUMBER.sub("*", path.name))
            found.setdefault(str(path.relative_to(folder).with_name(pattern)), []).append(path)
    return found


def _shown(families: dict[str, list[Path]], given: str) -> str:
    """The patterns of families, in the form in which a user gives one."""
    shown = [f"{given.rstrip('/')}/{pattern}" for pattern in families]
    return " or ".join(shown[:MAX_NAMED]) + (f" and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else "")
