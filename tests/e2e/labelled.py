"""A pipeline whose configuration says what its rows are: pipeline=tests.e2e.labelled:SPEC own.kind=labelled."""

from __future__ import annotations

from typing import Literal

from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import PipelineSpec


class LabelledConfig(Section):
    """The pipeline's keys."""

    kind: Literal["pairs", "labelled"] = "pairs"
    """What its rows are."""


SPEC = PipelineSpec(
    about="A loss on pairs or labelled answers.",
    make="tests.e2e.simpo:train",
    section=LabelledConfig,
    learns_from_rewards=False,
    rows=lambda config: config.own.kind,
    objective="tests.e2e.simpo_loss:SimPO",
    batch_size=lambda config: 4,
)
