"""Puts sections into one HTML file: data as JSON, scripts and style inline, nothing from the network."""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from types import ModuleType
from typing import Any

import hpcrl
from hpcrl.report.run_files import RunFiles
from hpcrl.report.section import ReportSection
from hpcrl.report.sections import SECTIONS

STYLE = "page.css"
SCRIPTS = ("page.js", "chart.js", "conversation.js")
"""Scripts of every page; those of its sections follow."""
START = "report.start();"


def page(runs: Sequence[RunFiles], sections: Sequence[ModuleType] = SECTIONS, index: str = "") -> str:
    """The report of one run, or of several runs in one page. A section that fails is named in the page, the others are
    shown. `index`: the relative address of a server's list of runs; then the page offers to load itself again."""
    found: dict[str, tuple[int, ReportSection]] = {}
    shown: list[dict[str, Any]] = []
    blocks: list[str] = []
    for number, run in enumerate(runs):
        names = []
        for place, module in enumerate(sections):
            try:
                section = module.section(run)
            except Exception as error:  # a damaged file must not hide what the other sections show
                run.problems.append(f"{module.__name__.rpartition('.')[2]}: {type(error).__name__}: {error}")
                continue
            if section is not None:
                found.setdefault(section.name, (place, section))
                names.append(section.name)
                blocks.append(_data(f"data-{number}-{section.name}", section.data))
        shown.append({"name": run.name, "path": str(run.path), "sections": names, "problems": run.problems})
    ordered = [section for _, section in sorted(found.values(), key=lambda each: each[0])]
    told_apart = _distinct(shown)
    head = {
        "runs": told_apart,
        "sections": [{"name": section.name, "title": section.title} for section in ordered],
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": hpcrl.__version__,
        "index": index,
    }
    title = ", ".join(run["name"] for run in told_apart)
    scripts = dict.fromkeys((*SCRIPTS, *(section.script for section in ordered)))
    return document(title, [_data("report-head", head), *blocks], [asset(name) for name in scripts] + [START])


def document(title: str, body: Iterable[str], scripts: Sequence[str] = ()) -> str:
    """An HTML document. Its security policy permits only these scripts and the style, and no request."""
    style = asset(STYLE)
    allowed = " ".join(f"'{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src '{_digest(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)} - hpcrl</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        *body,
        *(["<noscript>This page needs JavaScript, which is part of this file.</noscript>"] if scripts else []),
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    text = "\n".join(parts) + "\n"
    return text.encode(errors="backslashreplace").decode()  # a folder's name may be no Unicode


def asset(name: str) -> str:
    """A file of hpcrl/report/assets."""
    return (resources.files("hpcrl.report") / "assets" / name).read_text(encoding="utf-8")


def _data(identity: str, value: Any) -> str:
    return f'<script type="application/json" id="{html.escape(identity)}">{embedded(value)}</script>'


def embedded(value: Any) -> str:
    """JSON that no HTML parser takes for markup: `<` is written as \\u003c, non-finite numbers as null."""
    text = json.dumps(_finite(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def _digest(text: str) -> str:
    """The text's hash in the form of a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _distinct(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs, with their paths as names where two runs have the same name."""
    names = [run["name"] for run in shown]
    return [run | {"name": run["path"] if names.count(run["name"]) > 1 else run["name"]} for run in shown]
