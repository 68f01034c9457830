"""A section of the report: its data, and the script that draws the data in a browser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReportSection:
    """What one section shows of one run.

    A module of `hpcrl.report.sections` has a function `section(run: RunFiles) -> ReportSection | None`, None if the run
    has nothing to show. It reads files through `run`, which names those that cannot be read.

    Args:
        name: Identifies the section in the page, its address (`report.html#name`) and `report.section(name, ...)`.
        title: The label in the page's navigation.
        data: Anything that `json.dumps` takes; non-finite numbers become null.
        script: A file of `hpcrl/report/assets` that calls `report.section(name, (root, data, run) => ...)`, or
            `report.overlaid(name, (root, runs) => ...)` if several runs are drawn in one place.
    """

    name: str
    title: str
    data: Any
    script: str
