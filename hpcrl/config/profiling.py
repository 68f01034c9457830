"""Profiles of single steps: the section `profile`."""

from __future__ import annotations

from hpcrl.spec.fields import Natural, Positive, Section


class ProfileConfig(Section):
    """Profiles of single steps."""

    steps: list[Positive] = []
    """Steps to profile, such as [3,5]; empty: none. For each step and rank a trace for chrome://tracing or Perfetto:
    profiles/step_NNNNNN/rank_NNNN.json.gz in the run folder."""
    ranks: list[Natural | str] = ["trainer", "generator"]
    """Ranks to profile; the name of a role is its first rank."""
    memory: bool = False
    """Also write a snapshot of GPU memory with the stacks of its allocations, rank_NNNN.pickle, for
    pytorch.org/memory_viz."""
    nsys: bool = False
    """Instead of traces, mark the steps for `nsys profile --capture-range=cudaProfilerApi`, with which the run must be
    started."""
