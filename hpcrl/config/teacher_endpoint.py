"""The section `teacher.endpoint`: a teacher that another server runs."""

from __future__ import annotations

import re
import urllib.parse
from typing import Annotated, Literal

from pydantic import AfterValidator

from hpcrl.spec.fields import Count, NonEmpty, Seconds, Section


def _address(url: str) -> str:
    expected = "an address such as http://HOST:8000/v1"
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # ValueError if it is none
    except ValueError as error:
        raise ValueError(f"expected {expected} ({error})") from error
    if not re.fullmatch(r"https?://[^\s/]+\S*", url) or not parts.hostname:
        raise ValueError(f"expected {expected}")
    if parts.username is not None or parts.query or parts.fragment:
        text = "expected an address without user name, query and fragment, which the run folder would show"
        raise ValueError(f"{text} (a key: teacher.endpoint.api_key_env)")
    return url.rstrip("/")


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("expected the name of an environment variable, not the key itself")
    return name


EndpointProtocol = Literal["vllm", "sglang", "openai"]
EndpointUrl = Annotated[str, AfterValidator(_address)]


class TeacherEndpoint(Section):
    """A teacher behind a server that gives log-probs of a prompt's tokens, in place of teacher.path."""

    url: EndpointUrl | None = None
    """Address of the server, including /v1; null: the teacher is a folder."""
    protocol: EndpointProtocol = "vllm"
    """How the server is asked. vllm: prompt_logprobs of /v1/completions; sglang: /generate, beside /v1; openai: echo of
    /v1/completions, which names tokens by texts, so teacher.form must be sampled."""
    model: NonEmpty | None = None
    """Name of the model at the endpoint."""
    api_key_env: Annotated[str, AfterValidator(_variable)] | None = None
    """Environment variable with the endpoint's key; null: no key."""
    timeout_s: Seconds = 120.0
    """Time for one request, seconds."""
    retry_s: Seconds = 300.0
    """Time after which a sequence without an answer ends the run, seconds; until then its request is repeated."""
    backoff_s: Seconds = 1.0
    """Pause before the first repetition, seconds; it doubles with each, to 30 at most."""
    max_in_flight: Count = 32
    """Concurrent requests of one rank, each with one sequence."""
