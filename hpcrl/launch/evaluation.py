"""Evaluate a model, or a run's model, on validation data, without training.

    python -m hpcrl eval runs/sft                                        # the run's final model on its data.val
    python -m hpcrl eval runs/sft --step 200 eval.samples=8 eval.temperature=0.8
    python -m hpcrl eval runs/sft --step best                            # with keep_best.metric
    python -m hpcrl eval runs/sft --follow                               # each checkpoint, while the run goes on
    python -m hpcrl eval runs/sft --follow --every 100 +cluster=slurm cluster.partition=gpu
    python -m hpcrl eval Qwen/Qwen2.5-0.5B-Instruct data.val=gsm8k.jsonl eval.num_prompts=500
    python -m hpcrl eval models/mine +experiment=rlvr_gsm8k generator.engine=vllm +cluster=slurm cluster.partition=gpu

FOLDER is a model in HF layout, or a run: then data.val, rewards, environments, eval, the generator and the sampling are
those of the run. WORDS are settings as for `python -m hpcrl.launch`; dry_run=true prints the plan only. The evaluation
is a run of its own, runs/NAME_eval. The same command continues it after a kill, and shows its results again.

--follow holds none of the run's ranks: it evaluates each checkpoint like --step N, the oldest first, one at a time (on
Slurm as a job each), waits for the next one until the run has ended, and prints the scores over steps. The run may have
eval_every=0, and still wait in the queue. After a kill the same command goes on, and shows the table again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpcrl.checkpoint.best import read_best
from hpcrl.cluster import slurm
from hpcrl.config import Config, ConfigError, read
from hpcrl.config.untrained import OTHERS, READ
from hpcrl.launch import following
from hpcrl.launch.hub import NAME
from hpcrl.launch.start import start
from hpcrl.launch.watched import Watched
from hpcrl.metrics.evaluated import SUMMARY, as_table
from hpcrl.node.devices import visible_gpus
from hpcrl.rewards.serving.router import built_in_rewards
from hpcrl.run_folder import CONFIG, SUBMITTED, branches_of, read_finished, stored_config
from hpcrl.run_folder.opening import EVALUATED
from hpcrl.run_folder.records import read_attempts
from hpcrl.system import log
from hpcrl.system.cli import ArgumentParser, in_shell, show, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import is_storage_error, step_name, steps_in, write_durably

RUNS = Path("runs")
SECTIONS = ("seed", "data", "reward", "env", "eval", "rollout", "generator", "judge", "reward_model", "timeouts")
"""What an evaluation takes from a run."""
OF_CLUSTER = ("device", "threads_per_rank")
KEYS, MODEL = "keys.yaml", following.MODEL
"""In EVALUATED: the keys taken from the run, and the model of its checkpoint."""
OF_EACH = ("run_name", "run_dir", "resume", "dry_run")
"""Keys that a following command sets for each evaluation, or cannot have."""


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code of the evaluation's run."""
    parser = ArgumentParser("hpcrl eval", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="model in HF layout, its hub name, or a run")
    parser.add_argument("words", nargs="*", metavar="WORD", help="setting, such as data.val=gsm8k.jsonl")
    parser.add_argument(
        "--step", metavar="N|best", help="of a run: this step's checkpoint, or the best one (keep_best.metric)"
    )
    parser.add_argument(
        "--follow", action="store_true", help="of a run: each checkpoint, until the run has ended; then a table"
    )
    parser.add_argument("--every", metavar="N", help="with --follow: only steps that are multiples of N")
    parser.add_argument("--newest", action="store_true", help="with --follow: skip checkpoints if there is a newer one")
    parser.add_argument(
        "--keep-best", action="store_true", help="with --follow: of the converted models, keep that of the best step"
    )
    try:
        given = parser.parse_intermixed_args(argv)
        if given.follow:
            return _follow(given.folder, given.step, given.every, given.newest, given.keep_best, given.words)
        for option in ("every", "newest", "keep_best"):
            if getattr(given, option):
                raise ValueError(f"--{option.replace('_', '-')} belongs to --follow; give both or none")
        return _evaluate(given.folder, given.step, given.words)
    except ConfigError as error:
        print(in_shell("\n".join(error.problems)), file=sys.stderr)
        return ExitCode.BAD_INPUT
    except (ValueError, OSError, slurm.SlurmError) as error:
        print(in_shell(f"hpcrl eval: {' '.join(str(error).split())}"), file=sys.stderr)
        return ExitCode.NOT_SAVED if is_storage_error(error) else ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _evaluate(given: str, step: str | None, words: Sequence[str]) -> int:
    if "dry_run=true" not in words:
        _check_slurm(words)
    folder = _folder(given)
    if (folder / CONFIG).is_file():
        return _of_run(folder, None if step is None else _number(folder, step), words)
    if step is not None:
        raise ValueError(f"--step {step}: {given} is not a run folder (no {CONFIG}); leave --step out")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{given}: neither a model (no config.json) nor a run (no {CONFIG}); name one of them")
    if not folder.is_dir() and not NAME.fullmatch(given):
        raise ValueError(f"{given}: no such folder, and no run of this name in {RUNS}/")
    if folder.name == MODEL and (run := folder.parent / CONFIG).is_file() and not _sets_data(words):
        raise ValueError(
            f"{given}: no validation data; give data.val=FILE, or evaluate the run on its own data: "
            f"python -m hpcrl eval {shlex.quote(str(run.parent))}"
        )
    path = json.dumps(str(folder) if folder.is_dir() else given, ensure_ascii=False)
    own = [f"run_name={_name(folder)}_eval", "pipeline=evaluate", f"model.path={path}"]
    if not any(word.lstrip("+~").startswith(("layout", "experiment=", "--config")) for word in words):
        own += ["layout.generator.colocate_with=null", f"layout.generator.num_ranks={_num_ranks(1, words)}"]
    words = [*own, *words]
    return _start(words, _run_dir(words))


