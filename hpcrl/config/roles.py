"""The roles of a run, and keys of the layout that give ranks to roles that it does not have."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hpcrl.config.abilities import chosen
from hpcrl.config.cluster import RoleConfig, RoleName
from hpcrl.config.schema import Config
from hpcrl.spec.problems import Path, Problem, dotted
from hpcrl.spec.tables import ROLES

DECIDE: tuple[Path, ...] = tuple(
    (key,) for key in ("pipeline", "debug", "algorithm", "loss", "reward", "env", "teacher", "data", "eval_every")
)
"""Keys on which it depends whether a run has a role."""


def needed_roles(config: Config) -> tuple[RoleName, ...]:
    """The roles that the run needs, in addition to the controller."""
    if config.pipeline_spec.rank0_only:
        return ()
    asked = {role for _, _, spec in chosen(config) for role in spec.roles}
    return tuple(
        name
        for name, role in ROLES.items()
        if (name in asked or role.needed(config)) and not role.done_by_others(config)
    )


def check_unused_ranks(config: Config, given: Collection[Path]) -> Iterator[Problem]:
    """Report keys of the command line (`given`) for ranks of a role that the run does not have. Sharing another role's
    ranks asks for none."""
    if config.pipeline_spec.rank0_only:  # reads no key of the layout
        return
    needed = needed_roles(config)
    absent = [role for role in ROLES if role not in needed]
    if not config.pipeline_spec.trains and "trainer" in absent:
        absent.remove("trainer")  # the generator gets its ranks (hpcrl.config.untrained)
    keys = [key for key in RoleConfig.model_fields if key != "colocate_with"]
    for path in given:
        if path[0] == "layout" and len(path) > 2 and path[1] in absent and path[2] in keys:
            role = str(path[1])
            if path[2] == "num_ranks" and config.layout.of(role).num_ranks is None:
                continue
            others = " of its own: other ranks do its work" if ROLES[role].done_by_others(config) else ""
            yield Problem(path, f"{dotted(path)}: not read here, the run has no {role} ranks{others}", DECIDE)
