"""Comparing samples that lm-evaluation-harness wrote (tests/fixtures/lm_eval), also with a validation of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcrl.commands.compare import main
from hpcrl.metrics.lm_eval_samples import is_samples, newest_samples, read_samples
from hpcrl.system.exit_codes import ExitCode
from tests.test_compare import compare, header, line, refused, write

FOLDER = Path(__file__).parents[1] / "fixtures" / "lm_eval"
PLAIN, WORDY = FOLDER / "plain", FOLDER / "wordy"


def test_the_scores_are_those_of_lm_evaluation_harness(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(capsys, str(PLAIN), str(WORDY))
    means = {name: (each["mean_a"], each["mean_b"]) for name, each in found["sets"].items()}
    # Its results: sums 1.0 and 0.0 with the filter strict, parity .5 and .5; "yes" is right for 2 and 42.
    assert means == {"sums": (1.0, 0.0), "parity": (0.5, 0.5)}
    assert (found["sets"]["parity"]["lost"], found["sets"]["parity"]["gained"]) == (2, 2)
    assert found["a"] == {"path": str(PLAIN), "origin": "lm-evaluation-harness", "model": "plain", "step": None}


def test_a_metric_and_its_filter_are_selected(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(PLAIN), str(WORDY), "--metric", "exact_match,number"]
    sums = compare(capsys, *words, "--set", "sums")["sets"]["sums"]
    assert (sums["mean_a"], sums["mean_b"], sums["lost"]) == (1.0, 0.75, 1), "14 instead of 15 is wrong"
    said = refused(capsys, *words)
    assert "samples_parity" in said and "no number for the metric exact_match" not in said
    assert "no samples of the filter number, which --metric selects (there: none)" in said
    said = refused(capsys, str(PLAIN), str(WORDY), "--metric", "acc_norm", "--set", "parity")
    assert "no number for the metric acc_norm; --metric METRIC[,FILTER] selects another (there: acc)" in said


def test_the_newest_file_of_each_task_is_read(tmp_path: Path) -> None:
    shutil.copytree(PLAIN, tmp_path / "plain")
    (old,) = (tmp_path / "plain").glob("samples_sums_*")
    old.rename(old.with_name("samples_sums_2026-01-01T00-00-00.000001.jsonl"))
    new = Path(shutil.copy(next(WORDY.glob("samples_sums_*")), tmp_path / "plain"))
    found = newest_samples(tmp_path / "plain")
    assert list(found) == ["parity", "sums"] and found["sums"] == new
    assert is_samples(old.with_name("samples_sums_2026-01-01T00-00-00.000001.jsonl"))


def test_responses_and_log_likelihoods_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(PLAIN), str(WORDY), "--show", "8"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "[prompt]\nQ: 40 + 2\nA:\n[gold answer]\n42\n[A]\n42\n[B]\nThe sum is 42" in text
    assert '[A]\n[[["-1.0", "False"]], [["-2.0", "False"]]]' in text
    assert (
        main([str(PLAIN), str(WORDY), "--show", "8", "--set", "sums", "--metric", "exact_match,number"])
        == ExitCode.DONE
    )
    assert "[gold answer]\n15\n[A]\n15\n[B]\n14" in capsys.readouterr().out


def test_a_run_is_compared_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line("default", number, 0, score) for number, score in enumerate((1, 1, 0, 1))]
    ours = write(tmp_path / "ours.jsonl", header(), *rows)
    (theirs,) = map(str, WORDY.glob("samples_sums_*"))
    both = [theirs, ours, "--set", "sums=default"]
    assert "--by row" in refused(capsys, *both)
    found = compare(capsys, *both, "--by", "row", "--metric", "exact_match,number", "--show", "9")
    # Theirs is wrong for document 1, ours for row 2.
    assert (found["overall"]["lost"], found["overall"]["gained"], found["overall"]["mean_b"]) == (1, 1, 0.75)
    assert [each["row"] for each in found["shown"]] == ["1", "2"]


def test_numbers_that_json_does_not_have_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Python's json writes them: NaN in a document of pandas, a lone surrogate in a response."""
    (good,) = PLAIN.glob("samples_sums_*")
    row = json.loads(good.read_text().splitlines()[0])
    odd = write(tmp_path / "odd.jsonl", row | {"doc": {"year": float("nan")}, "resps": [["\ud800"]], "exact_match": 0})
    assert "NaN" in Path(odd).read_text()
    assert main([str(good), odd, "--set", "sums=odd", "--show", "1"]) == ExitCode.DONE
    assert "[B]\n\\ud800" in capsys.readouterr().out
    bad = write(tmp_path / "bad.jsonl", row | {"exact_match": float("nan")})
    assert "no number for the metric exact_match" in refused(capsys, bad, bad)


def test_damaged_samples_name_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good,) = PLAIN.glob("samples_sums_*")
    lines = good.read_text().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines)[:-20])
    assert read_samples([torn], metric="exact_match,number").torn == torn
    torn.write_text(lines[0] + "{half\n" + lines[1])
    assert f"{torn}:2: not JSON" in refused(capsys, str(good), str(torn))
    torn.write_text(lines[0] + json.dumps({"doc": {}}) + "\n")
    assert f"{torn}:2: no doc_id" in refused(capsys, str(good), str(torn))
    assert "@STEP" in refused(capsys, f"{PLAIN}@3", str(WORDY))
