"""Training samples of a run for a page: which ones, within a budget of bytes.

How prompts ended is read of all steps; rollouts are read of the chosen steps only, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrl.report.run_files import RunFiles
from hpcrl.report.samples_pictures import PagePictures
from hpcrl.report.samples_rows import SampleRows
from hpcrl.report.samples_text import clean, cut, num_bytes
from hpcrl.report.samples_tokens import TokenPieces
from hpcrl.rollout.step_files import (
    OUTCOMES,
    OUTCOMES_UNTIL_0_6,
    IncompleteStepError,
    OutcomeRecord,
    StepRows,
    open_step,
    read_outcomes,
)
from hpcrl.rollout.types import PromptOutcome
from hpcrl.system.files import STEP_NAME, step_name

ROLLOUTS = "rollouts"
"""Folder of a run."""
MIN_STEPS, MAX_STEPS = 6, 40
"""Steps of which samples are chosen, if the run has that many."""
MIN_CHARS, MAX_CHARS = 1500, 16000
"""Characters of a message that the page shows: fewer if groups are large."""
BYTES_PER_CHAR = 3
BYTES_PER_TOKEN, BYTES_PER_SAMPLE = 12, 400
"""Rough sizes in a page, from which the number of steps follows."""
ENDED_SHARE = 0.05
"""Share of the budget for prompts that were not trained on, of which no responses are kept."""


@dataclass
class FoundRollouts:
    """What a page shows of a run's rollouts.

    Args:
        samples: Rows of rollouts, by step.
        prompts: The prompts' messages, by hash.
        ended: Prompts that were not trained on.
        counts: Prompts by outcome, in all steps.
        total: Samples that were trained on, in all steps.
        num_steps: Of the run.
        steps: Those with samples.
        choice: How samples were chosen, in words.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ended: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    total: int = 0
    num_steps: int = 0
    steps: list[int] = field(default_factory=list)
    choice: str = ""


def find_rollouts(run: RunFiles, budget: int, pieces: TokenPieces | None, pictures: PagePictures) -> FoundRollouts:
    """The training samples for a page in about `budget` bytes."""
    found = FoundRollouts()
    known = sorted(int(match[1]) for entry in run.entries(ROLLOUTS) if (match := STEP_NAME.fullmatch(entry.name)))
    endings = {step: _endings(run, step, with_metrics=False) for step in known}
    found.num_steps, found.total = len(known), sum(_trained(run, step, endings[step]) for step in known)
    for records in endings.values():
        for record in records:
            found.counts[record.outcome] = found.counts.get(record.outcome, 0) + 1
    if not known:
        return found
    limit, count = _sizes(run, known, budget)
    even = [known[place] for place in np.unique(np.linspace(0, len(known) - 1, count).round().astype(int))]
    extremes = _extremes(endings)
    left = budget * (1 - ENDED_SHARE)
    visited = sorted({*even, *(step for step, _ in extremes.values())})
    for number, step in enumerate(visited):
        wanted = {uid for at, uid in extremes.values() if at == step}
        share = left / (len(visited) - number)
        try:
            with _opened(run, step) as rows:
                records = _endings(run, step) if endings[step] else []
                reading = SampleRows(step, rows, records, pieces, pictures, limit)
                left -= _take(reading, found, share, wanted, others=step in even)
        except IncompleteStepError as error:
            if step != known[-1]:  # the run may be writing its newest step
                run.problems.append(str(error))
        except ValueError as error:
            run.problems.append(str(error))
    found.steps = sorted({sample["step"] for sample in found.samples})
    found.ended = _not_trained(endings, budget * ENDED_SHARE, even)
    found.choice = _choice(found, even, extremes)
    return found


def _endings(run: RunFiles, step: int, with_metrics: bool = True) -> list[OutcomeRecord]:
    """How prompts ended in a step; none if the step has no such file, or it cannot be read."""
    folder = f"{ROLLOUTS}/{step_name(step)}"
    path = run.file(folder)
    if path is None or any(run.file(f"{folder}/{name}") is None for name in (OUTCOMES, OUTCOMES_UNTIL_0_6)):
        return []
    try:
        return read_outcomes(path, with_metrics)
    except ValueError as error:
        run.problems.append(str(error))
        return []


def _opened(run: RunFiles, step: int) -> AbstractContextManager[StepRows]:
    """The step's rows. ValueError as of open_step()."""
    name = f"{ROLLOUTS}/{step_name(step)}"
    paths = [path for path in run.entries(name) if path.match("rank_*.h5")]
    return open_step(run.path / name, paths)


