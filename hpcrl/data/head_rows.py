"""Rows for a model with one output per token (PipelineSpec.trains_head): pairs, answers with a score, and steps with
labels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hpcrl.config import Config
from hpcrl.config.head_training import HeadTrainingConfig
from hpcrl.data.answers import EncodedRow, SFTRows, TrainedSequence
from hpcrl.data.chat import encode, marked, render
from hpcrl.data.dialogue_tokens import dialogue_with_images, padding_token, scored_index
from hpcrl.data.files import BadRow
from hpcrl.data.image_tokens import bound_vision
from hpcrl.data.media import read_images
from hpcrl.data.pair_forms import LARGEST, number
from hpcrl.data.pairs import parse_pair
from hpcrl.data.row_lengths import LengthLimit, TooLong
from hpcrl.data.rows import RawContext, ReadRow, Row, RowSet, columns_of, learning_obstacle, parse_row
from hpcrl.data.tasks import Split
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.spec.media import Medium

MARGIN, SCORE, STEPS, LABELS = "margin", "score", "completions", "labels"
"""Columns, with TRL's names."""


def head_row_reader(section: HeadTrainingConfig) -> ReadRow:
    """The parser of a pipeline's rows, which ends with BadRow for a row that cannot be learned from."""
    if section.rows == "scores" and section.heads != 1:
        return functools.partial(_scored_by_heads, heads=section.heads)
    return READERS[section.rows]


class HeadRows(SFTRows):
    """Random access to sequences whose trained token follows the one whose value is learned, since a value is that of
    the state before a token (ValueEngine): a dialogue's last token is there twice, and nothing depends on the second
    one."""

    def __init__(self, config: Config, split: Split, tokenizer: Any):
        self._section, self._seed, self._tokenizer = config.head_training, config.seed, tokenizer
        self.kind = config.row_kind
        self.per_row = 2 if self.kind == "pairs" else 1
        self.num_heads = len(self._section.labels)
        self.limit = LengthLimit(self._section.max_tokens, "rm.max_tokens")
        drop = config.data.unusable_rows == "drop"
        self._rows = rows = RowSet(config.data, split, config.seed, read=head_row_reader(self._section), drop=drop)
        self._take_usable(rows)
        self._padding = padding_token(tokenizer)

    def encode(self, index: int) -> EncodedRow:
        """The sequences of a row, chosen before rejected. BadRow if the chat template refuses the row, or an image
        cannot be read; TooLong if a sequence has more tokens than the section allows."""
        place = int(self._usable[index])
        row, where = self._rows.row(place), self._rows.where(place)
        images = read_images(row.images, bound_vision(self._tokenizer))  # the prompt's, equal in both parts
        try:
            if self._section.rows == "steps":
                found = [self._by_steps(row)]
            else:
                found = [self._whole(part, images) for part in (row, row.rejected) if part is not None]
        except TemplateRefusal as error:
            raise BadRow(f"{where}: the chat template refuses the row: {error.reason}") from error
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from error
        longest = max(len(sequence.token_ids) for sequence in found) - 1
        if longest > self._section.max_tokens:
            raise TooLong(f"{where}: {longest} tokens are more than rm.max_tokens={self._section.max_tokens}")
        return EncodedRow(found, [True, False][: len(found)])

    def targets(self, index: int) -> list[list[float]] | list[list[list[float]]]:
        """For each sequence of a row, the targets of its trained tokens in order; with several heads, a list of targets
        for each of these tokens."""
        row = self._rows.row(int(self._usable[index]))
        match self._section.rows:
            case "pairs":
                return [[float(row.extra.get(MARGIN) or 0.0)]] * 2
            case "scores":
                scores = [float(value) for value in _values(row.extra, self._section.heads)]
                return [[scores]] if self.num_heads > 1 else [scores]
            case "steps":
                return [list(map(float, row.extra[LABELS]))]

    def _whole(self, part: Row, images: tuple[Medium, ...]) -> TrainedSequence:
        assert part.turn is not None, "a row without an answer is refused"
        ids, media = dialogue_with_images(self._tokenizer, [*part.messages, part.turn], images)
        count = scored_index(ids, self._padding) + 1
        return TrainedSequence([*ids[:count], ids[count - 1]], [*[False] * count, True], media)

    def _by_steps(self, row: Row) -> TrainedSequence:
        ids = encode(self._tokenizer, render(self._tokenizer, row.messages, None))
        trained = []
        for step in row.extra[STEPS]:
            ids += encode(self._tokenizer, marked(self._tokenizer, step) + self._section.step_separator, begins=False)
            trained.append(len(ids))
        mask = [index in trained for index in range(len(ids) + 1)]
        return TrainedSequence([*ids, ids[-1]], mask)


