"""The section `generate`: which responses of a model become rows, and where they are written."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpcrl.config.rollout import MAX_MEMBERS
from hpcrl.spec.fields import NUMBER, Float, Positive, Section

ENDINGS = (".jsonl", ".parquet")
"""How the name of generate.target may end."""


class GenerateConfig(Section):
    """The generate pipeline: responses to the prompts of data.train become rows to train on."""

    target: str | None = None
    """File of the rows, .jsonl or .parquet; null: rows.jsonl in the run folder. Other runs' files are not
    overwritten."""
    form: Literal["answers", "pairs"] = "answers"
    """answers: a row for each response that is kept (pipeline=sft); pairs: for each prompt, the responses with the
    highest and the lowest score as chosen and rejected."""
    num_prompts: Positive | None = None
    """Prompts that are responded to, from the domains in turn; null: all."""
    samples: Annotated[int, Field(ge=1, le=MAX_MEMBERS), NUMBER] = 1
    """Responses per prompt; sampling is as in rollout."""
    min_score: Float | None = None
    """Keep only responses with at least this score; of a pair, the chosen one must have it. null: any score."""
    keep: Positive | None = None
    """Responses kept per prompt, those with the highest scores, the first ones of equal scores; null: all."""
    truncated: Literal["drop", "keep"] = "drop"
    """What to do with responses that reached the maximum length."""

    @property
    def reads_scores(self) -> str:
        """The setting that compares scores; empty if there is none."""
        if self.form == "pairs":
            return "generate.form=pairs"
        if self.min_score is not None:
            return f"generate.min_score={self.min_score:g}"
        return f"generate.keep={self.keep}" if self.keep is not None else ""
