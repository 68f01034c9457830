"""Parses rows (prompt, answer, tools, domain, under any column name) and finds a data set's errors."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hpcrl.config import DataConfig, DataSource
from hpcrl.config.data import NOT_VARIABLES
from hpcrl.data.env_sources import STARTS, given_start
from hpcrl.data.files import BadRow, Table
from hpcrl.data.media import ImageFile, image_column, images_of, place_images, read_parts
from hpcrl.data.messages import ImagePart, Messages, one_turn, read_messages, read_tools
from hpcrl.data.places import open_table
from hpcrl.data.tasks import Split
from hpcrl.spec.benchmarks import BENCHMARK
from hpcrl.spec.media import IMAGE, IMAGE_MARK

logger = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "messages", "conversations", "question", "problem", "instruction")
ANSWER_KEYS = ("answer", "ground_truth", "label", "solution")
RESPONSE_KEYS = ("response", "completion", "output")
VARIABLES_KEY = "chat_template_kwargs"
DEFAULT_DOMAIN = "default"
PROGRESS_ROWS = 100_000  # rows between progress lines, about half a minute
DEFAULT_KEYS = {"prompt_key": None, "answer_key": None, "domain_key": "tag"}
"""Keys of data that select columns, for benchmarks, which have columns of their own."""
MAX_PROBLEMS = 10  # lines shown; further problems are counted
MAX_ROW_BYTES = 16 << 20
"""Limit for the JSON of a row's answer and other columns, which go to the reward or environment with each response: a
message between ranks is at most 64 MiB, including the prompt, and contains the answer twice."""
IMAGE_FILES = "image files of"
"""How a fingerprint's keys begin whose values are hashes of image files."""


@dataclass(frozen=True, slots=True)
class Row:
    """`messages` end with the turn to answer; `turn` is a reference answer for the SFT pipeline, an assistant turn with
    all its keys; `extra` has all columns except the prompt, including the answer, and the paths of images in files;
    `variables` are the row's own variables for the chat template. In a pair (hpcrl.data.pairs) the row is the chosen
    part, and `rejected` the other part; `label` says whether the answer of a labelled row (hpcrl.data.labelled) is
    good. The first `prompt_messages` messages are not trained on."""

    messages: Messages
    answer: Any
    turn: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    domain: str
    extra: dict[str, Any]
    variables: dict[str, Any] = field(default_factory=dict)
    images: tuple[ImageFile, ...] = ()
    rejected: Row | None = None
    label: bool | None = None
    prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class RawContext:
    """What the parser of a raw row needs to know.

    Args:
        config: The keys that name columns.
        where: Place of the row, for errors.
        fixed_domain: Domain that replaces the row's tag; None: use the tag.
        padded: Whether absent keys of nested values are null.
        folder: Folder to which the row's paths are relative.
    """

    config: DataConfig
    where: str
    fixed_domain: str | None = None
    padded: bool = False
    folder: Path = Path()

    @classmethod
    def of(cls, table: Table, index: int, config: DataConfig, fixed_domain: str | None = None) -> RawContext:
        """Of a row of a table."""
        return cls(config, table.where(index), fixed_domain, table.padded, table.folder(index))


ReadRow = Callable[[dict[str, Any], RawContext], Row]
"""parse_row, or a function with the same arguments."""