def _sets_data(words: Sequence[str]) -> bool:
    """Whether settings may give validation data."""
    return any(word.lstrip("+").startswith(("data", "experiment=", "--config")) for word in words)


def _check_slurm(words: Sequence[str]) -> None:
    """SlurmError for an evaluation as a job where Slurm does not answer, before a folder or a model is made."""
    if not any(word.lstrip("+") in ("cluster=slurm", "cluster.name=slurm") for word in words):
        return
    try:
        slurm.cluster_name()
    except slurm.SlurmError as error:
        raise slurm.SlurmError(f"cluster=slurm: {error}; on a machine without Slurm, leave it out") from error


def _folder(given: str) -> Path:
    return next((path for path in (Path(given), RUNS / given) if path.is_dir()), Path(given))


def _follow(
    given: str, step: str | None, every: str | None, newest: bool, keep_best: bool, words: Sequence[str]
) -> int:
    """Evaluate the checkpoints of a run as they are written."""
    _check_slurm(words)
    if step is not None:
        raise ValueError(f"--step {step}: --follow evaluates every checkpoint; leave one of the two out")
    if every is not None and not re.fullmatch(r"[1-9]\d{0,11}", every):
        raise ValueError(f"--every {every}: expected a number of steps from 1")
    for word in words:
        if (key := word.lstrip("+~").partition("=")[0]) in OF_EACH:
            raise ValueError(f"{word}: --follow starts a run for each step; leave {key} out")
    folder = _folder(given)
    if not (folder / CONFIG).is_file():
        if not (folder / SUBMITTED).is_file():
            raise ValueError(f"--follow: {given} is not a run folder (no {CONFIG}); leave --follow out")
        _wait_for_start(folder)
    config = _config_of(folder, words)
    best = config.keep_best
    return following.Following(
        folder,
        lambda number: RUNS / _run_name(folder, number),
        lambda number: _of_run(folder, number, words),
        metric=best.metric or "val/score/mean",
        mode=best.mode,
        every=int(every or 1),
        newest=newest,
        keep_best=keep_best,
    ).follow()


def _wait_for_start(folder: Path) -> None:
    """Return when the submitted run has begun. ValueError if it will not."""
    run = Watched(folder, aloud=True)
    while not (folder / CONFIG).is_file():
        if (ended := run.ended()) and not (folder / CONFIG).is_file():
            raise ValueError(f"--follow: {folder} is {ended}; submit the run first")
        time.sleep(following.POLL_S)


def _number(run: Path, step: str) -> int:
    """The step that `--step` means. ValueError if it is none of this run's."""
    if re.fullmatch(r"\d{1,12}", step):
        return int(step)
    if step != "best":
        raise ValueError(f"--step {step}: expected a step's number or best")
    if (best := read_best(run / "checkpoints")) is None:
        raise ValueError(f"--step best: {run} names no best checkpoint (keep_best.metric); give --step N")
    return best.step


def _config_of(run: Path, words: Sequence[str]) -> Config:
    """The run's configuration. ValueError if the run has no model or validation data to evaluate."""
    config = stored_config(run)
    if not config.pipeline_spec.trains:
        raise ValueError(
            f"{run}: the run has no model of its own, it only evaluates {config.model.path}; give this folder"
        )
    if config.data.val is None and not any(word.lstrip("+").startswith("data.val=") for word in words):
        raise ValueError(f"{run}: the run has no validation data (data.val); give data.val=FILE")
    return config


def _run_name(run: Path, number: int) -> str:
    """The name of the evaluation of a run's step."""
    return f"{_name(run)}_eval_{step_name(number)}{_branch(run, number)}"


