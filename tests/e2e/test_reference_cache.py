"""The reference's log-probs, computed once: equal to those of every step, and kept for later runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.metrics.log import read_metrics
from tests.e2e.test_reference import other, train

__all__ = ["other"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def by_row(found: list[dict[str, torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
    """Row -> the reference's log-probs of its trained tokens, as often as a loss read them."""
    rows: dict[int, list[torch.Tensor]] = {}
    for each in found:
        values = torch.zeros(len(each["mask"])).masked_scatter(each["mask"], each["reference"])
        masks, parts = (tensor.tensor_split(each["starts"][1:-1]) for tensor in (each["mask"], values))
        for row, mask, part in zip(each["ids"].tolist(), masks, parts, strict=True):
            rows.setdefault(row, []).append(part[mask])
    return rows


def test_stored_log_probs_equal_those_of_each_step_and_serve_later_runs(
    tmp_path: Path, digit_model: Path, digit_data: Path, other: Path
) -> None:
    words = [f"reference.path={other}", "max_steps=2"]
    each = by_row(train(tmp_path / "each", tmp_path / "seen_each", digit_model, digit_data, *words, "layout=single"))
    cached = [*words, f"reference.cache={tmp_path}/cache"]
    alone = [*cached, "layout=single"]
    once = by_row(train(tmp_path / "once", tmp_path / "seen_once", digit_model, digit_data, *alone))
    assert once.keys() == each.keys() and len(once) == 16
    assert all(a.equal(b) for row in each for a, b in zip(each[row], once[row], strict=True)), "bitwise"
    losses = [[row["sft/kl"] for row in read_metrics(tmp_path / name)] for name in ("each", "once")]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    (folder,) = (tmp_path / "cache").iterdir()
    (values,) = folder.glob("values_*")
    assert not list(folder.glob("part_*")) and sorted(path.name for path in folder.iterdir()) == sorted(
        [".lock", "facts.json", "index.npz", values.name]
    )
    # A later run, on other ranks, reads them.
    written = values.stat().st_mtime_ns
    cached.append("layout=colocated")
    later = by_row(train(tmp_path / "later", tmp_path / "seen_later", digit_model, digit_data, *cached))
    assert later.keys() == once.keys() and all(later[row][0].equal(once[row][0]) for row in once)
    log = (tmp_path / "later" / "logs" / "attempt_0001" / "rank_0000.log").read_text()
    assert f"log-probs are read from {folder}" in log and values.stat().st_mtime_ns == written
