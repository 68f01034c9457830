"""The environment protocol: the gymnasium interface over text. Imports neither torch.distributed nor engines."""

from __future__ import annotations

import inspect
import io
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from PIL import Image

from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK, Medium

Observation = str | list[dict[str, Any]]
"""Text, which becomes a user message, or messages in chat form: {"role": "tool", "content": "..."}. A message may have
images: {"role": "user", "content": "The map: <image>", "images": [image]}. An image is a path or data URL (str), an
image file's bytes, a PIL image, or a numpy array (uint8 [height, width, 3]). `<image>` in the content marks an image's
place, once per image; without marks the images precede the text."""
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of PIL images that PNG stores without loss."""


class Env(Protocol):
    """One episode. `info["metrics"]` (name -> float) is logged under env/<domain>/. The texts `info["prefix"]` and
    `info["suffix"]` are shown before and after the observation, as in GEM. Other keys of info are ignored.

    The constructor gets env.<domain>.options, and the columns of the prompt's row (answer, prompt, messages and data
    columns) that its parameters name; with **columns it gets all columns. An environment that holds a resource (a
    process, a file) also has close(), called once after its last step, even if the episode has not ended.

    A class may set `runs_in` (env.<domain>.runs_in) to "thread", "process", or "task" if its methods are coroutines. If
    it sets `max_turns = None`, its objects get env.<domain>.max_turns as this attribute. If `special_tokens` is true,
    actions keep their special tokens, without the last token.
    """

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, which is a function of row and seed only; returns (first observation, info).

        The observation is the first prompt: a text replaces the last message of the row's prompt, a list of messages
        replaces all messages, and an empty text keeps the row's prompt. `info["tools"]` are tools in OpenAI form that
        the chat template shows the model, in addition to the row's tools. If `info["terminated"]` or
        `info["truncated"]` is true, the episode ends before its first turn.
        """

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """(observation, reward of this turn, terminated, truncated, info)."""


KEPT = ("metrics", "tools", "terminated", "truncated")
"""Keys of info that are read."""
UNREAD_KEYS = "hpcrl_unread"
"""Key of info that lists the ignored keys."""


def begin(env: Any, seed: int) -> Any:
    """Call reset(), which may accept the seed only as a keyword argument (gymnasium)."""
    return env.reset(seed=seed) if _names_seed(env.reset) else env.reset(seed)


def expert_response(env: Any, seed: int) -> Any:
    """The response of the environment's expert in the present state (EnvSpec.has_expert); the seed determines its
    random choices."""
    return env.expert(random.Random(seed), 0.0)


def reset_problem(made: type) -> str:
    """Why reset() of a class cannot be called with a seed; empty if it can, or if its parameters are unknown."""
    function = inspect.getattr_static(made, "reset")
    if not callable(made.reset):  # type: ignore[attr-defined]
        return "reset is not a method"
    own = () if isinstance(function, staticmethod | classmethod) else (None,)
    try:
        signature = inspect.signature(made.reset)  # type: ignore[attr-defined]
        signature.bind(*own, seed=0) if _names_seed(made.reset) else signature.bind(*own, 0)  # type: ignore[attr-defined]
    except TypeError as error:
        return f"reset() must take a seed, as in reset(self, seed): {error}"
    except ValueError:  # a C function has no signature
        return ""
    return ""


