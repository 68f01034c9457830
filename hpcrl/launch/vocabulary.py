"""Whether the policy and a second model have equal tokens, by the tokenizers' files: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.launch.model_folder import TOKENIZERS
from hpcrl.models.shape import decoder_keys


def check_vocabulary(key: str, folder: Path, policy: Path) -> Iterator[str]:
    """A line that begins with the folder's key if the folder's tokenizer lacks a token of the policy's tokenizer,
    special tokens included, or gives it another id. Additional tokens are allowed: no row contains them. Nothing if a
    folder has no tokenizer, which inspect_model() reports."""
    files = [[name for name in TOKENIZERS if (place / name).is_file()] for place in (folder, policy)]
    common = next((name for name in files[0] if name in files[1]), "")
    if not all(files) or (common and (folder / common).read_bytes() == (policy / common).read_bytes()):
        return
    try:
        there, here = _tokens(folder), _tokens(policy)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"the tokenizers of {folder} and of {policy} (model.path) cannot be compared"
        yield f"{key}: {text}: {type(error).__name__}: {error}; give both a tokenizer.json"
        return
    for token, number in here.items():
        if there.get(token) != number:
            found = f"has the id {there[token]}" if token in there else "does not exist"
            text = f"{folder} has another vocabulary than {policy} (model.path): token {token!r} {found}, not {number}"
            yield f"{key}: {text}; give a model with the policy's tokenizer"
            return


def check_embedding(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """A line that begins with model.path if a token of tokenizer.json has no row of the embedding. Tokens added to a
    vocabulary, such as placeholders of images, may have none: no text yields them. Nothing if the files cannot be read,
    which others report."""
    rows = decoder_keys(config).get("vocab_size")
    try:
        vocabulary = _vocabulary(_read(folder / "tokenizer.json"))
        token, number = max(vocabulary.items(), key=lambda item: item[1])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    if isinstance(rows, int) and isinstance(number, int) and number >= rows:
        text = f"tokenizer.json has the token {token!r} with the id {number}, but vocab_size in config.json is {rows}"
        yield f"model.path: {folder}: {text}; give the tokenizer with which the model was trained"


def _tokens(folder: Path) -> dict[str, int]:
    """The id of every token."""
    if (folder / "tokenizer.json").is_file():
        content = _read(folder / "tokenizer.json")
        return {**_vocabulary(content), **{added["content"]: added["id"] for added in content.get("added_tokens", ())}}
    added = folder / "added_tokens.json"
    return {**_read(folder / "vocab.json"), **(_read(added) if added.is_file() else {})}


def _vocabulary(content: Mapping[str, Any]) -> dict[str, int]:
    """The id of every token of a tokenizer.json that was not added to its vocabulary."""
    tokens = content["model"]["vocab"]
    if isinstance(tokens, list):  # of Unigram: (token, score)
        return {token: number for number, (token, _) in enumerate(tokens)}
    return dict(tokens)


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
