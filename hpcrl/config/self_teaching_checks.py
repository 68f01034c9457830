"""Checks of a policy that is its own teacher, and of a teacher's own prompt (hpcrl.config.self_teaching)."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.spec.problems import Path, Problem

SOURCE, CONTEXT = ("teacher", "source"), ("teacher", "context")


def check_self_teaching(config: Config) -> Iterator[Problem]:
    """Report a policy that cannot be its own teacher, and runs whose teacher cannot read another prompt."""
    own = config.teacher
    if own.source == "base" and not config.trainer.lora.rank:
        text = "base is the policy without its adapters, and trainer.lora.rank is 0; raise it, or use folder with"
        yield Problem(
            SOURCE, f"teacher.source: {text} teacher.path={config.model.path}", (("trainer", "lora", "rank"),)
        )
    if own.source == "policy" and own.is_trainer and own.context is None:
        text = "the policy would learn from itself, so there is nothing to learn; give teacher.sync_every or"
        yield Problem(SOURCE, f"teacher.source: policy: {text} teacher.context", (("teacher", "sync_every"), CONTEXT))
    if own.source == "policy" and own.is_trainer and own.form == "full":
        text = "full reads the teacher's output head, which the step's update changes; use top_k or sampled, or"
        yield Problem(("teacher", "form"), f"teacher.form: {text} teacher.sync_every=1", (SOURCE,))
    if own.context is None:
        return
    if config.envs:
        text = "environments show turns that no template describes; use null, or prompts without env"
        yield Problem(CONTEXT, f"teacher.context: {text}", (("env",),))
    if config.debug == "train_only":
        text = "stored rollouts do not have the rows' columns; use null, or another debug mode"
        yield Problem(CONTEXT, f"teacher.context: debug=train_only: {text}", (("debug",),))
    if own.is_trainer and config.trainer.router_replay:
        text = "the generator chose no experts for the teacher's prompt; use trainer.router_replay=false or null"
        yield Problem(CONTEXT, f"teacher.context: {text}", (("trainer", "router_replay"),))


def check_teacher_length(config: Config, limit: int, name: str) -> Iterator[Problem]:
    """Check that the longest prompt with teacher.context and response fit into the teacher's `limit` positions; `name`
    is the key of this limit."""
    if not config.uses_teacher or config.teacher.context is None:
        return
    prompt, response = config.teacher_prompt_tokens, config.rollout.max_new_tokens
    if prompt + response > limit:
        text = f"prompt {prompt} + response {response} = {prompt + response} tokens exceed {name} = {limit}"
        involved = (("data", "max_prompt_tokens"), ("rollout", "max_new_tokens"), ("teacher",), ("model",))
        yield Problem(("teacher", "max_prompt_tokens"), f"teacher.max_prompt_tokens: {text}", involved)


def unread_of_teaching(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """(prefix of unread keys, key whose value is the cause, reason) in a run with a teacher."""
    own = config.teacher
    if own.source != "folder":
        for key in ("path", "paths"):
            yield ("teacher", key), SOURCE, f"source is {own.source}"
    if own.source != "policy":
        yield ("teacher", "sync_every"), SOURCE, f"source is {own.source}"
    if own.is_trainer:
        yield ("teacher", "engine"), SOURCE, "the trainer's engine computes the teacher's values"
    if own.context is None:
        yield ("teacher", "max_prompt_tokens"), CONTEXT, "teacher.context is null, and the policy's prompt is read"
