"""The front door: `python -m hpcrl.launch`. Checks everything that can be known before a process is started."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.cluster import slurm
from hpcrl.cluster.container import check_container
from hpcrl.cluster.layout import RoleLayout, check_layout
from hpcrl.cluster.placement import Placement, check_placement
from hpcrl.config import Config, ConfigError, Problem, Reading, read
from hpcrl.config.checks import check_built, check_family, check_length
from hpcrl.exitcodes import ExitCode
from hpcrl.files import write_durably
from hpcrl.launch.help import overview, reference, section
from hpcrl.launch.hub import find_model
from hpcrl.launch.model_folder import ModelFolder, inspect_model
from hpcrl.launch.plan import describe, plan_shape
from hpcrl.launch.render import check_prologue, check_words, render
from hpcrl.launch.stored import check_rollouts
from hpcrl.planner.memory import check_sizes
from hpcrl.planner.shapes import CannotPlanError
from hpcrl.rundir import CONFIG, SLURM, RunState, check_run, record_submission
from hpcrl.signals import held_back


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code (hpcrl/exitcodes.py)."""
    try:
        if help_at := [i for i, word in enumerate(argv) if word in ("-h", "--help")]:
            topic = argv[help_at[0] + 1 :]
            print(reference() if topic == ["markdown"] else section(topic[0]) if topic else overview())
            return ExitCode.DONE
        if "-m" in argv or "--multirun" in argv:
            from hpcrl.launch.sweep import sweep

            return sweep([word for word in argv if word not in ("-m", "--multirun")])
        return start(argv)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return ExitCode.BAD_INPUT
    except slurm.SlurmError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except OSError as error:  # a full disk, a folder that went away
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def start(argv: Sequence[str]) -> int:
    """Check the run, print its plan and, unless there is nothing to do, run it to its end; returns the exit code."""
    config, layout, model, run = prepare(argv)
    print(describe(config, layout, model, run), flush=True)
    if config.dry_run:
        print("\ndry_run: nothing was started or written")
        print("".join(f"this version cannot run it: {problem.text}\n" for problem in check_built(config)), end="")
        return ExitCode.DONE
    if run.kind == "finished":
        print(f"\nfinished: {run.finished['reason']}; raise max_steps, or choose another run_name or resume=fresh")
        return ExitCode.DONE
    if config.cluster.name == "slurm":
        job, *links = submit(config, layout, argv)
        log = Path(config.run_dir) / SLURM / f"job-{job}.log"
        print(f"\njob {job} is submitted\n  follow  tail -F {log}")
        print(f"  status  python -m hpcrl.status {config.run_dir}")
        print(f"  stop    scancel {' '.join(map(str, [job, *links]))}")
        if links:
            print(f"  chain   {', '.join(map(str, links))} go on after it")
        return ExitCode.DONE
    from hpcrl.run import launch_local  # a dry run needs none of it

    return launch_local(config)


def submit(config: Config, layout: RoleLayout, argv: Sequence[str]) -> list[int]:
    """Write the batch script into the run folder and submit it; returns the job's id, of a chain those of all links.

    SlurmError with Slurm's reason, ConfigError where the script cannot be written; then nothing is left in the queue.
    """
    run_dir = Path(config.run_dir)
    words = [word for word in argv if not word.startswith(("run_dir=", "resume="))]
    script = run_dir / SLURM / "job.sbatch"
    words += [f"run_dir={run_dir}", *(["resume=auto"] if config.resume == "fresh" else [])]  # fresh is done with
    text = render(config, Placement.from_config(config, layout), words, sys.executable)
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        write_durably(script, text.encode())
    except OSError as error:
        raise ConfigError([f"run folder {run_dir} cannot be written: {error}"]) from error
    jobs: list[int] = []
    cluster = slurm.cluster_name()
    try:
        for _ in range(config.cluster.num_links if config.cluster.after == "chain" else 1):
            with held_back():  # an interrupt would leave a job in the queue that nobody knows of
                jobs.append(slurm.submit(script, script.parent / "job-%j.log", after=jobs[-1] if jobs else None))
                record_submission(run_dir, jobs, cluster)
    except (OSError, KeyboardInterrupt):  # no note of a job that is in the queue, or half a chain
        slurm.cancel(jobs)
        raise
    except slurm.SlurmError as error:
        slurm.cancel(jobs)
        raise slurm.SlurmError(f"Slurm refuses the job: {error} (script: {script})") from error
    return jobs


