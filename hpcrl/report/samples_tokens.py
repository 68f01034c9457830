"""Tokens of a response as pieces of text with a value per token, for colours."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.report.samples_text import HEAD_SHARE, clean

REPLACEMENT = "\ufffd"
MAX_TOKENS_PER_CHARACTER = 6
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
"""Files that a folder with a tokenizer has, the first of them or only the second."""
SCALE = {"mismatch": 1000, "lag": 1, "advantage": 1000, "entropy": 1000}
"""Values per token are integers in the page: the value times this."""
MAX_SCALED = 10**6


class TokenPieces:
    """The text of each token. A character that several tokens form is the text of the first of them.

    Args:
        decode: Text of token ids, with special tokens.
        anchor: The id of a token of an ordinary character. Tokens are decoded after it, since many tokenizers drop a
            space at the beginning of a text.
    """

    def __init__(self, decode: Callable[[list[int]], str], anchor: int):
        self._decode, self._anchor, self._head = decode, anchor, decode([anchor])
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text per token; their concatenation is the text of the tokens."""
        found: list[str] = []
        while len(found) < len(ids):
            at = len(found)
            piece = self._text(ids[at : at + 1])
            found.append(piece)
            if REPLACEMENT not in piece:
                continue
            for end in range(at + 2, min(at + MAX_TOKENS_PER_CHARACTER, len(ids)) + 1):
                if REPLACEMENT not in self._text(ids[end - 1 : end]):
                    break
                if REPLACEMENT not in (whole := self._text(ids[at:end])):
                    found[at:] = [whole, *[""] * (end - at - 1)]
                    break
        return found

    def _text(self, ids: Sequence[int]) -> str:
        key = tuple(ids)
        if key not in self._known:
            text = self._decode([self._anchor, *key])
            follows = text.startswith(self._head)
            self._known[key] = clean(text[len(self._head) :] if follows else self._decode(list(key)))
        return self._known[key]


def token_pieces(files: Sequence[Path]) -> TokenPieces | None:
    """The pieces of the first of these files, named as in TOKENIZERS, that exists; None without one. ValueError if it
    cannot be read. Nothing is loaded from a network, and no code of the folder is run."""
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return None
    try:
        if path.name == TOKENIZERS[0]:  # without the seconds that importing transformers takes
            from tokenizers import Tokenizer

            plain = Tokenizer.from_file(str(path))
            anchor = plain.encode("a", add_special_tokens=False).ids[-1]
            return TokenPieces(functools.partial(plain.decode, skip_special_tokens=False), anchor)
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(str(path.parent), local_files_only=True)
        return TokenPieces(loaded.decode, loaded.encode("a", add_special_tokens=False)[-1])
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"the tokenizer in {path.parent} cannot be read: {error}") from error


def segments(
    pieces: TokenPieces, ids: np.ndarray, values: Mapping[str, np.ndarray], limit: int
) -> list[dict[str, Any]]:
    """The tokens of a turn for the page, in about `limit` characters: [{"text", "cuts", NAME: values, ...}], and for a
    longer turn its beginning, {"left_out": number of tokens}, and its end.

    `cuts` are the lengths of the tokens' texts in UTF-16 units, as browsers count. Values are multiplied by SCALE; one
    number stands for equal values of all tokens.
    """
    count = len(ids)
    head, tail = int(limit * HEAD_SHARE), limit - int(limit * HEAD_SHARE)
    if count <= limit:
        found = pieces.of(ids.tolist())
        if sum(map(len, found)) <= limit:
            return [_segment(found, values)]
    first = _within(_whole(pieces.of(ids[:head].tolist())[::-1])[::-1], head)
    last = _within(_whole(pieces.of(ids[max(len(first), count - tail) :].tolist()))[::-1], tail)[::-1]
    shown = [_segment(first, {name: column[: len(first)] for name, column in values.items()})]
    if left_out := count - len(first) - len(last):
        shown.append({"left_out": left_out})
    if last:
        shown.append(_segment(last, {name: column[count - len(last) :] for name, column in values.items()}))
    return shown


def _whole(texts: list[str]) -> list[str]:
    """The texts without those at the beginning that are part of a character."""
    broken = itertools.takewhile(lambda text: REPLACEMENT in text, texts[: MAX_TOKENS_PER_CHARACTER - 1])
    return texts[len(list(broken)) :]


def _within(texts: Sequence[str], limit: int) -> list[str]:
    """The first texts, of together at most `limit` characters; at least one, which is cut if it is longer."""
    ends = np.cumsum([len(text) for text in texts])
    found = list(texts[: max(1, int(np.searchsorted(ends, limit, side="right")))])
    return [found[0][:limit], *found[1:]] if found else []


def _segment(texts: Sequence[str], values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    cuts = [len(text) + sum(character > "\uffff" for character in text) for text in texts]
    found: dict[str, Any] = {"text": "".join(texts), "cuts": cuts}
    for name, column in values.items():
        scaled = np.nan_to_num(column.astype(np.float64) * SCALE[name], nan=0.0)
        whole = np.rint(scaled.clip(-MAX_SCALED, MAX_SCALED)).astype(np.int64)
        found[name] = int(whole[0]) if len(whole) and (whole == whole[0]).all() else whole.tolist()
    return found
