"""The stream of prompts: shuffled epochs per domain, a fixed mix per rollout batch, an exactly resumable cursor."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcrl.config import DataConfig
from hpcrl.data.chat import cut_to_fit, encode, plain, render
from hpcrl.data.files import BadRow
from hpcrl.data.image_tokens import bound_vision, encode_with_images
from hpcrl.data.media import read_images
from hpcrl.data.privileged import PrivilegedContext
from hpcrl.data.rows import Row, RowSet, domain_shares, require_same
from hpcrl.data.tasks import Split
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.rollout.prompt_ledger import ClosedPrompt, PromptLedger
from hpcrl.rollout.types import Prompt, PromptOutcome
from hpcrl.spec.media import Medium

logger = logging.getLogger(__name__)


def epoch_order(seed: int, name: str, epoch: int, num_rows: int, shuffle: bool = True) -> np.ndarray:
    """int64 [num_rows]: the order of an epoch, a function of the arguments only."""
    if not shuffle:
        return np.arange(num_rows)
    digest = hashlib.blake2b(f"{seed}/{name}/{epoch}".encode(), digest_size=32).digest()
    # RandomState's streams are frozen; the streams of numpy's Generator may change between versions.
    return np.random.RandomState(np.frombuffer(digest, np.uint32)).permutation(num_rows)


class RowOrigin(NamedTuple):
    """The path of a row's source, as configured, and the row's index among the rows of its domain."""

    path: str
    place: int


class _Encoded(NamedTuple):
    """A row's prompt: its rendered text, its token ids, its images, and the token ids that a teacher reads."""

    text: str
    token_ids: list[int]
    media: tuple[Medium, ...]
    teacher_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Stream:
    """Rows that are drawn together: one domain's rows, or all rows if no mix is configured."""

    name: str
    rows: np.ndarray
    share: int  # prompts per rollout batch
    num_drawn: int = 0
    order: tuple[int, np.ndarray] | None = None  # (epoch, its order)


