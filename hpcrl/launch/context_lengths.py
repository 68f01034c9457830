"""How many prompts are too long with teacher.context, measured on some rows before the start. No transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcrl.config import Config, Problem
from hpcrl.data.chat import plain, render
from hpcrl.data.files import BadRow
from hpcrl.data.image_sizes import without_pixels
from hpcrl.data.image_tokens import write_pictures
from hpcrl.data.privileged import PrivilegedContext
from hpcrl.data.rows import RowSet
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.data.templates import FolderTemplate
from hpcrl.launch.model_folder import TOKENIZERS
from hpcrl.models.vision import Vision
from hpcrl.spec.media import by_picture

MAX_MEASURED = 256
"""Rows whose prompts are measured, evenly spread over data.train."""
KEY = ("teacher", "max_prompt_tokens")


@dataclass(frozen=True)
class ContextLengths:
    """Lengths of prompts that the teacher reads, of a sample of the rows that it teaches.

    Args:
        measured: Rows of the sample.
        too_long: Those with a longer prompt than teacher.max_prompt_tokens.
        shortest: The shortest prompt, tokens.
        where: The first row that is too long.
        is_all: Whether the sample is all rows.
    """

    measured: int
    too_long: int
    shortest: int
    where: str
    is_all: bool

    def problems(self, config: Config) -> Iterator[Problem]:
        """A problem if no prompt of the sample fits."""
        if self.measured and self.too_long == self.measured:
            text = (
                f"teacher.max_prompt_tokens: {self._limit(config)}, but all {self._rows} have more tokens with "
                f"teacher.context, the shortest {self.shortest}; raise it"
            )
            yield Problem(KEY, text, (("teacher", "context"), ("data",), ("model",)))

    def notes(self, config: Config) -> Iterator[str]:
        """A line of the plan if some prompts do not fit."""
        if self.too_long:
            done = "end the run" if config.data.overlong_prompts == "error" else "are dropped"
            yield (
                f"{self.where}: longer than teacher.max_prompt_tokens={self._limit(config)} with teacher.context; "
                f"{self.too_long} of {self._rows} are and {done}"
            )

    @property
    def _rows(self) -> str:
        return f"{self.measured} {'' if self.is_all else 'sampled '}rows of data.train"

    def _limit(self, config: Config) -> str:
        limit = str(config.teacher_prompt_tokens)
        return limit if config.teacher.max_prompt_tokens is not None else f"null (data.max_prompt_tokens={limit})"


def context_lengths(
    config: Config, template: FolderTemplate, rows: RowSet, vision: Vision | None
) -> ContextLengths | None:
    """The lengths of a sample's prompts in tokens of the policy, those of images included; None without
    teacher.context, or if the policy's folder has no tokenizer.json that can be read here."""
    context = PrivilegedContext.of(config)
    if context is None or (count := _counter(config, template)) is None:
        return None
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(MAX_MEASURED, len(rows))).astype(int)).tolist()
    lengths: dict[int, int] = {}
    for number in chosen:
        try:
            row = rows.row(number)
            if not context.is_read(row.domain):
                continue
            read = context.messages(row, rows.where(number))
            text = render(template, read, row.tools, **row.variables)
            images = without_pixels(row.images, vision) if vision is not None else []
            if vision is not None and images:
                text = write_pictures(text, vision, iter(by_picture(images)))
            lengths[number] = count(text) + sum(image.length - 1 for image in images)
        except (BadRow, TemplateRefusal, ValueError, OSError):  # reported, or skipped with a note
            continue
    over = [number for number, length in lengths.items() if length > context.max_tokens]
    where = rows.where(over[0]) if over else ""
    return ContextLengths(len(lengths), len(over), min(lengths.values(), default=0), where, len(chosen) == len(rows))


def _counter(config: Config, template: FolderTemplate) -> Callable[[str], int] | None:
    path = None if config.model.path is None else Path(config.model.path) / TOKENIZERS[0]
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises Exception itself; the ranks name the file
        return None
    begins = not template.chat_template
    return lambda text: len(tokenizer.encode(plain(text), add_special_tokens=begins).ids)
