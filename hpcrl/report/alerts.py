"""Section `warnings`: what is wrong with the run, in words, and since which step."""

from __future__ import annotations

from hpcrl.report.anomalies import Anomaly, anomalies
from hpcrl.report.run_files import RunFiles
from hpcrl.report.section import ReportSection


def section(run: RunFiles) -> ReportSection | None:
    """None for a run without metrics and without errors."""
    if not run.metrics and not run.user_errors:
        return None
    found = [vars(each) for each in anomalies_of(run)]
    return ReportSection("warnings", "Warnings", {"found": found, "steps": len(run.metrics)}, "warnings.js")


def anomalies_of(run: RunFiles) -> list[Anomaly]:
    """What is wrong with a run, from its metrics and errors.json."""
    bound = run.key("rollout.max_staleness")
    return anomalies(run.metrics, float(bound) if isinstance(bound, (int, float)) else None, run.user_errors)
