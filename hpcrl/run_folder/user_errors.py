"""Errors of rewards, environments and generators that each cost a sample, not the run: the first of each kind is
printed at once, and all are counted in the run folder's errors.json."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

from hpcrl.config import ConfigError
from hpcrl.run_folder.records import damaged, now, read_record
from hpcrl.system.files import write_durably

logger = logging.getLogger(__name__)

ERRORS = "errors.json"
ENTRY = {"source": str, "domain": str, "error": str, "count": int, "first": str, "last": str}
MAX_CHARS = 600
"""Maximum characters of an error's text."""
MAX_KINDS = 50
"""Maximum kinds of errors; further kinds are counted together."""
PRINTED_KINDS = 10
"""Maximum kinds of errors of which the first error is printed."""
FIRST_ALIKE = 32
"""So many samples with errors of one kind, before any without, are enough to call a run hopeless."""
OTHERS = "errors of other kinds"
WRITE_S = 5.0
"""Seconds between two writes, which wait for the disk; the first error of a kind is written at once."""
PLACE = re.compile(r" \([^()]+:\d+\)$")
"""File and line at the end of an error's text, from hpcrl.rewards.serving.guarded.describe."""


class UserErrors:
    """A run's error counts, continued from its earlier attempts. Errors of one kind differ only in numbers: they come
    from one line of code, or have no line."""

    def __init__(self, run_dir: Path | None):
        """Without `run_dir`, the counts are kept in memory."""
        self._path = None if run_dir is None else run_dir / ERRORS
        self._kinds: dict[tuple[str, ...], dict[str, Any]] = {}
        try:
            self._kinds |= {_kind(known): known for known in (() if run_dir is None else read_errors(run_dir))}
        except ConfigError as problem:
            logger.warning("%s; error counts start again from 0", problem)
        self._printed: set[tuple[str, ...]] = set()  # in this attempt
        self._total = 0  # in this attempt
        self._alike: tuple[str, ...] | None = None  # the kind of all errors, until the first sample without an error
        self._undecided = True
        self._written, self._changed = -WRITE_S, False

    def succeeded(self) -> None:
        """Note a sample without an error."""
        self._undecided = False

    def hopeless(self) -> str:
        """The error that the attempt's first samples have all had, with its number; empty if they had not."""
        if not self._undecided or self._alike is None or self._total < FIRST_ALIKE:
            return ""
        entry = self._kinds[self._alike]
        where = f"the {entry['source']} of domain {entry['domain']}"
        return f"{entry['error']}: {where} failed so for each of the first {self._total} samples"

    def report(self, source: str, domain: str, error: str) -> None:
        """Count an error of this source (environment, reward or generator)."""
        error = " ".join(error[:MAX_CHARS].split())
        error = "".join(sign if sign.isprintable() else "?" for sign in error)
        entry: dict[str, Any] = {"source": source, "domain": domain, "error": error, "count": 0, "first": now()}
        kind = _kind(entry)
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            entry |= {"source": "", "domain": "", "error": OTHERS}
            kind = _kind(entry)
        self._undecided = self._undecided and self._alike in (None, kind)
        self._alike = kind
        known = self._kinds.setdefault(kind, entry)
        known["count"] += 1
        known["last"] = now()
        self._total, self._changed = self._total + 1, True
        if kind not in self._printed and len(self._printed) < PRINTED_KINDS:
            self._printed.add(kind)
            logger.warning("%s of domain %s: %s; further ones are counted in %s", source, domain, error, ERRORS)
        elif str(self._total).strip("0") == "1":  # 10, 100, ...
            text = "%d samples had errors so far, the last: %s of domain %s: %s"
            logger.warning(text, self._total, source, domain, error)
        if known["count"] == 1 or time.monotonic() >= self._written + WRITE_S:
            self.write()

    def write(self) -> None:
        """Write errors.json if it has changed. A full disk costs the file, not the run."""
        if self._path is None or not self._changed:
            return
        self._written, self._changed = time.monotonic(), False
        try:
            write_durably(self._path, json.dumps({"errors": [*self._kinds.values()]}, indent=1).encode())
        except OSError as problem:
            logger.warning("%s cannot be written: %s", self._path, problem)


def read_errors(run_dir: Path) -> list[dict[str, Any]]:
    """The kinds of errors of a run, in order of their first occurrence: source, domain, error, count, first, last.
    ConfigError for a damaged file."""
    found: list[dict[str, Any]] = read_record(run_dir / ERRORS, errors=list).get("errors", [])
    for entry in found:
        if not (isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in ENTRY.items())):
            raise damaged(run_dir / ERRORS, f"{str(entry)[:200]} is not a kind of error")
    return found


def _kind(entry: dict[str, Any]) -> tuple[str, ...]:
    error = str(entry["error"])
    place = PLACE.search(error)
    text = error[: place.start()] if place else error
    return entry["source"], entry["domain"], re.sub(r"\d+", "0", text), place[0] if place else ""
