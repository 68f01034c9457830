"""The ranks whose steps are profiled."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem


def profiled_ranks(config: Config, layout: RoleLayout) -> list[int]:
    """The ranks of profile.ranks, ascending; roles that the run lacks have none."""
    chosen = [layout.ranks.get(name, ())[:1] if isinstance(name, str) else (name,) for name in config.profile.ranks]
    return sorted({rank for ranks in chosen for rank in ranks})


def check_profile(config: Config, layout: RoleLayout) -> Iterator[Problem]:
    """Steps that the run does not have, and ranks or roles that it lacks."""
    profile = config.profile
    if late := [step for step in profile.steps if step > config.max_steps]:
        text = f"profile.steps: {late[0]}, but the last step is max_steps={config.max_steps}"
        yield Problem(("profile", "steps"), text, (("max_steps",),))
    if not profile.steps:
        return
    for name in profile.ranks:
        if isinstance(name, int) and name >= layout.world_size:
            text = f"profile.ranks: {name}, but the run's last rank is {layout.world_size - 1}"
            yield Problem(("profile", "ranks"), text, (("layout",),))
        elif isinstance(name, str) and name not in layout.ranks:
            yield Problem(("profile", "ranks"), f"profile.ranks: {name!r} is not one of {', '.join(layout.ranks)}")
    if not config.pipeline_spec.rank0_only and not profiled_ranks(config, layout):
        yield Problem(("profile", "ranks"), "profile.ranks: no rank of this run; name a rank or a role that it has")
