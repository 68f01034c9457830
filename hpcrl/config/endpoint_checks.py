"""Checks of the section `teacher.endpoint`."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.spec.problems import Problem

AT = ("teacher", "endpoint")
URL = (*AT, "url")


def check_teacher_endpoint(config: Config) -> Iterator[Problem]:
    """Report what a teacher behind an endpoint cannot give, and keys that its section lacks."""
    if (endpoint := config.teacher_endpoint) is None:
        return
    teacher, temperature = config.teacher, config.divergence.temperature if config.divergence else 1.0
    others = {"path": teacher.path, "paths": teacher.paths, "source": teacher.source != "folder"}
    for name in (name for name, given in others.items() if given):
        text = f"teacher.{name}: the teacher is behind teacher.endpoint.url; give one of the two"
        yield Problem(("teacher", name), text, (URL,))
    if endpoint.model is None:
        text = f"teacher.endpoint.model: missing; {endpoint.url} serves models by name"
        yield Problem((*AT, "model"), text, (URL,))
    if teacher.form == "full":
        text = "full, but an endpoint gives no hidden states; use sampled or top_k, or teacher.path"
        yield Problem(("teacher", "form"), f"teacher.form: {text}", (URL,))
    if teacher.form == "top_k" and endpoint.protocol == "openai":
        text = (
            "top_k, but the protocol openai names tokens by their texts, not by ids; use sampled, or "
            "teacher.endpoint.protocol=vllm or sglang"
        )
        yield Problem(("teacher", "form"), f"teacher.form: {text}", ((*AT, "protocol"),))
    if temperature != 1:
        text = f"{temperature:g}, but an endpoint's log-probs are at temperature 1; use 1, or teacher.path"
        yield Problem(("rollout", "temperature"), f"rollout.temperature: {text}", (URL,))
    if config.deterministic:
        text = "an endpoint's log-probs depend on what else it computes at the time; use false, or teacher.path"
        yield Problem(("deterministic",), f"deterministic: {text}", (URL,))
    if endpoint.retry_s >= config.timeouts.command_s:
        text = f"{endpoint.retry_s:g} must be below timeouts.command_s, which is {config.timeouts.command_s:g}"
        yield Problem((*AT, "retry_s"), f"teacher.endpoint.retry_s: {text}", (("timeouts", "command_s"),))
