"""Whether the model of an endpoint can be the teacher, asked before anything is generated."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from hpcrl.rewards.serving.endpoint import EndpointRefusal
from hpcrl.workers.endpoint_answers import Told
from hpcrl.workers.prompt_logprobs import PromptLogprobs

NUM_COMPARED = 256
"""Tokens whose texts are compared with the endpoint's."""
UNKNOWN_CHARACTER = "\ufffd"
MAX_SHOWN = 8


def probe(
    endpoint: PromptLogprobs, model: str, key_env: str | None, tokenizer: Any, longest: int, deadline: float
) -> None:
    """Ask for log-probs of tokens from all of the policy's vocabulary, all of the special tokens among them.

    ValueError, with the key of the configuration, if the endpoint refuses or lacks the model, gives no log-probs, has
    another tokenizer, or a context below `longest` tokens. EndpointError if it does not answer before `deadline`.
    """
    limit = None
    if key_env is not None and not os.environ.get(key_env):
        raise ValueError(f"teacher.endpoint.api_key_env: {key_env} is not set where the teacher's ranks run")
    try:
        limit = _context(endpoint, model, longest, deadline)
    except EndpointRefusal as error:
        if error.status != 404:  # not every server has a list of its models
            raise ValueError(_refused(error, key_env, endpoint.k)) from None
    ids = compared_ids(tokenizer, NUM_COMPARED if limit is None else min(NUM_COMPARED, limit - 1))
    try:
        told = endpoint.ask(ids, deadline, Counter())
    except EndpointRefusal as error:
        raise ValueError(_refused(error, key_env, endpoint.k)) from None
    except ValueError as error:
        raise ValueError(f"teacher.endpoint.url: {error}") from None
    _compare(tokenizer, ids, told, f"{model} at {endpoint.url}")


def compared_ids(tokenizer: Any, count: int) -> list[int]:
    """At most `count` tokens of a vocabulary: special ones, the last, and the others at equal distances. The first is
    there twice, since an answer tells nothing about a prompt's first token."""
    known = sorted(set(tokenizer.get_vocab().values()))
    special = sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}.intersection(known))
    chosen = {*_spread(special, (count - 1) // 2), known[-1]}
    rest = [number for number in known if number not in chosen]
    chosen.update(_spread(rest, count - 1 - len(chosen)))
    ids = sorted(chosen)
    return [ids[0], *ids]


def _spread(numbers: Sequence[int], count: int) -> Collection[int]:
    if count <= 0:
        return ()
    return numbers if len(numbers) <= count else [numbers[i * len(numbers) // count] for i in range(count)]


def _context(endpoint: PromptLogprobs, model: str, longest: int, deadline: float) -> int | None:
    """The tokens that the server takes in one request, one new token included; None if it does not tell."""
    try:
        served = {each.id: each.max_model_len for each in endpoint.models(deadline)}
    except ValueError as error:
        raise ValueError(f"teacher.endpoint.url: {error}") from None
    if model not in served:
        more = f" and {len(served) - MAX_SHOWN} more" if len(served) > MAX_SHOWN else ""
        names = ", ".join(map(repr, sorted(served)[:MAX_SHOWN])) or "no model"
        raise ValueError(f"teacher.endpoint.model: {endpoint.url} has no {model!r}; it has {names}{more}")
    limit = served[model]
    if limit is not None and limit <= longest:
        text = f"{model} takes {limit} tokens, but the longest sequence has {longest}, and one new token is needed"
        remedy = "raise the server's limit (vLLM: --max-model-len, SGLang: --context-length)"
        raise ValueError(f"teacher.endpoint.model: {text}; {remedy}")
    return limit


def _refused(error: EndpointRefusal, key_env: str | None, k: int) -> str:
    if error.status in (401, 403):
        remedy = "give the key's environment variable" if key_env is None else f"check the key in {key_env}"
        return f"teacher.endpoint.api_key_env: {error}; {remedy}"
    if error.status == 404:
        return f"teacher.endpoint.url: {error}; give the address with /v1, the name of a model there, and its protocol"
    if k and "prompt logprobs" in str(error):
        return f"teacher.top_k: {error}; lower it, or raise the server's limit (vLLM: --max-logprobs)"
    return f"teacher.endpoint.url: {error}; the model must give log-probs of the policy's tokens"


def _compare(tokenizer: Any, ids: Sequence[int], told: Told, who: str) -> None:
    """ValueError if a token has another text. Parts of characters have no text of their own, so they do not count."""
    compared = 0
    for number, text in zip(ids[1:], told.texts, strict=True):
        own = tokenizer.decode([number])
        if text is None or UNKNOWN_CHARACTER in own:
            continue
        compared += 1
        if text.strip() != own.strip():  # a server may keep or drop the space before a word
            differs = f"token {number} is {text[:40]!r}, the policy's is {own[:40]!r}"
            text = f"{who} has another tokenizer than model.path: {differs}"
            raise ValueError(f"teacher.endpoint.model: {text}; give a model with the policy's tokenizer")
    if not compared:
        text = f"{who} gives no texts of tokens, so its tokenizer cannot be compared with the policy's"
        raise ValueError(f"teacher.endpoint.model: {text}; start the server with its tokenizer")
