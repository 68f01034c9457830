"""Section `cost`: hours and energy of attempts and jobs, what was lost, and what each role used its GPUs for."""

from __future__ import annotations

from hpcrl.report.hours_text import as_json, energy_in_words, lost_in_words, measured_in_words, spent_in_words
from hpcrl.report.role_hours import hours_split
from hpcrl.report.run_files import RunFiles
from hpcrl.report.run_hours import run_hours
from hpcrl.report.section import ReportSection


def section(run: RunFiles) -> ReportSection | None:
    """None for a run that no attempt has begun."""
    hours = run_hours(run)
    if not hours.attempts and not hours.jobs:
        return None
    split = hours_split(run, hours)
    told = {
        "hours": spent_in_words(hours.total) or "unknown",
        "energy": energy_in_words(hours) or "unknown: no accounting has it",
        "lost": lost_in_words(hours) or "no complete step",
    }
    more = {"told": list(told.items()), "measured": "" if split is None else measured_in_words(split)}
    return ReportSection("cost", "Cost", as_json(hours, split) | more, "cost.js")