def parse_row(raw: dict[str, Any], context: RawContext) -> Row:
    """Parse a raw row. BadRow describes an error."""
    config, where, padded = context.config, context.where, context.padded
    key, pictures = _first(raw, config.prompt_key, PROMPT_KEYS), image_column(raw)
    if key is None:
        looked = config.prompt_key or ", ".join(PROMPT_KEYS)
        raise BadRow(f"{where}: no prompt: looked for {looked} (data.prompt_key); the row has {columns_of(raw)}")
    inside: list[ImagePart] = []
    messages = _with_context(read_messages(raw[key], where, key, padded, inside), raw, key, where)
    messages, turn = _split_turn(messages, raw, where, padded)
    column = images_of(raw[pictures], pictures, where) if pictures is not None else []
    images = read_parts(place_images(messages, inside, column, where), context.folder) if inside or column else ()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"{where}: {key} has no user turn to answer")
    answer = _answer(raw, config, where)
    extra = {k: v for k, v in raw.items() if k not in (key, pictures)}
    if images and all(image.content is None for image in images):
        extra["images"] = [str(image.path.absolute()) for image in images]
    try:
        given_start(extra)
    except ValueError as error:
        raise BadRow(f"{where}: {error}") from None
    response = turn["content"] if turn is not None else None
    _check_size(response if answer is None else None, extra, where)
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Row(
        messages=messages,
        answer=response if answer is None else answer,
        turn=turn if turn is not None or not isinstance(answer, str) else one_turn(answer),
        tools=read_tools(raw.get("tools"), where, padded),
        domain=context.fixed_domain or _domain(raw, config, where),
        extra=extra,
        variables=_variables(raw.get(VARIABLES_KEY), where, padded),
        images=images,
    )


def _with_context(messages: Messages, raw: dict[str, Any], key: str, where: str) -> Messages:
    """The messages with the content of the columns `system`, `input` and `history` of ShareGPT and Alpaca files."""
    if key not in ("conversations", "instruction"):
        return messages
    if key == "instruction" and isinstance(given := raw.get("input"), str) and given.strip():
        given = given.replace(IMAGE_MARK, "")
        messages = [{**messages[0], "content": f"{messages[0]['content']}\n{given}"}, *messages[1:]]
    if past := raw.get("history"):
        try:
            turns = [text for said, answered in past for text in (("user", said), ("assistant", answered))]
        except (TypeError, ValueError):
            raise BadRow(f"{where}: history must be a list of [instruction, output]") from None
        past = [{"role": role, "content": text} for role, text in turns]
        messages = [*read_messages(past, where, "history"), *messages]
    if isinstance(system := raw.get("system"), str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system.replace(IMAGE_MARK, "")}, *messages]
    return messages


def _split_turn(
    messages: Messages, raw: dict[str, Any], where: str, padded: bool
) -> tuple[Messages, dict[str, Any] | None]:
    """The messages up to the turn to answer, and the answer from a column or the last message."""
    for name in RESPONSE_KEYS:
        written = raw.get(name)
        if isinstance(written, str):
            return messages, one_turn(written)
        if isinstance(written, list) and written and isinstance(written[0], dict):  # TRL's conversational completion
            messages = [*messages, *read_messages(written, where, name, padded)]
            break
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]
    return messages, None


def _variables(given: Any, where: str, padded: bool) -> dict[str, Any]:
    """The variables of a row for the chat template (TRL's column)."""
    if isinstance(given, str):
        with contextlib.suppress(msgspec.DecodeError):
            given = msgspec.json.decode(given) if given.strip() else None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRow(f"{where}: {VARIABLES_KEY} must be an object, or the JSON text of one")
    if taken := next((name for name in given if name in NOT_VARIABLES), None):
        raise BadRow(f"{where}: {VARIABLES_KEY}.{taken} is not a template variable; {NOT_VARIABLES[taken]}")
    return {name: value for name, value in given.items() if value is not None or not padded}


def learning_obstacle(row: Row) -> str:
    """Why a supervised pipeline cannot learn from a row; empty if it can, as far as is known without a tokenizer."""
    if row.turn is None:
        return (
            f"no answer to learn from: there is no text in {', '.join(RESPONSE_KEYS)} or the answer (data.answer_key), "
            "and the last message is not an assistant turn with text"
        )
    if not (row.turn.get("tool_calls") or row.turn["content"].strip()):
        return "the answer to learn from is empty"
    answered = row.messages[row.prompt_messages :]
    for message in answered:
        if message["role"] == "assistant" and not (message.get("tool_calls") or message["content"].strip()):
            return "an assistant turn is empty, and all of them are learned from"
    turns = [message for message in (*answered, row.turn) if message["role"] == "assistant"]
    if all(turn.get("weight") == 0 for turn in turns):
        return "all assistant turns have weight 0"
    return ""


