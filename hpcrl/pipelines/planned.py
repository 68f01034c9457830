"""Pipelines that can be planned and checked, but not yet run."""

from __future__ import annotations

from hpcrl.spec.kinds import PipelineSpec

RLVR_VL = PipelineSpec(about="Reinforcement learning from verifiable rewards on prompts with images.")
