"""The reports of an evaluation."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hpcrl.controller.evaluation import Evaluation, _folder_name
from hpcrl.controller.examples import keep_examples
from hpcrl.rollout.types import MAX_VALIDATION_ROWS, make_sample_id, validation_uid
from hpcrl.spec.media import IMAGE, Medium

pytestmark = pytest.mark.usefixtures("console")


def test_every_evaluation_gives_validation_prompts_different_uids() -> None:
    uids = {
        validation_uid(evaluation, row)
        for evaluation in (0, 1, 2, 9, 262_143)
        for row in (0, 1, MAX_VALIDATION_ROWS - 1)
    }
    assert len(uids) == 15 and validation_uid(262_144, 3) == validation_uid(0, 3)
    assert make_sample_id(max(uids), 0, 0) < 1 << 63


@pytest.mark.parametrize("content", [b"{", b"\xff", b"3", b"[" * 100_000])
def test_damaged_examples_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    evaluation = object.__new__(Evaluation)  # its report at the end of a run needs only the run folder
    evaluation._run_dir = tmp_path
    assert evaluation.before_and_after(3) == ""
    (tmp_path / "examples.json").write_bytes(content)
    assert evaluation.before_and_after(3) == ""
    assert evaluation.before_and_after(3) == ""
    assert f"hpcrl: {tmp_path}/examples.json cannot be read: " in capsys.readouterr().out


def examples(step: int) -> tuple[list[dict[str, Any]], list[tuple[Medium, ...]]]:
    """Two prompts of equal text and different images, and a text of the model that no page must run."""
    response = "<script>alert(1)</script>"
    rows = [
        {"domain": "d", "row": row, "prompt": "colour?", "answer": answer, "response": response, "score": score}
        for row, answer, score in ((0, "r", 0.0), (1, "b", 1.0 if step else 0.0))
    ]
    return rows, [(Medium(IMAGE, bytes([n, 0, 0] * 4), 2, 2),) for n in (1, 2)]


def test_examples_of_equal_text_are_told_apart_by_row(tmp_path: Path) -> None:
    for step in (0, 5):
        keep_examples(tmp_path, step, *examples(step))
    evaluation = object.__new__(Evaluation)
    evaluation._run_dir = tmp_path
    told = evaluation.before_and_after(5)
    assert re.findall(r"->  (.)|(right|wrong)", told) == [
        *[("r", ""), ("", "wrong"), ("", "wrong")],
        *[("b", ""), ("", "wrong"), ("", "right")],
    ]


def test_the_page_of_examples_shows_images_responses_and_scores(tmp_path: Path) -> None:
    for step in (0, 5):
        keep_examples(tmp_path, step, *examples(step))
    shown = (tmp_path / "examples.html").read_text()
    assert shown.count("<table>") == 2 and shown.count("<img ") == 2
    contents = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", shown)]
    colours = [Image.open(io.BytesIO(content)).convert("RGB").getpixel((0, 0)) for content in contents]
    assert colours == [(1, 0, 0), (2, 0, 0)]
    assert shown.count("<tr><td>0</td><td>0</td>") == 2 and shown.count("<tr><td>5</td><td>1</td>") == 1
    assert "<script>" not in shown and shown.count("&lt;script&gt;") == 4 and "default-src 'none'" in shown


def test_a_domain_named_like_a_path_becomes_one_folder() -> None:
    assert [_folder_name(name) for name in ("lake", "a/b", "..")] == ["lake", "a%2Fb", "%2E%2E"]
    assert len(_folder_name("\udcff" + "x" * 1000).encode()) == 200
