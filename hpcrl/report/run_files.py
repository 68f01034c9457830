"""Reads a run folder for the report: also one that is being written, is damaged, or belongs to another user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hpcrl.cluster.accounting import Accounting
from hpcrl.config import Config, ConfigError, parse
from hpcrl.config.renamed_keys import with_new_names
from hpcrl.metrics.log import METRICS, read_metrics
from hpcrl.metrics.metric_table import MetricsReader, MetricTable
from hpcrl.run_folder import CONFIG, FACTS, FINISHED, OUTCOME, OWNERS, PLAN, SUBMITTED, VERDICT, world_folder
from hpcrl.run_folder.user_errors import ERRORS, read_errors
from hpcrl.system.files import open_regular

MARKS = (CONFIG, SUBMITTED, PLAN, OWNERS)
"""A folder with one of these is a run folder; the last three exist before the first attempt has begun."""
NEWEST_BYTES = 1 << 20
NOT_ASKED = Accounting()


@dataclass(frozen=True)
class RunAttempt:
    """One attempt of a run; an empty object for each file that is missing or cannot be read.

    Args:
        facts: Its entry in facts.json: start, host, versions, commit, changed keys.
        owner: owners/NNNN: the job or process, and how the attempt ended.
        verdict: Exit code and message of a failed attempt, from world/.
        outcome: Exit code of the attempt, from world/.
    """

    number: int
    facts: dict[str, Any] = field(default_factory=dict)
    owner: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)


class RunFiles:
    """A run's folder, read on access. Missing files read as empty; files that exist and cannot be read are also listed
    in `problems`. Nothing is written.

    Args:
        path: The run folder. ValueError if it is none.
        state: The run's state in words, if the caller knows it.
        accounting: What Slurm's accounting has of its jobs, if the caller has asked.
        inside: With it, files that a symbolic link leads out of this folder are not read, and are listed in `problems`.
        metrics: Reader of its metrics.jsonl, which has perhaps read a part of it before.
    """

    def __init__(
        self,
        path: Path,
        state: str = "",
        accounting: Accounting = NOT_ASKED,
        inside: Path | None = None,
        metrics: MetricsReader | None = None,
    ):
        self.path, self.state, self.accounting = path, state, accounting
        self._metrics = metrics or MetricsReader(path / METRICS)
        self._inside = None if inside is None else inside.resolve()
        self.problems: list[str] = []
        if problem := not_a_run(path):
            raise ValueError(problem)

    @property
    def name(self) -> str:
        """The run's name: the name of its folder."""
        return self.path.resolve().name

    @property
    def stays_inside(self) -> bool:
        """Whether files outside of a folder may not be read."""
        return self._inside is not None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml with the keys of this version, unchecked; else the configuration from which a submitted job will
        start."""
        for name in (CONFIG, "slurm/submitted.yaml"):
            if text := self.text(name):
                try:
                    found = yaml.safe_load(text)
                except (yaml.YAMLError, RecursionError) as error:
                    self._cannot_read(name, " ".join(str(error).split()))
                    continue
                if isinstance(found, dict):
                    return with_new_names(found)
                self._cannot_read(name, "it contains no configuration")
        return {}

    def key(self, dotted: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key."""
        found: Any = self.config
        for part in dotted.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found

    @cached_property
    def checked(self) -> Config | None:
        """The configuration, checked; None if it cannot be checked here, as with another version's keys."""
        try:
            return parse(self.config) if self.config else None
        except ConfigError:
            return None

    @cached_property
    def attempts(self) -> list[RunAttempt]:
        """The attempts, in order."""
        facts = {}
        listed = self.json(FACTS).get("attempts")
        for place, entry in enumerate(listed if isinstance(listed, list) else [], 1):
            if isinstance(entry, dict):
                number = entry.get("attempt", place)
                facts[number if isinstance(number, int) else place] = entry
        owned = [int(path.name) for path in self.entries(OWNERS) if path.name.isdigit()]
        return [self._attempt(number, facts.get(number, {})) for number in sorted({*facts, *owned})]

    def _attempt(self, number: int, facts: dict[str, Any]) -> RunAttempt:
        world = world_folder(Path(), number)
        owner = self.json(f"{OWNERS}/{number:04d}")
        return RunAttempt(number, facts, owner, self.json(str(world / VERDICT)), self.json(str(world / OUTCOME)))

    @cached_property
    def metrics(self) -> MetricTable:
        """metrics.jsonl."""
        try:
            return self._metrics.read() if self.file(METRICS) is not None else MetricTable()
        except OSError as error:
            self._cannot_read(METRICS, error.strerror or str(error))
            return MetricTable()

    @cached_property
    def newest_rows(self) -> list[dict[str, Any]]:
        """The last rows of metrics.jsonl with this version's names: `step`, and a float or None per metric."""
        try:
            return read_metrics(self.path, NEWEST_BYTES) if self.file(METRICS) is not None else []
        except OSError as error:
            self._cannot_read(METRICS, error.strerror or str(error))
            return []

    @cached_property
    def finished(self) -> dict[str, Any]:
        """finished.json; empty while the run is not finished."""
        return self.json(FINISHED)

    @cached_property
    def user_errors(self) -> list[dict[str, Any]]:
        """The kinds of errors that each cost a sample, from errors.json, the most frequent first."""
        try:
            found = read_errors(self.path) if self.file(ERRORS) is not None else []
            return sorted(found, key=lambda kind: -kind["count"])
        except ConfigError as error:
            self._cannot_read(ERRORS, error.problems[0].partition("cannot be read: ")[2])
            return []

    def file(self, name: str) -> Path | None:
        """The path of a file or folder below the run folder, for a reader that needs a path, whether or not it exists;
        None if it may not be read (`inside`)."""
        path = self.path / name
        try:
            if self._inside is None or path.resolve().is_relative_to(self._inside):
                return path
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            self._cannot_read(name, str(error))
            return None
        self._cannot_read(name, f"it leads out of {self._inside}, which is not followed here")
        return None

    def text(self, name: str, max_bytes: int = 1 << 26) -> str:
        """A text file below the run folder; empty if it is missing or cannot be read. Longer files are cut."""
        if (path := self.file(name)) is None:
            return ""
        try:
            with open_regular(path) as file:
                return file.read(max_bytes).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            self._cannot_read(name, error.strerror or str(error))
            return ""

    def tail(self, name: str, max_bytes: int) -> str:
        """The end of a text file below the run folder, from the start of a line; empty as in text()."""
        if (path := self.file(name)) is None:
            return ""
        try:
            with open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - max_bytes, 0))
                found = file.read(max_bytes).decode(errors="replace")
                return found if size <= max_bytes else found.partition("\n")[2]
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            self._cannot_read(name, error.strerror or str(error))
            return ""

    def json(self, name: str) -> dict[str, Any]:
        """The object in a file below the run folder; empty if there is none."""
        text = self.text(name)
        if not text.strip():
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._cannot_read(name, str(error))
            return {}
        if not isinstance(found, dict):
            self._cannot_read(name, "it contains no object")
            return {}
        return found

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The objects in a file of JSON lines, read one by one. A last line that is being written is left out; other
        damaged lines are counted in `problems`."""
        if (path := self.file(name)) is None:
            return
        damaged = 0
        try:
            with open_regular(path) as file:
                for line in file:
                    try:
                        found = json.loads(line) if line.endswith(b"\n") else {}
                    except (ValueError, RecursionError):
                        found = None
                    if isinstance(found, dict):
                        if found:
                            yield found
                    else:
                        damaged += 1
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._cannot_read(name, error.strerror or str(error))
        if damaged:
            self._cannot_read(name, f"{damaged} damaged lines are left out")

    def entries(self, name: str) -> list[Path]:
        """Files and folders in a folder below the run folder, by name; none if it is missing or cannot be read."""
        if (folder := self.file(name)) is None:
            return []
        try:
            found = sorted(folder.iterdir())
            return [path for path in found if not path.is_symlink() or self.file(f"{name}/{path.name}") is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._cannot_read(name, error.strerror or str(error))
            return []

    def _cannot_read(self, name: str, why: str) -> None:
        problem = f"{name}: {why}"
        if problem not in self.problems:
            self.problems.append(problem)


def not_a_run(path: Path) -> str:
    """Why a path is no run folder, in one line; empty if it is one."""
    try:
        if not path.is_dir():
            return f"{path} is not a folder" if path.exists() else f"{path}: no such folder"
        if any((path / mark).exists() for mark in MARKS):
            return ""
        next(path.iterdir(), None)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return f"{path} is not a run folder: it has none of {', '.join(MARKS)}"
