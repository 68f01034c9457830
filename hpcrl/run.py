"""The program of a node: agent -> ranks -> roles -> pipeline -> exit code.

    python -m hpcrl.run RUN_DIR      one process per node (the agent starts the ranks), or one per rank (torchrun, MPI)

RUN_DIR contains the config.yaml that `python -m hpcrl.launch` wrote. Time, seeds and environment variables are read
here and in hpcrl/messaging.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.cluster import slurm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config
from hpcrl.messaging.bootstrap import ProcessInfo, find_place
from hpcrl.messaging.processes import rank_name
from hpcrl.messaging.trace import DESCRIPTOR
from hpcrl.node.agent import Agent, Verdict
from hpcrl.node.caches import cache_folders
from hpcrl.node.devices import BY_BUS, HIDDEN, ORDER, bind_gpus, own_devices, show_peers, visible_gpus
from hpcrl.node.forks import FORKS, Parent
from hpcrl.node.gpus import AskedToStopError, GpuNeeds, look, mislisted
from hpcrl.node.hang_report import write_hang_report
from hpcrl.node.preflight import preflight, rendezvous_folder, see_run, stopped
from hpcrl.run_folder import (
    OUTCOME,
    VERDICT,
    SupersededError,
    close_run,
    log_folder,
    open_run,
    stored_config,
    world_folder,
)
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.system import log
from hpcrl.system.cli import in_shell, use_utf8
from hpcrl.system.exit_codes import ASKED, SIGNAL_CODES, ExitCode
from hpcrl.system.files import allow_files, is_storage_error, shield_output, write_durably
from hpcrl.system.signals import STOPPING, held_back, ignore_signals, noted
from hpcrl.system.stacks import new_page, register_stacks

logger = logging.getLogger("hpcrl.run")  # not __name__: a program

UNWRITTEN = frozenset(code for code in ExitCode if code > ExitCode.BAD_INPUT and code is not ExitCode.STORE_LOST)
"""Exit codes that rank 0 uses only after writing a verdict, unless writing it fails."""


def launch_local(config: Config, plan: str, words: Sequence[str] | None) -> int:
    """Open the run folder and run all ranks on this machine; return the exit code. plan: the text for plan.txt. words:
    the command-line arguments of the configuration, if known."""
    opened = open_run(config.model_dump(mode="json"), config.run_dir, config.resume, plan, words)
    try:
        with noted() as signals:
            return run_node(opened.run_dir, opened.attempt, node=0, num_nodes=1, signals=signals)
    finally:
        # The exit code already reports the error, and the next start detects that this process is dead.
        with contextlib.suppress(SupersededError, OSError):
            close_run(opened.run_dir, opened.attempt)


def run_node(run_dir: Path, attempt: int, node: int, num_nodes: int, signals: Sequence[int]) -> int:
    """One node's agent: run its share of the ranks until they end, and report a failure in one message. `signals`: from
    signals.noted."""
    log.start("agent", file=log_folder(run_dir, attempt) / f"agent_{node:04d}.log", console="stderr")
    config = stored_config(run_dir)
    layout = RoleLayout.from_config(config)
    world = world_folder(run_dir, attempt)
    if config.cluster.name == "slurm":
        code = check_nodes(config, run_dir, world, node, num_nodes, signals)
        if code != ExitCode.DONE:
            return code
        config = stored_config(run_dir)  # this node may have read an outdated file before
        layout = RoleLayout.from_config(config)
    ranks = ranks_of_node(config, layout, node, num_nodes)
    environ = {
        "OMP_NUM_THREADS": str(config.cluster.threads_per_rank),
        "OPENBLAS_NUM_THREADS": "1",  # else numpy's OpenBLAS starts threads at import
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MPLCONFIGDIR": str(world / "matplotlib"),  # for the font cache, which is otherwise in the user's home
        ORDER: BY_BUS,
        **cache_folders(os.environ),
        **os.environ,
        "HPCRL_ATTEMPT": str(attempt),
        "HPCRL_NODE": str(node),
        "HPCRL_NUM_NODES": str(num_nodes),
    }
    if num_nodes == 1:
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeouts = config.timeouts
    try:
        if config.cluster.name != "slurm":  # in a Slurm job, the preflight has checked GPUs
            check_gpus(GpuNeeds.of(config, layout, ranks), signals)
        gpus = gpus_of_node(config, layout, node, num_nodes)
    except ValueError as error:
        _say(str(error), logging.ERROR)
        return ExitCode.BAD_INPUT
    except AskedToStopError:
        asked = stopped(signals, node=0)
        _say(asked.message)
        return asked.code
    roles, reports = [layout.roles_of(rank) for rank in range(layout.world_size)], list[str]()
    agent = Agent(
        lambda rank: [sys.executable, "-m", "hpcrl.run", str(run_dir)],
        ranks,
        environ=environ,
        gpus=gpus,
        signals=signals,
        world_folder=world,
        logs=log_folder(run_dir, attempt),
        grace_s=timeouts.grace_s,
        # Shorter than a command's deadline, so the message names this rank and not the ranks that wait for it.
        silent_s=timeouts.command_s / 2,
        stopped_s=timeouts.store_s / 2,
        start_s=timeouts.start_s,
        impatient=config.cluster.name == "local",
        parent=[sys.executable, "-m", "hpcrl.run", str(run_dir)],
        report_hang=lambda cause: reports.append(write_hang_report(run_dir, attempt, f"rank 0 {cause}", roles)),
    )
    try:
        verdict = agent.run()
    except OSError as error:
        if not is_storage_error(error):
            raise
        _say(f"the ranks of this node were ended: {error}", logging.ERROR)
        code = ExitCode.NOT_SAVED
    else:
        code = _conclude(verdict, layout, run_dir, attempt, *reports)
    if 0 in ranks:
        _leave_outcome(world, code)
    return code


def check_nodes(config: Config, run_dir: Path, world: Path, node: int, num_nodes: int, signals: Sequence[int]) -> int:
    """Run the preflight of a Slurm job's nodes; return its exit code. Called by all agents. It ends hanging nodes."""
    judgement = preflight(config, run_dir, rendezvous_folder(world), node, num_nodes, signals)
    if judgement.message:
        _say(judgement.message, logging.INFO if judgement.code in ASKED else logging.ERROR)
    if node == 0 and judgement.code != ExitCode.DONE:
        _leave_outcome(world, judgement.code)
        if judgement.code == ExitCode.DEADLINE and (own := slurm.own_job(os.environ)) is not None:
            with contextlib.suppress(slurm.SlurmError):  # parts of the job step may have ended
                # the whole job step, including this process
                slurm.call("scancel", f"{own[0]}.{os.environ['SLURM_STEP_ID']}")
    return judgement.code


