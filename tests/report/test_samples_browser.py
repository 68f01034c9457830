"""The report's samples in a real browser: choosing, filters, colours, links, comparisons, hostile text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.report import samples as samples_section
from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles
from hpcrl.rollout.store import OutcomeRecord
from hpcrl.rollout.types import FinishReason, PromptOutcome
from tests.report.browser import Browser
from tests.report.samples_run import HOSTILE, answered, make_run, sample, trained, write_step, write_validation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SECTION = "document.getElementById('section-samples')"
ROWS = f"[...{SECTION}.querySelectorAll('.sample-row')]"
DETAIL = f"{SECTION}.querySelector('.sample-detail')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs: three steps with two prompts of two samples each, and validations that differ."""
    folder = tmp_path_factory.mktemp("runs")
    made = [make_run(folder / name) for name in ("first", "second")]
    for number, run in enumerate(made):
        for step in (1, 2, 3):
            group = [
                sample(10 * step, 0, ["one"], 1.0, "prompt a", step - 1),
                sample(10 * step, 1, ["two"], 0.0, "prompt a", step - 1, finish=FinishReason.LENGTH),
                sample(10 * step + 1, 0, [HOSTILE, "end"], 0.5, "prompt b", 0),
                sample(10 * step + 1, 1, ["needle"], 0.25, "prompt b", step - 1),
            ]
            records = [*trained(group), OutcomeRecord(10 * step + 2, 0, PromptOutcome.FILTERED, "std", "other", (1.0,))]
            write_step(run, step, group, records)
        for step in (0, 3):
            scores = {1: 0.0, 2: 0.0 if step == 0 else 1.0, 3: 0.5 if step == 0 else 0.25 - 0.25 * number}
            lines = [answered(n, f"{run.name} {step}: {n}", score) for n, score in scores.items()]
            write_validation(run, step, lines)
    return made


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> str:
    return written(runs[:1], runs[0].parent / "one.html")


def written(runs: list[Path], path: Path) -> str:
    path.write_text(page([RunFiles(run) for run in runs], [samples_section]))
    return path.as_uri()


def text(browser: Browser, node: str = DETAIL) -> str:
    return str(browser.run(f"{node}.innerText"))


def rows(browser: Browser) -> list[str]:
    return list(browser.run(f"{ROWS}.map(row => row.innerText.trim())"))


def change(browser: Browser, label: str, value: str) -> None:
    """Set a field of the section, as a user does."""
    browser.run(
        f"(() => {{ const field = {SECTION}.querySelector('[aria-label={json.dumps(label)}]');"
        f"field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true})) })()"
    )


def click(browser: Browser, label: str) -> None:
    browser.run(f"[...{SECTION}.querySelectorAll('button')].find(b => b.innerText === {json.dumps(label)}).click()")


def test_keys_and_addresses_choose_samples(browser: Browser, address: str) -> None:
    browser.open(f"{address}#samples/s2-20-0-1")
    assert "prompt a" in text(browser) and "length: truncated" in text(browser) and "version 1, lag 0" in text(browser)
    at = f"{ROWS}.findIndex(row => row.getAttribute('aria-selected') === 'true')"
    place = browser.run(at)
    browser.press("j")
    assert browser.run(at) == place + 1 and browser.run("location.hash") != "#samples/s2-20-0-1"
    browser.press("k")
    assert browser.run(at) == place and browser.run("location.hash") == "#samples/s2-20-0-1"
    browser.open(f"{address}#sample=v3%2Fsums%2F0000000000000002%2F2-0g")
    assert "question 2" in text(browser) and "first 3: 2" in text(browser) and "3 (the answer" in text(browser)
    browser.run("location.hash = '#samples/s9-99-0-0'")
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert "is not in this page" in text(browser, SECTION) and "12 of 12 training samples" in text(browser, SECTION)
    assert browser.errors == []


