"""The prompt that only a teacher reads: the policy's, with more of the row in its last message (teacher.context)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config import Config
from hpcrl.config.self_teaching import ANSWER, PLACES, PROMPT, places_of
from hpcrl.data.files import BadRow
from hpcrl.data.messages import Messages
from hpcrl.data.rows import ChecksRows, Row, columns_of
from hpcrl.spec.media import IMAGE_MARK


@dataclass(frozen=True)
class PrivilegedContext:
    """A template (teacher.context), and the most tokens of a prompt that is made with it.

    Args:
        untaught: Domain -> whether it learns from no teacher, so its rows need none of the template's values; `default`
            is for all other domains.
    """

    template: str
    max_tokens: int
    untaught: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> PrivilegedContext | None:
        """That of the run's teacher; None if it reads the policy's prompts."""
        if not config.uses_teacher or config.teacher.context is None:
            return None
        names = ("default", *config.loss)
        untaught = {name: not config.loss_of(name).divergence for name in names}
        return cls(config.teacher.context, config.teacher_prompt_tokens, untaught)

    def is_read(self, domain: str) -> bool:
        """Whether a domain's rows have the template; otherwise the teacher would read the policy's prompt."""
        return not self.untaught.get(domain, self.untaught.get("default", False))

    def messages(self, row: Row, where: str) -> Messages:
        """The row's messages, with the template in place of the last user message if its domain is taught. Its
        images stay in {prompt}. BadRow, with `where`, if the row lacks a value that the template reads, or if the
        template would repeat the images."""
        if not self.is_read(row.domain):
            return row.messages
        last = max((n for n, said in enumerate(row.messages) if said["role"] == "user"), default=None)
        if last is None:
            raise BadRow(f"{where}: no user message for teacher.context; leave the row out, or use null")
        values = {PROMPT: row.messages[last]["content"], ANSWER: row.answer}
        texts = {name: _text(values.get(name, row.extra.get(name))) for name in places_of(self.template)}
        if lacking := next((name for name, text in texts.items() if not text.strip()), None):
            raise BadRow(f"{where}: no {lacking}, which teacher.context reads; the row has {columns_of(row.extra)}")
        asked = row.messages[last]["content"]
        if IMAGE_MARK in asked and sum(found[1] == PROMPT for found in PLACES.finditer(self.template)) > 1:
            raise BadRow(f"{where}: the message has images, which teacher.context would repeat; give {{prompt}} once")
        texts = {name: text.replace(IMAGE_MARK, "") for name, text in texts.items()} | {PROMPT: asked}
        template = self.template.replace(IMAGE_MARK, "")
        text = PLACES.sub(lambda place: texts[place[1]] if place[1] else place[0][0], template)
        return [*row.messages[:last], {**row.messages[last], "content": text}, *row.messages[last + 1 :]]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class ContextCheck:
    """Finds rows that lack what teacher.context reads, after another check."""

    def __init__(self, context: PrivilegedContext, other: ChecksRows | None):
        self._context, self._other = context, other

    def problem_of(self, row: Row, where: str) -> str:
        """See ChecksRows."""
        if self._other is not None and (found := self._other.problem_of(row, where)):
            return found
        try:
            self._context.messages(row, where)
        except BadRow as error:
            return str(error)
        return ""


def with_context_check(config: Config, checks: Mapping[Any, ChecksRows]) -> dict[Any, ChecksRows]:
    """The checks of splits, with that of training rows for teacher.context, if it is given."""
    context = PrivilegedContext.of(config)
    return {**checks} if context is None else {**checks, "train": ContextCheck(context, checks.get("train"))}
