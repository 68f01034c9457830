"""The section `timeline` in a real browser: 300 ranks, mouse, keyboard, a phone's width."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.page import page
from tests.report.browser import Browser
from tests.report.test_page import make_run
from tests.report.test_timeline_section import write
from tests.timeline.steps import large_step, make_step
from tests.timeline.test_waiting import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LANES = "document.querySelector('#section-timeline canvas')"
DETAIL = "document.querySelector('.lane-detail').textContent"
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20))))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        opened.resize(1200, 900)
        yield opened


def show(browser: Browser, path: Path, *steps: Any) -> None:
    run = write(make_run(path / "run"), *steps)
    (path / "report.html").write_text(page([run]))
    browser.open("about:blank")
    browser.open(f"{(path / 'report.html').as_uri()}#timeline")
    browser.run(FRAMES)


def point_at(browser: Browser, x: float, y: float) -> str:
    """The details of a place in the lanes, in CSS pixels of the canvas."""
    place = browser.run(f"(({LANES}).scrollIntoView(), JSON.stringify({LANES}.getBoundingClientRect()))")
    box = json.loads(place)
    browser.point_at(box["x"] + x, box["y"] + y)
    browser.run(FRAMES)
    return str(browser.run(DETAIL))


def colours(browser: Browser, y: int) -> int:
    """Number of colours in a row of pixels of the lanes."""
    script = (
        f"[...new Set(new Uint32Array({LANES}.getContext('2d').getImageData(160, {y}, 1000, 1).data.buffer))].length"
    )
    return int(browser.run(script))


def test_mouse_and_keys_show_what_a_rank_did_and_waited_for(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, make_step(*ROWS, step=6), make_step(*ROWS, step=7))
    assert "trainer (1 rank) worked 38 % of the step and waited 40 % for generation" in browser.run(
        "document.querySelector('#section-timeline ul').innerText"
    )
    width = browser.run(f"{LANES}.clientWidth")

    def at(time: float) -> float:
        return 150 + time / 100 * (width - 150)

    assert point_at(browser, at(20), 24).startswith("the pipeline waited for generation, ")
    trainer, second = 18 + 16 + 20 + 8, 18 + 16 + 20 + 20 + 4 + 20 + 30
    assert point_at(browser, at(70), trainer).startswith(
        "rank 1 (trainer) on node1: training, 0.00002 s from 6.00e-5 s"
    )
    assert point_at(browser, at(59), trainer).startswith(
        "rank 1 (trainer) on node1: waited for slower ranks in rollout"
    )
    assert point_at(browser, at(5), second).endswith("from 0 s; 8 requests run, 0 wait")
    assert point_at(browser, at(30), second).startswith("rank 3 (generator) on node1: waited for slower replicas")
    browser.run(f"{LANES}.focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        browser.press(key)
    assert "rank 1 (trainer)" in browser.run(DETAIL)
    seen = []
    for key in (",", ",", "."):
        browser.press(key)
        seen.append(browser.run(DETAIL).split(": ")[1].split(",")[0])
    assert seen == ["waited for scheduling", "waited for rewards", "waited for scheduling"]
    for key in ("+", "+", "ArrowRight", "-"):
        browser.press(key)
    browser.run(FRAMES)
    # 0..100, 25..75, 37.5..62.5, 40.6..65.6, 28.1..78.1
    assert "training, " in point_at(browser, at(95), trainer)
    browser.press("Home")
    browser.run(FRAMES)
    assert "waited for the controller, " in point_at(browser, at(94), trainer)
    height = browser.run(f"{LANES}.clientHeight")
    browser.press("ArrowUp")
    browser.press("Enter")  # closes the group of the trainer
    browser.run(FRAMES)
    assert browser.run(f"{LANES}.clientHeight") != height
    browser.run("document.querySelector('#section-timeline table:last-of-type button').click()")
    assert browser.run("document.querySelector('#section-timeline select').value") == "6"
    assert browser.run("document.body.dataset.shown") == "timeline" and browser.errors == []


def test_300_ranks_are_readable_as_strips(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, large_step())
    assert browser.errors == [] and browser.run(f"{LANES}.clientHeight") < 400
    strip = 18 + 16 + 20 + 32
    assert colours(browser, strip) > 3
    assert point_at(browser, 300, strip).endswith(" s: 128 waited for generation")
    browser.run(f"{LANES}.focus()")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    browser.press("Enter")
    browser.run(FRAMES)
    assert 400 < browser.run(f"{LANES}.clientHeight") < 1400  # 128 lanes
    assert point_at(browser, 900, strip).startswith("rank 7 (trainer) on node1: ")


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, tmp_path: Path) -> None:
    browser.resize(360, 740, phone=True)
    try:
        show(browser, tmp_path, large_step(8, 8))
        assert browser.run("document.scrollingElement.scrollWidth") <= 360 and browser.errors == []
        assert browser.run(f"{LANES}.clientWidth") > 300
    finally:
        browser.resize(1200, 900)
