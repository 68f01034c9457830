"""Tokens of an environment's observations: the first prompt, and the tokens between two turns of the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcrl.data.chat import encode, render
from hpcrl.data.rows import Messages

CONTENT = "0CONTENT0"
"""Placeholder for the model's text; letters and digits, which no template trims or escapes."""


def as_messages(observation: Any) -> Messages:
    """An observation in chat form. TypeError for one that is neither text nor messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, list):
        raise TypeError(f"the observation is not text but {type(observation).__name__}")
    for message in observation:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise TypeError("a message of the observation has no role or content that is text")
        if not all(isinstance(image, str) for image in message.get("images", [])):
            raise TypeError("images of an observation are given by reference, as text")
    return observation


def first_prompt(tokenizer: Any, row: dict[str, Any], observation: Any) -> tuple[Messages, np.ndarray]:
    """(messages, int32 token ids) of the first prompt of an episode; no tokens if the observation is empty, so that the
    row's own prompt stays. row: {messages, tools, ...}. TypeError as in as_messages()."""
    said = as_messages(observation)
    if not observation:
        return row["messages"], np.empty(0, dtype=np.int32)
    messages = [*row["messages"][:-1], *said] if isinstance(observation, str) else said
    return messages, np.array(encode(tokenizer, render(tokenizer, messages, row["tools"])), dtype=np.int32)


def observation_ids(tokenizer: Any, observation: Messages, last_token: int) -> np.ndarray:
    """int32 [n]: the tokens after a model turn that ends with `last_token`, up to the start of the next model turn.

    This is the chat template's text between the contents of two model turns around the observation, without the token
    that ends a model turn if the model has generated it. Without a template: the contents of the messages. ValueError
    if the template renders no model turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        text = render(tokenizer, observation, None)
        return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    dialogue = [{"role": "user", "content": "0"}, {"role": "assistant", "content": CONTENT}, *observation]
    _, found, following = render(tokenizer, dialogue, None).partition(CONTENT)
    if not found:
        raise ValueError("the chat template does not show an assistant turn that an observation follows")
    ids = encode(tokenizer, following)
    # Only an added token ends a turn: a newline of the model is content, even if the template adds another.
    if ids and ids[0] == last_token and last_token in tokenizer.added_tokens_decoder:
        ids = ids[1:]
    return np.array(ids, dtype=np.int32)
