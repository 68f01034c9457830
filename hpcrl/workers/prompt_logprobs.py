"""Log-probs of given tokens from a server in the form of vLLM: `prompt_logprobs` of an OpenAI completion. Answers are
checked before a number of them is used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpcrl.config.teacher_endpoint import TeacherEndpoint
from hpcrl.rewards.serving.endpoint import MAX_BYTES, Endpoint

BYTES_PER_NUMBER = 512
"""Maximum size of one log-prob in an answer, with the text of its token."""
ZERO_PROBABILITY = -9999.0
"""What vLLM gives in place of the log of 0, which JSON cannot hold."""
ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much."""


class TokenLogprob(msgspec.Struct):
    """What an answer has about one token at one place."""

    logprob: float
    decoded_token: str | None = None


class ScoredPrompt(msgspec.Struct):
    """The completion, with the prompt's log-probs: for each place token -> log-prob, null for the first place."""

    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


class Completion(msgspec.Struct):
    """The answer to a request with one prompt."""

    choices: list[ScoredPrompt]


class ServedModel(msgspec.Struct):
    """A model that the server has."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """The answer to /v1/models."""

    data: list[ServedModel]


COMPLETION, MODELS = msgspec.json.Decoder(Completion), msgspec.json.Decoder(ModelList)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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


class PromptLogprobs:
    """A model at an endpoint. Thread-safe; EndpointError and ValueError as in Endpoint.ask().

    Args:
        k: Most probable tokens to ask for at each place.
        most_tokens: Tokens of the longest sequence.
    """

    def __init__(self, given: TeacherEndpoint, k: int, most_tokens: int):
        self.url, self.k = given.url, k
        self._model = given.model
        size = MAX_BYTES + most_tokens * (k + 1) * BYTES_PER_NUMBER
        self._completions, self._models = (
            Endpoint(
                [f"{given.url}/{path}"],
                timeout_s=given.timeout_s,
                backoff_s=given.backoff_s,
                key_env=given.api_key_env,
                max_bytes=size,
            )
            for path in ("completions", "models")
        )

    def models(self, deadline: float) -> list[ServedModel]:
        """The models of the server. ValueError for another answer."""
        body = self._models.ask(None, deadline, Counter())
        try:
            return MODELS.decode(body).data
        except UNREADABLE as error:
            raise ValueError(f"{self.url}/models: the answer is no list of models: {error}") from None

    def ask(self, ids: Sequence[int], deadline: float, counts: Counter[str]) -> Told:
        """What the model tells about these tokens, at least two. ValueError for an answer without log-probs, or with
        impossible ones."""
        # Temperature and other sampling parameters do not change the prompt's log-probs; the one new token is not read.
        asked = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": self.k}
        try:
            return read_completion(self._completions.ask(asked, deadline, counts), ids, self.k)
        except ValueError as error:
            raise ValueError(f"{self.url}/completions: {error}") from None


def read_completion(body: bytes, ids: Sequence[int], k: int) -> Told:
    """The log-probs in an answer about a prompt of these tokens. ValueError if they are missing or impossible."""
    try:
        choices = COMPLETION.decode(body).choices
    except UNREADABLE as error:
        raise ValueError(f"the answer is not as expected: {error}") from None
    if len(choices) != 1 or (given := choices[0].prompt_logprobs) is None:
        raise ValueError("the answer has no prompt_logprobs; the server must give log-probs of a prompt's tokens")
    if len(given) != len(ids):
        raise ValueError(f"the answer has log-probs of {len(given)} tokens, {len(ids)} were asked about")
    told = Told([], [], [])
    for place, (token, found) in enumerate(zip(ids[1:], given[1:], strict=True), 1):
        if found is None or (own := found.get(token)) is None:
            raise ValueError(f"the answer has no log-prob of token {token} at place {place}")
        for each in found.values():
            _check(each.logprob, place)
        best = sorted(((-each.logprob, number) for number, each in found.items()))[:k]
        if len(best) < k or (best and min(found) < 0):
            raise ValueError(f"the answer has {len(found)} tokens at place {place}, not the {k} most probable ones")
        if math.fsum(math.exp(-minus) for minus, _ in best) > 1 + ROUNDING:
            raise ValueError(f"the probabilities at place {place} have a sum above 1")
        told.logprobs.append(min(own.logprob, 0.0))
        told.best.append([(number, min(-minus, 0.0)) for minus, number in best])
        told.texts.append(own.decoded_token)
    return told


def _check(logprob: float, place: int) -> None:
    if not math.isfinite(logprob) or logprob > ROUNDING:
        text = f"the answer has the log-prob {logprob} at place {place}; log-probs are at most 0"
        raise ValueError(f"{text} (vLLM: --logprobs-mode raw_logprobs)")
