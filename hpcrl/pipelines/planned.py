"""Pipelines that can be planned and checked, but not yet run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem


class ConvertConfig(Section):
    """The convert pipeline: a checkpoint of a run becomes a model in HF layout."""

    source: str | None = None
    """Run folder whose newest checkpoint is read."""
    target: str | None = None
    """Folder to write the model to; null: hf in the source."""


def _source(config: Any) -> Iterator[Problem]:
    if config.convert.source is None:
        text = "convert.source: needs the run folder whose newest checkpoint becomes a model"
        yield Problem(("convert", "source"), text, (("pipeline",),))


def _conversion(config: Any) -> str:
    source = config.convert.source
    return f"convert: the newest checkpoint of {source} to {config.convert.target or f'{source}/hf'}"


RLVR_VL = PipelineSpec(about="Reinforcement learning from verifiable rewards on prompts with images.")
AGENTIC = PipelineSpec(about="Reinforcement learning in environments.")
CONVERT = PipelineSpec(
    about="Conversion of a checkpoint.",
    section=ConvertConfig,
    check=_source,
    generates=False,
    learns=False,
    work=_conversion,
)
