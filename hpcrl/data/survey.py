"""What a split's rows hold: counts, lengths of prompts, duplicates, rows that would be refused."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from hpcrl.config import DataConfig
from hpcrl.data.files import BadRow, Table
from hpcrl.data.pair_forms import UselessPair
from hpcrl.data.places import open_table
from hpcrl.data.rows import PROGRESS_ROWS, RawContext, ReadRow, Row, keys_of, parse_row, sources
from hpcrl.data.tasks import Split

logger = logging.getLogger(__name__)

MAX_MEASURED = 20_000
"""Rows per split whose length is measured; of more rows, this many are measured, evenly spread."""
MAX_REFUSED = 10
"""Problems kept per split; further ones are counted."""


class Pair(NamedTuple):
    """`file:line` of a row, and of an earlier row with the same prompt."""

    where: str
    earlier: str


@dataclass
class Survey:
    """The rows of one split.

    Attributes:
        sizes: Path of a source -> its number of rows.
        domains: Domain -> number of usable rows.
        unanswered: Number of usable rows without an answer.
        with_images: Number of usable rows with images.
        refused: The first problems of unusable rows, `file:line: text`; num_refused is the number of all.
        lengths: Lengths of the measured prompts, in the unit of the measure.
        longest: `file:line` of the longest measured prompt.
        repeated: Number of rows whose prompt occurs in an earlier row, and the first of them.
        first: `file:line` and row to show; None if no row is usable.
        prompts: Hash of each prompt -> `file:line` of its first row.
        useless: Why pairs teach nothing (UselessPair.kind) -> their number.
        parts: Part of measured rows (chosen, rejected, good, bad) -> lengths of its answers; `whole` has the lengths of
            the longer sequence of each row, with the prompt.
        twins: Number of pairs and labelled rows that equal an earlier one, and the first of them.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    domains: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    with_images: int = 0
    refused: list[str] = field(default_factory=list)
    num_refused: int = 0
    lengths: list[int] = field(default_factory=list)
    longest: str = ""
    repeated: tuple[int, Pair | None] = (0, None)
    first: tuple[str, Row] | None = None
    prompts: dict[bytes, str] = field(default_factory=dict)
    useless: Counter[str] = field(default_factory=Counter)
    parts: dict[str, list[int]] = field(default_factory=dict)
    twins: tuple[int, Pair | None] = (0, None)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes.values())

    def quantiles(self, *shares: float) -> list[int]:
        """Lengths that these shares of the measured prompts do not exceed; empty if none is measured."""
        return quantiles(self.lengths, *shares)

    def overlap(self, other: Survey) -> tuple[int, Pair | None]:
        """Number of this split's prompts that the other has too, and the first of them."""
        shared = [key for key in self.prompts if key in other.prompts]
        return len(shared), Pair(self.prompts[shared[0]], other.prompts[shared[0]]) if shared else None

    def refuse(self, problem: str) -> None:
        self.num_refused += 1
        if len(self.refused) < MAX_REFUSED:
            self.refused.append(problem)


def quantiles(lengths: Sequence[int], *shares: float) -> list[int]:
    """Lengths that these shares of all do not exceed; empty if there are none."""
    return [int(value) for value in np.quantile(lengths, shares, method="inverted_cdf")] if lengths else []


def survey(
    config: DataConfig,
    split: Split,
    seed: int,
    measure: Callable[[Row], int] | None = None,
    check: Callable[[Row, str], str] | None = None,
    read: ReadRow = parse_row,
    measure_parts: Callable[[Row], Mapping[str, int]] | None = None,
) -> Survey:
    """Read all rows of a split. ValueError if a source as a whole cannot be read.

    Args:
        measure: Length of a row's prompt.
        measure_parts: Lengths of the answers of a pair or a labelled row, as in Survey.parts.
        check: A further check of a row and its `file:line`: its problem, or an empty text.
        read: Parser of a raw row.
    """
    tables = [(source, open_table(source, seed, split)) for source in sources(config, split)]
    found = Survey(sizes={source.path: len(table) for source, table in tables})
    every = max(1, -(-found.num_rows // MAX_MEASURED))
    rows = (row for source, table in tables for row in _rows(table, keys_of(source, config), source.domain, read))
    most, known = -1, dict[bytes, str]()
    for number, (where, row) in enumerate(rows):
        if number and number % PROGRESS_ROWS == 0:
            logger.info("%d of %d rows of data.%s are read", number, found.num_rows, split)
        if isinstance(row, BadRow):
            found.refuse(str(row))
            if isinstance(row, UselessPair):
                found.useless[row.kind] += 1
            continue
        if check is not None and (problem := check(row, where)):
            found.refuse(problem)
            continue
        found.first = found.first or (where, row)
        found.domains[row.domain] += 1
        found.unanswered += row.answer is None or (isinstance(row.answer, str) and not row.answer.strip())
        found.with_images += bool(row.images)
        key = prompt_hash(row)
        if (earlier := found.prompts.setdefault(key, where)) != where:
            count, pair = found.repeated
            found.repeated = count + 1, pair or Pair(where, earlier)
        if row.rejected is not None or row.label is not None:
            same = msgspec.msgpack.encode([key, row.turn, row.rejected and row.rejected.turn, row.label])
            digest = hashlib.blake2b(same, digest_size=16).digest()
            if (earlier := known.setdefault(digest, where)) != where:
                count, pair = found.twins
                found.twins = count + 1, pair or Pair(where, earlier)
        if measure_parts is not None and number % every == 0:
            for name, length in measure_parts(row).items():
                found.parts.setdefault(name, []).append(length)
        if measure is not None and number % every == 0:
            length = measure(row)
            if length > most:
                most, found.longest = length, where
            found.lengths.append(length)
    return found


def prompt_hash(row: Row) -> bytes:
    """Equal for prompts that differ in case and white space only. Images count by their size and beginning."""
    messages = [[message["role"], " ".join(str(message["content"]).split()).casefold()] for message in row.messages]
    images = [
        [image.num_bytes, image.beginning] if image.content is None else [len(image.content), image.content]
        for image in row.images
    ]
    return hashlib.blake2b(msgspec.msgpack.encode([messages, images]), digest_size=16).digest()


def _rows(table: Table, config: DataConfig, domain: str | None, read: ReadRow) -> Iterator[tuple[str, Row | BadRow]]:
    """(`file:line`, row) of a table; an unusable row as its error."""
    fixed = domain or table.fixed_domain
    for index in range(len(table)):
        context = RawContext.of(table, index, config, fixed)
        try:
            yield context.where, read(table.row(index), context)
        except BadRow as error:
            yield context.where, error