def test_filters_and_order(browser: Browser, address: str) -> None:
    browser.open(address)
    assert len(rows(browser)) == 12
    change(browser, "reward from", "0.5")
    assert len(rows(browser)) == 6
    change(browser, "step to", "2")
    assert len(rows(browser)) == 4 and "4 samples" in text(browser, SECTION)
    change(browser, "reward from", "")
    change(browser, "search text", "NEEDLE")
    assert len(rows(browser)) == 2 and all("needle" in row for row in rows(browser))
    change(browser, "search text", "")
    change(browser, "sort", "lowest reward first")
    assert [row.split()[3] for row in rows(browser)] == ["0", "0", "0.25", "0.25", "0.5", "0.5", "1", "1"]
    change(browser, "kind", "truncated")
    assert len(rows(browser)) == 2 and all("two" in row for row in rows(browser))
    click(browser, "All")
    change(browser, "kind", "filtered")
    assert len(rows(browser)) == 3 and "std" in text(browser) and "keeps no responses" in text(browser)
    change(browser, "label", "sums")
    assert rows(browser) == [] and "Nothing matches" in text(browser)
    change(browser, "search text", "x")
    browser.run(f"{SECTION}.querySelector('[aria-label=\"search text\"]').focus()")
    browser.press("j")
    assert browser.run(f"{SECTION}.querySelector('[aria-label=\"search text\"]').value") == "xj", (
        "typing does not go on"
    )


def test_tokens_have_colours(browser: Browser, address: str) -> None:
    browser.open(f"{address}#samples/s3-31-0-0")
    spans = f"[...{DETAIL}.querySelector('.said-model').querySelectorAll('.said-text > span[title]')]"
    found = browser.run(f"{spans}.map(span => [span.title.split('\\n')[0], span.style.backgroundColor])")
    assert found[0][0] == "log-prob, trainer - generator: 0.001" and found[9][0].endswith(": 0.01")
    strengths = [float(colour.rpartition(",")[2].strip(" )")) for _, colour in found]
    assert strengths == sorted(strengths) and strengths[0] < 0.05 < strengths[-1]
    change(browser, "colour of tokens", "lag")
    assert "the strongest colour in this sample is 2" in text(browser)
    change(browser, "colour of tokens", "")
    assert browser.run(f"{spans}.length") == 0


def test_hostile_text_is_shown_as_text(browser: Browser, address: str) -> None:
    browser.open(f"{address}#samples/s1-11-0-0")
    assert browser.run("window.attacked") is None
    assert browser.run(f"{SECTION}.querySelectorAll('script, img').length") == 0
    shown = HOSTILE
    for character in "\u2028\x1b\u202e":
        shown = shown.replace(character, f"[U+{ord(character):04X}]")
    for colour in ("mismatch", ""):
        change(browser, "colour of tokens", colour)
        assert shown in browser.run(f"{DETAIL}.textContent")
    assert browser.errors == [] and {url.partition("#")[0] for url in browser.requests} <= {address, "data:,"}


def test_the_same_prompt_over_steps(browser: Browser, address: str) -> None:
    browser.open(f"{address}#samples/s2-20-0-0")
    browser.run(f"[...{DETAIL}.querySelectorAll('button')].find(b => b.innerText.startsWith('The same')).click()")
    lines = browser.run(f"[...{DETAIL}.querySelectorAll('summary')].map(each => each.innerText)")
    assert [line.split()[:4] for line in lines] == [
        ["step", str(step), "reward", reward] for step in (1, 2, 3) for reward in ("1", "0")
    ]
    assert text(browser).count("prompt a") == 1
    browser.press("j")
    assert "prompt a" not in text(browser)


def test_two_steps_of_a_run_side_by_side(browser: Browser, address: str) -> None:
    browser.open(address)
    click(browser, "Side by side")
    assert [row.split(" question")[0] for row in rows(browser)] == ["0 to 1", "0.5 to 0.25", "0 to 0"]
    assert text(browser).count("question 2") == 1 and "first 0: 2" in text(browser) and "first 3: 2" in text(browser)
    change(browser, "order", "most worsened first")
    assert rows(browser)[0].startswith("0.5 to 0.25")


def test_two_runs_side_by_side(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(written(runs, tmp_path / "two.html"))
    assert len(rows(browser)) == 24
    click(browser, "Side by side")
    assert "first, step 3" in text(browser) and "second, step 3" in text(browser)
    assert [row.split(" question")[0] for row in rows(browser)] == ["0.25 to 0", "0 to 0", "1 to 1"]
    assert "first 3: 3" in text(browser) and "second 3: 3" in text(browser) and browser.errors == []


def test_no_view_is_wider_than_a_phone(browser: Browser, address: str) -> None:
    browser.resize(360, 740, phone=True)
    try:
        browser.open(f"{address}#samples/s1-11-0-0")
        for view in ("Samples", "The same prompt over steps", "Side by side"):
            click(browser, view)
            assert browser.run("document.scrollingElement.scrollWidth") <= 360, view
    finally:
        browser.resize(1200, 900)
