"""Renders a data set's rows with the model's chat template before the start, as the run will."""

from __future__ import annotations

from typing import Any

from hpcrl.config import DataConfig
from hpcrl.data.answers import LeftOut, Rewritten, turns_of
from hpcrl.data.chat import render
from hpcrl.data.rows import Row, learning_obstacle
from hpcrl.data.template_forms import TemplateRefusal


class RowCheck:
    """Finds rows that a chat template refuses; with `answers` it renders the answers too, since they are trained on.
    After the scan, `skipped` has the number of rows whose earlier turns the template rewrites, which a supervised run
    skips, and `file:line` of the first."""

    def __init__(self, template: Any, model: str, config: DataConfig, answers: bool = False):
        self._template, self._model, self._config, self._answers = template, model, config, answers
        self._without_system = False
        self.skipped = (0, "")

    def problem_of(self, row: Row, where: str) -> str:
        """Why a row cannot be rendered, in one line; empty if it can. If data.system_prompt is the reason, it is
        reported only once."""
        added = self._config.system_prompt is not None and row.messages[0]["content"] == self._config.system_prompt
        messages = row.messages[1:] if added and self._without_system else row.messages
        try:
            self._render(row, messages)
        except Rewritten:
            self.skipped = (self.skipped[0] + 1, self.skipped[1] or where)
        except LeftOut as error:
            return f"{where}: {error}"
        except TemplateRefusal as error:
            if added and not self._without_system and self._takes(row.messages[1:], row):
                self._without_system = True
                return (
                    f"data.system_prompt: the chat template of {self._model} refuses a system message "
                    f"({error.reason}); leave it unset, or write the text into the prompts"
                )
            return f"{where}: the chat template refuses the row: {error.reason}"
        return ""

    def _render(self, row: Row, messages: list[dict[str, Any]]) -> None:
        if self._answers and messages is row.messages and not learning_obstacle(row):
            for part in (row, row.rejected):
                for _ in turns_of(self._template, part) if part is not None else ():
                    pass
        else:
            render(self._template, messages, row.tools, **row.variables)

    def _takes(self, messages: list[dict[str, Any]], row: Row) -> bool:
        try:
            render(self._template, messages, row.tools, **row.variables)
        except TemplateRefusal:
            return False
        return True
