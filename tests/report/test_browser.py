"""The report in a real browser: time, requests, keyboard, a phone's width, hostile text, curves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands.serve import ReportServer
from hpcrl.report.live import LivePages
from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles
from hpcrl.timeline.step_file import CommandRow
from tests.conftest import ROOT
from tests.report.browser import Browser
from tests.report.synthetic import row, write_run
from tests.report.test_page import HOSTILE
from tests.report.test_role_hours import made, write
from tests.report.test_serve import serving
from tests.timeline.steps import make_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 500
LOAD_S = 2.0
SHOWN = "document.body.dataset.shown"
SECTIONS = "[...document.querySelectorAll('main > section')].map(each => each.id.slice(8))"
INERT = "window.hacked = (window.hacked || 0) + 1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of 500 steps, written by the command."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "long", STEPS)
    command = [sys.executable, "-m", "hpcrl", "report", str(folder)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True, timeout=100)
    return folder / "report.html"


def visible(browser: Browser) -> str:
    return str(browser.run("document.body.innerText"))


@pytest.mark.alone
def test_a_run_of_500_steps_opens_within_two_seconds_and_asks_for_nothing(browser: Browser, report: Path) -> None:
    address = report.as_uri()
    seconds = []
    for _ in range(3):  # the machine may be busy for a moment
        seconds.append(browser.open(f"{address}#curves"))
        assert browser.run("document.querySelectorAll('#section-curves svg path').length") >= 8
    assert min(seconds) < LOAD_S
    for name in browser.run(SECTIONS):
        browser.run(f"report.show({json.dumps(name)})")
        assert browser.run(f"document.getElementById('section-{name}').innerText.trim().length") > 0
    assert browser.requests and {url.partition("#")[0] for url in browser.requests} <= {address, "data:,"}
    assert browser.errors == []


def test_the_overview_tells_the_attempts(browser: Browser, report: Path) -> None:
    browser.open(report.as_uri())
    text = visible(browser)
    for part in ("preempted", "13 to 15", "3 min 10 s, of which 2 min 30 s before it began", "torch: 2.12.0 -> 2.13.0"):
        assert part in text
    assert browser.run("document.querySelectorAll('.problem').length") == 0


def test_the_keyboard_goes_from_section_to_section(browser: Browser, report: Path) -> None:
    browser.open(report.as_uri())
    names = browser.run(SECTIONS)
    seen = [browser.run(SHOWN)]
    for key in ("]", "]", "[", "1", "End", "ArrowRight", "ArrowLeft", "Home", "3"):
        browser.press(key)
        seen.append(browser.run(SHOWN))
    last = names[-1]
    assert seen == [*names[:3], names[1], names[0], last, names[0], last, names[0], names[2]]
    assert browser.run("document.activeElement.id") == f"tab-{names[2]}"
    assert browser.run("[...document.querySelectorAll('main > section')].filter(each => !each.hidden).length") == 1
    browser.press("Tab")  # from the tab into the section, and there typing does not leave it
    assert browser.run(f"document.getElementById('section-{names[2]}').contains(document.activeElement)")
    browser.run("document.querySelector('input[type=search]').focus()")
    browser.press("1")
    assert browser.run(SHOWN) == "curves" and browser.run("document.querySelector('input[type=search]').value") == "1"


@pytest.mark.parametrize("width", [360, 1200])
def test_no_section_is_wider_than_the_screen(browser: Browser, report: Path, width: int) -> None:
    browser.resize(width, 740, phone=width < 500)
    try:
        browser.open(report.as_uri())
        for name in browser.run(SECTIONS):
            browser.run(f"report.show({json.dumps(name)})")
            browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert browser.run("document.scrollingElement.scrollWidth") <= width, name
            assert browser.run("window.innerWidth") == width
    finally:
        browser.resize(1200, 900)


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    markup = f"<img src=x onerror='{INERT}'></script><script>{INERT}</script>{HOSTILE}"
    folder = write_run(tmp_path / "run" / "<b>name", run_name="x")
    (folder / "config.yaml").write_text(json.dumps({"run_name": markup, "data": {"train": markup}, "max_steps": 30}))
    (folder / "plan.txt").write_text(markup)
    kind = {"source": markup, "domain": "javascript:1", "error": markup, "count": 3, "first": "x", "last": "y"}
    (folder / "errors.json").write_text(json.dumps({"errors": [kind]}))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(31) | {markup: 1.0, "__proto__": 2.0, "constructor": 3.0}) + "\n")
    write(folder, make_step(CommandRow(1, markup, 1, 10, 50), step=5, roles=(("controller",), (markup,))))
    path = tmp_path / "report.html"
    path.write_text(page([RunFiles(folder, markup)]))
    browser.open(path.as_uri())
    for name in browser.run(SECTIONS):
        browser.run(f"report.show({json.dumps(name)})")
        assert markup in browser.run(f"document.getElementById('section-{name}').textContent"), name
        assert browser.run(f"document.querySelectorAll('#section-{name} script').length") == 0
    assert browser.run("window.hacked") is None and browser.run("document.images.length") == 0
    assert browser.run("document.querySelectorAll('h1 b').length") == 0
    assert browser.errors == []


def test_the_policy_stops_a_script_that_would_get_in(browser: Browser, report: Path) -> None:
    """Negative control: even markup written into the page runs nothing and loads nothing."""
    browser.open(report.as_uri())
    browser.run(
        f"document.body.insertAdjacentHTML('beforeend', `<img src='http://127.0.0.1:9/x' onerror='{INERT}'>"
        f"<button id='bad' onclick='{INERT}'>x</button>`); document.getElementById('bad').click()"
    )
    assert browser.run("new Promise(done => setTimeout(() => done(window.hacked || 0), 300))") == 0
    assert browser.errors  # the browser says that it refused


@pytest.mark.parametrize(
    "call",
    [
        "report.el('script', {}, 'x')",
        "report.el('iframe', {})",
        "report.el('a', {href: 'javascript:alert(1)'})",
        "report.el('a', {href: ' java' + String.fromCharCode(9) + 'script:alert(1)'})",
        "report.el('img', {src: 'https://example.org/x.png'})",
        "report.el('img', {src: '//example.org/x.png'})",
        "report.el('a', {href: 'data:text/html,x'})",
        "report.el('p', {onclick: 'alert(1)'})",
        "report.el('iframe', {srcdoc: 'x'})",
    ],
)
def test_sections_cannot_build_what_runs_or_loads(browser: Browser, report: Path, call: str) -> None:
    browser.open(report.as_uri())
    assert browser.run(f"(() => {{ try {{ {call}; return false }} catch (error) {{ return true }} }})()")


def chart(browser: Browser, name: str) -> Any:
    """Lines, marks and ticks of the chart of a metric, after the next frames; None without the chart."""
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return browser.run(
        f"(() => {{ const found = [...document.querySelectorAll('figure')].find(each => "
        f"each.querySelector('figcaption').firstChild.textContent === {json.dumps(name)});"
        "return found && {lines: found.querySelectorAll('path.series').length,"
        " faint: found.querySelectorAll('path.faint').length,"
        " marks: [...found.querySelectorAll('.mark title')].map(t => t.textContent),"
        " ticks: [...found.querySelectorAll('.tick')].map(t => t.textContent)} })()"
    )


def typed(browser: Browser, selector: str, value: str) -> None:
    browser.run(
        f"(() => {{ const input = document.querySelector({json.dumps(selector)}); input.value = {json.dumps(value)};"
        "input.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )


def test_curves_can_be_searched_smoothed_and_drawn_on_a_log_axis(browser: Browser, report: Path) -> None:
    browser.open(f"{report.as_uri()}#curves/other%2Fmetric_007")
    assert chart(browser, "other/metric_007")["lines"] == 1  # the address chose it
    assert chart(browser, "val/score/mean")["marks"] == [
        "attempt 2 continues from step 10",
        "attempt 3 continues from step 12",
    ]
    typed(browser, "input[type=search]", "metric_01")
    labels = browser.run("[...document.querySelectorAll('.metric-list label')].map(each => each.innerText.trim())")
    assert labels == [f"other/metric_{number:03d}" for number in range(10, 20)]
    browser.run("document.querySelector('.metric-list input').click()")
    assert chart(browser, "other/metric_010")["lines"] == 1
    typed(browser, "input[type=range]", "5")
    assert chart(browser, "val/score/mean")["lines"] == 2 and chart(browser, "val/score/mean")["faint"] == 1
    assert "mean of 11" in visible(browser)
    typed(browser, "input[type=range]", "0")
    browser.run("document.querySelector('.controls input[type=checkbox]').click()")
    assert "0.4" not in chart(browser, "val/score/mean")["ticks"]
    browser.run("document.querySelector('figure button').click()")
    assert chart(browser, "critic/rewards/mean") is None and chart(browser, "val/score/mean") is not None
    assert browser.errors == []


def test_the_pointer_shows_the_values_of_a_step(browser: Browser, report: Path) -> None:
    browser.open(f"{report.as_uri()}#curves")
    place = "document.querySelector('figure svg').getBoundingClientRect()"
    box = browser.run(f"(() => {{ const b = {place}; return [b.left, b.top, b.width, b.height] }})()")
    browser.point_at(box[0] + box[2] - 10, box[1] + box[3] / 2)
    text = browser.run("document.querySelector('figure .values').innerText")
    assert text.startswith("step 500") and f"{row(500)['critic/rewards/mean']:.4g}" in text


def test_several_runs_lie_over_each_other(browser: Browser, tmp_path: Path) -> None:
    runs = [RunFiles(write_run(tmp_path / name)) for name in ("first", "second")]
    (tmp_path / "both.html").write_text(page(runs))
    browser.open(f"{(tmp_path / 'both.html').as_uri()}#curves")
    assert chart(browser, "val/score/mean")["lines"] == 2
    browser.run("report.show('overview')")
    assert str(tmp_path / "first") in visible(browser)
    browser.run(
        "(() => { const box = document.querySelector('#section-overview select'); box.value = '1';"
        "box.dispatchEvent(new Event('change')) })()"
    )
    assert str(tmp_path / "second") in visible(browser) and str(tmp_path / "first") not in visible(browser)
    assert browser.errors == []


def test_dark_and_light(browser: Browser, report: Path) -> None:
    browser.open(report.as_uri())
    back = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(back)
    browser.run("[...document.querySelectorAll('button')].find(each => each.innerText === 'Dark / light').click()")
    assert browser.run(back) != before


def test_a_served_page_leads_back_to_the_list_and_loads_again(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    with serving(LivePages(tmp_path / "runs", lambda folder: "running: here")) as server:
        assert isinstance(server, ReportServer)
        browser.open(f"{server.address}run/one#curves")
        assert browser.run("document.querySelector('.made a').href") == server.address
        with open(tmp_path / "runs" / "one" / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row(31) | {"only/now": 1.0}) + "\n")
        browser.open(f"{server.address}run/one#curves/only%2Fnow")
        assert chart(browser, "only/now")["lines"] == 1
        assert {url.partition("/secret/")[0] for url in browser.requests if url != "data:,"} == {
            server.address.partition("/secret/")[0]
        }
        browser.open(server.address)
        assert "one" in visible(browser) and browser.errors == []


def test_the_cost_in_numbers(browser: Browser, tmp_path: Path) -> None:
    """As tests/report/test_role_hours.py works them out: 180 s of decoding on one of 8 GPUs are .05 GPU-hours."""
    folder = write_run(tmp_path / "run")
    write(folder, made(5), made(20, validates=True))
    path = tmp_path / "cost.html"
    path.write_text(page([RunFiles(folder, "finished: x")]))
    browser.open(f"{path.as_uri()}#cost")
    tables = browser.run(
        "[...document.querySelectorAll('#section-cost table')].map(table => [...table.rows].map(row => "
        "[...row.cells].map(cell => cell.innerText)))"
    )
    assert [row[0] for row in tables[0]][1:] == ["1", "2", "3"] and tables[0][1][-1] == "records"
    assert {row[0]: row[1] for row in tables[1]}["generate"] == "0.05"
    assert [row[0] for row in tables[2]] == ["Roles", "trainer", "generator"] and tables[2][2][-1] == "34.3 %"
    assert "50.0 % of these GPU-hours were idle" in visible(browser) and browser.errors == []
