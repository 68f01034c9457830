"""A run that only evaluates: prompts, their stored responses, and the results."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.best_effort import best_effort
from hpcrl.controller.evaluation import Evaluation
from hpcrl.controller.evaluation_page import PAGE, evaluation_page
from hpcrl.controller.rank0_run import Rank0Run
from hpcrl.data.source import RowOrigin
from hpcrl.metrics.evaluated import SUMMARY, as_table, summarised
from hpcrl.metrics.responses import (
    as_lines,
    by_prompt,
    partial_file,
    read_responses,
    responses_file,
    write_responses,
)
from hpcrl.rollout.types import Prompt
from hpcrl.system.files import naming, write_durably
from hpcrl.system.log import BARE

logger = logging.getLogger(__name__)

ROUNDS = 4
"""Responses of a part at most, as a multiple of the responses that are generated at the same time."""


class EvaluationRun(Rank0Run):
    """The argument of a pipeline without trainers. Responses are appended to a partial file, part by part; a later
    attempt keeps those of prompts with all responses."""

    def __init__(
        self, config: Config, run_dir: Path, attempt: int, tell_agent: Callable[[], None], evaluation: Evaluation
    ):
        super().__init__(config, run_dir, attempt, tell_agent)
        self._evaluation, self._head = evaluation, evaluation.header(0)
        self._inputs = {"inputs": inputs_digest(config.model.path, evaluation.prompts)}
        self._wanted: list[tuple[str, int, int]] = []  # by place: set, row and number of responses
        for prompt, origin in evaluation.prompts:
            self._wanted.append((prompt.domain, origin.place, config.eval.of_domain(prompt.domain).samples))
        self._rows: list[dict[str, Any]] = []
        self._started, self._path = time.monotonic(), partial_file(run_dir)
        self._restore()

    def _restore(self) -> None:
        """Read the partial file, and remove torn lines and prompts that lack responses. ValueError if the file is of
        another evaluation."""
        kept: list[dict[str, Any]] = []
        if self._path.exists():
            head, rows = read_responses(self._path)
            if head != self._head | self._inputs:
                own = {name: value for name, value in head.items() if name != "inputs"}
                changed = "from before files of the model or of the data changed"
                cause = changed if own == self._head else "of another evaluation"
                raise ValueError(f"{self._path} is {cause}; remove it, or use another run_name")
            known = by_prompt(rows)
            for name, row, count in self._wanted:
                group = known.get((name, row), [])
                kept += [dict(response) for response in group] if len(group) == count else []
        write_responses(self._path, self._head | self._inputs, kept)
        self._rows = kept
        if kept:
            text = f"{self.num_done} of {len(self._wanted)} prompts have their responses from an earlier attempt"
            logger.info("%s", text, extra=BARE)

    @property
    def num_done(self) -> int:
        """Prompts with all responses."""
        return len(self._wanted) - len(self._missing())

    def next_prompts(self) -> list[int]:
        """The places of the next prompts to respond to; none if all have their responses. Raises as
        report_progress()."""
        self.report_progress()
        chosen: list[int] = []
        left = ROUNDS * self._evaluation.num_slots
        for place in self._missing():
            left -= self._wanted[place][2]
            if chosen and left < 0:
                break
            chosen.append(place)
        return chosen

    def _missing(self) -> list[int]:
        done = by_prompt(self._rows).keys()
        return [place for place, (name, row, _) in enumerate(self._wanted) if (name, row) not in done]

    def respond(self, prompts: Collection[int]) -> list[dict[str, Any]]:
        """The rows of all responses to these prompts, without prompts of which a replica was lost."""
        rows, count = self._evaluation.rows_of(prompts), {wanted[:2]: wanted[2] for wanted in self._wanted}
        whole = {key for key, group in by_prompt(rows).items() if len(group) == count[key]}
        return [row for row in rows if (row["set"], row["row"]) in whole]

    def store(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows to the partial file. OSError names a file that cannot be written, SupersededError if another
        attempt owns the run."""
        self.fence()
        with naming(self._path), self._path.open("ab") as file:
            file.write(as_lines(rows))
            file.flush()
            os.fsync(file.fileno())
        self._rows += rows
        score = sum(row["score"] for row in self._rows) / max(len(self._rows), 1)
        seconds = time.monotonic() - self._started
        text = f"{self.num_done} of {len(self._wanted)} prompts  mean score {score:.3f}  {seconds:.0f} s"
        logger.info("%s", text, extra=BARE)

    def summarise(self) -> None:
        """Write responses, summary and page, and remove the partial file."""
        order = {wanted[:2]: place for place, wanted in enumerate(self._wanted)}
        self._rows.sort(key=lambda row: (order[row["set"], row["row"]], row["sample"]))
        self.fence()
        write_responses(responses_file(self.run_dir, 0), self._head, self._rows)
        summary = summarised(self._head, self._rows)
        write_durably(self.run_dir / SUMMARY, json.dumps(summary, indent=1).encode())
        page = best_effort(PAGE, lambda: evaluation_page(self.run_dir.name, summary, self._rows), b"")
        if page:
            write_durably(self.run_dir / PAGE, page)
        self._path.unlink(missing_ok=True)
        self.reason = f"evaluated {len(self._rows)} responses to {len(self._wanted)} prompts"

    def report(self) -> str:
        """The table of results, and the files."""
        summary = json.loads((self.run_dir / SUMMARY).read_bytes())
        files = [f"responses {responses_file(self.run_dir, 0)}", f"page {self.run_dir / PAGE}"]
        return "\n".join(["", *as_table(summary), "", *files])


def inputs_digest(model: str | None, prompts: Sequence[tuple[Prompt, RowOrigin]]) -> str:
    """A digest of what responses and scores depend on and the header does not name: names, sizes and times of the files
    in the model's folder, and the prompts with their gold answers."""
    digest = hashlib.sha256()
    folder = Path(model) if model is not None else None
    for path in sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ():
        known = path.stat()
        digest.update(f"{path.name} {known.st_size} {known.st_mtime_ns}\n".encode(errors="surrogateescape"))
    for prompt, origin in prompts:
        told = [prompt.domain, origin.place, prompt.text, prompt.messages, prompt.answer, prompt.extra]
        digest.update(json.dumps(told, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