def prepare(argv: Sequence[str]) -> tuple[Config, RoleLayout, ModelFolder | None, RunState]:
    """Everything about a run that is known before it starts; its config.run_dir is the folder it will use.

    Writes nothing. ConfigError holds all problems of configuration, layout, data, rewards, model and run folder.
    """
    reading = read(argv)
    config = reading.config
    model = run = None
    if config is not None:
        reading.add([] if config.dry_run else check_built(config))
        layout_problems = check_layout(config)
        reading.add(layout_problems)
        if not layout_problems:
            reading.add(check_placement(config, RoleLayout.from_config(config)))
        _check_inputs(reading, config)
        config = _find_model(reading, config)
        model = _check_model(reading, config)
        if not layout_problems:
            _check_sizes(reading, config, model)
        run = _check_run(reading, config)
        if run is not None and config.cluster.name == "slurm":
            reading.add([Problem((), line, (("run_dir",),)) for line in check_words(argv, run.run_dir)])
    if reading.problems or config is None or run is None:
        raise ConfigError(reading.lines())
    config = config.model_copy(update={"run_dir": str(run.run_dir)})
    return config, RoleLayout.from_config(config), model, run


def _check_inputs(reading: Reading, config: Config) -> None:
    """Files of prompts, how they are scored, stored rollouts, and what the ranks run in."""
    from hpcrl.data import validate_sources
    from hpcrl.rewards.router import validate_rewards

    if config.debug != "train_only" or config.evaluates:
        prompts = config.rollout.num_prompts if config.reinforces else None
        reading.add([Problem((), line, (("data",),)) for line in validate_sources(config.data, prompts)])
        reading.add([Problem((), line, (("reward",), ("data",))) for line in validate_rewards(config)])
    reading.add(check_rollouts(config))
    reading.add(check_container(config.cluster))
    reading.add(check_prologue(config.cluster))


def _find_model(reading: Reading, config: Config) -> Config:
    """The configuration with the folder in place of a model's hub name; as it was where that is not to be had."""
    if config.model.path is None:
        return config
    try:
        path = find_model(config.model.path, plan_only=config.dry_run)
    except ValueError as error:
        key = ("model", "path")
        reading.add([Problem(key, str(error))])
        reading.unread.append(key)  # nothing more can be said of it
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _check_model(reading: Reading, config: Config) -> ModelFolder | None:
    """The model folder, where one is given; None where the tiny model is made."""
    if config.model.path is None:
        return None
    model = inspect_model(Path(config.model.path), to_plan=config.dry_run)
    reading.add([Problem((), line, (("model", "path"),)) for line in model.problems])
    if model.model_type:
        reading.add(list(check_family(config, model.model_type, ("model", "path"))))
    if model.max_positions is not None:
        reading.add(list(check_length(config, model.max_positions, f"max_position_embeddings of {model.path}")))
    return model


def _check_sizes(reading: Reading, config: Config, model: ModelFolder | None) -> None:
    """Whether the model can be cut as asked; nothing where its family is not known, which the plan says."""
    with contextlib.suppress(CannotPlanError):
        reading.add(check_sizes(config, RoleLayout.from_config(config), plan_shape(config, model)))


def _check_run(reading: Reading, config: Config) -> RunState | None:
    """The run folder. Where keys could not be read, a stored run cannot be compared and is left alone."""
    if reading.unread and (Path(config.run_dir) / CONFIG).exists():
        return None
    try:
        started = config.model_copy(update={"dry_run": False})
        return check_run(started.model_dump(mode="json"), config.run_dir, config.resume)
    except ConfigError as error:
        reading.add([Problem((), line, (("run_dir",), ("run_name",))) for line in error.problems])
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
