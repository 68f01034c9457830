"""TensorBoard: event files in the run's folder tensorboard/. The next attempt's first event hides an earlier attempt's
steps past the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics.trackers.tracker import TrackedRun


class TensorBoard:
    """See Tracker."""

    def __init__(self, run: TrackedRun, section: object = None):
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._board = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.first_step)
        if run.first_step <= 0:
            for name, text in ("config", json.dumps(run.config, indent=1, default=str)), ("plan", run.plan):
                self._board.add_text(name, f"```\n{text}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0]) if rows else []
        cells = [columns, ["---"] * len(columns), *([_cell(row[column]) for column in columns] for row in rows)]
        self._board.add_text(name, "\n".join(f"| {' | '.join(row)} |" for row in cells), step)

    def image(self, name: str, path: Path) -> None:
        import matplotlib.image

        self._board.add_image(name, matplotlib.image.imread(path)[:, :, :3], dataformats="HWC")

    def close(self) -> str:
        self._board.close()
        return ""


def _cell(value: Any) -> str:
    """A value as a Markdown table cell, escaped so a response cannot break the table."""
    text = " ".join(str(value).split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
