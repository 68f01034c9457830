"""Files of responses, and the metrics of their rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpcrl.metrics.responses import (
    as_lines,
    by_prompt,
    header,
    read_responses,
    response_stats,
    responses_file,
    write_responses,
)
from hpcrl.metrics.stats import flatten


def response(name: str, row: int, sample: int, score: float, **more: Any) -> dict[str, Any]:
    known = {"prompt_id": "0" * 16, "greedy": False, "prompt": [], "response": "x", "rewards": {}, "answer": None}
    known |= {"tokens": 4, "truncated": False, "error": None, "tags": []}
    return known | {"set": name, "row": row, "sample": sample, "score": score} | more


def test_failed_rewards_are_reported_with_the_score() -> None:
    """They score 0, which may be the fault of the model or of the reward."""
    rows = [response("a", 0, 0, 1.0), response("a", 1, 0, 0.0), response("a", 2, 0, 0.0, error="KeyError")]
    stats = response_stats("val", rows)
    assert (stats["val/score/*"].total, stats["val/score/*"].count) == (1.0, 3)
    assert stats["val/score_errors"].total == 1 and "val/a/score" not in stats
    stats = response_stats("val", [rows[0], response("b", 0, 0, 0.0), rows[2]])
    assert [(stats[f"val/{name}/score"].total, stats[f"val/{name}/score"].count) for name in "ab"] == [(1, 2), (0, 1)]


def test_metrics_worked_out_by_hand() -> None:
    """Three prompts with two responses: means 1, .5 and 0."""
    scores = {0: (1, 1), 1: (1, 0), 2: (0, 0)}
    rows = [
        response("a", row, sample, score, tokens=row + sample, truncated=row == 2, answer="yn"[sample])
        for row, both in scores.items()
        for sample, score in enumerate(both)
    ]
    told = flatten(response_stats("val", [*rows[::-1]]))
    assert told["val/score/mean"] == 0.5 and told["val/pass@2"] == pytest.approx(2 / 3)
    assert told["val/score_stderr"] == pytest.approx(math.sqrt(0.25 / 3)) and told["val/maj@2"] == 0.5
    assert told["val/response_length/mean"] == 1.5 and told["val/response_length/max"] == 3
    assert told["val/truncated"] == pytest.approx(1 / 3)


def test_one_prompt_has_no_standard_error_and_unequal_counts_have_no_pass_at_k() -> None:
    assert "val/score_stderr" not in response_stats("val", [response("a", 0, 0, 1.0)])
    both = [response("a", 0, 0, 1.0), response("a", 1, 0, 1.0), response("a", 1, 1, 0.0)]
    assert not [name for name in response_stats("val", both) if "@" in name or "stderr" in name]
    assert response_stats("val", []) == {}


def test_metrics_of_rewards_and_environments_are_means_by_set() -> None:
    rows = [response("a", row, 0, 0.0, rewards={"turns": 2.0 * row}) for row in (0, 1)]
    assert flatten(response_stats("val", rows))["val/env/a/turns"] == 1.0


def test_a_file_is_read_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    head = header("m", 3, {"a": {"temperature": 0.0}})
    rows = [response("a", row, 0, 1.0, response="line\u2028\nend \ud800") for row in range(3)]
    write_responses(path := responses_file(tmp_path, 3), head, rows)
    assert path == tmp_path / "validation" / "step_000003.jsonl" and read_responses(path) == (head, rows)
    assert len(path.read_text().splitlines()) == 4, "no reader finds an end of line in a text"
    whole = path.read_bytes()
    for cut in (1, len(as_lines(rows[-1:])) - 1):
        path.write_bytes(whole[:-cut])
        assert read_responses(path) == (head, rows[:2])
    path.write_bytes(whole.replace(b"[]", b"[", 1))
    assert read_responses(path)[1] == rows[1:]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[" * 100_000, b'{"format": 2}\n', b"3\n"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "step_000000.jsonl").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"step_000000\.jsonl: the first line is no header of an evaluation of format 1"
    ):
        read_responses(path)


def test_responses_to_a_prompt_are_in_order() -> None:
    rows = [response("a", 1, 1, 0.0), response("b", 1, 0, 0.5), response("a", 1, 0, 1.0)]
    found = by_prompt(rows)
    assert [[row["score"] for row in group] for group in found.values()] == [[1.0, 0.0], [0.5]]
    assert json.loads(as_lines(rows[:1]))["set"] == "a"