def _names_seed(reset: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(reset).parameters.get("seed")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


def checked_reset(returned: Any) -> tuple[Observation, dict[str, Any]]:
    """reset()'s result: (observation with prefix and suffix, known keys of info), with images as str or bytes.
    TypeError if it has another form."""
    observation, info = _values(returned, "reset()", "observation", "info")
    return _whole(observation, info), _kept(info)


def checked_step(returned: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """step()'s result, with observation and info as in checked_reset(). TypeError if it has another form."""
    values = _values(returned, "step()", "observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = values
    return _whole(observation, info), reward, terminated, truncated, _kept(info)


def _whole(observation: Observation, info: Mapping[str, Any]) -> Observation:
    """The observation with the texts prefix and suffix of info around it, and with images as str or bytes."""
    prefix, suffix = (text if isinstance(text := info.get(key), str) else "" for key in ("prefix", "suffix"))
    if isinstance(observation, str):
        return _after(prefix + observation, suffix)
    if not isinstance(observation, list):
        return observation
    observation = [_with_files(message) for message in observation]
    if not (prefix or suffix):
        return observation
    messages = [dict(message) for message in observation] or [{"role": "user", "content": ""}]
    messages[0]["content"] = f"{prefix}{messages[0]['content']}"
    messages[-1]["content"] = _after(messages[-1]["content"], suffix)
    return messages


def _with_files(message: dict[str, Any]) -> dict[str, Any]:
    """The message with every image as image_bytes() gives it. TypeError names the image that has another form."""
    if not isinstance(message, dict) or message.get("images") is None:
        return message
    if not isinstance(message["images"], list | tuple):
        raise TypeError(f"the images of a message must be a list, not {type(message['images']).__name__}")
    files = []
    for number, image in enumerate(message["images"]):
        try:
            files.append(image_bytes(image))
        except TypeError as error:
            raise TypeError(f"images[{number}] of a message: {error}") from None
    return {**message, "images": files}


def image_bytes(image: Any) -> bytes | str:
    """A PIL image or an array (uint8 [height, width, 3]) as the bytes of a PNG file; a path, a data URL and bytes are
    returned unchanged. TypeError for anything else, also for an array with an alpha channel."""
    if isinstance(image, str | bytes):
        return image
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise TypeError(f"an array must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
        image = Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise TypeError(f"{type(image).__name__} is not a path, a data URL, bytes, a PIL image or a numpy array")
    if image.mode not in PNG_MODES or not (image.width and image.height):
        size = f"{image.width} x {image.height} pixels of mode {image.mode}"
        raise TypeError(f"a PIL image of {size} cannot be a PNG file; convert('RGB') changes the mode")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _after(text: str, suffix: str) -> str:
    """The text with a suffix, which begins on a new line."""
    return f"{text}\n{suffix}" if text and suffix and not text.endswith("\n") else f"{text}{suffix}"


def _kept(info: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: info[key] for key in KEPT if key in info}
    known = (*KEPT, "prefix", "suffix", UNREAD_KEYS)
    unread = [*map(str, info.get(UNREAD_KEYS, ())), *sorted(str(key) for key in info if key not in known)]
    return kept | ({UNREAD_KEYS: unread[:20]} if unread else {})


def _values(returned: Any, call: str, *names: str) -> list[Any]:
    """The values that a call returned, one for each name. The last, a mapping, may be None."""
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
        raise TypeError(f"{call} must return ({', '.join(names)}), but returned {got}")
    *values, info = returned
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{call} must return a mapping as info, but returned {type(info).__name__}")
    return [*values, info or {}]


def shortened(text: str, most_chars: int) -> str:
    """The text; a longer text is cut to its beginning and end, most_chars in total, around a line with the number of
    characters left out."""
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return f"{text[:half]}\n[{len(text) - most_chars} characters left out]\n{text[len(text) - most_chars + half :]}"


def num_chars(observation: Observation) -> int:
    """Number of characters of an observation: the texts of all messages, plus one for each message. Images count only
    with their marks."""
    if isinstance(observation, str):
        return len(observation)
    return sum(1 + sum(len(text) for text in message.values() if isinstance(text, str)) for message in observation)


def num_image_bytes(observation: Observation) -> int:
    """Size of the image files in an observation."""
    messages = [] if isinstance(observation, str) else observation
    images = (image for message in messages for image in message.get("images") or ())
    return sum(len(image) for image in images if isinstance(image, bytes))


def cut(observation: Observation, most_chars: int) -> Observation:
    """The observation with its longest message cut to most_chars by shortened(). Images and their marks remain."""
    if isinstance(observation, str):
        return shortened(observation, most_chars)
    if not observation:
        return observation
    place = max(range(len(observation)), key=lambda number: len(observation[number]["content"]))
    longest = {**observation[place], "content": _cut_content(observation[place], most_chars)}
    return [*observation[:place], longest, *observation[place + 1 :]]


def _cut_content(message: Mapping[str, Any], most_chars: int) -> str:
    """The message's text cut to most_chars, in which the mark of an image counts as one character: `<image>`, or
    IMAGE_MARK where images are decoded. Marks in the omitted middle precede the note about it."""
    text: str = message["content"]
    if not message.get("images"):
        return shortened(text, most_chars)
    decoded = isinstance(message["images"][0], Medium)
    # One character per mark, so that no cut goes through a mark.
    marked = text if decoded else text.replace(IMAGE_MARK, "").replace(WRITTEN_MARK, IMAGE_MARK)
    kept = shortened(marked, most_chars)
    omitted = IMAGE_MARK * (marked.count(IMAGE_MARK) - kept.count(IMAGE_MARK))
    half = most_chars // 2
    whole = f"{kept[:half]}{omitted}{kept[half:]}"
    return whole if decoded else whole.replace(IMAGE_MARK, WRITTEN_MARK)
