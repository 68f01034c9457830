"""Keys of the section `teacher` with which the policy is its own teacher, or the teacher reads another prompt."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpcrl.spec.fields import Natural, Positive, Section

TeacherSource = Literal["folder", "base", "policy"]
PROMPT, ANSWER = "prompt", "answer"
PLACES = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
"""Braces that are doubled, and places for values; other braces, as in \\boxed{}, are text."""


def places_of(template: str) -> list[str]:
    """The names of the values in a template, each once."""
    return list(dict.fromkeys(found[1] for found in PLACES.finditer(template) if found[1]))


def _template(value: str) -> str:
    if PROMPT not in places_of(value):
        raise ValueError("expected a text with {prompt}, the place of the policy's prompt")
    return value


class SelfTeaching(Section):
    """Which model teaches, and what it reads."""

    source: TeacherSource = "folder"
    """folder: the model in teacher.path. base: the policy without its adapters (trainer.lora), for which the trainer's
    engine computes, so there is no second copy of weights. policy: the policy itself (teacher.sync_every)."""
    sync_every: Natural | None = None
    """With source=policy, steps between updates of the teacher, a copy that is first the initial policy. null or 0: no
    copy, the trainer's engine computes with the policy before the step's update, which needs teacher.context."""
    context: Annotated[str, AfterValidator(_template), Field(max_length=100_000)] | None = None
    """Privileged context: what the teacher reads in place of the prompt's last user message, as in on-policy
    self-distillation (arXiv 2601.18734). {prompt} stands for this message and its images, {answer} for the row's
    answer, and another name for the row's column; {{ and }} for braces. null: the teacher reads the policy's prompt."""
    max_prompt_tokens: Positive | None = None
    """Maximum length of a prompt with teacher.context, tokens. Rows with a longer one are dropped and counted, or
    refused with data.overlong_prompts=error; null: data.max_prompt_tokens."""

    @property
    def is_trainer(self) -> bool:
        """Whether the trainer's engine computes the teacher's values."""
        return self.source == "base" or (self.source == "policy" and not self.sync_every)