def _check_size(written: str | None, extra: dict[str, Any], where: str) -> None:
    """BadRow if the row is too large to send, which would end the run. `written` is an answer that is not a column."""
    try:
        num_bytes = len(msgspec.json.encode((written, extra)))
    except TypeError as error:  # a numpy number, from a generated source
        raise BadRow(f"{where}: a column cannot be sent: {error}") from error
    if num_bytes > MAX_ROW_BYTES:
        sizes = {name: len(msgspec.json.encode(value)) for name, value in {"the answer": written, **extra}.items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise BadRow(
            f"{where}: {num_bytes / 2**20:.1f} MiB of answer and other columns would go with every response to the "
            f"reward, but the limit is {MAX_ROW_BYTES >> 20} (the largest: {largest}); store the path of a file instead"
        )


def _first(raw: dict[str, Any], chosen: str | None, known: tuple[str, ...]) -> str | None:
    keys = (chosen,) if chosen else known
    return next((key for key in keys if raw.get(key) is not None), None)


def _answer(raw: dict[str, Any], config: DataConfig, where: str) -> Any:
    key = _first(raw, config.answer_key, ANSWER_KEYS)
    if key is None and config.answer_key:
        raise BadRow(f"{where}: no {config.answer_key} (data.answer_key); the row has {columns_of(raw)}")
    model = raw.get("reward_model")
    answer = raw[key] if key is not None else model.get("ground_truth") if isinstance(model, dict) else None
    if number := _no_number(answer):
        raise BadRow(f"{where}: the answer {key or 'reward_model.ground_truth'} is {number}; leave it null if unknown")
    return answer


def _no_number(value: Any) -> str:
    """The part of an answer that is a non-finite number, such as inf; empty if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else str(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_no_number, inner)), "")


def _domain(raw: dict[str, Any], config: DataConfig, where: str) -> str:
    for key in (config.domain_key, "data_source"):
        tag = raw.get(key)
        if isinstance(tag, list) and len(tag) == 1:  # open-instruct's list of verifiers
            tag = tag[0]
        if tag is None:
            continue
        if not isinstance(tag, str) or not tag:
            raise BadRow(f"{where}: {key} must be text, not {str(tag)[:40]!r}")
        return tag
    return DEFAULT_DOMAIN


def columns_of(raw: Mapping[str, Any]) -> str:
    """The names of a row's keys, those that are null apart."""
    given, null = ([str(name) for name in raw if (raw[name] is None) == absent] for absent in (False, True))
    return (", ".join(given) or "no keys") + (f" (null: {', '.join(null)})" if null else "")


def sources(config: DataConfig, split: Split) -> list[DataSource]:
    """The sources of a split; none if data.val is not set."""
    given = config.train if split == "train" else config.val
    if given is None:
        return []
    entries = [given] if isinstance(given, str) else given
    return [DataSource(path=entry) if isinstance(entry, str) else entry for entry in entries]


def start_domains(config: DataConfig, split: Split) -> dict[str, str]:
    """Domain -> path of the sources whose rows are episode starts of an environment."""
    given = (source for source in sources(config, split) if source.path.startswith(STARTS))
    return {source.domain or source.path.removeprefix(STARTS): source.path for source in given}


def keys_of(source: DataSource, config: DataConfig) -> DataConfig:
    """The keys with which a source's rows are parsed."""
    return config.model_copy(update=DEFAULT_KEYS) if source.path.startswith(BENCHMARK) else config


class ChecksRows(Protocol):
    """A check of rows that needs more than the row, such as the chat template."""

    def problem_of(self, row: Row, where: str) -> str:
        """The row's problem in one line, or empty."""


class RowSet:
    """All rows of a split, checked, source after source. ValueError lists all problems.

    Args:
        check: Applied to rows from files, and to the first row of a generated source.
        read: Parser of a raw row.
        drop: Leave out unusable rows instead of raising ValueError, unless all rows are unusable.

    Attributes:
        unusable: Indices of the rows that are left out, ascending.
        left_out: The problems of the first of them, and of the first that `check` would leave out.
        num_left_out: Number of all of them.
        domain_names: Names of the domains, in order of appearance.
        domains: int32 [rows], each row's index into domain_names.
        unanswered: Domain -> number of rows without an answer, and `file:line` of the first.
        unlearnable: Result of learning_obstacle() -> number of such rows, and the first.
        own_variables: Domain -> number of rows with template variables, and the first.
        media: Kind (hpcrl.spec.media) -> number of rows with such media, and the first; all rows of a generated source
            if its first row has some.
    """

    def __init__(
        self,
        config: DataConfig,
        split: Split,
        seed: int,
        check: ChecksRows | None = None,
        read: ReadRow = parse_row,
        drop: bool = False,
    ):
        self._check, self._read, self._drop = check, read, drop
        self.sources = sources(config, split)
        self._configs = [keys_of(source, config) for source in self.sources]
        if not self.sources:
            raise ValueError(f"data.{split} is not set")
        problems: list[str] = []
        self.tables: list[Table] = []
        for source in self.sources:
            try:
                self.tables.append(open_table(source, seed, split))
            except ValueError as error:
                problems.append(f"data.{split}: {error}")  # the other sources are still checked
        self._starts = np.cumsum([0, *(len(table) for table in self.tables)])
        self.domain_names: list[str] = []
        self.domains = np.zeros(self._starts[-1], dtype=np.int32)
        self.unanswered: dict[str, tuple[int, str]] = {}
        self.unlearnable: dict[str, tuple[int, str]] = {}
        self.own_variables: dict[str, tuple[int, str]] = {}
        self.media: dict[str, tuple[int, str]] = {}
        self.unusable: list[int] = []
        self.left_out: list[str] = []
        self.num_left_out = 0
        self._image_files: dict[int, Any] = {}  # by source, the hash of its image files' beginnings and sizes
        what, more = "sources", len(problems) - MAX_PROBLEMS
        if not problems:
            found = filter(None, self._scan(split))
            problems = list(itertools.islice(found, MAX_PROBLEMS))
            what, more = "rows", sum(1 for _ in found)
            if self.unusable and len(self.unusable) == len(self):
                problems = [f"data.{split}: none of the {len(self)} rows can be used; {self.left_out[0]}"]
        if more > 0:
            problems[MAX_PROBLEMS:] = [f"data.{split}: and {more} more {what} with problems"]
        if problems:
            raise ValueError("\n".join(problems))

    def _scan(self, split: Split) -> Iterator[str]:
        """Find the domain of every row; yields a problem, or an empty text, per row."""
        for number, table in enumerate(self.tables):
            start, end = self._starts[number : number + 2]
            if table.fixed_domain is not None:  # generated rows are correct by construction
                self.domains[start:end] = self._domain_index(self.sources[number].domain or table.fixed_domain)
                row = self._parse(number, 0)
                if row.images:
                    count, first = self.media.get(IMAGE, (0, table.where(0)))
                    self.media[IMAGE] = count + len(table), first
                if self._check is not None:
                    yield self._check.problem_of(row, table.where(0))
                continue
            for index in range(len(table)):
                if self._check is not None and (done := int(start) + index) % PROGRESS_ROWS == 0 and done:
                    logger.info("%d of %d rows of data.%s are checked", done, len(self), split)
                try:
                    row = self._parse(number, index)
                    self.domains[start + index] = self._domain_index(row.domain)
                    if row.answer is None or (isinstance(row.answer, str) and not row.answer.strip()):
                        count, first = self.unanswered.get(row.domain, (0, table.where(index)))
                        self.unanswered[row.domain] = count + 1, first
                    obstacle = learning_obstacle(row)
                    if obstacle and self._drop:
                        raise BadRow(f"{table.where(index)}: {obstacle}")
                    if obstacle:
                        count, first = self.unlearnable.get(obstacle, (0, table.where(index)))
                        self.unlearnable[obstacle] = count + 1, first
                    if row.variables:
                        count, first = self.own_variables.get(row.domain, (0, table.where(index)))
                        self.own_variables[row.domain] = count + 1, first
                    if row.images:
                        count, first = self.media.get(IMAGE, (0, table.where(index)))
                        self.media[IMAGE] = count + 1, first
                        self._note_files(number, row.images)
                    if self._check is not None:
                        where, problem = table.where(index), self._check.problem_of(row, table.where(index))
                        if problem.startswith(f"{where}: ") and self._drop:  # the run finds it when it is drawn
                            self._leave_out(problem)
                        else:
                            yield problem
                except BadRow as error:
                    if not self._drop:
                        yield str(error)
                        continue
                    self._leave_out(str(error))
                    self.unusable.append(int(start) + index)

    def _leave_out(self, problem: str) -> None:
        """Count an unusable row."""
        self.num_left_out += 1
        if len(self.left_out) < MAX_PROBLEMS:
            self.left_out.append(problem)

    def _note_files(self, source: int, images: Sequence[ImageFile]) -> None:
        """Hash what identifies image files. Images within the rows' own file are in the table's digest."""
        for image in images:
            if image.content is None:
                known = self._image_files.setdefault(source, hashlib.blake2b(digest_size=16))
                known.update(image.num_bytes.to_bytes(8, "little") + image.beginning)

    def _domain_index(self, name: str) -> int:
        if name not in self.domain_names:
            self.domain_names.append(name)
        return self.domain_names.index(name)

    def __len__(self) -> int:
        return len(self.domains)

    def _locate(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return number, row - int(self._starts[number])

    @property
    def first_usable(self) -> int:
        """The first row that is not left out."""
        return next((n for n, row in enumerate(self.unusable) if n != row), len(self.unusable))

    def domain_of(self, row: int) -> str:
        return self.domain_names[self.domains[row]]

    def row(self, row: int) -> Row:
        """The row; BadRow if it is unusable."""
        return self._parse(*self._locate(row))

    def where(self, row: int) -> str:
        number, index = self._locate(row)
        return self.tables[number].where(index)

    def _parse(self, number: int, index: int) -> Row:
        table, source = self.tables[number], self.sources[number]
        fixed = source.domain or table.fixed_domain
        return self._read(table.row(index), RawContext.of(table, index, self._configs[number], fixed))

    def rows_of(self, domain: str) -> tuple[int, str]:
        """The number of rows of a domain, and `file:line` of the first."""
        rows = np.flatnonzero(self.domains == self.domain_names.index(domain))
        return len(rows), self.where(int(rows[0]))

    def read_rows(self, domain: str) -> Iterator[tuple[str, Row]]:
        """(`file:line`, row) of each row of a domain that is from a file, not generated."""
        for number, table in enumerate(self.tables):
            start, end = self._starts[number : number + 2]
            if table.fixed_domain is None:
                for index in np.flatnonzero(self.domains[start:end] == self.domain_names.index(domain)).tolist():
                    yield table.where(index), self._parse(number, index)

    def domains_in_turn(self) -> np.ndarray:
        """int64 [rows]: the first row of each domain, then the second of each, and so on."""
        return np.lexsort((self.domains, self.places_in_domains()))

    def places_in_domains(self) -> np.ndarray:
        """int64 [rows]: each row's index among the rows of its domain."""
        place = np.empty(len(self), dtype=np.int64)
        for domain in range(len(self.domain_names)):
            mine = np.flatnonzero(self.domains == domain)
            place[mine] = np.arange(len(mine))
        return place

    def source_of(self, row: int) -> DataSource:
        """The source with this row."""
        return self.sources[self._locate(row)[0]]

    def fingerprint(self) -> dict[str, str]:
        """Source -> properties that determine its rows and their domains, to check a cursor."""
        rows = {
            f"{number} {source.path}": f"{len(table)} rows {table.digest} tag {source.domain or config.domain_key}"
            for number, (source, table, config) in enumerate(zip(self.sources, self.tables, self._configs, strict=True))
        }
        images = {
            f"{IMAGE_FILES} {number} {self.sources[number].path}": known.hexdigest()
            for number, known in self._image_files.items()
        }
        return rows | images


def require_same(was: dict[str, str], now: dict[str, str], place: str) -> None:
    """ValueError names the source or setting of `place` that differs from the checkpoint. Image files are not compared
    if the checkpoint lacks their hash, which earlier versions did not write."""
    for key in dict.fromkeys([*was, *now]):
        if key.startswith(IMAGE_FILES) and key not in was:
            continue
        before, after = was.get(key, "absent"), now.get(key, "absent")
        if before != after:
            raise ValueError(
                f"{place}: {key} differs from the checkpoint (it was {before}, it is {after}); "
                "restore it, or start a new run with resume=fresh"
            )


def domain_shares(names: list[str], probs: dict[str, float], batch_size: int) -> dict[str, int]:
    """Prompts of each domain in a rollout batch: int(p * batch_size); the last domain of `probs` gets the remainder.
    ValueError if `probs` does not name the domains of the data or would never draw one of them."""
    wrong = sorted(set(probs) ^ set(names))
    if wrong:
        raise ValueError(f"data.domain_interleave_probs must name the domains {', '.join(names)}; {wrong[0]!r} differs")
    counts = {name: int(p * batch_size + 1e-9) for name, p in probs.items()}
    last = next(reversed(counts))
    counts[last] = batch_size - sum(count for name, count in counts.items() if name != last)
    for name, count in counts.items():
        if count == 0:
            raise ValueError(
                f"data.domain_interleave_probs.{name}={probs[name]:g} "
                f"of rollout.num_prompts={batch_size} gives no prompt"
            )
    return counts


def read_splits(
    config: DataConfig,
    seed: int,
    checks: Mapping[Split, ChecksRows] | None = None,
    read_train: ReadRow = parse_row,
    drop: bool = False,
    read_val: ReadRow = parse_row,
) -> tuple[dict[Split, RowSet], list[str]]:
    """The valid rows of data.train and data.val, and all errors of other rows that can be found without a tokenizer,
    one line each. `checks` are further checks of a split's rows; `read_train` and `read_val` parse a raw row of a
    split; with `drop`, unusable rows of a split without prompts are left out (RowSet)."""
    found: dict[Split, RowSet] = {}
    problems: list[str] = []
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        if sources(config, split):
            try:
                read = read_train if split == "train" else read_val
                drops = drop and (split == "train" or read_val is not parse_row)
                found[split] = RowSet(config, split, seed, (checks or {}).get(split), read, drops)
            except ValueError as error:
                problems += str(error).splitlines()
    return found, list(dict.fromkeys(problems))


def check_answers(rows: Mapping[Split, RowSet]) -> list[str]:
    """One line for each reason why a supervised pipeline cannot learn from rows of data.train."""
    if "train" not in rows:
        return []
    return [
        f"{first}: {obstacle}; {count} of {len(rows['train'])} rows of data.train are so"
        for obstacle, (count, first) in rows["train"].unlearnable.items()
    ]


def check_shares(config: DataConfig, rows: Mapping[Split, RowSet], batch_size: int) -> list[str]:
    """Errors of data.domain_interleave_probs for batches of this many prompts, if the rows are valid."""
    if not config.domain_interleave_probs or "train" not in rows:
        return []
    try:
        domain_shares(rows["train"].domain_names, config.domain_interleave_probs, batch_size)
    except ValueError as error:
        return [str(error)]
    return []
