"""Log-probs of a prompt's tokens in the answers of a teacher's server (teacher.endpoint.protocol): what is asked, and
how an answer is read. Answers are checked before a number of them is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcrl.config.teacher_endpoint import EndpointProtocol

ZERO_PROBABILITY = -9999.0
"""What vLLM gives in place of the log of 0, which JSON cannot hold."""
ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
OTHER = "the server must give log-probs of a prompt's tokens, or has another teacher.endpoint.protocol"


@dataclass(frozen=True)
class Told:
    """About each token of a sequence but the first.

    Args:
        logprobs: The tokens' log-probs, at most 0.
        best: The k most probable tokens and their log-probs, descending.
        texts: The tokens' texts; None where the server gives none.
    """

    logprobs: list[float]
    best: list[list[tuple[int, float]]]
    texts: list[str | None]

    def add(self, place: int, own: float, found: Mapping[int, float], text: str | None, k: int) -> None:
        """Add what an answer has about the token at a place: its log-prob, those of the most probable tokens by id, of
        which there may be more than k, and its text. ValueError for impossible ones."""
        for logprob in (own, *found.values()):
            _check(logprob, place)
        best = sorted((-logprob, number) for number, logprob in found.items())[:k]
        if len(best) < k or (best and min(found) < 0):
            raise ValueError(f"the answer has {len(found)} tokens at place {place}, not the {k} most probable ones")
        if math.fsum(math.exp(-minus) for minus, _ in best) > 1 + ROUNDING:
            raise ValueError(f"the probabilities at place {place} have a sum above 1")
        self.logprobs.append(min(own, 0.0))
        self.best.append([(number, min(-minus, 0.0)) for minus, number in best])
        self.texts.append(text)


class TokenLogprob(msgspec.Struct):
    """What vLLM tells about one token at one place."""

    logprob: float
    decoded_token: str | None = None


class ScoredPrompt(msgspec.Struct):
    """vLLM's completion, with the prompt's log-probs: for each place token -> log-prob, null for the first place."""

    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


class Completion(msgspec.Struct):
    """vLLM's answer to a request with one prompt."""

    choices: list[ScoredPrompt]


Triple = tuple[float | None, int, str | None]
"""SGLang's log-prob, id and text of a token; the log-prob of a prompt's first token is null."""


class ScoredInput(msgspec.Struct):
    """What SGLang tells about the prompt's tokens, and about the most probable ones in their places."""

    input_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None


class Generated(msgspec.Struct):
    """SGLang's answer of /generate to one prompt."""

    meta_info: ScoredInput


class EchoLogprobs(msgspec.Struct):
    """Log-probs and texts of the tokens of prompt and completion; null for the first one's log-prob."""

    token_logprobs: list[float | None]
    tokens: list[str] | None = None


class EchoedPrompt(msgspec.Struct):
    """OpenAI's completion with echo=true."""

    logprobs: EchoLogprobs | None = None


class CountedTokens(msgspec.Struct):
    """The tokens of a request as the server counts them."""

    prompt_tokens: int | None = None


class Echo(msgspec.Struct):
    """OpenAI's answer to a request with one prompt and echo=true."""

    choices: list[EchoedPrompt]
    usage: CountedTokens | None = None


COMPLETION, GENERATED, ECHO = (msgspec.json.Decoder(kind) for kind in (Completion, Generated, Echo))


def read_completion(body: bytes, ids: Sequence[int], k: int) -> Told:
    """The log-probs in vLLM's answer about a prompt of these tokens. ValueError if they are missing or impossible."""
    choices = _decoded(COMPLETION, body).choices
    if len(choices) != 1 or (given := choices[0].prompt_logprobs) is None:
        raise ValueError(f"the answer has no prompt_logprobs; {OTHER}")
    _check_count(len(given), ids)
    told = Told([], [], [])
    for place, (token, found) in enumerate(zip(ids[1:], given[1:], strict=True), 1):
        if found is None or (own := found.get(token)) is None:
            raise ValueError(f"the answer has no log-prob of token {token} at place {place}")
        told.add(place, own.logprob, {number: each.logprob for number, each in found.items()}, own.decoded_token, k)
    return told


