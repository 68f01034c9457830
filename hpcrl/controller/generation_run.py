"""A run that writes rows to train on: prompts, the stored rows of those that are done, and the finished file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.generating import GenerateConfig
from hpcrl.controller.evaluation_run import ROUNDS, inputs_digest
from hpcrl.controller.rank0_run import Rank0Run
from hpcrl.controller.responder import Responder
from hpcrl.data.response_rows import rows_of
from hpcrl.data.row_files import as_line, digest_of, publish, write_rows
from hpcrl.metrics.duration import duration
from hpcrl.metrics.generated import SUMMARY, GeneratedCounts, work_file, written_file
from hpcrl.rewards.serving.router import Router
from hpcrl.rewards.spec import UNSCORED
from hpcrl.rollout.types import Prompt, PromptOutcome
from hpcrl.system.files import naming, write_durably
from hpcrl.system.log import BARE

logger = logging.getLogger(__name__)

FORMAT = 1
TOKENS = ("tokens", "tokens_chosen", "tokens_rejected")
SCORES = ("score", "score_chosen")
"""Columns of rows that are counted."""


class GenerationRun(Rank0Run):
    """The argument of a pipeline that writes responses (PipelineSpec.writes_responses). The rows of each prompt are
    appended to a work file, part by part and in the order of the prompts, so a later attempt continues after them."""

    def __init__(
        self, config: Config, run_dir: Path, attempt: int, tell_agent: Callable[[], None], responder: Responder
    ):
        """ValueError if the target is not this run's, or the work file is from before a change of data or model."""
        super().__init__(config, run_dir, attempt, tell_agent)
        self._asked, self._responder = config.section(GenerateConfig), responder
        self._target, self._work = target_of(self._asked, run_dir), work_file(run_dir)
        mark = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]  # other runs may write there, too
        self._whole = self._target.with_name(f".{self._target.stem}.{mark}.tmp{self._target.suffix}")
        self._router, self._scored = Router(config), dict[str, bool]()
        self._order = responder.source.in_turn()
        self._counts, self._next = GeneratedCounts(), 0
        self._is_written = self._check_target()
        if not self._is_written:
            self._restore()
        self._begun, self._before = time.monotonic(), self._counts.prompts

    @property
    def num_prompts(self) -> int:
        """Prompts to respond to, at most: of rows that turn out to be unusable, none is generated."""
        return min(self._asked.num_prompts or len(self._order), len(self._order))

    def _check_target(self) -> bool:
        """Whether the target is this run's finished file. ValueError if it is another file."""
        if not self._target.parent.is_dir():
            raise ValueError(f"generate.target: {self._target.parent} is no folder; make it, or name another file")
        if not self._target.exists():
            return False
        if self._known().get("sha256") == digest_of(self._target):
            self._counts = GeneratedCounts.of(self._known()["counts"])
            return True
        text = "exists and is not this run's; name another file or remove it"
        raise ValueError(f"generate.target: {self._target} {text}")

    def _known(self) -> dict[str, Any]:
        path = written_file(self.run_dir)
        found = json.loads(path.read_bytes()) if path.exists() else {}
        return found if isinstance(found, dict) else {}

    def _restore(self) -> None:
        """Read the work file, and cut it at the first line that is torn or damaged. ValueError if files of the model
        or of the data have changed since."""
        model = inputs_digest(self.config.model.path, ())
        head = {"format": FORMAT, "model": model, **self._responder.source.identity}
        kept = 0
        if self._work.exists():
            with self._work.open("rb") as file:
                kept = self._read(file, head)
        self._work.parent.mkdir(parents=True, exist_ok=True)
        with naming(self._work), self._work.open("ab") as file:
            file.truncate(kept)
            if not kept:
                file.write(as_line(head))
            file.flush()
            os.fsync(file.fileno())
        if self._next:
            text = f"{self._counts.prompts} of {self.num_prompts} prompts have their rows from an earlier attempt"
            logger.info("%s", text, extra=BARE)

    def _read(self, file: Iterator[bytes], head: Mapping[str, Any]) -> int:
        """Read whole lines, the header first; returns their bytes."""
        kept = 0
        for line in file:
            self._tell_agent()
            found = _object(line)
            if found is None:
                break
            if not kept and found != dict(head):
                names = [name for name in {**found, **head} if found.get(name) != head.get(name)]
                what = "files of the model" if names == ["model"] else f"data.train ({', '.join(names)})"
                raise ValueError(
                    f"{self._work} is from before {what} changed; restore them, or start anew with another run_name"
                )
            if kept:
                if self._next == len(self._order) or found.get("row") != int(self._order[self._next]):
                    break
                self._counts.add(GeneratedCounts.of(found["counts"]))
                self._next += 1
            kept += len(line)
        return kept

    def next_part(self) -> list[Prompt | tuple[int, PromptOutcome]]:
        """The next prompts to respond to, at most ROUNDS times as many responses as are generated at the same time,
        and (row, reason) of rows between them that are unusable; empty if all is done. Raises as report_progress()."""
        self.report_progress()
        part: list[Prompt | tuple[int, PromptOutcome]] = []
        if self._is_written:
            return part
        left = self._asked.num_prompts or len(self._order)
        left = min(left - self._counts.prompts, max(1, ROUNDS * self._responder.num_slots // self._asked.samples))
        for row in self._order[self._next :]:
            if left <= 0:
                break
            self._tell_agent()
            found = self._responder.source.of_row(int(row))
            part.append((int(row), found) if isinstance(found, PromptOutcome) else found)
            left -= isinstance(found, Prompt)
        return part

    def respond(self, part: Sequence[Prompt | tuple[int, PromptOutcome]]) -> list[dict[str, Any]]:
        """What the work file stores for each entry of a part, in order. Prompts of a lost replica are responded to
        again."""
        prompts = [prompt for prompt in part if isinstance(prompt, Prompt)]
        found: dict[int, Sequence[Mapping[str, Any]]] = {}
        while missing := [prompt for prompt in prompts if prompt.row not in found]:
            found |= self._responder.respond(missing, self._asked.samples)
            self.report_progress()
        return [
            self._done(entry, found[entry.row]) if isinstance(entry, Prompt) else _skipped(*entry) for entry in part
        ]

    def _done(self, prompt: Prompt, responses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        scored = self._is_scored(prompt.domain)
        made = rows_of(prompt, responses, self._asked, scored, self._responder.turns.message)
        counts = GeneratedCounts(1, len(responses), len(made.rows), sum(each["tokens"] for each in responses))
        counts.row_tokens = sum(row[name] for row in made.rows for name in TOKENS if name in row)
        if scored:
            counts.scored, counts.scored_rows = len(responses), len(made.rows)
            counts.score = sum(response["score"] for response in responses)
            counts.row_score = sum(row[name] for row in made.rows for name in SCORES if name in row)
        counts.dropped.update(made.dropped)
        counts.no_pair.update([made.no_pair] if made.no_pair else [])
        return {"row": prompt.row, "counts": counts.as_json(), "rows": made.rows}

    def _is_scored(self, domain: str) -> bool:
        """Whether a reward or an environment scores the domain's responses."""
        if domain not in self._scored:
            played = self.config.env_of(domain) is not None
            self._scored[domain] = played or self._router.of(domain).name != UNSCORED
        return self._scored[domain]

    def store(self, done: Sequence[Mapping[str, Any]]) -> None:
        """Append a part to the work file. OSError names a file that cannot be written, SupersededError if another
        attempt owns the run."""
        self.fence()
        with naming(self._work), self._work.open("ab") as file:
            file.write(b"".join(map(as_line, done)))
            file.flush()
            os.fsync(file.fileno())
        for one in done:
            self._counts.add(GeneratedCounts.of(one["counts"]))
        self._next += len(done)
        logger.info("%s", self._progress(), extra=BARE)

    def _progress(self) -> str:
        counts, seconds = self._counts, time.monotonic() - self._begun
        rate = (counts.prompts - self._before) / seconds if seconds else 0.0
        left = self.num_prompts - counts.prompts
        score = f"  mean score {counts.mean_score:.3f}" if counts.mean_score is not None else ""
        eta = f"  ETA {duration(left / rate)}" if left and rate else ""
        done = f"{counts.prompts} of {self.num_prompts} prompts  {counts.rows} rows of {counts.responses} responses"
        return f"{done}{score}  {60 * rate:.3g} prompts/min{eta}"

    def write(self) -> None:
        """Write the file of rows and the summary, and remove the work file. ValueError if another run has written the
        target meanwhile."""
        if not self._is_written:
            digest = write_rows(self._whole, self._stored_rows, self.report_progress)
            self.fence()
            known = {"target": str(self._target), "sha256": digest, "counts": self._counts.as_json()}
            write_durably(written_file(self.run_dir), json.dumps(known).encode())
            try:
                publish(self._whole, self._target)
            except FileExistsError:
                self._check_target()
        self._whole.unlink(missing_ok=True)
        summary = {"format": FORMAT, "target": str(self._target), "counts": self._counts.as_json()}
        write_durably(self.run_dir / SUMMARY, json.dumps(summary, indent=1).encode())
        self._work.unlink(missing_ok=True)
        self.reason = f"wrote {self._counts.rows} rows from {self._counts.prompts} prompts"

    def _stored_rows(self) -> Iterator[Mapping[str, Any]]:
        with self._work.open("rb") as file:
            next(file)  # the header
            for line in file:
                yield from json.loads(line)["rows"]

    def report(self) -> str:
        """The table of counts, and the file."""
        return "\n".join(["", *self._counts.as_table(), "", f"rows  {self._target}"])


def target_of(asked: GenerateConfig, run_dir: Path) -> Path:
    """The file of rows."""
    return Path(asked.target).absolute() if asked.target is not None else run_dir / "rows.jsonl"


def _skipped(row: int, why: PromptOutcome) -> dict[str, Any]:
    reason = "too long" if why is PromptOutcome.TOO_LONG else "unusable"
    counts = GeneratedCounts()
    counts.skipped[reason] += 1
    return {"row": row, "counts": counts.as_json(), "rows": []}


def _object(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None for a torn or damaged one."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
