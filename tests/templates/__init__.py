"""Chat templates as published, and a small tokenizer for each: README.md says where they come from."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BYTES = 259
"""Size of a vocabulary of bytes, with the tokenizer's own three special tokens."""


@dataclass(frozen=True)
class Published:
    """A row of the table; README.md describes its columns."""

    name: str
    model: str
    source: str
    licence: str
    bos: str
    eos: str
    ends: tuple[str, ...]
    special: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()


def _table() -> dict[str, Published]:
    rows = tomllib.loads((FOLDER / "table.toml").read_text())
    lists = ("ends", "special", "added")
    return {name: Published(name, **row | {key: tuple(row[key]) for key in lists}) for name, row in rows.items()}


TABLE = _table()


def tokenizer_of(name: str, all_special: bool = False) -> Any:
    """A byte-level tokenizer with the tokens and the template of a model. all_special: its ordinary added tokens are
    special ones, too."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    published = TABLE[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bytes()),
        bos_token=published.bos or None,
        eos_token=published.eos,
        additional_special_tokens=[*published.special, *(published.added if all_special else ())],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([] if all_special else list(published.added))
    tokenizer.chat_template = published.template
    return tokenizer


@functools.cache
def _bytes() -> str:
    """The tokenizer without the tokens of a model, as JSON."""
    from hpcrl.engines.tiny import make_tokenizer

    return make_tokenizer(BYTES).to_str()
