"""hpcrl.train and hpcrl.evaluate: runs as the commands start them, from a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcrl.python.arguments import Given, arguments_of
from hpcrl.python.command_process import CommandProcess
from hpcrl.python.handle import RunHandle
from hpcrl.python.nesting import check_outside


def train(
    *words: str,
    reward: Given | Mapping[str, object] | None = None,
    env: Given | Mapping[str, object] | None = None,
    **keys: object,
) -> RunHandle:
    """Run a training, as `python -m hpcrl.launch` with these words and keys does, and return the run.

    On this machine (cluster=local, the default) the call returns when the run is finished; progress is printed, an
    interrupt (Ctrl-C, a notebook's stop) makes the run save at the next step boundary, and a second one kills it. With
    cluster="slurm" the call returns when the job is submitted. The same call again resumes the run, or returns a
    finished run at once.

    Args:
        words: Arguments of the command, such as "+experiment=demo", "trainer.lr=1e-5" or "--config=my.yaml"; they
            override keywords.
        reward: The reward of all domains, or domain -> reward: a function or class that can be imported from a file,
            its path ("my_reward.py:score"), the name of a built-in reward, or a mapping of keys.
        env: The same for environments.
        keys: Groups (experiment="demo", cluster="slurm") and keys, nested (trainer={"lr": 1e-5}). Texts are literal.

    ValueError if a value or a part cannot be given; RunFailed, with exit code 2 if nothing was started. Processes of
    the run import the files of parts, so a script calls this below `if __name__ == "__main__":`.
    """
    check_outside("hpcrl.train")
    arguments = _arguments("hpcrl.train starts it", words, reward, env, keys)
    return RunHandle(CommandProcess("launch", arguments).wait())


def evaluate(
    model: str | os.PathLike[str] | RunHandle,
    *words: str,
    step: int | str | None = None,
    reward: Given | Mapping[str, object] | None = None,
    env: Given | Mapping[str, object] | None = None,
    **keys: object,
) -> RunHandle:
    """Evaluate a model, or a run's model, as `hpcrl eval` does with these words and keys, and return the evaluation,
    which is a run of its own: `evaluation` has its scores, `validation()` its responses.

    Args:
        model: A folder in HF layout, a hub name in the local cache, or a run, whose data, rewards and sampling are
            used.
        step: Of a run: the checkpoint of this step, or `best` (keep_best.metric); None: the final model.

    Other arguments, printing, interrupts and errors are as for hpcrl.train. The same call again continues the
    evaluation, or returns a finished one.
    """
    check_outside("hpcrl.evaluate")
    arguments = _arguments("hpcrl.evaluate starts it", words, reward, env, keys)
    given = os.fspath(model.path if isinstance(model, RunHandle) else model)
    at = [] if step is None else ["--step", str(step)]
    return RunHandle(CommandProcess("eval", [given, *at, *arguments]).wait())


def _arguments(
    starts: str,
    words: Sequence[str],
    reward: Given | Mapping[str, object] | None,
    env: Given | Mapping[str, object] | None,
    keys: Mapping[str, object],
) -> list[str]:
    parts = {name: value for name, value in (("reward", reward), ("env", env)) if value is not None}
    arguments = arguments_of(words, {**keys, **parts})
    if any(word.lstrip("+").lower() == "dry_run=true" for word in arguments):
        raise ValueError(f"dry_run: hpcrl.plan returns the plan of a run; {starts}")
    return arguments
