"""Build the prompts of episodes: the first prompt, and each turn's prompt if turns are separate sequences.

A message's images are in its key `images`, as hpcrl.spec.media.Medium, with an IMAGE_MARK each in its content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.data.chat import render
from hpcrl.data.files import BadRow
from hpcrl.data.image_tokens import bound_vision, encode_with_images
from hpcrl.data.media import read_images, read_parts
from hpcrl.data.messages import ImagePart, Messages, mark_images
from hpcrl.envs.environment import Observation, cut, num_chars
from hpcrl.models.vision import Vision
from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK, Medium, by_picture


class Encoded(NamedTuple):
    """Messages, their tokens (int32 [n]), and their images with their places among these."""

    messages: Messages
    token_ids: np.ndarray
    media: tuple[Medium, ...] = ()


def as_messages(observation: Any, vision: Vision | None = None) -> Messages:
    """An observation as chat messages, its images as the model sees them. TypeError if it is neither text nor messages,
    or if an image cannot be read or the model takes none."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, list):
        raise TypeError(f"the observation is not text but {type(observation).__name__}")
    for message in observation:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise TypeError("a message of the observation has no role or content that is text")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"the observation is no valid Unicode: {error}") from None
    return [_seen(message, vision) for message in observation]


def _seen(message: dict[str, Any], vision: Vision | None) -> dict[str, Any]:
    """The message with its images decoded, and a mark for each."""
    given = message.get("images") or []
    if not given:
        return {**message, "content": message["content"].replace(IMAGE_MARK, "")}
    if all(isinstance(image, Medium) for image in given):
        return message
    try:
        files = read_parts([ImagePart(image, f"images[{n}] of a message") for n, image in enumerate(given)], Path())
        content = mark_images(message["content"].replace(IMAGE_MARK, ""), len(files), "a message")
        return {**message, "content": content, "images": list(read_images(files, vision))}
    except BadRow as error:
        raise TypeError(str(error)) from None


def with_images(messages: Messages, media: Sequence[Medium]) -> Messages:
    """The messages of a row with the row's images, which their marks stand for."""
    following = iter(by_picture(media))
    return [
        {**message, "images": [medium for _ in range(count) for medium in next(following)]}
        if (count := (message["content"] or "").count(IMAGE_MARK))
        else message
        for message in messages
    ]


def without_images(messages: Messages) -> Messages:
    """The messages without the key `images`, as they are stored and rendered."""
    return [{key: value for key, value in message.items() if key != "images"} for message in messages]


def images_of(messages: Messages) -> list[Medium]:
    """The images of messages, in the order of their marks."""
    return [image for message in messages for image in message.get("images") or ()]


def with_tools(known: list[dict[str, Any]] | None, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add an environment's tools to a row's tools, all in OpenAI form. The environment's tools replace known tools of
    the same name. TypeError for an invalid tool."""
    try:
        names = {tool["function"]["name"] for tool in added}
    except (KeyError, TypeError) as error:
        raise TypeError("info['tools'] must be a list of tools: {'type': 'function', 'function': {...}}") from error
    return [*(tool for tool in known or [] if tool.get("function", {}).get("name") not in names), *added]


def first_prompt(
    tokenizer: Any, row: dict[str, Any], observation: Any, added: bool = False, examples: Messages | None = None
) -> Encoded:
    """An episode's first prompt. With an empty observation there are no tokens, and the
    row's own prompt is used, unless the environment has added tools to the row (`added`) or there are examples. `row`
    is {messages, tools, ...}; examples are inserted after the system messages. TypeError as in as_messages()."""
    said, tools = as_messages(observation, bound_vision(tokenizer)), row["tools"]
    if not (observation or added or examples):
        return Encoded(row["messages"], np.empty(0, dtype=np.int32))
    if isinstance(observation, str):
        messages = list(row["messages"])
        if observation:
            messages[-1] = _in_place_of(messages[-1], said[0])
    else:
        messages = said or list(row["messages"])
    if examples:
        begins = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
        messages = [*messages[:begins], *examples, *messages[begins:]]
    return encode_prompt(tokenizer, messages, tools)


def _in_place_of(asked: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A text that replaces a row's last message, whose images it keeps: at their marks in the text, or before it."""
    images, text = asked.get("images") or [], said["content"].replace(IMAGE_MARK, "")
    if not images:
        return said
    count = len(by_picture(images))
    placed = text.count(WRITTEN_MARK) == count
    content = text.replace(WRITTEN_MARK, IMAGE_MARK) if placed else IMAGE_MARK * count + text
    return {**said, "content": content, "images": images}


def fitting(observation: Observation, room: int, tokens: Callable[[Observation], Encoded]) -> Encoded:
    """Cut text from the middle of the observation's longest message until tokens(observation) has at most `room`
    tokens, and return its result. If even an empty message is too long, return the result for the empty message."""
    fits, too_many = 0, num_chars(observation)
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if len(tokens(cut(observation, count)).token_ids) > room:
            too_many = count
        else:
            fits = count
    return tokens(cut(observation, fits))


def window(shown: Sequence[Messages], said: Sequence[str], history: int) -> Messages:
    """A turn's prompt if turns are separate sequences: the first prompt, the latest `history` turns (observation and
    the model's turn), and the current observation. A tool's result always follows the turn that called the tool.

    `shown` has the first prompt and all observations since, `said` the model's turns between them. Where turns are left
    out, adjacent messages of the same role are joined, because some chat templates refuse two in a row.
    """
    first = max(0, len(said) - history)
    messages = list(shown[0])
    for number, observation in enumerate(shown[1:], 1):
        answers = bool(observation) and observation[0]["role"] == "tool"
        if number > first or (number == first and answers):
            messages.append({"role": "assistant", "content": said[number - 1]})
        elif number < first or not observation:
            continue
        elif messages[-1]["role"] == observation[0]["role"]:
            messages[-1] = _joined(messages[-1], observation[0])
            observation = observation[1:]
        messages += observation
    return messages


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join two messages into one, with a blank line between them."""
    images = [*first.get("images", []), *second.get("images", [])]
    joined = {**first, **second, "content": f"{first['content']}\n\n{second['content']}"}
    return joined | ({"images": images} if images else {})


def encode_prompt(tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None) -> Encoded:
    """A prompt's tokens. ValueError if the chat template has not one placeholder per image."""
    text = render(tokenizer, without_images(messages), tools)
    token_ids, media = encode_with_images(tokenizer, text, images_of(messages))
    return Encoded(messages, np.array(token_ids, dtype=np.int32), media)
