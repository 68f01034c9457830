"""evaluation.json and the table, worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from hpcrl.metrics.evaluated import as_table, summarised
from hpcrl.metrics.responses import header
from tests.metrics.test_responses import response

SETS = {name: {"temperature": 0.5, "samples": 2, "max_new_tokens": 9, "path": "x"} for name in ("one", "t w\no")}


def test_tags_have_results_of_their_own_if_they_differ() -> None:
    tags = {0: ["easy", "algebra"], 1: ["hard", "algebra"], 2: ["hard", "hard"], 3: []}
    rows = [response("one", row, k, float(k == row), tags=own) for row, own in tags.items() for k in range(2)]
    told = summarised(header("m", 0, SETS), rows)
    found = told["sets"]["one"]["tags"]
    assert {tag: (own["prompts"], own["responses"], own["score"]) for tag, own in found.items()} == {
        "algebra": (2, 4, 0.5),
        "easy": (1, 2, 0.5),
        "hard": (2, 4, 0.25),
    }
    assert found["hard"]["pass@2"] == 0.5 and found["easy"]["score_stderr"] is None
    assert [line.split()[:4] for line in as_table(told)[2:]] == [
        ["-", "algebra", "2", "2"], ["-", "easy", "1", "2"], ["-", "hard", "2", "2"],
    ]  # fmt: skip
    alike = [response("one", row, 0, 1.0, tags=["maths"]) for row in range(2)]
    assert summarised(header("m", 0, SETS), alike)["sets"]["one"]["tags"] == {}


def test_results_of_two_sets() -> None:
    rows = [
        response("one", row, k, score, answer="a")
        for row, both in enumerate([(1, 0), (0, 0)])
        for k, score in enumerate(both)
    ]
    rows += [response("t w\no", 0, k, 1.0, error="late" if k else None, truncated=True, tokens=9) for k in range(2)]
    told = summarised(header("m", 0, SETS), rows)
    assert json.loads(json.dumps(told, allow_nan=False)) == told, "no NaN of a set with one prompt"
    one, two = told["sets"].values()
    assert (one["score"], one["score_stderr"]) == (0.25, pytest.approx(math.sqrt(0.125 / 2)))  # of .5 and 0
    assert (one["prompts"], one["responses"], one["pass@2"], one["maj@2"]) == (2, 4, 0.5, 0.25)
    assert (two["score"], two["score_stderr"], two["truncated"], two["score_errors"]) == (1.0, None, 1.0, 1)
    assert told["metrics"]["val/score/mean"] == 0.5 and told["metrics"]["val/one/score"] == 0.25
    assert told["metrics"]["val/score_errors"] == 1
    table = as_table(told)
    assert (
        len(table) == 3
        and len({line.index(word) for line, word in zip(table[1:], ("0.250", "1.000"), strict=True)}) == 1
    )
    assert table[1].split() == ["one", "2", "2", "0.250", "±", "0.250", "@2=0.500", "0.250", "4.0", "0.0%", "0"]
    assert table[2].split() == ["t", "w", "o", "1", "2", "1.000", "@2=1.000", "-", "9.0", "100.0%", "1"]
