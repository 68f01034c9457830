"""Compare two models on the same prompts: mean scores, the paired difference with its 95 % interval, and the prompts
that changed side.

    python -m hpcrl compare runs/a runs/b                  the newest validation of each run
    python -m hpcrl compare runs/a@0 runs/a@100            a run before its first step and after step 100
    python -m hpcrl compare runs/a runs/b --set aime --show 5      one set, and the five prompts that changed most
    python -m hpcrl compare runs/a runs/b --set gsm8k=default --by row     sets of other names and prompt templates
    python -m hpcrl compare out/model_a out/model_b --metric exact_match,strict-match      lm-evaluation-harness

A and B are run folders (or names in runs/), files validation/step_NNNNNN.jsonl, files samples_TASK_DATE.jsonl of
lm-evaluation-harness, or folders of these. Prompts that only one side has are counted and left out. Does not import
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.commands.comparison import Comparison, compared
from hpcrl.commands.comparison_text import as_json, as_table
from hpcrl.commands.status import find_run
from hpcrl.metrics.compared_side import By, ComparedSide
from hpcrl.metrics.lm_eval_samples import is_samples, newest_samples, read_samples
from hpcrl.metrics.responses import FOLDER
from hpcrl.metrics.validation_files import read_validation, validation_file
from hpcrl.system.cli import ArgumentParser, show, use_utf8
from hpcrl.system.exit_codes import ExitCode


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = ArgumentParser("hpcrl compare", __doc__)
    parser.add_argument("a", metavar="A[@STEP]", help="run folder or file; the baseline")
    parser.add_argument("b", metavar="B[@STEP]", help="run folder or file, which is compared with A")
    parser.add_argument("--set", metavar="NAME", help="compare this set only; NAME_A=NAME_B: sets of different names")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="show the N prompts with the largest change")
    parser.add_argument(
        "--by",
        choices=("prompt", "row"),
        default="prompt",
        help="prompts are the same if their texts are (default), or if they are the same row of the set's file",
    )
    parser.add_argument("--metric", metavar="NAME[,FILTER]", help="metric of lm-evaluation-harness; default: the first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        arguments = parser.parse_args(argv)
        if arguments.show < 0:
            raise ValueError(f"--show {arguments.show}: a number of prompts, from 0")
        names = (arguments.set or "").split("=")  # of the set in A and in B
        sides = zip((arguments.a, arguments.b), (names[0], names[-1]), strict=True)
        a, b = (read_side(given, arguments.by, arguments.metric, name) for given, name in sides)
        if arguments.metric is not None and a.origin == b.origin == "hpcrl":
            raise ValueError(f"--metric {arguments.metric}: of lm-evaluation-harness, and both sides are hpcrl's")
        found = compared(a, b, arguments.set, arguments.by)
        text = _shown(found, arguments.show, arguments.json)
    except (ValueError, OSError) as error:
        print(f"hpcrl compare: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    show(text)
    return ExitCode.DONE


def _shown(found: Comparison, count: int, json: bool) -> str:
    return as_json(found, count) if json else as_table(found, count)


def read_side(name: str, by: By = "prompt", metric: str | None = None, task: str = "") -> ComparedSide:
    """The responses that an argument names. Of a folder of lm-evaluation-harness, only `task` is read, if it has this
    task. ValueError if there are none."""
    path, step = _step_of(name)
    if not path.exists():
        try:
            path = find_run(str(path))
        except ValueError as error:
            raise ValueError(f"{path}: no such file, run folder or run in runs/") from error
    files = [path]
    if path.is_dir():
        samples = newest_samples(path) if not (path / FOLDER).is_dir() else {}
        if samples and step is not None:
            raise ValueError(f"{name}: @STEP selects a validation of a run folder; {path} has samples of tasks")
        files = [samples[task]] if task in samples else [*samples.values()] or [validation_file(path, step)]
    elif step is not None:
        raise ValueError(f"{name}: @STEP selects a validation of a run folder, and {path} is a file")
    if is_samples(files[0]):
        return read_samples(files, by, metric)
    return read_validation(files[0], by)


def _step_of(name: str) -> tuple[Path, int | None]:
    """The path, and the step after the last @ unless the whole name exists."""
    path, at, step = name.rpartition("@")
    if not at or Path(name).exists():
        return Path(name), None
    if not step.isascii() or not step.isdigit():
        raise ValueError(f"{name}: expected RUN@STEP with a number, such as {path or 'RUN'}@100")
    return Path(path), int(step)


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
