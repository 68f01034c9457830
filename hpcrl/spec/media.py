"""The medium of a prompt, as data, messages and engines exchange it."""

from __future__ import annotations

import msgspec

IMAGE = "image"


class Medium(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One medium of a prompt.

    Args:
        kind: What it is, such as IMAGE.
        content: The bytes of its file, such as a PNG or JPEG; nothing decodes them on the way to the engine.
    """

    kind: str
    content: bytes