def read_generated(body: bytes, ids: Sequence[int], k: int) -> Told:
    """As read_completion(), in SGLang's answer."""
    found = _decoded(GENERATED, body).meta_info
    if (given := found.input_token_logprobs) is None:
        raise ValueError(f"the answer has no input_token_logprobs; {OTHER}")
    _check_count(len(given), ids)
    tops = (found.input_top_logprobs or []) if k else [None] * len(ids)
    if len(tops) != len(ids):
        raise ValueError(f"the answer has the most probable tokens (input_top_logprobs) of {len(tops)} places")
    told = Told([], [], [])
    for place, (token, (own, number, text), top) in enumerate(zip(ids[1:], given[1:], tops[1:], strict=True), 1):
        best = {each: logprob for logprob, each, _ in top or () if logprob is not None}
        if own is None or number != token:
            raise ValueError(f"the answer has no log-prob of token {token} at place {place}")
        told.add(place, own, best, text, k)
    return told


def read_echo(body: bytes, ids: Sequence[int], k: int) -> Told:
    """As read_completion(), in OpenAI's answer, which names tokens by their texts; so k is 0."""
    assert not k, "checked before the start"
    found = _decoded(ECHO, body)
    if len(found.choices) != 1 or (given := found.choices[0].logprobs) is None:
        raise ValueError(f"the answer has no logprobs; {OTHER}")
    counted = found.usage.prompt_tokens if found.usage is not None else None
    logprobs, count = given.token_logprobs, len(ids)
    _check_count(len(logprobs) if counted is None else counted, ids, 1 if counted is None else 0)
    if len(logprobs) < count:
        raise ValueError(f"the answer has log-probs of {len(logprobs)} tokens, not the prompt's (echo=true); {OTHER}")
    texts: Sequence[str | None] = given.tokens if given.tokens is not None else [None] * len(logprobs)
    if len(texts) != len(logprobs):
        raise ValueError(f"the answer has {len(logprobs)} log-probs and {len(texts)} texts of tokens")
    told = Told([], [], [])
    for place, token in enumerate(ids[1:], 1):
        if (own := logprobs[place]) is None:
            raise ValueError(f"the answer has no log-prob of token {token} at place {place}")
        told.add(place, own, {}, texts[place], 0)
    return told


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise ValueError(f"the answer is not as expected: {error}") from None


def _check_count(count: int, ids: Sequence[int], new: int = 0) -> None:
    """ValueError unless the answer is about these tokens, and at most `new` further ones."""
    if not len(ids) <= count <= len(ids) + new:
        raise ValueError(f"the answer has log-probs of {count} tokens, {len(ids)} were asked about")


def _check(logprob: float, place: int) -> None:
    if not math.isfinite(logprob) or logprob > ROUNDING:
        text = f"the answer has the log-prob {logprob} at place {place}; log-probs are at most 0"
        raise ValueError(f"{text} (vLLM: --logprobs-mode raw_logprobs)")


@dataclass(frozen=True)
class AnswerForm:
    """How a kind of server is asked, and answers.

    Args:
        path: Of the requests, below the server's address; `root`: without /v1.
        request: `request(model, ids, k)`: the JSON object to send. Temperature and other sampling parameters do not
            change the prompt's log-probs in vLLM; the one new token, which vLLM requires, is not read.
        read: `read(answer, ids, k)`.
    """

    path: str
    request: Callable[[str, list[int], int], dict[str, Any]]
    read: Callable[[bytes, Sequence[int], int], Told]
    root: bool = False

    def addresses(self, url: str) -> tuple[str, str]:
        """Where requests are sent, and where the list of models is; `url` as in teacher.endpoint.url."""
        if not self.root:
            return f"{url}/{self.path}", f"{url}/models"
        root = url.removesuffix("/v1")
        return f"{root}/{self.path}", f"{root}/v1/models"


def _of_vllm(model: str, ids: list[int], k: int) -> dict[str, Any]:
    return {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": k}


def _of_sglang(model: str, ids: list[int], k: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k, "return_text_in_logprobs": True}
    return {"input_ids": ids, "sampling_params": sampling, **asked}


def _of_openai(model: str, ids: list[int], k: int) -> dict[str, Any]:
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}


FORMS: Mapping[EndpointProtocol, AnswerForm] = {
    "vllm": AnswerForm("completions", _of_vllm, read_completion),
    "sglang": AnswerForm("generate", _of_sglang, read_generated, root=True),
    "openai": AnswerForm("completions", _of_openai, read_echo),
}
"""teacher.endpoint.protocol -> how its servers are asked."""
