"""The page that lists reports of runs, with links to them."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from hpcrl.metrics.progress import SHOWN
from hpcrl.report.landmarks import scores
from hpcrl.report.page import document
from hpcrl.report.run_files import RunFiles


@dataclass(frozen=True)
class IndexEntry:
    """A line of the index: a link relative to the index, the run's name, its state, and how far it is."""

    address: str
    name: str
    state: str = ""
    step: str = ""
    values: str = ""


def entry(run: RunFiles, address: str) -> IndexEntry:
    """The line of a run."""
    newest = run.newest_rows
    step = f"{newest[-1]['step']}/{run.key('max_steps', '?')}" if newest else ""
    found = []
    for metric, word, form in SHOWN[:-1]:
        value = next((row[metric] for row in reversed(newest) if isinstance(row.get(metric), float)), None)
        found += [f"{word} {form.format(value)}"] if value is not None else []
    return IndexEntry(address, run.name, run.state, step, ", ".join(found or scores(run)))


def index(title: str, entries: Sequence[IndexEntry], notes: Sequence[str] = (), above: str = "") -> str:
    """An HTML page with a line per entry. `notes` are shown above the lines, one paragraph each; `above` is an entry's
    address for all runs in one page."""
    rows = [
        f'<tr><td><a href="{_link(each.address)}">{html.escape(each.name)}</a></td><td>{html.escape(each.state)}</td>'
        f'<td class="number">{html.escape(each.step)}</td><td>{html.escape(each.values)}</td></tr>'
        for each in entries
    ]
    body = [
        f"<h1>{html.escape(title)}</h1>",
        *(f'<p class="problem">{html.escape(note)}</p>' for note in notes),
        *([f'<p><a href="{_link(above)}">All runs in one page</a></p>'] if above else []),
        '<div class="wide" tabindex="0" role="group" aria-label="runs"><table>',
        "<thead><tr><th>Run</th><th>State</th><th>Step</th><th>Last values</th></tr></thead>",
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    ]
    return document(title, body)


def _link(address: str) -> str:
    """The path of a page beside this one, for an attribute."""
    return html.escape(f"./{quote(os.fsencode(address))}")