class PromptSource:
    """An endless stream of a split's prompts. `ledger` has the drawn prompts without an outcome. With
    data.domain_interleave_probs, every `batch_size` prompts contain int(p x batch_size) of each domain, distributed
    evenly; the last domain gets the remainder. A prompt that cannot be trained on is replaced by another prompt of its
    domain: immediately if it is too long, else when replace() is called."""

    def __init__(
        self,
        config: DataConfig,
        split: Split,
        tokenizer: Any,
        seed: int,
        batch_size: int,
        context: PrivilegedContext | None = None,
    ):
        """`context` makes the prompts that a teacher reads. ValueError lists all errors of the data, one line each."""
        self._config, self._context = config, context
        self._split = split
        self._tokenizer = tokenizer
        self._seed = seed
        self._rows = RowSet(config, split, seed)
        self._streams = self._make_streams(batch_size)
        if split == "train":
            self._require_room()
        # The stream for each prompt of a batch, distributed evenly: any part of a batch has about this mix.
        places = [((i + 0.5) / s.share, n) for n, s in enumerate(self._streams) for i in range(s.share)]
        self._pattern = [n for _, n in sorted(places)]
        self._num_given = 0  # prompts given, not counting replacements
        self._owed: list[int] = []  # streams of the replacements to draw
        self._dropped: list[ClosedPrompt] = []
        self.ledger = PromptLedger()

    def _make_streams(self, batch_size: int) -> list[_Stream]:
        names, probs = self._rows.domain_names, self._config.domain_interleave_probs
        if not probs or self._split == "val":
            return [_Stream("all", np.arange(len(self._rows)), batch_size)]
        shares = domain_shares(names, probs, batch_size)
        return [
            _Stream(name, np.flatnonzero(self._rows.domains == names.index(name)), share)
            for name, share in shares.items()
        ]

    def _require_room(self) -> None:
        """ValueError if all prompts of a stream are over-long, which would otherwise only appear during the run."""
        for stream in self._streams:
            if not any(self._fits(int(row)) for row in stream.rows):
                raise ValueError(self._all_too_long(stream))

    def _fits(self, row: int) -> bool:
        """Whether a row's length allows drawing it; a row that is unusable for another reason may pass."""
        try:
            return not self._too_long(self._encode(self._rows.row(row), row))
        except BadRow:
            return True

    def _all_too_long(self, stream: _Stream) -> str:
        whose = f" of domain {stream.name}" if self._mixed else ""
        limit, remedy = f"data.max_prompt_tokens={self._config.max_prompt_tokens}", "data.overlong_prompts=truncate"
        if self._context is not None:
            limit += f" or, with teacher.context, teacher.max_prompt_tokens={self._context.max_tokens}"
            remedy = "a shorter teacher.context"
        rows = f"all {len(stream.rows)} prompts{whose}"
        return f"data.{self._split}: {rows} have more than {limit} tokens; raise it, or set {remedy}"

    @property
    def domains(self) -> list[str]:
        """Domains of the data, in order of appearance."""
        return list(self._rows.domain_names)

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def next(self) -> Prompt:
        """Draw the next prompt. Skipped rows get an outcome: too_long (data.overlong_prompts=drop), or failed if the
        chat template refuses the row or a generated row is unusable.

        ValueError if a whole epoch has no usable prompt, or if a prompt is over the limit
        (data.overlong_prompts=error).
        """
        owed = bool(self._owed)
        stream = self._streams[self._owed[0] if owed else self._pattern[self._num_given % len(self._pattern)]]
        unusable = ""
        for _ in range(len(stream.rows)):
            epoch, row = self._advance(stream)
            try:
                parsed = self._rows.row(row)
                encoded = self._encode(parsed, row)
            except BadRow as error:
                uid, unusable = self.ledger.open(epoch, row, self._rows.domain_of(row)), str(error)
                self._dropped.append(self.ledger.close_prompt(uid, PromptOutcome.FAILED, unusable))
                continue
            uid = self.ledger.open(epoch, row, parsed.domain)
            if not (reason := self._too_long(encoded)):
                if owed:
                    self._owed.pop(0)
                else:
                    self._num_given += 1
                return _prompt(uid, epoch, row, parsed, encoded)
            self._dropped.append(self.ledger.close_prompt(uid, PromptOutcome.TOO_LONG, reason))
        raise ValueError(unusable or self._all_too_long(stream))

    def replace(self, domain: str) -> None:
        """Draw another prompt of this domain next, since one was filtered or failed; no effect without a mix."""
        owed = [place for place, stream in enumerate(self._streams) if stream.name == domain]
        self._owed += owed if self._mixed else []

    @property
    def owed(self) -> dict[str, int]:
        """Domain -> number of replacements to draw."""
        return dict(Counter(self._streams[place].name for place in self._owed))

    def take_dropped(self) -> list[ClosedPrompt]:
        """The prompts that next() skipped since the last call; after a resume, prompts that were not fetched are still
        returned."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def prompt(self, uid: int) -> Prompt:
        """An open prompt again, after a resume or for another attempt. KeyError if it is not open."""
        epoch, row = self.ledger.origin(uid)
        parsed = self._rows.row(row)
        return _prompt(uid, epoch, row, parsed, self._encode(parsed, row))

    @property
    def _mixed(self) -> bool:
        """Whether domains have shares of a batch; otherwise the order does not depend on the batch size."""
        return len(self._streams) > 1

    def head(self, count: int, own: Mapping[str, int] | None = None) -> list[Prompt]:
        """For evaluation: the first `count` rows (or fewer) that are not over-long, from the domains in turn, in the
        data's order within each domain. `own` has domains with another count, which is not part of `count`. The uid is
        the row's index; the ledger is not changed."""
        found: list[Prompt] = []
        left = {None: count} | dict[str | None, int](own or {})  # None: the domains without an own count
        for row in self._rows.domains_in_turn().tolist():
            if not any(left.values()):
                break
            counter = domain if (domain := self._rows.domain_of(row)) in left else None
            if not left[counter]:
                continue
            if isinstance(prompt := self.of_row(row), Prompt):
                found.append(prompt)
                left[counter] -= 1
        return found

    def in_turn(self) -> np.ndarray:
        """int64 [rows]: all rows, from the domains in turn, in the data's order within each domain."""
        return self._rows.domains_in_turn()

    def of_row(self, row: int) -> Prompt | PromptOutcome:
        """The prompt of a row, with the row's index as uid, or why there is none: TOO_LONG or FAILED, which is logged.
        The ledger is not changed."""
        try:
            parsed = self._rows.row(row)
            encoded = self._encode(parsed, row)
        except BadRow as error:  # from a generated source, or its images are gone
            logger.warning("%s; the row is left out", error)
            return PromptOutcome.FAILED
        return PromptOutcome.TOO_LONG if self._too_long(encoded) else _prompt(row, 0, row, parsed, encoded)

    def origins(self, prompts: Iterable[Prompt]) -> list[RowOrigin]:
        """Where each of these prompts is from."""
        places = self._rows.places_in_domains()
        return [RowOrigin(self._rows.source_of(prompt.row).path, int(places[prompt.row])) for prompt in prompts]

    def _advance(self, stream: _Stream) -> tuple[int, int]:
        epoch, position = divmod(stream.num_drawn, len(stream.rows))
        stream.num_drawn += 1
        if stream.order is None or stream.order[0] != epoch:
            order = epoch_order(self._seed, stream.name, epoch, len(stream.rows), self._config.shuffle)
            stream.order = (epoch, order)
        return epoch, int(stream.rows[stream.order[1][position]])

    def _too_long(self, encoded: _Encoded) -> str:
        """The length of a prompt that exceeds its limit, as text; empty if none does."""
        if len(encoded.token_ids) > self._config.max_prompt_tokens:
            return f"{len(encoded.token_ids)} tokens"
        if self._context is not None and len(encoded.teacher_ids) > self._context.max_tokens:
            return f"{len(encoded.teacher_ids)} tokens with teacher.context"
        return ""

    def _encode(self, parsed: Row, row: int) -> _Encoded:
        """The prompt, and what a teacher reads. Errors as in _encode_prompt(); BadRow if the row lacks what
        teacher.context reads; ValueError if this is too long and so configured."""
        encoded = self._encode_prompt(parsed, row)
        if self._context is None:
            return encoded
        messages = self._context.messages(parsed, self._rows.where(row))
        if not self._context.is_read(parsed.domain):
            return encoded._replace(teacher_ids=tuple(encoded.token_ids))
        try:
            text = render(self._tokenizer, messages, parsed.tools, **parsed.variables)
        except TemplateRefusal as error:
            reason = f"the chat template refuses the row with teacher.context: {error.reason}"
            raise BadRow(f"{self._rows.where(row)}: {reason}") from error
        try:
            teacher_ids, _ = encode_with_images(self._tokenizer, text, encoded.media)
        except ValueError as error:
            raise BadRow(f"{self._rows.where(row)}: with teacher.context, {error}") from error
        found = encoded._replace(teacher_ids=tuple(teacher_ids))
        if self._config.overlong_prompts == "error" and (why := self._too_long(found)):
            limit = f"teacher.max_prompt_tokens={self._context.max_tokens}"
            raise ValueError(
                f"{self._rows.where(row)}: the prompt has {why}, but {limit} (data.overlong_prompts=drop leaves it out)"
            )
        return found

    def _encode_prompt(self, parsed: Row, row: int) -> _Encoded:
        """Text, token ids and images, truncated if so configured; still too long if the prompt is to be dropped. BadRow
        if the chat template refuses the row, or if an image cannot be read."""
        images = read_images(parsed.images, bound_vision(self._tokenizer))
        try:
            text = render(self._tokenizer, parsed.messages, parsed.tools, **parsed.variables)
            token_ids, media = encode_with_images(self._tokenizer, text, images)
        except TemplateRefusal as error:
            raise BadRow(f"{self._rows.where(row)}: the chat template refuses the row: {error.reason}") from error
        except ValueError as error:
            raise BadRow(f"{self._rows.where(row)}: {error}") from error
        limit = self._config.max_prompt_tokens
        if len(token_ids) <= limit or self._config.overlong_prompts == "drop":
            return _Encoded(plain(text), token_ids, media)
        if self._config.overlong_prompts == "error":
            raise ValueError(
                f"{self._rows.where(row)}: the prompt has {len(token_ids)} tokens, but data.max_prompt_tokens={limit} "
                "(data.overlong_prompts=drop or truncate accepts it)"
            )
        added = len(token_ids) - len(encode(self._tokenizer, text))  # to the template's placeholders
        fitting = cut_to_fit(self._tokenizer, parsed.messages, parsed.tools, limit - added, **parsed.variables)
        if fitting is not None:
            text = fitting[0]
            token_ids, media = encode_with_images(self._tokenizer, text, images)
        return _Encoded(plain(text), token_ids, media)

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible cursor: the drawn and open prompts, and the identification of the data."""
        return {
            "data": self.identity,
            "num_given": self._num_given,
            "owed": [self._streams[place].name for place in self._owed],
            "num_drawn": {stream.name: stream.num_drawn for stream in self._streams},
            "ledger": self.ledger.state_dict(),
            "dropped": [[*astuple(s)[:4], s.outcome.value, s.reason] for s in self._dropped],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. ValueError names the source or setting that has changed."""
        require_same(state["data"], self.identity, f"data.{self._split}")
        self._num_given = state["num_given"]
        names = [stream.name for stream in self._streams]
        self._owed = [names.index(name) for name in state.get("owed", [])]
        for stream in self._streams:
            stream.num_drawn = state["num_drawn"][stream.name]
        self.ledger.load_state_dict(state["ledger"] if "ledger" in state else state["dispositions"])  # until 0.6
        self._dropped = [
            ClosedPrompt(uid, epoch, row, domain, PromptOutcome(kind), reason)
            for uid, epoch, row, domain, kind, reason in state["dropped"]
        ]

    @property
    def identity(self) -> dict[str, str]:
        """What determines the rows: the settings, and each source with a digest of its content."""
        return {
            "seed": str(self._seed),
            "shuffle": str(self._config.shuffle),
            "mix": ", ".join(f"{stream.name} {stream.share}" for stream in self._streams) if self._mixed else "none",
            **self._rows.fingerprint(),
        }


def _prompt(uid: int, epoch: int, row: int, parsed: Row, encoded: _Encoded) -> Prompt:
    return Prompt(
        uid,
        parsed.domain,
        epoch,
        row,
        tuple(encoded.token_ids),
        encoded.text,
        parsed.answer,
        parsed.extra,
        parsed.messages,
        parsed.tools,
        encoded.media,
        encoded.teacher_ids,
    )
