"""Rows of a step's rollouts as a page shows them: prompt, turns, rewards, and values of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcrl.data.identity import prompt_id
from hpcrl.report.samples_pictures import PagePictures
from hpcrl.report.samples_text import as_messages, clean, message
from hpcrl.report.samples_tokens import TokenPieces, segments
from hpcrl.rollout.step_files import OutcomeRecord, StepRows
from hpcrl.rollout.types import STATUS, is_greedy, split_sample_id
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import WRITTEN_MARK

SHORTEST_CHARS = 200
"""Characters of a message that a page shows at least, if the message has them."""
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


class SampleRows:
    """The rows of an open step, as the page shows them.

    Args:
        records: How the step's prompts ended, with metrics.
        pieces: None: no tokenizer is known, so texts have no colours.
        pictures: Gets the pictures of rows that are shown.
        limit: Characters of a message at most.
    """

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
            for name in ("sample_ids", "group_ids", "rewards", "scores", "status", "weights", "failed")
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
            "prompt": prompt_id(said[:begins], map(bytes.fromhex, digests[:in_prompt])),
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
        if found["tokens"] and "versions" in given and bool((given["versions"][given["loss_mask"] > 0] < 0).all()):
            found["expert"] = True
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
            gap = given["old_logprobs"] - given["gen_logprobs"]
            found["mismatch"] = np.where(given["versions"] >= 0, gap, 0) if "versions" in given else gap
        if "versions" in given:
            found["lag"] = np.where(given["versions"] >= 0, self._version - given["versions"], 0)
        if "advantages" in given:
            found["advantage"] = given["advantages"]
        if "old_entropies" in given:
            found["entropy"] = given["old_entropies"]
        return found

    def _of_tokens(self, tokens: Mapping[str, np.ndarray | None]) -> dict[str, Any]:
        """Lengths, and versions, lag, and the mean advantage and mismatch of the tokens that the model generated."""
        mask = tokens["loss_mask"]
        if mask is None:
            return {}
        model = mask > 0
        found: dict[str, Any] = {"tokens": int(model.sum()), "all_tokens": len(model)}
        if (versions := tokens["versions"]) is not None:
            model &= versions >= 0  # others are an expert's
        if not model.any():
            return found
        if versions is not None:
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
