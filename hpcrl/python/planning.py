"""hpcrl.plan: what a run would do, without starting it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config
from hpcrl.config.abilities import check_installed
from hpcrl.launch.model_folder import ModelFolder
from hpcrl.launch.plan import ShownRows, describe, plan_shape
from hpcrl.launch.prepare import prepare
from hpcrl.launch.submission import environment_notes, trial
from hpcrl.models.shape import CannotPlanError
from hpcrl.planner.image_memory import with_row_tokens
from hpcrl.planner.memory import memory
from hpcrl.planner.storage import whole_checkpoint_bytes
from hpcrl.python.arguments import Given, arguments_of
from hpcrl.python.nesting import check_outside, inside


@dataclass(frozen=True)
class Plan:
    """The plan of a run; str() is the text of the command's dry_run=true. A number is None if it cannot be planned.

    Args:
        config: The complete configuration.
        run_dir: The folder that the run would use.
        kind: Whether a start would begin a run, resume it, or find it finished.
        roles: Role -> its ranks.
        responses_per_step: Responses trained on in a step; 0 if the run does not learn from rewards.
        num_parameters: Of the policy.
        memory_bytes: Rank -> its peak, on its GPU, or in host memory if it has none.
        checkpoint_bytes: Size of a checkpoint.
        node_hours: At most, of a job (cluster=slurm), at its time limit; None for other runs.
        refusals: Why this machine or Slurm's installation here would refuse a start.
    """

    text: str
    config: dict[str, Any]
    run_dir: Path
    kind: Literal["fresh", "resume", "finished"]
    num_ranks: int
    roles: dict[str, tuple[int, ...]]
    responses_per_step: int
    num_parameters: int | None = None
    memory_bytes: dict[int, int] | None = None
    checkpoint_bytes: int | None = None
    node_hours: float | None = None
    refusals: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<plan of {self.run_dir}, {self.kind}, {self.num_ranks} ranks; print() shows it>"


def plan(
    *words: str,
    reward: Given | Mapping[str, object] | None = None,
    env: Given | Mapping[str, object] | None = None,
    **keys: object,
) -> Plan:
    """The plan of the run that hpcrl.train would start with these arguments. Starts and writes nothing; files of parts
    are run, as in a start. ValueError if a value cannot be given, ConfigError, a ValueError, with all problems."""
    check_outside("hpcrl.plan")
    parts = {name: value for name, value in (("reward", reward), ("env", env)) if value is not None}
    arguments = arguments_of(words, {**keys, **parts})
    arguments = [word for word in arguments if not word.lstrip("+").startswith("dry_run=")]
    with inside(), _same_modules():
        config, layout, model, run, shown = prepare([*arguments, "dry_run=true"])
        text = "".join([describe(config, layout, model, run, shown), "\n", *environment_notes(config, layout)])
        refusals = [problem.text for problem in check_installed(config)]
        lacking = [f"note: a start would be refused: {problem}" for problem in refusals]
        text = "\n".join([text.rstrip("\n"), *trial(config, layout), *lacking])
        learns = config.learns_from_rewards
        return Plan(
            text=text,
            config=config.model_dump(mode="json"),
            run_dir=run.run_dir,
            kind=run.kind,
            num_ranks=layout.world_size,
            roles={role: tuple(ranks) for role, ranks in layout.ranks.items() if ranks},
            responses_per_step=config.rollout.num_prompts * config.rollout.group_size if learns else 0,
            node_hours=_node_hours(config, layout),
            refusals=refusals,
            **_sizes(config, layout, model, shown),
        )


def _sizes(config: Config, layout: RoleLayout, model: ModelFolder | None, shown: ShownRows) -> dict[str, Any]:
    """The numbers that follow from the model; none for an unknown family."""
    found: dict[str, Any] = {}
    if not config.pipeline_spec.learns or config.debug == "fake":
        return found
    with contextlib.suppress(CannotPlanError):
        shape = with_row_tokens(plan_shape(config, model), shown.image_tokens)
        found["num_parameters"] = shape.num_parameters
        kinds = memory(config, layout, shape)
        peaks = {rank: kind.peak(on_host=not kind.on_gpu, least=True)[1] for kind in kinds for rank in kind.ranks}
        found["memory_bytes"] = dict(sorted(peaks.items()))
        found["checkpoint_bytes"] = whole_checkpoint_bytes(config, shape)
    return found


def _node_hours(config: Config, layout: RoleLayout) -> float | None:
    if config.cluster.name != "slurm":
        return None
    nodes = sum(len(component.nodes) for component in Placement.from_config(config, layout).components)
    return nodes * config.cluster.time_s / 3600


@contextlib.contextmanager
def _same_modules() -> Iterator[None]:
    """Checks run the files of parts; the caller's modules of the same names, and its search path, stay."""
    modules, path = dict(sys.modules), list(sys.path)
    try:
        yield
    finally:
        sys.modules.update(modules)
        sys.path[:] = path