def _pair(raw: dict[str, Any], context: RawContext) -> Row:
    """A pair, and its margin in the column `margin`, if there is one."""
    row = parse_pair(raw, context)
    if row.extra.get(MARGIN) is not None:
        _number(row.extra[MARGIN], MARGIN, context.where)
    return _scorable(row, context.where)


def _scored(raw: dict[str, Any], context: RawContext) -> Row:
    """A prompt, an answer, and its score in the column `score`."""
    row = parse_row(raw, context)
    if raw.get(SCORE) is None:
        raise BadRow(
            f"{context.where}: no score: the row has {columns_of(raw)}; rm.rows=pairs reads chosen and rejected"
        )
    _number(raw[SCORE], SCORE, context.where)
    return _scorable(row, context.where)


def _scored_by_heads(raw: dict[str, Any], context: RawContext, *, heads: int | list[str]) -> Row:
    """A prompt, an answer, and a score for each head: in the column of its name, or in the list `score`."""
    row = parse_row(raw, context)
    if isinstance(heads, int):
        scores = raw.get(SCORE)
        if not isinstance(scores, list) or len(scores) != heads:
            found = f"{len(scores)} numbers" if isinstance(scores, list) else repr(scores)[:40]
            raise BadRow(f"{context.where}: score must be a list of rm.heads={heads} numbers, got {found}")
    elif lacking := [name for name in heads if raw.get(name) is None]:
        has = f"{len(heads) - len(lacking)} of the {len(heads)} scores in rm.heads"
        raise BadRow(f"{context.where}: no {', '.join(lacking)}: the row has {has}, and the columns {columns_of(raw)}")
    names = heads if isinstance(heads, list) else [f"{SCORE}[{place}]" for place in range(heads)]
    for name, value in zip(names, _values(raw, heads), strict=True):
        _number(value, name, context.where)
    return _scorable(row, context.where)


def _values(columns: dict[str, Any], heads: int | list[str]) -> list[Any]:
    """What a row has for each head."""
    if isinstance(heads, list):
        return [columns[name] for name in heads]
    return [columns[SCORE]] if heads == 1 else list(columns[SCORE])


def _stepwise(raw: dict[str, Any], context: RawContext) -> Row:
    """A prompt, the steps of an answer in `completions`, and whether each is right in `labels`."""
    steps, labels = raw.get(STEPS), raw.get(LABELS)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        text = "completions must be a list of texts, the steps of an answer"
        raise BadRow(f"{context.where}: {text}; the row has {columns_of(raw)}")
    if not isinstance(labels, list) or not all(isinstance(label, bool) for label in labels):
        raise BadRow(f"{context.where}: labels must be a list of true or false, got {str(labels)[:40]}")
    if len(labels) != len(steps):
        raise BadRow(f"{context.where}: {len(steps)} steps in completions, but {len(labels)} labels")
    row = parse_row({**raw, "completion": "\n".join(steps)}, context)
    if row.images:
        text = "the row has images, and a model that scores steps is made of a text model; leave them out"
        raise BadRow(f"{context.where}: {text}, or score whole answers (rm.rows=scores)")
    return _scorable(row, context.where)


def _scorable(row: Row, where: str) -> Row:
    """The row. BadRow if the role reward_model would not score its dialogue as it is."""
    if obstacle := learning_obstacle(row):
        raise BadRow(f"{where}: {obstacle}")
    for what, given in (("tools", row.tools), ("template variables", row.variables)):
        if given:
            raise BadRow(f"{where}: the row has {what}, which a reward model does not see; leave them out")
    return row


def _number(value: Any, name: str, where: str) -> None:
    if number(value) is None:
        raise BadRow(f"{where}: {name} must be a finite number up to {LARGEST:g}, got {str(value)[:40]!r}")


READERS: dict[str, Callable[..., Row]] = {"pairs": _pair, "scores": _scored, "steps": _stepwise}
"""Value of rm.rows -> parser of a raw row."""
