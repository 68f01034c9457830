"""Log-probs of given tokens from a server, in one of the forms of hpcrl.workers.endpoint_answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from hpcrl.config.teacher_endpoint import TeacherEndpoint
from hpcrl.rewards.serving.endpoint import MAX_BYTES, Endpoint
from hpcrl.workers.endpoint_answers import FORMS, UNREADABLE, Told

BYTES_PER_NUMBER = 512
"""Maximum size of one log-prob in an answer, with the text of its token."""


class ServedModel(msgspec.Struct):
    """A model that the server has."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """The answer to /v1/models."""

    data: list[ServedModel]


MODELS = msgspec.json.Decoder(ModelList)


class PromptLogprobs:
    """A model at an endpoint. Thread-safe; EndpointError and ValueError as in Endpoint.ask().

    Args:
        k: Most probable tokens to ask for at each place.
        most_tokens: Tokens of the longest sequence.
    """

    def __init__(self, given: TeacherEndpoint, k: int, most_tokens: int):
        assert given.url is not None and given.model is not None, "checked before the start"
        self.url, self.k = given.url, k
        self._model, self._form = given.model, FORMS[given.protocol]
        self._address, self._models_address = self._form.addresses(given.url)
        size = MAX_BYTES + most_tokens * (k + 1) * BYTES_PER_NUMBER
        self._answers, self._models = (
            Endpoint(
                [address],
                timeout_s=given.timeout_s,
                backoff_s=given.backoff_s,
                key_env=given.api_key_env,
                max_bytes=size,
            )
            for address in (self._address, self._models_address)
        )

    def models(self, deadline: float) -> list[ServedModel]:
        """The models of the server. ValueError for another answer."""
        body = self._models.ask(None, deadline, Counter())
        try:
            return MODELS.decode(body).data
        except UNREADABLE as error:
            raise ValueError(f"{self._models_address}: the answer is no list of models: {error}") from None

    def ask(self, ids: Sequence[int], deadline: float, counts: Counter[str]) -> Told:
        """What the model tells about these tokens, at least two. ValueError for an answer without log-probs, or with
        impossible ones."""
        asked = self._form.request(self._model, list(ids), self.k)
        try:
            return self._form.read(self._answers.ask(asked, deadline, counts), ids, self.k)
        except ValueError as error:
            raise ValueError(f"{self._address}: {error}") from None
