"""Messages between a rank and its reward workers: four bytes of length, then msgpack."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from hpcrl.rewards.reward import ModelTurn, RewardItem
from hpcrl.rewards.services import NOBODY, Services
from hpcrl.spec.media import Medium

LENGTH = struct.Struct("<I")


class Item(msgspec.Struct, array_like=True):
    """The fields of RewardItem except images, token ids as int32."""

    sample_id: int
    domain: str
    prompt: str
    response: str
    answer: Any
    extra: dict[str, Any]
    finish_reason: str
    token_ids: bytes
    earlier: list[tuple[str, bytes]]
    messages: list[dict[str, Any]] = []


class ItemChunk(msgspec.Struct, array_like=True):
    """A message to a worker: different images, items, and the indices of each item's images."""

    images: list[Medium]
    items: list[Item]
    shown: list[list[int]]


def to_message(item: RewardItem) -> bytes:
    """The message of an item without its images. TypeError if msgpack does not support a value of the row."""
    fields = (item.sample_id, item.domain, item.prompt, item.response, item.answer, item.extra, item.finish_reason)
    earlier = [(turn.text, array("i", turn.token_ids).tobytes()) for turn in item.earlier]
    messages = list(map(dict, item.messages))
    ids = array("i", item.token_ids).tobytes()
    return msgspec.msgpack.encode(Item(*fields, ids, earlier, messages))


def content_of(item: RewardItem, message: bytes) -> bytes:
    """A digest of the item's message without the sample id, and of its images."""
    start = 1 + len(msgspec.msgpack.encode(item.sample_id))  # after the length of the array
    found = hashlib.blake2b(memoryview(message)[start:], digest_size=16)
    for image in item.images:
        found.update(image.digest)
    return found.digest()


def pack_chunk(items: Sequence[RewardItem], messages: Sequence[bytes]) -> bytes:
    """The ItemChunk of items and their messages, as written to the pipe. An image of several items is written once."""
    images: list[Medium] = []
    places: dict[tuple[bytes, int, int], int] = {}
    for image in (image for item in items for image in item.images):
        if image.identity not in places:
            places[image.identity] = len(images)
            images.append(image)
    shown = [[places[image.identity] for image in item.images] for item in items]
    return pack((images, list(map(msgspec.Raw, messages)), shown))


def read_chunk(body: bytes) -> list[RewardItem]:
    """The items of an ItemChunk; items with equal images share them."""
    chunk = msgspec.msgpack.decode(body, type=ItemChunk)
    return [
        _from_message(item, [chunk.images[place] for place in shown])
        for item, shown in zip(chunk.items, chunk.shown, strict=True)
    ]


def _from_message(item: Item, images: Sequence[Medium]) -> RewardItem:
    fields = (item.sample_id, item.domain, item.prompt, item.response, item.answer, item.extra, item.finish_reason)
    return RewardItem(*fields, array("i", item.token_ids), turns_of(item.earlier), item.messages, images)


def turns_of(messages: Sequence[tuple[str, bytes]]) -> tuple[ModelTurn, ...]:
    """The model's turns from their texts and int32 token ids."""
    return tuple(ModelTurn(text, array("i", token_ids)) for text, token_ids in messages)


class Begin(msgspec.Struct):
    """The first message to a worker: its RewardConfig as JSON, and the serving ranks that it may call."""

    section: str
    services: Services = NOBODY


class Ready(msgspec.Struct, tag="ready"):
    """The first message of a worker: the reward is loaded, or `error` has the reason why it is not."""

    batched: bool = False
    scores: Literal["samples", "groups"] = "samples"
    pool: Literal["process", "async"] = "process"
    pure: bool = False
    error: str = ""


class ItemScore(msgspec.Struct, tag="score"):
    """The score of the `place`-th item sent to the worker; None: the call failed for all of its items. `extracted` is
    as in hpcrl.messaging.messages.ScoredSample."""

    place: int | None
    reward: float = 0.0
    score: float = 0.0
    error: str = ""
    metrics: dict[str, float] = {}
    turn_rewards: list[float] = []
    token_rewards: dict[int, float] = {}
    extracted: str | None = None


Answer = Ready | ItemScore
_decoder = msgspec.msgpack.Decoder(Answer)


def frame(body: bytes) -> bytes:
    """A message's bytes with their length, as written to the pipe."""
    return LENGTH.pack(len(body)) + body


def pack(message: Any) -> bytes:
    """A message as written to the pipe. TypeError if msgpack does not support a value."""
    return frame(msgspec.msgpack.encode(message))


def take_answers(buffer: bytearray) -> list[Answer]:
    """Remove and return the complete messages at the front of `buffer`. msgspec.DecodeError if they are invalid."""
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
