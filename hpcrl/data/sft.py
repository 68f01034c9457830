"""Rows of the supervised pipeline: a prompt and its written answer, with the answer marked."""

from __future__ import annotations

from typing import Any

from hpcrl.config import DataConfig
from hpcrl.data.chat import encode, marked, render
from hpcrl.data.files import BadRow
from hpcrl.data.rows import Messages, RowSet, check_answers, learning_obstacle, require_same
from hpcrl.data.tasks import Split


class SFTRows:
    """Random access to (token_ids, loss_mask). Every assistant turn is marked, including its end token."""

    def __init__(self, config: DataConfig, split: Split, tokenizer: Any, seed: int):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token to end an answer with")
        self._rows = RowSet(config, split, seed)
        if wrong := check_answers({split: self._rows}):
            raise ValueError("\n".join(wrong))
        self._seed = seed
        self._tokenizer = tokenizer

    def state_dict(self) -> dict[str, Any]:
        """Identification of the data. The rows of a step follow from the step and the seed."""
        return {"cursor": {**self._rows.fingerprint(), "seed": str(self._seed)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError names the source that differs from the checkpoint."""
        require_same(state["cursor"], self.state_dict()["cursor"], "data.train")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> tuple[list[int], list[bool]]:
        """Token ids and loss mask of a row, of equal length. BadRow if the chat template rewrites earlier turns, or if
        a generated row has no answer.

        The prompt has the tokens that PromptSource gives; the answer is tokenised separately, as in generation.
        """
        row = self._rows.row(index)
        if obstacle := learning_obstacle(row):
            raise BadRow(f"{self._rows.where(index)}: {obstacle}")
        assert row.response is not None, "a row without a response has an obstacle"
        ids: list[int] = []
        mask: list[bool] = []

        def extend(text: str, learned: bool) -> None:
            # Only the first piece may get the special tokens that a tokenizer without a chat template adds.
            new = encode(self._tokenizer, text, begins=not ids)
            ids.extend(new)
            mask.extend([learned] * len(new))

        done = ""
        for turn in [n for n, message in enumerate(row.messages) if message["role"] == "assistant"]:
            prompt = self._text_after(done, row.messages[:turn], row.tools, index, ask=True)
            answer = self._text_after(done + prompt, row.messages[: turn + 1], row.tools, index, ask=False)
            written, end, rest = answer.partition(self._tokenizer.eos_token)
            extend(prompt, False)
            extend(written + end, True)
            extend(rest, False)
            done += prompt + answer
        extend(self._text_after(done, row.messages, row.tools, index, ask=True), False)
        extend(marked(self._tokenizer, row.response), True)
        return [*ids, self._tokenizer.eos_token_id], [*mask, True]

    def _text_after(self, done: str, messages: Messages, tools: Any, index: int, ask: bool) -> str:
        text = render(self._tokenizer, messages, tools, ask)
        if not text.startswith(done):
            raise BadRow(
                f"{self._rows.where(index)}: the chat template rewrites earlier turns, so that their answers cannot be "
                "marked; split the row into one row per answer"
            )
        return text[len(done) :]


def sft_rows(config: DataConfig, split: Split, tokenizer: Any, seed: int = 0) -> SFTRows:
    """The rows of a split for supervised training. ValueError lists all errors of the data."""
    return SFTRows(config, split, tokenizer, seed)
