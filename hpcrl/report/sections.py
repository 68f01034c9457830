"""The sections of the report, in the order of the page: one line each."""

from __future__ import annotations

from types import ModuleType

from hpcrl.report import alerts, cost, curves, overview, samples, timeline

SECTIONS: tuple[ModuleType, ...] = (
    overview,
    alerts,
    curves,
    samples,
    timeline,
    cost,
)
