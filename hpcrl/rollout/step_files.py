"""The files of a step's rollouts, read in parts: outcomes of prompts, and columns of single rows. Imports no torch.

docs/rollouts.md describes the schema; hpcrl/rollout/store.py writes the files, and reads whole steps.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from hpcrl.rollout.types import PromptOutcome
from hpcrl.system.files import open_regular

T = TypeVar("T")
SCHEMA_VERSIONS = {"rollouts": 2, "outcomes": 2}
"""Versions of written files. Version 1 can be read too; it lacks field descriptions and metrics of outcomes."""
OUTCOMES, OUTCOMES_UNTIL_0_6 = "outcomes.h5", "dispositions.h5"
ERRORS = (OSError, KeyError, ValueError, RuntimeError, TypeError)
"""What h5py raises for damaged files."""


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """How one prompt ended in a step; its samples' rewards and metrics (name -> value), if any, by member."""

    uid: int
    attempt: int
    outcome: PromptOutcome
    reason: str = ""
    domain: str = ""
    rewards: tuple[float, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()


def read_outcomes(folder: Path, with_metrics: bool = True) -> list[OutcomeRecord]:
    """The records in a step's folder, if it has any; metrics only on demand. ValueError names a damaged file."""

    def read(file: h5py.File) -> list[OutcomeRecord]:
        codes = own(file, "outcome" if "outcome" in file else "disposition")
        kinds = [PromptOutcome(name) for name in codes.attrs["meaning"].split(",")]
        values, ends = own(file, "rewards/values")[()].tolist(), own(file, "rewards/offsets")[()].tolist()
        has_metrics = with_metrics and "metrics" in file
        metrics = stored_texts(file, "metrics") if has_metrics else [""] * len(own(file, "uid"))
        columns = zip(
            own(file, "uid")[()].tolist(),
            own(file, "attempt")[()].tolist(),
            (kinds[code] for code in codes[()].tolist()),
            stored_texts(file, "reason"),
            stored_texts(file, "domain"),
            (tuple(values[start:end]) for start, end in pairwise(ends)),
            (tuple(json.loads(text)) if text else () for text in metrics),
            strict=True,
        )
        return [OutcomeRecord(*column) for column in columns]

    path = next((path for name in (OUTCOMES, OUTCOMES_UNTIL_0_6) if (path := folder / name).exists()), None)
    return [] if path is None else reading(path, "outcomes", read)


def stored_texts(file: h5py.File, name: str) -> list[str]:
    """The strings of a field of texts."""
    data, offsets = own(file, f"{name}/utf8")[()].tobytes(), own(file, f"{name}/offsets")[()].tolist()
    return [data[start:end].decode() for start, end in pairwise(offsets)]


def own(file: h5py.File, name: str) -> h5py.Dataset:
    """A dataset of the file. KeyError if there is none; ValueError if the file only refers to it and its bytes are in
    another file, since hpcrl writes none of these, and the file may be of another user."""
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise KeyError(f"{name} is no dataset")
    if found.external or found.is_virtual or found.file.id != file.id:
        raise ValueError(f"{name} is in another file")
    return found


def reading(path: Path, kind: str, read: Callable[[h5py.File], T]) -> T:
    """The result of `read` on an open file; ValueError names a file that is damaged or has another schema."""
    try:
        with _opened(path) as file:
            check_schema(file, path, kind)
            return read(file)
    except ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _opened(path: Path) -> h5py.File:
    open_regular(path).close()
    return h5py.File(path, "r", locking=False)


def check_schema(file: h5py.File, path: Path, kind: str) -> None:
    """ValueError if the file has another schema."""
    schema, version = file.attrs.get("schema"), file.attrs.get("schema_version")
    newest = SCHEMA_VERSIONS[kind]
    known = (f"hpcrl.{kind}", f"hpcrl.{path.stem}")  # dispositions.h5 has a schema of its name
    if schema not in known or version not in range(1, newest + 1):
        raise ValueError(f"schema {schema} {version}, this version reads hpcrl.{kind} 1 to {newest}")


class StepRows:
    """Rows of all rank files of a step, sorted by sample id. Only what is asked for is read. ValueError names a damaged
    file."""

    def __init__(self, files: Mapping[Path, h5py.File]):
        self._paths, self._files = list(files), list(files.values())
        self._datasets: dict[tuple[int, str], h5py.Dataset | None] = {}  # an open dataset keeps its decoded chunks
        self._starts: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        for number in range(len(self._files)):
            self._starts.append(self._all(number, "cu_seqlens"))
            ids.append(self._all(number, "sample_ids"))
        order = np.argsort(np.concatenate(ids), kind="stable")
        numbers = np.repeat(np.arange(len(ids)), [len(part) for part in ids])
        places = np.concatenate([np.arange(len(part)) for part in ids])
        self._order, self._places = order, list(zip(numbers[order].tolist(), places[order].tolist(), strict=True))
        stored = self._files[0]["facts"].attrs if "facts" in self._files[0] else {}
        self.facts: dict[str, Any] = {
            name: value.item() if hasattr(value, "item") else value for name, value in stored.items()
        }

    def __len__(self) -> int:
        return len(self._places)

    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens with prompt."""
        joined = np.concatenate([np.diff(starts) for starts in self._starts])
        return joined[self._order]

    def column(self, name: str) -> np.ndarray | None:
        """A row-level field of all rows; None if the step lacks it."""
        filled = [number for number in range(len(self._files)) if len(self._starts[number]) > 1]
        if not filled or any(self._dataset(number, name) is None for number in filled):
            return None
        return np.concatenate([self._all(number, name) for number in filled])[self._order]

    def tokens(self, row: int, name: str) -> np.ndarray | None:
        """A token-level field of one row; None if the step lacks it."""
        number, place = self._places[row]
        start, end = self._starts[number][place : place + 2].tolist()
        return self._slice(number, name, start, end)

    def ragged(self, row: int, name: str) -> np.ndarray | None:
        """A ragged field of one row; None if the step lacks it."""
        number, place = self._places[row]
        if self._dataset(number, f"{name}_counts") is None:
            return None
        counts = self._all(number, f"{name}_counts")
        start = int(counts[:place].sum())
        return self._slice(number, name, start, start + int(counts[place]))

    def text(self, row: int, name: str) -> str:
        """A text of one row, with invalid UTF-8 replaced; empty if the step lacks the field."""
        number, place = self._places[row]
        if self._dataset(number, f"texts/{name}/offsets") is None:
            return ""
        ends = self._slice(number, f"texts/{name}/offsets", place, place + 2)
        found = self._slice(number, f"texts/{name}/utf8", *ends.tolist()) if ends is not None else None
        return "" if found is None else found.tobytes().decode(errors="replace")

    def _dataset(self, number: int, name: str) -> h5py.Dataset | None:
        if (number, name) not in self._datasets:
            try:
                self._datasets[number, name] = own(self._files[number], name)
            except KeyError:
                self._datasets[number, name] = None
            except ValueError as error:
                raise ValueError(f"{self._paths[number]} cannot be read: {error}") from error
        return self._datasets[number, name]

    def _all(self, number: int, name: str) -> np.ndarray:
        dataset = self._dataset(number, name)
        if dataset is None:
            raise ValueError(f"{self._paths[number]} cannot be read: it has no {name}")
        return self._slice(number, name, 0, len(dataset))

    def _slice(self, number: int, name: str, start: int, end: int) -> Any:
        dataset = self._dataset(number, name)
        try:
            return None if dataset is None else dataset[start:end]
        except ERRORS as error:
            raise ValueError(f"{self._paths[number]} cannot be read: {name}: {error}") from error


class IncompleteStepError(ValueError):
    """A step whose ranks have not all written their files, or whose files were removed."""


@contextlib.contextmanager
def open_step(folder: Path, paths: Sequence[Path] | None = None) -> Iterator[StepRows]:
    """The rows of a step's folder while its files are open; `paths` are those of its rank files, if the caller knows
    them. IncompleteStepError if some are missing, ValueError if one is damaged."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, h5py.File] = {}
        for path in sorted(folder.glob("rank_*.h5")) if paths is None else paths:
            try:
                files[path] = stack.enter_context(_opened(path))
                check_schema(files[path], path, "rollouts")
            except ERRORS as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
        expected = next((int(file.attrs.get("num_ranks", 0)) for file in files.values()), 0)
        if not files or len(files) < expected:
            raise IncompleteStepError(f"{folder} has rollouts of {len(files)} ranks, of {expected or 'all'}")
        yield StepRows(files)
