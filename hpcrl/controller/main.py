"""Rank 0: the controller runs the pipeline, and converts its outcome to one message and an exit code."""

from __future__ import annotations

import functools
import json
import logging
import signal
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from hpcrl.cluster.layout import CONTROLLER, RoleLayout
from hpcrl.config import Config
from hpcrl.controller.building import build, build_evaluation, build_responder
from hpcrl.controller.checkpoints import CheckpointError, NotSavedError
from hpcrl.controller.context import Run
from hpcrl.controller.evaluation_run import EvaluationRun
from hpcrl.controller.generation_run import GenerationRun
from hpcrl.controller.guard import MismatchError, NoProgress, Stopped, after_divergence
from hpcrl.controller.rank0_run import Rank0Run
from hpcrl.messaging.background import Background
from hpcrl.messaging.dispatcher import Controller, RankFailed, RankLost, RankSilent
from hpcrl.messaging.messages import BuildRole, Failed
from hpcrl.messaging.queues import ControlError
from hpcrl.messaging.world import World
from hpcrl.node.hang_report import write_hang_report
from hpcrl.rollout.loop import BackgroundError
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted
from hpcrl.run_folder import OWNERS, VERDICT, SupersededError, check_owner, finish_run
from hpcrl.spec.tables import PIPELINES, ROLES
from hpcrl.system.exit_codes import ASKED, SIGNAL_CODES, ExitCode
from hpcrl.system.files import is_storage_error, steps_in, write_durably
from hpcrl.system.log import BARE
from hpcrl.system.signals import STOPPING
from hpcrl.timeline.recorder import Recorder
from hpcrl.timeline.writer import TimelineWriter
from hpcrl.workers.rank_loop import Worker

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""Time for each tracker to write its pending metrics when the run fails."""
CODES: list[tuple[type[BaseException], ExitCode]] = [
    (RankFailed, ExitCode.RANK_FAILED),
    (RankLost, ExitCode.RANK_KILLED),
    (RankSilent, ExitCode.DEADLINE),
    (ControlError, ExitCode.STORE_LOST),
    (RolloutExhausted, ExitCode.STARVED),
    (NoProgress, ExitCode.NO_PROGRESS),
    (MismatchError, ExitCode.MISMATCH),
    (NotSavedError, ExitCode.NOT_SAVED),
    (CheckpointError, ExitCode.CHECKPOINT),
    (SupersededError, ExitCode.SUPERSEDED),
]


def control(
    world: World, worker: Worker, config: Config, layout: RoleLayout, run_dir: Path, model_path: Path, attempt: int
) -> int:
    """Run the pipeline to its end; return the exit code. Leaves the world last, after the other ranks."""
    background = Background(worker.run_pending if layout.roles_of(CONTROLLER) != ("controller",) else None)
    controller = Controller(
        world,
        layout.roles_of,
        command_s=config.timeouts.command_s,
        start_s=config.timeouts.start_s,
        survivable=lambda rank, lost: _survivable(config, layout, rank, lost),
        background=background,
        timeline=_timeline(world, config, layout, run_dir, attempt),
    )
    worker.join()
    run: Run | Rank0Run | EvaluationRun | GenerationRun | None = None
    try:
        pipeline = PIPELINES[config.pipeline]
        if pipeline.rank0_only:
            run = Rank0Run(config, run_dir, attempt, world.trace.report_progress)
        else:
            if config.model.path is None and not model_path.exists():
                from hpcrl.engines.tiny import make_tiny_model  # imports models, which takes seconds

                make_tiny_model(config.model.tiny, model_path)
            if pipeline.trains:
                parts = build(controller, background, layout, config, run_dir, model_path, attempt)
                run = Run(config, run_dir, parts, controller.timeline)
            elif pipeline.writes_responses:
                responder = build_responder(controller, layout, config, run_dir, model_path)
                run = GenerationRun(config, run_dir, attempt, world.trace.report_progress, responder)
            else:
                evaluation = build_evaluation(controller, layout, config, run_dir, model_path)
                run = EvaluationRun(config, run_dir, attempt, world.trace.report_progress, evaluation)
        stop_run = run.stop
        for number in STOPPING:
            signal.signal(number, lambda n, _: stop_run(n))
        stopped = None
        try:
            pipeline.load()(run)
            run.finish()
            finish_run(run_dir, run.last_step, config.max_steps, run.reason)
            logger.info("%s", run.report(), extra=BARE)
        except Stopped as error:
            stopped = error
        _tell_hints(run.close())
        controller.shut_down()
        world.leave()
        if stopped is None:
            return ExitCode.DONE
        return _tell(world, SIGNAL_CODES.get(stopped.signal_number, ExitCode.REQUEUE), str(stopped))
    except Exception as error:
        logger.error("the run ends", exc_info=True)
        code, message = _explain(error, built=isinstance(run, Run | EvaluationRun | GenerationRun))
        if code is ExitCode.DEADLINE:
            pending = run.pending_prompts() if isinstance(run, Run) else []
            report = write_hang_report(
                run_dir,
                attempt,
                message,
                [layout.roles_of(rank) for rank in range(world.size)],
                unanswered=controller.unanswered(),
                prompts=[str(prompt) for prompt in pending],
                responses=sum((Counter(prompt.at) for prompt in pending), Counter[int]()),
                agents=world.place.launcher == "agent",
            )
            message = f"{message}; {report}"
        if run is not None:
            _tell_hints(run.close(within_s=LAST_WORDS_S))
        if code is ExitCode.NO_PROGRESS and not isinstance(error, NoProgress):  # a rank met numbers that are not finite
            message = f"{message}; {after_divergence(steps_in(run_dir / 'checkpoints'))}"
        if not (run_dir / OWNERS).is_dir():
            code, message = ExitCode.NOT_SAVED, f"{run_dir} was removed or moved while the run used it: {message}"
        if code is ExitCode.NOT_SAVED and isinstance(run, Run):
            run.checkpoint.discard()
        return _tell(world, code, message)


def _timeline(world: World, config: Config, layout: RoleLayout, run_dir: Path, attempt: int) -> Recorder | None:
    """The recorder of what the ranks do; None if the run records nothing."""
    pipeline = PIPELINES[config.pipeline]
    if not config.timeline.enabled or pipeline.rank0_only or not pipeline.trains:
        return None
    roles = [layout.roles_of(rank) for rank in range(world.size)]
    fence = functools.partial(check_owner, run_dir, attempt)
    return Recorder(roles, world.host, TimelineWriter(run_dir, config.timeline.keep_steps, fence))


def _explain(error: BaseException, built: bool) -> tuple[ExitCode, str]:
    """Exit code and one-line message. Only errors during the build of engines can be invalid user input."""
    if isinstance(error, BackgroundError) and error.__cause__ is not None:
        error = error.__cause__
    code = next((code for kind, code in CODES if isinstance(error, kind)), ExitCode.FAILED)
    match error:
        case RankFailed(event=Failed(kind="numbers")):
            code = ExitCode.NO_PROGRESS
        case RankFailed(event=Failed(kind="storage")):
            code = ExitCode.NOT_SAVED
        case BrokenPipeError():  # a rank's output has no reader: the job step's daemon is gone
            code = ExitCode.RANK_KILLED
        case OSError() if is_storage_error(error):
            code = ExitCode.NOT_SAVED
        case RankFailed(event=Failed(kind="control")):
            code = ExitCode.STORE_LOST
        case ValueError() | OSError() | RankFailed(event=Failed(kind="input", command=BuildRole.__name__)) if not built:
            code = ExitCode.BAD_INPUT
    text = str(error) if code is not ExitCode.FAILED else f"{type(error).__name__}: {error}"
    return code, " ".join(text.split())


def _tell_hints(text: str) -> None:
    if text:
        logger.info("%s", text.rstrip("\n"), extra=BARE)


def _tell(world: World, code: ExitCode, message: str) -> int:
    """Write the verdict for the node agent to print; without an agent or on a full disk, print it here."""
    if world.place.launcher != "agent":
        logger.log(logging.INFO if code in ASKED else logging.ERROR, "%s", message)
        return code
    try:
        write_durably(world.folder / VERDICT, json.dumps({"code": int(code), "message": message}).encode())
    except OSError:  # the agent then uses the exit code
        print(f"hpcrl: {message}", flush=True)  # stderr is a log on the same disk
    return code


def _survivable(config: Config, layout: RoleLayout, rank: int, lost: Collection[int]) -> bool:
    """Whether a rank may be lost: it only generates, rewards, serves a model to rewards or plays environments, enough
    ranks with the same work remain, and no replica of several ranks would wait for it within a decode chunk."""
    roles = {name: ROLES[name] for name in layout.roles_of(rank) if name != "controller"}
    if not roles or rank == CONTROLLER:
        return False
    if any(role.forms_replicas for role in roles.values()) and (rank,) not in layout.free_replicas:
        return False
    return all(
        role.min_ranks is not None and len(set(layout.peers_of(name, rank)) - set(lost)) >= role.min_ranks(config)
        for name, role in roles.items()
    )