def check_gpus(needs: GpuNeeds, signals: Sequence[int]) -> None:
    """Check this node's GPUs and log notes about them. ValueError if the node's ranks cannot compute on them, or if
    other processes fill them; AskedToStopError after a signal."""
    found = look(needs, os.environ, signals, lambda text: _say(f"this node {text}"))
    if found.problem:
        raise ValueError(f"cluster.device: this node {found.problem}")
    if found.note:
        _say(f"this node {found.note}")


def gpus_of_node(config: Config, layout: RoleLayout, node: int, num_nodes: int) -> dict[int, str]:
    """Rank -> its CUDA_VISIBLE_DEVICES on this node. ValueError if GPUs are requested but there are too few."""
    ranks = ranks_of_node(config, layout, node, num_nodes)
    if problem := mislisted(GpuNeeds.of(config, layout, ranks), os.environ):
        raise ValueError(f"cluster.device: this node {problem}")
    gpus = bind_gpus(ranks, sorted(layout.ranks_with_model), visible_gpus(os.environ), config.cluster.device)
    return show_peers(gpus, layout.replicas) if GEN_ENGINES[config.gen_engine].shows_peers(config) else gpus


def ranks_of_node(config: Config, layout: RoleLayout, node: int, num_nodes: int) -> list[int]:
    """A node's ranks: in a Slurm job by the run's placement, else in order and as evenly as possible."""
    if config.cluster.name == "slurm":
        return list(Placement.from_config(config, layout).nodes[node])
    return [rank for rank in range(layout.world_size) if rank * num_nodes // layout.world_size == node]


def fork_ranks_of_node(run_dir: Path) -> None:
    """Import the modules of the ranks that the agent requests, and fork them; returns in each forked rank."""
    parent, config = Parent(), stored_config(run_dir)
    log.start(f"rank {min(parent.gpus)}", file=log.STDERR)  # until the fork, output goes to this rank's log
    without_gpu = [rank for rank, gpus in parent.gpus.items() if gpus == HIDDEN]
    import_for(config, RoleLayout.from_config(config), without_gpu)
    if len(without_gpu) < len(parent.gpus):  # engines are not imported: that may open GPUs, which forks must not share
        from transformers import AutoTokenizer  # noqa: F401
    gc.freeze()  # a garbage collection in a rank would copy the pages of all these objects
    parent.fork()


def import_for(config: Config, layout: RoleLayout, ranks: Sequence[int]) -> None:
    """Import the modules of these ranks."""
    gc.disable()  # imported objects are permanent; repeated collections take a sixth of a rank's start
    from hpcrl.workers.rank_loop import import_engines

    import_engines(config, {role for rank in ranks for role in layout.roles_of(rank)})
    if 0 in ranks:
        from hpcrl.controller import main  # noqa: F401


def run_rank(run_dir: Path, place: ProcessInfo) -> int:
    """Run one rank, from joining the world to leaving it; return its exit code."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(rank_name(place.index))
    allow_files()  # an agent has done so, a launcher may not have
    config = stored_config(run_dir)
    layout = RoleLayout.from_config(config)
    if place.launcher not in ("agent", "local"):  # otherwise the agent has chosen the GPUs
        try:
            gpus = gpus_of_node(config, layout, place.node, place.num_nodes)
        except ValueError as error:
            logger.error("%s", error)
            return ExitCode.BAD_INPUT
        # Before engines are imported, which may query GPUs.
        os.environ.setdefault(ORDER, BY_BUS)
        os.environ |= own_devices(gpus[place.index]) | cache_folders(os.environ)
    import_for(config, layout, [place.index])
    if place.launcher == "agent":
        log.adopt_libraries()
    roles = ", ".join(layout.roles_of(place.index))
    logger.info("process %d is rank %d: %s", os.getpid(), place.index, roles, extra=log.UNSHOWN)
    from hpcrl.messaging.network import NoInterfaceError
    from hpcrl.messaging.node_peers import NodePeerWatch
    from hpcrl.messaging.queues import ControlError
    from hpcrl.messaging.world import join, pin_threads, seed_generators
    from hpcrl.workers.rank_loop import Reported, Worker, leave_default_group

    if place.index == 0:
        from hpcrl.controller.main import control
    gc.freeze()
    gc.enable()
    attempt = int(os.environ.get("HPCRL_ATTEMPT", "1"))
    pin_threads(config.cluster.threads_per_rank)
    seed_generators(config.seed, place.index)
    timeouts = config.timeouts
    model_path = Path(config.model.path) if config.model.path else run_dir / "model"
    if place.index == 0:
        (run_dir / "world").mkdir(exist_ok=True)
    try:
        world = join(
            place,
            layout.world_size,
            world_folder(run_dir, attempt),
            start_s=timeouts.start_s,
            store_s=timeouts.store_s,
            command_s=timeouts.command_s,
            interface=config.cluster.network_interface,
        )
    except NoInterfaceError as error:
        logger.error("this node %s: cluster.network_interface", error)
        return ExitCode.BAD_INPUT
    except (ControlError, TimeoutError) as error:
        logger.error("%s", error)
        return ExitCode.STORE_LOST
    if place.launcher not in ("agent", "local"):
        NodePeerWatch(world, timeouts.store_s / 2, timeouts.start_s)
    worker = Worker(world, config, layout, model_path, run_dir)
    try:
        if place.index == 0:
            return control(world, worker, config, layout, run_dir, model_path, attempt)
        worker.serve()
        leave_default_group()
        return ExitCode.DONE
    except Reported:
        return ExitCode.RANK_FAILED
    except ControlError as error:
        logger.error("%s", error)
        return ExitCode.STORE_LOST
    finally:
        worker.close()


def _start_log(run_dir: Path, place: ProcessInfo) -> None:
    """Start a rank's log: its standard error if an agent has started the rank, else a file in the same folder."""
    who = f"rank {place.index}"
    if place.launcher == "agent":
        log.start(who, file=log.STDERR, console=None if place.index else "stdout")
    else:
        file = log_folder(run_dir, int(os.environ.get("HPCRL_ATTEMPT", "1"))) / f"rank_{place.index:04d}.log"
        log.start(who, file=file, console="stderr" if place.index else "stdout")


def _conclude(verdict: Verdict, layout: RoleLayout, run_dir: Path, attempt: int, hang: str = "") -> int:
    """Print one line for the user if the run failed; return the exit code. `hang`: about the report of a controller
    that hung."""
    if verdict.controller_code is None:  # another node's agent reports for the controller
        return ExitCode.DONE if not verdict.lost else ExitCode.RANK_KILLED
    if verdict.controller_code == 0 and 0 not in verdict.lost:
        return ExitCode.DONE
    path = world_folder(run_dir, attempt) / VERDICT
    if path.exists():
        told = json.loads(path.read_text())
        code, message = ExitCode(told["code"]), told["message"]
    elif verdict.controller_code in UNWRITTEN:
        code = ExitCode(verdict.controller_code)
        message = f"rank 0 ended with code {code} ({code.name}); {path} could not be written"
    elif number := verdict.signal_number or _killed_by(verdict.controller_code):
        code = SIGNAL_CODES.get(number, ExitCode.REQUEUE)
        message = f"ended by {signal.Signals(number).name} before a step boundary"
    else:
        code = ExitCode.DEADLINE if 0 in verdict.silent else ExitCode.RANK_KILLED
        message = f"rank 0 ({', '.join(layout.roles_of(0))}) is lost: {verdict.lost[0]}" + f"; {hang}" * bool(hang)
    if code in ASKED:
        _say(message, logging.INFO)
    else:
        command = in_shell(f"python -m hpcrl logs {shlex.quote(str(run_dir))}")
        _say(f"{message} (logs: {command})", logging.ERROR)
    return code


def _leave_outcome(world: Path, code: int) -> None:
    """Write the outcome for other nodes' agents that still start and for hpcrl.launch.job; both work without it."""
    with contextlib.suppress(OSError):
        write_durably(world / OUTCOME, json.dumps({"code": code}).encode())


def _say(text: str, level: int = logging.WARNING) -> None:
    """Log one line for the user; it is lost if the log has no reader, so the exit code is kept."""
    with contextlib.suppress(OSError):
        logger.log(level, "%s", text)


def _killed_by(code: int) -> int:
    """The stop signal that ended rank 0 during its start, when rank 0 may receive it before the agent; else 0."""
    return -code if -code in STOPPING else 0


def main() -> int:
    """Command line of a node or rank process."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(in_shell(__doc__))
        return ExitCode.DONE if sys.argv[1:] in (["-h"], ["--help"]) else ExitCode.BAD_INPUT
    run_dir = Path(sys.argv[1])
    if FORKS in os.environ:
        fork_ranks_of_node(run_dir)
    with contextlib.ExitStack() as stack:
        with held_back():  # an agent loses no signal; signals end a rank until it can handle them
            if unseen := see_run(run_dir):
                logger.error(unseen)
                return ExitCode.BAD_INPUT
            config = stored_config(run_dir)
            place = find_place(os.environ, RoleLayout.from_config(config).world_size)
            # A batch script of hpcrl.launch starts agents, even if a node has only one rank.
            is_agent = place.kind == "agent" or (place.launcher == "slurm" and config.cluster.name == "slurm")
            signals = stack.enter_context(noted()) if is_agent else []
        if is_agent:
            attempt = int(os.environ.get("HPCRL_ATTEMPT", "1"))
            return run_node(run_dir, attempt, place.node, place.num_nodes, signals)
    shield_output()
    _start_log(run_dir, place)
    if place.launcher != "agent":
        os.environ[DESCRIPTOR] = str(new_page())  # for `hpcrl stacks --local`
    register_stacks(int(os.environ[DESCRIPTOR]))
    if place.index != 0:  # rank 0 and an agent handle them
        ignore_signals()
    return run_rank(run_dir, place)


if __name__ == "__main__":
    use_utf8()
    log.start("agent", console="stderr")
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of process groups and inference engines would keep the process alive
