"""What a rank and its reward workers say to each other: msgpack behind a length of four bytes."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")


class Item(msgspec.Struct, array_like=True):
    """A response in a message; the fields of RewardItem."""

    sample_id: int
    domain: str
    prompt: str
    response: str
    answer: Any
    extra: dict[str, Any]
    finish_reason: str


class Ready(msgspec.Struct, tag="ready"):
    """The first message of a worker: the reward is loaded. `error`: why it is not."""

    batched: bool = False
    error: str = ""


class Scored(msgspec.Struct, tag="scored"):
    """The score of the item at `place` of the current chunk; None: the call failed for the chunk as a whole."""

    place: int | None
    reward: float = 0.0
    score: float = 0.0
    error: str = ""
    metrics: dict[str, float] = {}


Answer = Ready | Scored
_decoder = msgspec.msgpack.Decoder(Answer)


def frame(body: bytes) -> bytes:
    """A message's bytes as they go through the pipe."""
    return LENGTH.pack(len(body)) + body


def pack(message: Any) -> bytes:
    """A message as it goes through the pipe. TypeError when it holds something msgpack does not know."""
    return frame(msgspec.msgpack.encode(message))


def take_answers(buffer: bytearray) -> list[Answer]:
    """The whole messages at the front of `buffer`, which they leave. msgspec.DecodeError when it is something else."""
    answers: list[Answer] = []
    start = 0
    while len(buffer) - start >= LENGTH.size:
        end = start + LENGTH.size + LENGTH.unpack_from(buffer, start)[0]
        if end > len(buffer):
            break
        answers.append(_decoder.decode(bytes(buffer[start + LENGTH.size : end])))
        start = end
    del buffer[:start]
    return answers
