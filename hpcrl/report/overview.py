"""Section `overview`: what the run is, and its state."""

from __future__ import annotations

from typing import Any

from hpcrl.report.run_files import RunFiles
from hpcrl.report.section import ReportSection


def section(run: RunFiles) -> ReportSection:
    facts = run.attempts[-1].facts if run.attempts else {}
    what: list[tuple[str, Any]] = [
        ("folder", str(run.path)),
        ("state", run.state),
        ("pipeline", run.key("pipeline")),
        ("algorithm", run.key("algorithm.name")),
        ("model", run.key("model.path")),
        ("training data", run.key("data.train")),
        ("validation data", run.key("data.val")),
        ("commit", facts.get("git_commit")),
    ]
    shown = [[label, value if isinstance(value, str) else str(value)] for label, value in what if value]
    return ReportSection("overview", "Overview", {"what": shown}, "overview.js")
