"""Runs that hang: `hpcrl stacks` shows where while they live, and hang.txt afterwards."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hpcrl.commands import stacks, status
from hpcrl.run_folder import hang_path
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.e2e.stuck_advantage import STUCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND_S = 10.0
SHOWN_S = 25.0  # in which a busy box shows the stacks of a live run several times
WORDS = f"""
max_steps=2000 save_every=0 eval_every=0 rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=3
data.max_prompt_tokens=32 rollout.filter_std=false algorithm.num_mini_batches=1 rollout.save_rollouts=false
timeouts.command_s={COMMAND_S} timeouts.grace_s=3 timeouts.store_s=6 timeouts.start_s=200 trackers=[]
""".split()


def start(folder: Path, model: Path, data: Path, *words: str) -> Start:
    environ = {"PYTHONPATH": str(ROOT), STUCK: "2"}
    return Start(folder / "run", [f"model.path={model}", f"data.train={data}", *WORDS, *words], environ)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `hpcrl stacks`."""
    code = stacks.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def read_only(path: Path, *_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def rank_of(text: str, rank: int) -> str:
    """What is said about a rank, with its stacks."""
    found = re.search(rf"^rank {rank} \(.*?(?=^rank \d+ \(.* on |\Z)", text[text.find("STACKS") + 1 :], re.M | re.S)
    assert found is not None, text
    return found[0]


def test_a_stuck_rank_is_shown_while_the_run_lives_and_when_its_deadline_ends_it(
    tmp_path: Path,
    digit_model: Path,
    digit_data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = "reward.default.name=exact_match", "algorithm.advantage_estimator=tests.e2e.user_code:STUCK"
    run = start(tmp_path, digit_model, digit_data, *stuck, f"timeouts.command_s={SHOWN_S}")
    run_dir = tmp_path / "run"
    run.wait_until(lambda: run.step >= 2)
    until = time.monotonic() + SHOWN_S
    while True:  # the third step may still decode
        code, out, err = shown(capsys, str(run_dir))
        assert (code, err) == (ExitCode.DONE, "")
        if ("in assign" in out and "waits for other ranks" in rank_of(out, 1)) or time.monotonic() > until:
            break
    assert re.match(r"rank 0 \(controller\) on \S+, process \d+: in call Advantages for \d+ s", out)
    assert "\n  waits for answers of other ranks\n" in rank_of(out, 0)
    assert re.search(r"\n  waits for other ranks, in \w+\n", rank_of(out, 1))
    told = rank_of(out, 2)
    assert re.search(r": in Advantages #\d+ for \d+ s, last heartbeat [0-4] s ago\n  is in assign \(.*stuck_adv", told)
    assert re.search(
        r"main thread \(most recent call first\):\n  File .*/stuck_advantage.py\", line \d+ in assign", told
    )
    for words, told in ((["--rank", "3"], "'3' is none of the run's ranks 0 to 2"), (["--wait", "0"], "--wait 0: ")):
        code, out, err = shown(capsys, str(run_dir), *words)
        assert code == ExitCode.BAD_INPUT and out == "" and err.count("\n") == 1 and told in err
    with monkeypatch.context() as patched:
        patched.setattr("hpcrl.node.stack_requests.write_durably", read_only)
        code, out, err = shown(capsys, str(run_dir))
    assert (code, out) == (ExitCode.BAD_INPUT, "") and err.startswith("hpcrl: no stacks: [Errno 30] Read-only")
    code, out, err = shown(capsys, str(run_dir), "--rank", "2", "--local")
    assert (code, err) == (ExitCode.DONE, "") and out.startswith("rank 2 (") and "in assign" in out

    assert run.wait(SHOWN_S + 40) == ExitCode.DEADLINE, run.text
    path = hang_path(run_dir, 1)
    assert f"; stacks of all ranks: {path} (logs: " in run.errors.read_text()
    text = path.read_text()
    assert "rank 1 waits for rank 2 in the same command\n" in text
    assert re.search(
        r"^rank 2 \(.*\) has been in Advantages #\d+ for [23]\d s: it is in assign \(.*stuck_adv", text, re.M
    )
    assert "in assign" in rank_of(text, 2) and "in all_sum" in rank_of(text, 1)
    assert f"\nhang     {path}: " in status.describe(run_dir, None, time.time())
    code, out, err = shown(capsys, str(run_dir))
    assert code == ExitCode.BAD_INPUT and out == "" and err.count("\n") == 1
    assert f"{run_dir} does not run: stopped: attempt 1 ended" in err and str(path) in err


def test_a_reward_that_sleeps_is_shown_with_its_own_process(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    """A reward without an effective timeout."""
    reward = f"reward.default.function={ROOT}/tests/e2e/user_code.py:slow_reward"
    words = "reward.default.name=function", reward, "reward.default.timeout_s=600"
    run = start(tmp_path, digit_model, digit_data, *words)
    assert run.wait(100) == ExitCode.DEADLINE, run.text
    text = hang_path(tmp_path / "run", 1).read_text()
    assert re.search(r"^8 responses wait for a reward or an environment of rank 1 \(trainer, ", text, re.M)
    assert re.search(r"^prompt 0 \(default\), drawn \d\d s ago: 0 of 4 responses done, 4 at rank \d$", text, re.M)
    child = rank_of(text, 1).partition("child process ")[2]
    assert re.search(r"main thread .*:\n  File .*user_code.py\", line \d+ in slow_reward\n", child)


def test_a_stopped_controller_is_reported_by_its_agent(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    run = start(tmp_path, digit_model, digit_data, "reward.default.name=exact_match")
    run.wait_until(lambda: run.step >= 1)
    os.kill(run.ranks[0], signal.SIGSTOP)
    assert run.wait(60) == ExitCode.DEADLINE, run.text
    path = hang_path(tmp_path / "run", 1)
    assert f"; stacks of all ranks: {path} (logs: " in run.errors.read_text()
    text = path.read_text()
    stopped = rank_of(text, 0)
    assert (
        "\n  process: stopped by a signal" in stopped and "\n  no stack: the process is stopped by a signal" in stopped
    )
    assert "main thread" not in stopped and "main thread" in rank_of(text, 1) and "main thread" in rank_of(text, 2)
    assert text.splitlines()[1].startswith("rank 0 was stopped (SIGSTOP) for ")
