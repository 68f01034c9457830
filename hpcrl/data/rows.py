"""Interprets rows (prompt, answer, tools, domain, under any column name) and finds the errors of a data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hpcrl.config import DataConfig, DataSource
from hpcrl.data.env_sources import STARTS, given_start
from hpcrl.data.files import NO_IMAGES, BadRow, Table, open_table
from hpcrl.data.tasks import Split

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
ANSWER_KEYS = ("answer", "ground_truth", "label", "solution")
RESPONSE_KEYS = ("response", "completion")
PICTURE_NAMES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
ROLES = ("system", "user", "assistant", "tool")
DEFAULT_DOMAIN = "default"
MAX_PROBLEMS = 10  # lines shown; the others are counted
MAX_ROW_BYTES = 16 << 20
"""Limit for the JSON of a row's answer and other columns, which go to the reward or environment with each response: a
message between ranks holds 64 MiB, including the prompt, and has the answer twice."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """`messages` end with the turn to answer; `response` is a reference answer for the SFT pipeline; `extra` holds all
    columns except the prompt, that of the answer included."""

    messages: Messages
    answer: Any
    response: str | None
    tools: list[dict[str, Any]] | None
    domain: str
    extra: dict[str, Any]


def parse_row(raw: dict[str, Any], config: DataConfig, fixed_domain: str | None, where: str) -> Row:
    """Read a raw row; `fixed_domain` replaces its tag. BadRow describes the error."""
    key = _first(raw, config.prompt_key, PROMPT_KEYS)
    if place := _image_in(raw, key):
        raise BadRow(f"{where}: {place}: {NO_IMAGES}")
    if key is None:
        looked = config.prompt_key or ", ".join(PROMPT_KEYS)
        raise BadRow(f"{where}: no prompt: looked for {looked} (data.prompt_key); the row has {_columns(raw)}")
    messages = _messages(raw[key], where, key)
    written = None
    response = next((raw[k] for k in RESPONSE_KEYS if isinstance(raw.get(k), str)), None)
    if messages[-1]["role"] == "assistant" and response is None:
        response = written = messages[-1]["content"]
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"{where}: {key} has no user turn to answer")
    answer = _answer(raw, config, where)
    extra = {k: v for k, v in raw.items() if k != key}
    try:
        given_start(extra)
    except ValueError as error:
        raise BadRow(f"{where}: {error}") from None
    _check_size(written if answer is None else None, extra, where)
    tools = raw.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow(f"{where}: tools must be a list of objects")
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Row(
        messages=messages,
        answer=response if answer is None else answer,
        response=response if response is not None or not isinstance(answer, str) else answer,
        tools=tools or None,
        domain=fixed_domain or _domain(raw, config, where),
        extra=extra,
    )


def learning_obstacle(row: Row) -> str:
    """Why a supervised pipeline cannot learn from a row; empty if it can, as far as is known without a tokenizer."""
    if row.response is None:
        return (
            f"no answer to learn from: there is no text in {', '.join(RESPONSE_KEYS)} or the answer (data.answer_key), "
            "and the last message is not an assistant turn with text"
        )
    if not row.response.strip():
        return "the answer to learn from is empty"
    for message in row.messages:
        if message["role"] == "assistant" and not (message.get("tool_calls") or message["content"].strip()):
            return "an assistant turn is empty, and all of them are learned from"
    return ""


def _image_in(raw: dict[str, Any], key: str | None) -> str | None:
    """The place of a row's first image, None if it has none: `images` or `image` of the row or of a message of column
    `key`, or a part of a message's content. A row's `image` may be a text of another meaning, such as a container."""
    if raw.get("images"):
        return "images"
    image = raw.get("image")
    if image and (not isinstance(image, str) or image.lower().endswith(PICTURE_NAMES)):
        return "image"
    messages = raw[key] if key is not None and isinstance(raw[key], list) else []
    for n, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        for name in ("images", "image"):
            if message.get(name):
                return f"{key}[{n}].{name}"
        content = message.get("content")
        for k, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image"):
                return f"{key}[{n}].content[{k}]"
    return None


def _check_size(written: str | None, extra: dict[str, Any], where: str) -> None:
    """BadRow if the row is too large to send: it would end the run at the step that draws it. `written`: an answer that
    is not a column."""
    num_bytes = len(msgspec.json.encode((written, extra)))
    if num_bytes > MAX_ROW_BYTES:
        sizes = {name: len(msgspec.json.encode(value)) for name, value in {"the answer": written, **extra}.items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise BadRow(
            f"{where}: {num_bytes / 2**20:.1f} MiB of answer and other columns would go with every response to the "
            f"reward, at most {MAX_ROW_BYTES >> 20} do (the largest: {largest}); store the path of a file instead"
        )


def _first(raw: dict[str, Any], chosen: str | None, known: tuple[str, ...]) -> str | None:
    keys = (chosen,) if chosen else known
    return next((key for key in keys if raw.get(key) is not None), None)


def _messages(value: Any, where: str, key: str) -> Messages:
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"{where}: {key} is empty")
        return [{"role": "user", "content": value}]
    if value == []:
        raise BadRow(f"{where}: {key} is empty")
    if not isinstance(value, list):
        raise BadRow(f"{where}: {key} must be text or a list of messages, it is {type(value).__name__}")
    for n, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise BadRow(f"{where}: {key}[{n}].role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}")
        if not isinstance(message.get("content"), str) and not (
            message["role"] == "assistant" and message.get("content") is None and message.get("tool_calls")
        ):
            raise BadRow(f"{where}: {key}[{n}].content must be text")
        if message["role"] == "user" and not message["content"].strip():
            raise BadRow(f"{where}: {key}[{n}].content is empty")
    # Parquet gives every struct of a list all keys, with null for keys that the message did not have.
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def _answer(raw: dict[str, Any], config: DataConfig, where: str) -> Any:
    key = _first(raw, config.answer_key, ANSWER_KEYS)
    if key is not None:
        return raw[key]
    if config.answer_key:
        raise BadRow(f"{where}: no {config.answer_key} (data.answer_key); the row has {_columns(raw)}")
    model = raw.get("reward_model")
    return model.get("ground_truth") if isinstance(model, dict) else None


def _domain(raw: dict[str, Any], config: DataConfig, where: str) -> str:
    for key in (config.tag_key, "data_source"):
        tag = raw.get(key)
        if tag is None:
            continue
        if not isinstance(tag, str) or not tag:
            raise BadRow(f"{where}: {key} must be text, not {str(tag)[:40]!r}")
        return tag
    return DEFAULT_DOMAIN


def _columns(raw: dict[str, Any]) -> str:
    return ", ".join(map(str, raw)) or "no keys"


def sources(config: DataConfig, split: Split) -> list[DataSource]:
    """The sources of a split; none if data.val is not set."""
    given = config.train if split == "train" else config.val
    if given is None:
        return []
    entries = [given] if isinstance(given, str) else given
    return [DataSource(path=entry) if isinstance(entry, str) else entry for entry in entries]


def start_domains(config: DataConfig, split: Split) -> dict[str, str]:
    """Domain -> path of the sources whose rows are starts of an environment."""
    given = (source for source in sources(config, split) if source.path.startswith(STARTS))
    return {source.tag or source.path.removeprefix(STARTS): source.path for source in given}


class RowSet:
    """All rows of a split, checked, source after source. ValueError lists all problems.

    `domain_names`: in order of appearance; `domains`: int32 [rows], each row's index into domain_names; `unanswered`:
    domain -> number of rows without an answer, and `file:line` of the first; `unlearnable`: learning_obstacle() -> the
    same two of the rows that have it.
    """

    def __init__(self, config: DataConfig, split: Split, seed: int):
        self._config = config
        self._sources = sources(config, split)
        if not self._sources:
            raise ValueError(f"data.{split} is not set")
        problems: list[str] = []
        self.tables: list[Table] = []
        for source in self._sources:
            try:
                self.tables.append(open_table(source, seed, split))
            except ValueError as error:
                problems.append(f"data.{split}: {error}")  # the other sources are still checked
        self._starts = np.cumsum([0, *(len(table) for table in self.tables)])
        self.domain_names: list[str] = []
        self.domains = np.zeros(self._starts[-1], dtype=np.int32)
        self.unanswered: dict[str, tuple[int, str]] = {}
        self.unlearnable: dict[str, tuple[int, str]] = {}
        what, more = "sources", len(problems) - MAX_PROBLEMS
        if not problems:
            found = self._scan()
            problems = list(itertools.islice(found, MAX_PROBLEMS))
            what, more = "rows", sum(1 for _ in found)
        if more > 0:
            problems[MAX_PROBLEMS:] = [f"data.{split}: and {more} more {what} with problems"]
        if problems:
            raise ValueError("\n".join(problems))

    def _scan(self) -> Iterator[str]:
        """Find the domain of every row; yields one problem per unusable row."""
        for number, table in enumerate(self.tables):
            start, end = self._starts[number : number + 2]
            if table.fixed_domain is not None:  # generated rows are correct by construction
                self.domains[start:end] = self._domain_index(self._sources[number].tag or table.fixed_domain)
                continue
            for index in range(len(table)):
                try:
                    row = self._parse(number, index)
                    self.domains[start + index] = self._domain_index(row.domain)
                    if row.answer is None or (isinstance(row.answer, str) and not row.answer.strip()):
                        count, first = self.unanswered.get(row.domain, (0, table.where(index)))
                        self.unanswered[row.domain] = count + 1, first
                    if obstacle := learning_obstacle(row):
                        count, first = self.unlearnable.get(obstacle, (0, table.where(index)))
                        self.unlearnable[obstacle] = count + 1, first
                except BadRow as error:
                    yield str(error)

    def _domain_index(self, name: str) -> int:
        if name not in self.domain_names:
            self.domain_names.append(name)
        return self.domain_names.index(name)

    def __len__(self) -> int:
        return len(self.domains)

    def _locate(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return number, row - int(self._starts[number])

    def domain_of(self, row: int) -> str:
        return self.domain_names[self.domains[row]]

    def row(self, row: int) -> Row:
        """The row; BadRow if it is unusable."""
        return self._parse(*self._locate(row))

    def where(self, row: int) -> str:
        number, index = self._locate(row)
        return self.tables[number].where(index)

    def _parse(self, number: int, index: int) -> Row:
        table, source = self.tables[number], self._sources[number]
        fixed = source.tag or table.fixed_domain
        return parse_row(table.row(index), self._config, fixed, table.where(index))

    def rows_of(self, domain: str) -> tuple[int, str]:
        """The number of rows of a domain, and `file:line` of the first."""
        rows = np.flatnonzero(self.domains == self.domain_names.index(domain))
        return len(rows), self.where(int(rows[0]))

    def read_rows(self, domain: str) -> Iterator[tuple[str, Row]]:
        """(`file:line`, row) of each row of a domain that was read and not generated."""
        for number, table in enumerate(self.tables):
            start, end = self._starts[number : number + 2]
            if table.fixed_domain is None:
                for index in np.flatnonzero(self.domains[start:end] == self.domain_names.index(domain)).tolist():
                    yield table.where(index), self._parse(number, index)

    def domains_in_turn(self) -> np.ndarray:
        """int64 [rows]: the first row of each domain, then the second of each, and so on."""
        place = np.empty(len(self), dtype=np.int64)  # of each row among those of its domain
        for domain in range(len(self.domain_names)):
            mine = np.flatnonzero(self.domains == domain)
            place[mine] = np.arange(len(mine))
        return np.lexsort((self.domains, place))

    def fingerprint(self) -> dict[str, str]:
        """Source -> what its rows and their domains depend on, to check a cursor."""
        return {
            f"{number} {source.path}": f"{len(table)} rows {table.digest} tag {source.tag or self._config.tag_key}"
            for number, (source, table) in enumerate(zip(self._sources, self.tables, strict=True))
        }


def require_same(was: dict[str, str], now: dict[str, str], place: str) -> None:
    """ValueError names the source or setting of `place` that differs from the checkpoint."""
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key, "absent"), now.get(key, "absent")
        if before != after:
            raise ValueError(
                f"{place}: {key} is not what the checkpoint was made with (it was {before}, it is {after}); "
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


def read_splits(config: DataConfig, seed: int) -> tuple[dict[Split, RowSet], list[str]]:
    """The valid rows of data.train and data.val, and all errors of the others that can be found without a tokenizer,
    one line each."""
    found: dict[Split, RowSet] = {}
    problems: list[str] = []
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        if sources(config, split):
            try:
                found[split] = RowSet(config, split, seed)
            except ValueError as error:
                problems += str(error).splitlines()
    return found, list(dict.fromkeys(problems))


def check_answers(rows: Mapping[Split, RowSet]) -> list[str]:
    """One line for each reason why rows of data.train cannot be learned from by a supervised pipeline."""
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
