"""Rank 0: the controller runs the pipeline; whatever ends it becomes one message and an exit code."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path

from hpcrl.checkpoint.tiny import make_tiny_model
from hpcrl.config import Config
from hpcrl.dist.agent import VERDICT
from hpcrl.dist.control import ControlError, StoreLost
from hpcrl.dist.controller import Controller, RankFailed, RankLost, RankSilent
from hpcrl.dist.world import World
from hpcrl.exitcodes import SIGNAL_CODES, ExitCode
from hpcrl.files import write_durably
from hpcrl.layout import CONTROLLER, RoleLayout
from hpcrl.pipelines import PIPELINES
from hpcrl.pipelines.context import Run, Stopped
from hpcrl.roles.worker import Worker
from hpcrl.rollout.scheduler import RolloutExhausted
from hpcrl.rundir import SupersededError, finish_run

CODES: list[tuple[type[BaseException], ExitCode]] = [
    (RankFailed, ExitCode.RANK_FAILED),
    (RankLost, ExitCode.RANK_KILLED),
    (RankSilent, ExitCode.DEADLINE),
    (StoreLost, ExitCode.STORE_LOST),
    (ControlError, ExitCode.FAILED),
    (RolloutExhausted, ExitCode.STARVED),
    (SupersededError, ExitCode.SUPERSEDED),
]


def control(
    world: World, worker: Worker, config: Config, layout: RoleLayout, run_dir: Path, model_path: Path, attempt: int
) -> int:
    """Run the pipeline to its end; returns the exit code. Leaves last: the other ranks are told to go before."""
    controller = Controller(
        world,
        layout.roles_of,
        command_s=config.timeouts.command_s,
        start_s=config.timeouts.start_s,
        survivable=lambda rank, lost: _survivable(config, layout, rank, lost),
    )
    if layout.roles_of(CONTROLLER) != ("controller",):
        controller.pump = worker.pump
    worker.join()
    try:
        if config.model.path is None and not model_path.exists():
            make_tiny_model(config.model.tiny, model_path)
        run = Run(controller, layout, config, run_dir, model_path, attempt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda n, _: setattr(run, "stop_signal", run.stop_signal or n))
        PIPELINES[config.pipeline](run)
        print(run.finish(), flush=True)
        finish_run(run_dir, run.last_step, config.max_steps, f"trained {run.last_step} steps")
        controller.dismiss()
        world.leave()
        return ExitCode.DONE
    except Stopped as stop:
        controller.dismiss()
        return _tell(world, SIGNAL_CODES.get(stop.signal_number, ExitCode.REQUEUE), str(stop))
    except Exception as error:
        traceback.print_exc()
        code = next((code for kind, code in CODES if isinstance(error, kind)), ExitCode.FAILED)
        text = str(error) if code is not ExitCode.FAILED else f"{type(error).__name__}: {error}"
        return _tell(world, code, text)


def _tell(world: World, code: ExitCode, message: str) -> int:
    """Leave the verdict for the node agent, which prints it; print it where there is no agent."""
    if world.place.launcher == "agent":
        write_durably(world.folder / VERDICT, json.dumps({"code": int(code), "message": message}).encode())
    else:
        print(f"hpcrl: {message}", file=sys.stderr, flush=True)
    return code


def _survivable(config: Config, layout: RoleLayout, rank: int, lost: set[int]) -> bool:
    """A rank may be lost where all it does is reward or env, and enough of its kind remain."""
    roles = layout.roles_of(rank)
    if not roles or not set(roles) <= {"reward", "env"}:
        return False
    least = {"reward": config.layout.reward.min_ranks, "env": config.layout.env.min_ranks}
    return all(len(set(layout.ranks[role]) - set(lost)) >= least[role] for role in roles)