def _trained(run: RunFiles, step: int, records: Sequence[OutcomeRecord]) -> int:
    """Samples of a step that were trained on."""
    if records:
        return sum(len(record.rewards) for record in records if record.outcome is PromptOutcome.TRAINED)
    try:
        with _opened(run, step) as rows:
            return len(rows)
    except ValueError:  # is a problem if the step is chosen
        return 0


def _sizes(run: RunFiles, known: Sequence[int], budget: int) -> tuple[int, int]:
    """(characters of a message to show, number of steps), from the size of groups in the newest step."""
    for step in reversed(known):
        try:
            with _opened(run, step) as rows:
                groups = rows.column("group_ids")
                if groups is None:
                    continue
                members = len(groups) / max(1, len(set(groups.tolist())))
                tokens = float(rows.lengths().mean())
        except ValueError:
            continue
        limit = int(min(max(budget / MIN_STEPS / members / BYTES_PER_CHAR, MIN_CHARS), MAX_CHARS))
        size = members * (min(tokens, limit) * BYTES_PER_TOKEN + BYTES_PER_SAMPLE)
        return limit, int(min(max(budget // size, MIN_STEPS), MAX_STEPS, len(known)))
    return MAX_CHARS, min(MIN_STEPS, len(known))


def _extremes(endings: Mapping[int, Sequence[OutcomeRecord]]) -> dict[str, tuple[int, int]]:
    """The newest (step, uid) of the highest and of the lowest reward that was trained on."""
    rewards = [
        (reward, step, record.uid)
        for step, records in endings.items()
        for record in records
        if record.outcome is PromptOutcome.TRAINED
        for reward in record.rewards
    ]
    if not rewards:
        return {}
    best = max(rewards)
    worst = max(rewards, key=lambda each: (-each[0], each[1]))
    return {"highest": best[1:], "lowest": worst[1:]}


def _take(reading: SampleRows, found: FoundRollouts, share: float, wanted: set[int], others: bool) -> int:
    """Add groups of a step: the wanted ones, and `others` in the order of their prompts' hashes, so that a prompt that
    recurs is chosen again, while they fit into `share` bytes. The first and the wanted ones are there in any case, with
    shorter texts if they do not fit. Returns the bytes."""
    used = taken = 0
    for uid in reading.order(wanted):
        if uid not in wanted and (not others or (taken and used >= share)):
            break
        samples, prompt = reading.group(uid)
        size = num_bytes(samples) + num_bytes(prompt)
        if size > share and (uid in wanted or not taken):
            samples, prompt = reading.group(uid, share / size)
            size = num_bytes(samples) + num_bytes(prompt)
        elif taken and used + size > share:
            break
        identity = samples[0]["prompt"]
        size -= num_bytes(prompt) if identity in found.prompts else 0
        found.samples += samples
        found.prompts.setdefault(identity, prompt)
        used, taken = used + size, taken + 1
    return used


def _not_trained(
    endings: Mapping[int, Sequence[OutcomeRecord]], budget: float, even: Sequence[int]
) -> list[dict[str, Any]]:
    """Prompts that were not trained on: failed ones first, then those of the chosen steps, then of other steps."""
    listed = [
        (record.outcome is not PromptOutcome.FAILED, step not in even, step, record)
        for step, records in endings.items()
        for record in records
        if record.outcome is not PromptOutcome.TRAINED
    ]
    found, used = [], 0
    for *_, step, record in sorted(listed, key=lambda each: each[:3]):
        shown = {
            "id": f"s{step}-{record.uid}-{record.attempt}",
            "step": step,
            "uid": record.uid,
            "outcome": str(record.outcome),
            "reason": cut(record.reason, 400)["text"],
            "domain": clean(record.domain)[:80],
            "rewards": [round(reward, 6) for reward in record.rewards[:64]],
        }
        used += num_bytes(shown)
        if used > budget:
            break
        found.append(shown)
    return sorted(found, key=lambda each: (each["step"], each["uid"]))


def _choice(found: FoundRollouts, even: Sequence[int], extremes: Mapping[str, tuple[int, int]]) -> str:
    if len(found.samples) >= found.total:
        return "all samples"
    told = f"whole groups from {len(even)} of {found.num_steps} steps, evenly spread, by a hash of their prompts"
    more = [f"the {name} reward (step {step})" for name, (step, _) in extremes.items()]
    return f"{told}; and the groups with {' and '.join(more)}" if more else told
