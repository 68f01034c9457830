"""Killed before every single file operation, in turn: nothing committed is lost, nothing blocks the next attempt."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.checkpoint.commit import find_latest
from hpcrl.checkpoint.lineage import abandon_after
from hpcrl.run_folder import branches_of, check_run, close_run, open_run
from hpcrl.run_folder.records import read_attempts
from hpcrl.system.files import steps_in
from tests.checkpoint.test_commit import check_whole, flip, save
from tests.checkpoint.test_lineage import make_run, metric_steps

pytestmark = pytest.mark.slow

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")


def killed_everywhere(template: Path, action: Callable[[Path], object]) -> Iterator[tuple[Path, bool]]:
    """Copies of `template` in which `action` was killed before its 1st, 2nd, ... file operation; the last one was not.

    Yields (copy, whether the action came to its end).
    """
    for countdown in range(1, 500):
        copy = template.with_name(f"{template.name}-{countdown}")
        if template.exists():
            shutil.copytree(template, copy)
        if not (child := os.fork()):
            _run_and_die(copy, action, countdown)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"the action failed by itself with {status}"
        yield copy, status == 0
        shutil.rmtree(copy, ignore_errors=True)
        if status == 0:
            assert countdown > 5, "the hook saw hardly any file operation"
            return


def _run_and_die(copy: Path, action: Callable[[Path], object], countdown: int) -> None:
    def hook(event: str, arguments: tuple) -> None:
        nonlocal countdown
        opened = event == "open" and isinstance(arguments[0], str | os.PathLike) and str(copy) in str(arguments[0])
        if opened or event in CHANGES:
            countdown -= 1
            if not countdown:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        os.fsync = lambda descriptor: None  # survives a power failure; a killed process needs no sync
        sys.addaudithook(hook)
        action(copy)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def test_a_save_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    template = tmp_path / "checkpoints"
    for step in (10, 20):
        save(template, step)
    (template / "step_000030.tmp-1").mkdir()
    (template / "step_000030.tmp-1" / "half").write_text("x")
    newest = []
    for root, done in killed_everywhere(template, lambda root: save(root, 30, attempt=2)):
        manifest = find_latest(root).manifest
        assert manifest is not None and {20} <= set(steps_in(root))
        newest.append(manifest.step)
        check_whole(root, manifest.step)
        if manifest.step == 20:
            save(root, 30, attempt=3)
        save(root, 40, attempt=3)
        assert sorted(p.name for p in root.iterdir() if p.name[0] != ".") == ["LATEST", "step_000030", "step_000040"]
        assert done <= (manifest.step == 30)
    assert newest == sorted(newest) and {20, 30} == set(newest), "once committed, always committed"


def test_setting_aside_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    template = tmp_path / "run"
    make_run(template)
    flip(template / "checkpoints/step_000004/state.json")
    for run, _ in killed_everywhere(template, lambda run: abandon_after(run, 2, attempt=2)):
        manifest = find_latest(run / "checkpoints").manifest
        assert manifest is not None and manifest.step == 2
        abandon_after(run, 2, attempt=3)
        assert steps_in(run / "rollouts") == [1, 2] and metric_steps(run / "metrics.jsonl") == [0, 1, 2]
        aside = [step for part in (run / "abandoned").iterdir() for step in steps_in(part / "rollouts")]
        assert sorted(aside) == [3, 4, 5, 6]
        cut = {step for path in (run / "abandoned").glob("*/metrics.jsonl") for step in metric_steps(path)}
        assert cut == {3, 4, 5, 6}


def test_a_branch_killed_anywhere_while_later_work_is_set_aside_loses_nothing(tmp_path: Path) -> None:
    template = tmp_path / "run"
    make_run(template)
    for run, _ in killed_everywhere(template, lambda run: abandon_after(run, 2, attempt=2, branch=True)):
        check_whole(run / "checkpoints", max(steps_in(run / "checkpoints")))
        abandon_after(run, 2, attempt=3, branch=True)
        assert steps_in(run / "checkpoints") == [2] and find_latest(run / "checkpoints").problems == []
        assert steps_in(run / "rollouts") == [1, 2] and metric_steps(run / "metrics.jsonl") == [0, 1, 2]
        kept = [part for part in (run / "abandoned").glob("*/checkpoints") if steps_in(part)]
        assert [steps_in(part) for part in kept] == [[4]]
        check_whole(kept[0], 4)


def test_opening_a_branch_killed_anywhere_opens_it_at_the_next_start(tmp_path: Path) -> None:
    """The old configuration with its newest step, or the new one with the branch's step; never a mixture."""
    config: dict[str, Any] = {"run_name": "demo", "max_steps": 5, "trainer": {"lr": 0.1}, "resume_from": None}
    changed = config | {"trainer": {"lr": 0.01}, "resume_from": 2}
    template = tmp_path / "demo"
    close_run(template, open_run(config, template, "auto").attempt)
    for step in (2, 4):
        (template / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    states = set()
    for run, _ in killed_everywhere(template, lambda run: open_run(changed, run, "auto")):
        for record in (run / "owners").glob("*"):
            if not record.read_text():
                record.write_text('{"ended": "spares the wait for a record that is made but not written"}')
        stored = yaml.safe_load((run / "config.yaml").read_text())
        states.add((stored["trainer"]["lr"], stored["resume_from"]))
        state = open_run(changed, run, "auto")
        assert state.from_step == 2
        branches = branches_of(read_attempts(run))
        assert {branch["from"] for branch in branches} == {2} and len(branches) == 1
        close_run(run, state.attempt)
    assert states == {(0.1, None), (0.01, 2)}


@pytest.mark.parametrize("before", ["nothing", "a run"])
def test_opening_a_run_killed_anywhere_loses_nothing(tmp_path: Path, before: str) -> None:
    config = {"run_name": "demo", "max_steps": 5, "trainer": {"lr": 0.1}}
    template = tmp_path / "demo"
    if before == "a run":
        close_run(template, open_run(config, template, "auto").attempt)
        (template / "checkpoints").mkdir()
    for run, _ in killed_everywhere(template, lambda run: open_run(config | {"run_dir": str(run)}, run, "auto")):
        for record in (run / "owners").glob("*") if (run / "owners").exists() else ():
            if not record.read_text():
                record.write_text('{"ended": "spares the wait for a record that is made but not written"}')
        state = open_run(config, run, "auto")
        assert state.attempt in (1, 2, 3)
        assert before == "nothing" or (state.kind == "resume" and (run / "checkpoints").is_dir())
        close_run(run, state.attempt)
        assert check_run(config, run, "auto").kind == "resume"
