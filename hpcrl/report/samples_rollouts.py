"""Training samples of a run for a page: which ones, within a budget of bytes, and what the page shows of each.

How prompts ended is read of all steps; rollouts are read of the chosen steps only, row by row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrl.report.run_files import RunFiles
from hpcrl.report.samples_pictures import PagePictures
from hpcrl.report.samples_text import as_messages, clean, cut, message, num_bytes, prompt_hash
from hpcrl.report.samples_tokens import TokenPieces, segments
from hpcrl.rollout.step_files import (
    OUTCOMES,
    OUTCOMES_UNTIL_0_6,
    IncompleteStepError,
    OutcomeRecord,
    StepRows,
    open_step,
    read_outcomes,
)
from hpcrl.rollout.types import STATUS, PromptOutcome, is_greedy, split_sample_id
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import WRITTEN_MARK
from hpcrl.system.files import STEP_NAME, step_name

ROLLOUTS = "rollouts"
"""Folder of a run."""
MIN_STEPS, MAX_STEPS = 6, 40
"""Steps of which samples are chosen, if the run has that many."""
MIN_CHARS, MAX_CHARS = 1500, 16000
"""Characters of a message that the page shows: fewer if groups are large."""
SHORTEST_CHARS = 200
"""The same for a group that is still too large."""
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
                reading = _Reading(step, rows, records, pieces, pictures, limit)
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


def _take(reading: _Reading, found: FoundRollouts, share: float, wanted: set[int], others: bool) -> int:
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


class _Reading:
    """The rows of an open step, as the page shows them."""

    def __init__(
        self,
        step: int,
        rows: StepRows,
        records: Sequence[OutcomeRecord],
        pieces: TokenPieces | None,
        pictures: PagePictures,
        limit: int,
    ):
        self._step, self._rows, self._pieces = step, rows, pieces
        self._pictures, self._max_chars, self._limit = pictures, limit, limit
        self._records = {record.uid: record for record in records}
        self._columns = {
            name: column.tolist()
            for name in ("sample_ids", "group_ids", "rewards", "scores", "status", "weights", "failed", "baselines")
            if (column := rows.column(name)) is not None
        }
        self._lengths = rows.lengths().tolist()
        self._members: dict[int, list[int]] = {}
        for row, uid in enumerate(self._columns.get("group_ids", ())):
            self._members.setdefault(uid, []).append(row)
        weights = rows.facts.get("weight_version", step - 1)
        self._version = int(weights) if isinstance(weights, int) else step - 1

    def order(self, wanted: set[int]) -> Iterator[int]:
        """Groups: the wanted ones, then one with a failed episode, then the others by a hash of their prompts."""
        failed = self._columns.get("failed", ())
        yield from (uid for uid in self._members if uid in wanted)
        others = [uid for uid in self._members if uid not in wanted]
        broken = next((uid for uid in others if failed and any(failed[row] for row in self._members[uid])), None)
        if broken is not None:
            yield broken
        yield from sorted((uid for uid in others if uid != broken), key=self._prompt_key)

    def group(self, uid: int, part: float = 1.0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A group's samples, and the prompt's messages; texts are cut to this part of their usual length."""
        rows = self._members[uid]
        longest = min(max(self._lengths[row] for row in rows), self._max_chars)
        self._limit = self._max_chars if part == 1.0 else max(int(longest * part), SHORTEST_CHARS)
        record = self._records.get(uid)
        by_member = sorted(rows, key=lambda row: split_sample_id(self._columns["sample_ids"][row])[2])
        parts = dict(zip(by_member, record.metrics if record else (), strict=False))
        prompt: list[dict[str, Any]] = []
        samples = []
        for row in rows:
            shown, prompt = self._sample(row, parts.get(row, {}))
            samples.append(shown | ({"domain": clean(record.domain)[:80]} if record and record.domain else {}))
        return samples, prompt

    def _prompt_key(self, uid: int) -> bytes:
        """A hash of the prompt's tokens."""
        row = self._members[uid][0]
        ids, turns = self._rows.tokens(row, "token_ids"), self._rows.tokens(row, "turn_ids")
        if ids is None or turns is None:
            return uid.to_bytes(8, "big", signed=True)
        return hashlib.blake2b(ids[: _prompt_length(turns)].astype("<i8").tobytes(), digest_size=8).digest()

    def _sample(self, row: int, parts: Mapping[str, float]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        columns = {name: values[row] for name, values in self._columns.items()}
        uid, attempt, member = split_sample_id(columns["sample_ids"])
        tokens = {name: self._rows.tokens(row, name) for name in TOKEN_FIELDS}
        mask, turns = tokens["loss_mask"], tokens["turn_ids"]
        spans = _turn_spans(mask, turns) if mask is not None and turns is not None else {}
        num_turns = int(turns.max(initial=-1)) + 1 if turns is not None else 0
        said = self._messages(row, tokens, spans)
        answers = [number for number, one in enumerate(said) if one.get("role") == "assistant"]
        answers = answers[len(answers) - num_turns :] if num_turns <= len(answers) else []
        begins = answers[0] if answers else len(said)
        digests, in_prompt = self._digests(row, _prompt_length(turns) if turns is not None else 0)
        shown: dict[str, Any] = {
            "id": f"s{self._step}-{uid}-{attempt}-{member}",
            "step": self._step,
            "uid": uid,
            "attempt": attempt,
            "member": member,
            "prompt": prompt_hash(said[:begins], digests[:in_prompt]),
            "reward": _rounded(columns.get("rewards")),
            "score": _rounded(columns.get("scores")),
            "finish": str(STATUS[columns["status"]]) if columns.get("status") in range(len(STATUS)) else "",
            "greedy": is_greedy(columns["sample_ids"]),
            "failed": bool(columns.get("failed", False)),
            "weight": _rounded(columns.get("weights", 1.0)),
            **self._of_tokens(tokens),
        }
        if parts:
            shown["parts"] = {clean(str(name))[:80]: _rounded(value) for name, value in parts.items()}
        messages = [self._message(one) for one in said]
        self._place_pictures(messages, said, digests)
        for turn, number in enumerate(answers):
            if turn in spans:
                messages[number] |= self._turn(turn, spans[turn], tokens, num_turns > 1)
                if "segments" in messages[number]:  # they have the text
                    messages[number] = {k: v for k, v in messages[number].items() if k not in TEXT_KEYS}
        shown["said"] = messages[begins:]
        return shown, messages[:begins]

    def _messages(
        self, row: int, tokens: Mapping[str, np.ndarray | None], spans: Mapping[int, tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """The stored messages; without them, or if they are damaged, the decoded tokens of prompt and turns."""
        text = self._rows.text(row, "messages")
        try:
            stored = json.loads(text or "[]")
        except (ValueError, RecursionError):
            stored = []
        if isinstance(stored, list) and stored:
            return as_messages(stored, "user")
        ids, turns = tokens["token_ids"], tokens["turn_ids"]
        if ids is None or turns is None:
            return []
        asked = self._decoded(ids[: _prompt_length(turns)])
        answers = [{"role": "assistant", "content": self._decoded(ids[start:end])} for start, end in spans.values()]
        return [{"role": "prompt", "content": asked}, *answers]

    def _decoded(self, ids: np.ndarray) -> str:
        listed = ids[: 4 * self._limit].tolist()
        return "".join(self._pieces.of(listed)) if self._pieces else " ".join(map(str, listed))

    def _message(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return message(said, self._limit)

    def _turn(
        self, turn: int, span: tuple[int, int], tokens: Mapping[str, np.ndarray | None], several: bool
    ) -> dict[str, Any]:
        """What the page shows of a model's turn besides its text: values of the turn, and its tokens."""
        start, end = span
        given = {name: column[start:end] for name, column in tokens.items() if column is not None}
        found: dict[str, Any] = {"turn": turn + 1, "tokens": int(given["loss_mask"].sum())}
        if several and "token_rewards" in given:
            found["reward"] = _rounded(given["token_rewards"].sum())
        if several and "advantages" in given:
            found["advantage"] = _rounded(given["advantages"][given["loss_mask"] > 0].mean())
        if self._pieces and "token_ids" in given:
            found["segments"] = segments(self._pieces, given["token_ids"], self._values(given), self._limit)
        return found

    def _values(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Values per token for colours."""
        found = {}
        if "old_logprobs" in given and "gen_logprobs" in given:
            found["mismatch"] = given["old_logprobs"] - given["gen_logprobs"]
        if "versions" in given:
            found["lag"] = np.where(given["versions"] >= 0, self._version - given["versions"], 0)
        if "advantages" in given:
            found["advantage"] = given["advantages"]
        if "old_entropies" in given:
            found["entropy"] = given["old_entropies"]
        return found

    def _of_tokens(self, tokens: Mapping[str, np.ndarray | None]) -> dict[str, Any]:
        """Lengths, versions, lag, and the mean advantage and mismatch of the model's tokens."""
        mask = tokens["loss_mask"]
        if mask is None:
            return {}
        model = mask > 0
        found: dict[str, Any] = {"tokens": int(model.sum()), "all_tokens": len(model)}
        if not model.any():
            return found
        if (versions := tokens["versions"]) is not None:
            low, high = int(versions[model].min()), int(versions[model].max())
            found |= {"versions": [low, high], "lag": [self._version - high, self._version - low]}
        if (advantages := tokens["advantages"]) is not None:
            found["advantage"] = _rounded(advantages[model].mean())
        if (old := tokens["old_logprobs"]) is not None and (generated := tokens["gen_logprobs"]) is not None:
            found["mismatch"] = _rounded(np.abs(old - generated)[model].mean())
        return found

    def _digests(self, row: int, prompt_length: int) -> tuple[list[str], int]:
        """The digests of a row's images, and how many of them are in the prompt."""
        images = self._rows.ragged(row, "images")
        spans = [] if images is None else image_spans(images)
        return [span.digest.hex() for span in spans], sum(span.start < prompt_length for span in spans)

    def _place_pictures(
        self, messages: Sequence[dict[str, Any]], said: Sequence[Mapping[str, Any]], digests: Sequence[str]
    ) -> None:
        """Give each message that is not the model's the pictures of its marks, in their order; the rest to the first
        message. Pictures that models see in parts have more digests than marks."""
        waiting = list(digests)
        for shown, one in zip(messages, said, strict=True):
            if count := _marks([one]):
                shown["pictures"], waiting = waiting[:count], waiting[count:]
        if waiting and messages:
            messages[0]["pictures"] = [*messages[0].get("pictures", []), *waiting]
        for digest in digests:
            self._pictures.add(digest)


TOKEN_FIELDS = (
    "token_ids",
    "loss_mask",
    "turn_ids",
    "versions",
    "gen_logprobs",
    "old_logprobs",
    "old_entropies",
    "advantages",
    "token_rewards",
)
"""Token-level fields that are read of chosen rows."""
TEXT_KEYS = ("text", "left_out", "tail")


def _prompt_length(turns: np.ndarray) -> int:
    """Tokens before the model's first turn."""
    later = np.flatnonzero(turns >= 0)
    return int(later[0]) if len(later) else len(turns)


def _turn_spans(mask: np.ndarray, turns: np.ndarray) -> dict[int, tuple[int, int]]:
    """Turn -> from its first to behind its last token of the model."""
    places = np.flatnonzero((mask > 0) & (turns >= 0))
    found: dict[int, tuple[int, int]] = {}
    for turn in np.unique(turns[places]).tolist():
        mine = places[turns[places] == turn]
        found[turn] = int(mine[0]), int(mine[-1]) + 1
    return found


def _marks(said: Sequence[Mapping[str, Any]]) -> int:
    """Places of images in messages that are not the model's."""
    texts = (str(one.get("content", "")) for one in said if one.get("role") != "assistant")
    return sum(text.count(WRITTEN_MARK) for text in texts)


def _rounded(value: Any) -> float | None:
    """The value with six significant digits; None if it is none."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{float(value):.6g}")
