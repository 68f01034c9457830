"""What the first half hour has taught: report.json, and report.txt, a page that takes a minute to read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten

from hpcrl.system.files import write_durably
from tests.bench.gpu_first.figures import Figure
from tests.bench.gpu_first.running import Outcome
from tests.bench.gpu_first.stacks import shortened
from tests.bench.gpu_first.steps import Setting, Step

VERSIONS = "versions"


class Report:
    """The outcomes so far. Those of earlier starts in the same folder stay until the step has run again. ValueError if
    they are of another device or size; OSError if the folder cannot be made."""

    def __init__(self, folder: Path, setting: Setting, steps: Mapping[str, Step]):
        self.folder, self._steps, self._setting = folder, steps, dataclasses.asdict(setting)
        folder.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, Outcome] = {}
        # None, or one that other code has written.
        with contextlib.suppress(KeyError, TypeError, json.JSONDecodeError, FileNotFoundError):
            earlier = json.loads(self._json.read_text())
            self.outcomes = {words["name"]: Outcome.of(words) for words in earlier["steps"] if words["name"] in steps}
            if any(earlier["setting"][name] != self._setting[name] for name in ("device", "tiny")):
                size = " --tiny" * earlier["setting"]["tiny"]
                raise ValueError(f"{folder} has the report of --device {earlier['setting']['device']}{size}")

    @property
    def _json(self) -> Path:
        return self.folder / "report.json"

    def add(self, outcome: Outcome) -> None:
        """Note an outcome and write both files: neither an interruption nor a step that is not run again loses one."""
        if outcome.status not in ("not run", "interrupted"):
            self.outcomes[outcome.name] = outcome
        self.outcomes.setdefault(outcome.name, outcome)
        ordered = [self.outcomes[name] for name in self._steps if name in self.outcomes]
        words = {"setting": self._setting, "steps": [dataclasses.asdict(outcome) for outcome in ordered]}
        write_durably(self._json, json.dumps(words, indent=1).encode())
        write_durably(self.folder / "report.txt", self.page(ordered).encode())

    def page(self, outcomes: Sequence[Outcome]) -> str:
        """Versions, a table of steps, all figures, then each failure with its stack."""
        good, size = sum(outcome.status == "ok" for outcome in outcomes), ", tiny" * self._setting["tiny"]
        lines = [f"hpcrl's first half hour on {self._setting['device']}{size}: {good} of {len(outcomes)} steps ok", ""]
        versions = [figure for outcome in outcomes if outcome.name == VERSIONS for figure in outcome.figures]
        lines += [f"{figure.what:<20}  {figure.note}" for figure in versions if figure.note]
        lines += ["", *columns([["step", "status", "seconds", "expected", "teaches"], *map(self._line, outcomes)])]
        rows = [_row(outcome.name, figure) for outcome in outcomes for figure in outcome.figures if _counts(figure)]
        lines += ["", *columns([["step", "figure", "value", "", "expected", "", "note"], *rows])]
        for outcome in outcomes:
            if outcome.error:
                lines += ["", f"== {outcome.name} {outcome.status}: {outcome.error}"]
            if outcome.status in ("failed", "hung"):
                lines += [f"   log {outcome.log}", *shortened(outcome.stacks)]
                lines += [f"   waits.txt: {line}" for line in outcome.table]
        return "\n".join(lines) + "\n"

    def _line(self, outcome: Outcome) -> list[str]:
        about = (outcome.status, f"{outcome.seconds:.0f}", tally(outcome), self._steps[outcome.name].teaches)
        return [outcome.name, *about]


def tally(outcome: Outcome) -> str:
    """How many of the figures with an expectation are as expected."""
    judged = [figure.within for figure in outcome.figures if figure.within is not None]
    return f"{sum(judged)} of {len(judged)}" if judged else ""


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{text:<{w}}" for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _counts(figure: Figure) -> bool:
    return figure.value is not None or figure.within is not None


def _row(name: str, figure: Figure) -> list[str]:
    value = "" if figure.value is None else f"{figure.value:.4g}"
    within = {True: "ok", False: "OUTSIDE", None: ""}[figure.within]
    note = shorten(figure.note, 60, placeholder=" ...")
    return [name, figure.what, value, figure.unit, figure.expected, within, note]
