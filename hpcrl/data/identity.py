"""Identifies prompts by their content, across runs, models and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK

NUM_DIGITS = 16


def prompt_id(messages: Sequence[Mapping[str, Any]], images: Iterable[bytes] = ()) -> str:
    """16 hex digits: the beginning of the SHA-256 of the messages' canonical JSON: UTF-8, keys sorted, no spaces,
    `<image>` for an image's mark. A prompt with images has one more entry, their digests
    (hpcrl.spec.media.Medium.digest) in hex: {"images": [..]}."""
    digests = [digest.hex() for digest in images]
    content = [*messages, {"images": digests}] if digests else [*messages]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    canonical = text.replace(IMAGE_MARK, WRITTEN_MARK).encode(errors="replace")
    return hashlib.sha256(canonical).hexdigest()[:NUM_DIGITS]