def _of_run(run: Path, step: int | None, words: Sequence[str]) -> int:
    config = _config_of(run, words)
    steps, finished = steps_in(run / "checkpoints"), read_finished(run)
    there = ", ".join(map(str, steps)) or "none"
    if step is None and not (finished and (run / MODEL / "config.json").is_file()):  # hf/ may be of an earlier end
        raise ValueError(f"{run}: no final model ({MODEL}/): the run has not ended; give --step N (there are: {there})")
    number = step if step is not None else finished.get("step")
    name = f"{_name(run)}_eval" if number is None else _run_name(run, number)
    words = [f"run_name={name}", "pipeline=evaluate", *words]
    folder, dry = _run_dir(words), "dry_run=true" in words
    model = run / MODEL if step is None else folder / EVALUATED / MODEL
    if step is not None and step not in steps and not model.is_dir():  # else keep_checkpoints has removed it since
        raise ValueError(f"--step {step}: {run} has no checkpoint of this step; there are: {there}")
    if dry and not model.is_dir():
        raise ValueError(f"dry_run: the checkpoint of step {step} is not converted yet; leave dry_run out")
    with tempfile.TemporaryDirectory() as temporary:
        beside = Path(temporary) if dry else folder / EVALUATED
        beside.mkdir(parents=True, exist_ok=True)
        keys = yaml.safe_dump(_keys(config, model, words), sort_keys=False, allow_unicode=True)
        write_durably(beside / KEYS, keys.encode())
        words = ["--config", str(beside / KEYS), *words]
        try:
            if not model.is_dir():
                _check_settings(words)
                _convert(run / "checkpoints" / step_name(step or 0), model, config)
            return _start(words, folder)
        except ConfigError:
            if not dry and not (folder / CONFIG).exists():  # nothing was started; a converted model is kept
                (beside / KEYS).unlink()
                _remove_empty(beside, folder)
            raise


def _branch(run: Path, step: int) -> str:
    """What tells a step apart from the same step before a branch, whose evaluation may exist: `_branch_ATTEMPT`."""
    opened = [each["attempt"] for each in branches_of(read_attempts(run)) if each["from"] < step]
    return f"_branch_{opened[-1]}" if opened else ""


def _check_settings(words: Sequence[str]) -> None:
    """ConfigError for wrong settings, before a conversion that may take long."""
    if (reading := read(words)).problems:
        raise ConfigError(reading.lines())


def _start(words: Sequence[str], folder: Path) -> int:
    """Start the run, or continue it; show the results of a run that had finished before."""
    finished = read_finished(folder)
    code = start(words)
    if finished and code == ExitCode.DONE and (folder / SUMMARY).is_file() and read_finished(folder) == finished:
        show("\n".join(["", *as_table(json.loads((folder / SUMMARY).read_bytes()))]))
    return code


def _convert(checkpoint: Path, target: Path, config: Config) -> None:
    """Write a checkpoint as a model in HF layout, in the type of the run's exports."""
    import torch  # only here: the other evaluations need none on a login node

    from hpcrl.convert.conversions import ConvertOptions, to_hf

    target.parent.mkdir(parents=True, exist_ok=True)
    options = ConvertOptions(dtype=getattr(torch, config.model.dtype), again=True, stream=sys.stderr)
    to_hf(checkpoint, target, options)


def _keys(config: Config, model: Path, words: Sequence[str]) -> dict[str, Any]:
    """The evaluation's configuration as far as the run has it."""
    stored = config.model_dump(mode="json")
    keys = {section: stored[section] for section in SECTIONS}
    for path in OTHERS:
        if len(path) > 1 and path[0] in keys:
            keys[path[0]] = {name: value for name, value in keys[path[0]].items() if name != path[1]}
    keys["rollout"] = {name: keys["rollout"][name] for name in READ if name != "min_replicas"}
    keys["rollout"]["domains"] = {
        domain: {"max_new_tokens": own["max_new_tokens"]} for domain, own in keys["rollout"]["domains"].items()
    }
    if not config.reward:
        keys["reward"] = {name: own.model_dump(mode="json") for name, own in built_in_rewards(config).items()}
    keys["model"] = {"path": str(model)}
    keys["cluster"] = {name: stored["cluster"][name] for name in OF_CLUSTER}
    tensor = config.layout.generator.tensor_parallel
    own = {"colocate_with": None, "num_ranks": _num_ranks(tensor, words), "tensor_parallel": tensor}
    keys["layout"] = {"generator": own}
    return {name: keys[name] for name in ("model", "layout", "cluster", *SECTIONS)}


def _num_ranks(tensor_parallel: int, words: Sequence[str]) -> int:
    """Generator ranks: as many replicas as this machine's GPUs allow; one on CPUs and in a Slurm job."""
    local = not any("cluster=slurm" in word or word == "cluster.device=cpu" for word in words)
    gpus = len(visible_gpus(os.environ)) if local else 0
    return max(1, gpus // tensor_parallel) * tensor_parallel


def _run_dir(words: Sequence[str]) -> Path:
    """The run folder of these settings."""
    found: Iterator[str] = (word.partition("=")[2] for word in reversed(words) if word.startswith("run_dir="))
    given = next(found, "")
    name = next(word.partition("=")[2] for word in reversed(words) if word.startswith("run_name="))
    return Path(given.strip("'\"")) if given else RUNS / name.strip("'\"")


def _name(folder: Path) -> str:
    """A run's or model's name, for the name of its evaluation."""
    place = folder.absolute()
    parts = [place.parent.name, place.name] if place.name == MODEL else [place.name]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).lstrip(".-") or "model"


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        if not any(folder.iterdir()):
            folder.rmdir()


if __name__ == "__main__":
    use_utf8()
    log.start("", console="stderr")
    sys.exit(main(sys.argv[1:]))
