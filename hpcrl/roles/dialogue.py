"""The tokens between two turns of a model: what closes the first, the observation, and the model's next word."""

from __future__ import annotations

from typing import Any

import numpy as np

CONTENT = "0CONTENT0"
"""Stands for what the model said; letters and digits, which no template trims or escapes."""


def observation_ids(tokenizer: Any, observation: str, last_token: int) -> np.ndarray:
    """int32 [n]: what follows a model turn that ends with `last_token`, up to where the model goes on.

    Exactly what the chat template puts between the content of a model turn and that of the next, the observation being
    a user turn; the token that ends a model turn is left out where the model has generated it. Without a template: the
    observation alone. TypeError for an observation that is no text; ValueError where the template shows no model turn.
    """
    if not isinstance(observation, str):
        raise TypeError(f"the observation is no text but {type(observation).__name__}")
    if not getattr(tokenizer, "chat_template", None):
        return np.array(tokenizer.encode(observation, add_special_tokens=False), dtype=np.int32)
    dialogue = [
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": CONTENT},
        {"role": "user", "content": observation},
    ]
    text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    _, found, following = text.partition(CONTENT)
    if not found:
        raise ValueError("the chat template does not show an assistant turn that a user turn follows")
    ids = tokenizer.encode(following, add_special_tokens=False)
    # Only an added token ends a turn: a newline that the model wrote is content, even if the template adds another.
    if ids and ids[0] == last_token and last_token in tokenizer.added_tokens_decoder:
        ids = ids[1:]
    return np.array(ids, dtype=np.int32)
