"""Rows of a pipeline that learns from given answers: a prompt with its answer, with the two answers of a pair, or with
a labelled answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.config import DataConfig
from hpcrl.data.chat import encode, end_of_turn, marked, plain, render
from hpcrl.data.files import BadRow
from hpcrl.data.image_tokens import bound_vision, expand, write_pictures
from hpcrl.data.media import read_images
from hpcrl.data.messages import THOUGHTS
from hpcrl.data.row_kinds import READERS
from hpcrl.data.row_lengths import LengthLimit
from hpcrl.data.rows import Row, RowSet, check_answers, learning_obstacle, require_same
from hpcrl.data.tasks import Split
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.spec.kinds import RowKind
from hpcrl.spec.media import Medium, by_picture

REWRITES = (
    "the chat template rewrites earlier turns, so their answers cannot be masked; split the row into one row per answer"
)


class TrainedSequence(NamedTuple):
    """A sequence to train on: token ids and loss mask, of equal length, and images with their places."""

    token_ids: list[int]
    loss_mask: list[bool]
    media: tuple[Medium, ...] = ()


def with_answer_of(sequence: TrainedSequence, other: TrainedSequence, max_tokens: int) -> TrainedSequence:
    """The first sequence up to its first trained token, and the other one from its first trained token on, cut to
    max_tokens."""
    end, start = sequence.loss_mask.index(True), other.loss_mask.index(True)
    ids, mask = sequence.token_ids[:end] + other.token_ids[start:], [False] * end + other.loss_mask[start:]
    media = tuple(medium for medium in sequence.media if medium.start < end)
    return TrainedSequence(ids[:max_tokens], mask[:max_tokens], media)


class EncodedRow(NamedTuple):
    """The sequences of a row; for each whether it is the chosen part or a good answer; and how many of their tokens
    were cut, since they were too long. In a row of plain answers, all are chosen."""

    sequences: list[TrainedSequence]
    chosen: list[bool]
    num_cut: int = 0


class SFTRows:
    """Random access to sequences. The mask has every assistant turn, including its end token, unless the message has
    `weight: 0`; in a pair or a labelled row, only turns after the prompt. Rows that data.unusable_rows=drop leaves out
    are not counted: row n is the n-th usable one.

    Attributes:
        kind: What the rows have.
        per_row: Maximum number of sequences of a row.
        limit: The longest sequence.
        left_out: The problems of the first rows that are left out; `num_left_out` is the number of all.
    """

    def __init__(
        self,
        config: DataConfig,
        split: Split,
        tokenizer: Any,
        seed: int,
        kind: RowKind = "answers",
        model: Path | None = None,
    ):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token to end an answer with")
        self.kind = kind
        self.per_row = 1 if kind == "answers" else 2
        self.limit, self._overlong = LengthLimit.of(config, model), config.overlong_sequences
        self._rows = rows = RowSet(config, split, seed, read=READERS[kind], drop=config.unusable_rows == "drop")
        if wrong := check_answers({split: rows}):
            raise ValueError("\n".join(wrong))
        self._take_usable(rows)
        self._seed = seed
        self._tokenizer = tokenizer

    def _take_usable(self, rows: RowSet) -> None:
        self._usable = np.delete(np.arange(len(rows)), rows.unusable)
        self.left_out, self.num_left_out = rows.left_out, rows.num_left_out

    def state_dict(self) -> dict[str, Any]:
        """Identification of the data. Step and seed determine a step's rows."""
        return {"cursor": {**self._rows.fingerprint(), "seed": str(self._seed)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError names the source that differs from the checkpoint."""
        require_same(state["cursor"], self.state_dict()["cursor"], "data.train")

    def __len__(self) -> int:
        return len(self._usable)

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        return self._rows.where(int(self._usable[index]))

    def row(self, index: int) -> TrainedSequence:
        """The sequence of a row, or of a pair's chosen part. See encode()."""
        return self.sequences(index)[0]

    def sequences(self, index: int) -> list[TrainedSequence]:
        """The sequences of a row, chosen before rejected. See encode()."""
        return self.encode(index).sequences

    def encode(self, index: int) -> EncodedRow:
        """The sequences of a row, chosen before rejected. BadRow if the chat template refuses the row or rewrites
        earlier turns, if an image cannot be read, or if a generated row has no answer; TooLong if the row is left out
        because of its length, ValueError with data.overlong_sequences=error.

        The prompt has the same tokens as in PromptSource; the answer is tokenised separately, as in generation.
        """
        place = int(self._usable[index])
        row = self._rows.row(place)
        parts = [part for part in (row, row.rejected) if part is not None]
        sequences = [self._encode(part, place) for part in parts]
        fitting, num_cut = self.limit.fit(sequences, self._overlong, self._rows.where(place))
        chosen = [True, False] if row.rejected is not None else [row.label is not False]
        return EncodedRow([TrainedSequence(*sequence) for sequence in fitting], chosen, num_cut)

    def _encode(self, row: Row, index: int) -> TrainedSequence:
        if obstacle := learning_obstacle(row):
            raise BadRow(f"{self._rows.where(index)}: {obstacle}")
        ids: list[int] = []
        mask: list[bool] = []
        images = read_images(row.images, vision := bound_vision(self._tokenizer))
        pictures = iter(by_picture(images))
        try:
            for text, learned in turns_of(self._tokenizer, row):
                # Without a chat template, the tokenizer may add its special tokens only to the first piece.
                if vision is not None and images:
                    text = write_pictures(text, vision, pictures)
                new = encode(self._tokenizer, text, begins=not ids)
                ids.extend(new)
                mask.extend([learned] * len(new))
        except TemplateRefusal as error:
            raise BadRow(f"{self._rows.where(index)}: the chat template refuses the row: {error.reason}") from error
        except ValueError as error:
            raise BadRow(f"{self._rows.where(index)}: {error}") from error
        if vision is None or not images:
            return TrainedSequence(ids, mask)
        try:
            whole, media = expand(ids, vision.image_token_id, images)
        except ValueError as error:
            raise BadRow(f"{self._rows.where(index)}: {error}") from error
        for medium in media:
            mask[medium.start : medium.start + 1] = [False] * medium.length
        return TrainedSequence(whole, mask, media)


class LeftOut(ValueError):
    """The chat template would omit text that is to be trained on."""


class Rewritten(LeftOut):
    """The chat template renders an earlier turn differently than when it was the last turn."""


def turns_of(tokenizer: Any, row: Row) -> Iterator[tuple[str, bool]]:
    """A row's parts as (rendered text, whether it is trained on). Raises the chat template's errors, and LeftOut."""
    assert row.turn is not None, "a row without an answer has an obstacle"
    end = end_of_turn(tokenizer) or tokenizer.eos_token
    done = ""

    def after(messages: list[dict[str, Any]], ask: bool) -> str:
        text = render(tokenizer, messages, row.tools, ask, **row.variables)
        if not text.startswith(done):
            raise Rewritten(REWRITES)
        return text[len(done) :]

    turns = [n for n, message in enumerate(row.messages) if message["role"] == "assistant" and n >= row.prompt_messages]
    for turn in turns:
        prompt = after(row.messages[:turn], ask=True)
        yield prompt, False
        done += prompt
        answer = after(row.messages[: turn + 1], ask=False)
        done += answer
        written, found, rest = answer.partition(end)
        yield written + found, row.messages[turn].get("weight") != 0
        yield rest, False
    prompt = after(row.messages, ask=True)
    yield prompt, False
    yield _last(tokenizer, row, done + prompt, end), row.turn.get("weight") != 0


def _last(tokenizer: Any, row: Row, done: str, end: str) -> str:
    """The last turn with its end token, as the template renders it after the text `done` before it; only the turn's
    text if the template does not render it, or would cut it."""
    turn = row.turn
    assert turn is not None
    text = ""
    if getattr(tokenizer, "chat_template", None):
        whole = render(tokenizer, [*row.messages, turn], row.tools, ask=False, **row.variables)
        text = whole.removeprefix(done) if whole.startswith(done) else ""
    lacking = _lacking(turn, plain(text))
    if not lacking:
        written, found, _ = text.partition(end)
        return (written if found else written.rstrip()) + end
    if (key := next((key for key in lacking if key != "content"), None)) is not None:
        raise LeftOut(
            f"the chat template does not show {key} of the last turn, so it would not be trained on; leave it out, or "
            "write it into content in the form that the model should write"
        )
    return str(marked(tokenizer, turn["content"])) + end


def _lacking(turn: dict[str, Any], shown: str) -> list[str]:
    """Keys of a turn whose values are not in a rendered text, ignoring white space."""
    text = "".join(shown.split())
    parts = {key: [turn[key]] for key in ("content", *THOUGHTS) if turn.get(key)}
    calls = [call["function"] for call in turn.get("tool_calls", [])]
    if calls:
        parts["tool_calls"] = [name for call in calls for name in (call["name"], *call["arguments"])]
    return [key for key, wanted in parts.items() if not all("".join(word.split()) in text for word in wanted)]


def sft_rows(
    config: DataConfig,
    split: Split,
    tokenizer: Any,
    seed: int = 0,
    kind: RowKind = "answers",
    model: Path | None = None,
) -> SFTRows:
    """A split's rows for training on answers, pairs or labelled answers, as long as the context of the model in this
    folder allows. ValueError lists all errors of the data."""
    return SFTRows(config, split, tokenizer, seed, kind, model)
