"""Whatever happens to a rank, the run ends in time with one line and the right code, or continues without the rank."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.checkpoint.commit import find_latest
from hpcrl.messaging import messages, queues
from hpcrl.messaging.mailbox_server import Dialer
from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.disks import small_file_system
from tests.e2e.cutting_off import cut_off
from tests.e2e.program import Start
from tests.e2e.test_resume import check_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND_S, GRACE_S, STORE_S = 14.0, 3.0, 6.0
SLACK_S = 30.0  # for a box whose cores are busy
WORDS = f"""
max_steps=2000 save_every=1 eval_every=0 rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=3
data.max_prompt_tokens=32 rollout.filter_std=false algorithm.num_mini_batches=1 reward.default.name=exact_match
trainer.lr=1e-3 rollout.save_rollouts=false timeouts.command_s={COMMAND_S} timeouts.grace_s={GRACE_S}
timeouts.store_s={STORE_S} timeouts.start_s=200
""".split()
APART = "layout.trainer.num_ranks=1 layout.{0}.num_ranks=2 layout.{0}.colocate_with=null"
"""One rank trains and generates, two of their own play the role {0}: ranks 2 and 3."""
REWARD = f"reward.default.name=function reward.default.function={ROOT}/tests/e2e/user_code.py:"
ENV = "env=scripted env.default.name=class env.default.class_path=tests.e2e.user_code:RoughEnv"


class Runs:
    """Starts in one folder."""

    def __init__(self, folder: Path, model: Path, data: Path):
        self.folder, self.words = folder, [f"model.path={model}", f"data.train={data}", *WORDS]

    def start(self, name: str, *more: str) -> Start:
        words = [word for line in more for word in line.split()]
        return Start(self.folder / name, [*self.words, *words], {"PYTHONPATH": str(ROOT)})

    def running(self, name: str, *more: str, past: int = 0) -> Start:
        """A start that has logged the fourth step after `past`, so the second step's checkpoint exists: a save waits
        for the one before."""
        start = self.start(name, *more)
        start.wait_until(lambda: start.step >= past + 4)
        assert start.process.poll() is None, start.text
        return start

    def ended(self, name: str, *more: str) -> Start:
        """A start that has ended."""
        start = self.start(name, *more)
        start.wait()
        return start


@pytest.fixture
def runs(tmp_path: Path, digit_model: Path, digit_data: Path) -> Runs:
    return Runs(tmp_path, digit_model, digit_data)


def newest(run_dir: Path) -> int:
    """Step of the newest valid checkpoint."""
    manifest = find_latest(run_dir / "checkpoints").manifest
    assert manifest is not None
    return manifest.step


def log_of(run_dir: Path, rank: int, attempt: int = 1) -> str:
    return (run_dir / "logs" / f"attempt_{attempt:04d}" / f"rank_{rank:04d}.log").read_text()


def assert_ended(start: Start, code: ExitCode, *parts: str, within_s: float) -> str:
    """It ends in time with this code and one line that has these parts, and leaves no process; the line."""
    began = time.monotonic()
    assert start.wait(within_s + SLACK_S) == code, start.text
    took_s = time.monotonic() - began
    lines = start.errors.read_text().splitlines()
    assert len(lines) == 1 and lines[0].startswith("hpcrl: "), start.text
    for part in parts:
        assert re.search(part, lines[0]), (part, lines[0], took_s)
    deadline = time.monotonic() + GRACE_S
    while left := start.processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    return lines[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (folder := tmp_path / "run").mkdir()
    with small_file_system(folder, 4) as small:
        yield small


def test_a_full_disk_ends_the_run_as_not_saved_and_names_the_file(runs: Runs, small_disk: Path) -> None:
    """Logs and the verdict are on the full disk too."""
    start = runs.start("run", "layout=single rollout.save_rollouts=true")
    start.wait_until(lambda: start.step >= 4)
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(512))
    assert start.wait() == ExitCode.NOT_SAVED, start.text
    assert re.search(
        rf"^hpcrl: .*{small_disk}/.*No space left|^hpcrl: .*No space left .*{small_disk}/", start.text, re.M
    )
    assert "Traceback" not in start.text
    assert [path for path in small_disk.rglob("*") if "tmp" in path.name] == []
    assert newest(small_disk) >= 2


def test_dead_or_stopped_ranks_end_the_run_which_then_resumes(runs: Runs) -> None:
    run_dir = runs.folder / "run"
    start = runs.running("run")
    os.kill(start.ranks[2], signal.SIGSEGV)
    assert_ended(
        start,
        ExitCode.RANK_KILLED,
        r"rank 2 \(trainer, generator, reward\) on \S+ is lost: process \d+ on \S+ was killed by SIGSEGV in \w+",
        r"\(logs: .*hpcrl logs .*/run\)$",
        within_s=COMMAND_S,
    )

    step = newest(run_dir)
    assert step >= 2
    start = runs.running("run", past=step)
    assert f"resumed from step_{step:06d}" in start.text
    os.kill(start.ranks[1], signal.SIGSTOP)
    cause = (
        r"rank 1 \(trainer, .*was stopped \(SIGSTOP\) for \d+ s in \w+.*; stacks of all ranks: .*/hang\.txt \(logs: "
    )
    assert_ended(start, ExitCode.DEADLINE, cause, within_s=STORE_S)
    report = (run_dir / "logs" / "attempt_0002" / "hang.txt").read_text()
    assert re.search(
        r"\nrank 1 \(trainer, .*\n  process: stopped by a signal.*\n  no stack: the process is stopped", report
    )
    assert len(re.findall(r"^main thread", report, re.M)) >= 2, "the controller, and rank 2"

    start = runs.running("run", past=newest(run_dir))
    os.kill(start.ranks[0], signal.SIGKILL)
    assert_ended(
        start, ExitCode.RANK_KILLED, r"rank 0 \(controller\) is lost: .* was killed by SIGKILL in \w+", within_s=GRACE_S
    )
    for rank in (1, 2):
        assert re.search(rf" rank {rank} ERROR the control store is gone \(while in ", log_of(run_dir, rank, attempt=3))

    start = runs.running("run", past=newest(run_dir))
    (run_dir / "checkpoints").rename(run_dir / "kept")
    (run_dir / "checkpoints").write_text("in the way")
    # Which step of the save fails first depends on timing: creating its folder, or finding its files.
    cause = rf"{run_dir}/checkpoints: .*(Not a directory|File exists|No such file|is not a file of the checkpoint)"
    assert_ended(start, ExitCode.NOT_SAVED, cause, within_s=COMMAND_S)

    (run_dir / "checkpoints").unlink()
    (run_dir / "kept").rename(run_dir / "checkpoints")
    assert newest(run_dir) >= step + 6
    step = newest(run_dir)
    start = runs.ended("run", f"max_steps={step + 2}")
    assert start.process.returncode == ExitCode.DONE, start.text
    assert f"resumed from step_{step:06d}" in start.text
    assert [row["step"] for row in read_metrics(run_dir)][-3:] == [step, step + 1, step + 2]


def test_a_run_survives_a_lost_reward_rank_bad_rewards_and_forged_messages(runs: Runs) -> None:
    run_dir = runs.folder / "run"
    reward = f"{REWARD}rough_reward +reward.default.options.folder={runs.folder} reward.default.timeout_s=2"
    start = runs.running("run", "max_steps=60", APART.format("reward"), reward)
    intrude(run_dir, "rank/1")
    intrude(run_dir, "controller")
    os.kill(start.ranks[3], signal.SIGKILL)
    assert start.wait() == ExitCode.DONE, start.text
    assert start.errors.read_text() == ""
    said = [line for line in start.text.splitlines() if "is lost" in line]
    assert len(said) == 1 and re.search(r"rank 3 \(reward\) .* SIGKILL .*; the run continues without it", said[0]), (
        start.text
    )
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(61))
    assert sum(row.get("scheduler/score_errors", 0.0) for row in rows) == 3  # hung, killed its process, not a number
    for rank, queue in ((1, "rank/1"), (0, "controller")):
        refused = re.findall(rf"refused on queue {queue}: (.*)", log_of(run_dir, rank))
        kinds = ["wrong signature", "wrong signature", "of 0 bytes", "on the connection of sender 77"]
        assert len(refused) == 4, refused
        assert all(kind in line for kind, line in zip(kinds, refused, strict=True)), refused


def intrude(run_dir: Path, queue: str) -> None:
    """Messages of a process with and without the key, under a rank's number and its own, and a replayed message."""
    folder = run_dir / "world" / "attempt_0001"
    endpoint = json.loads((folder / "endpoint.json").read_text())
    key = Path(endpoint["key_file"]).read_bytes()
    store = queues.connect(endpoint["host"], endpoint["port"], 10)
    with pytest.raises(ConnectionRefusedError, match="wrong key for this run"):
        Dialer(store, os.urandom(32), 77, 10, 10)(queue)
    taken = 0 if queue == "rank/1" else 1
    with pytest.raises(ConnectionRefusedError, match="two processes have the same rank"):
        Dialer(store, key, taken, 10, 10)(queue)
    push = Dialer(store, key, 77, 10, 10)(queue)
    push(b"no message at all, but longer than a signature is")
    push(forged(os.urandom(32), queue, messages.Shutdown(), sender=77))
    push(b"")
    push(forged(key, queue, messages.Shutdown(), sender=taken))


def forged(key: bytes, queue: str, message: messages.Message, sender: int) -> bytes:
    """The first message of a sender, as it was sent long ago."""
    frame = msgspec.msgpack.encode(queues.Frame(sender, 1, msgspec.msgpack.encode(message)))
    return queues.sign(key, queue, frame)


def test_a_hanging_environment_costs_its_sample_and_a_hanging_env_rank_only_itself(runs: Runs) -> None:
    run_dir, sleeps = (
        runs.folder / "run",
        "+env.default.options.how=sleep +env.default.options.after=40 +env.default.options.rank=2",
    )
    start = runs.running("run", APART.format("env"), ENV, sleeps)
    start.wait_until(
        lambda: any(row.get("scheduler/score_errors") for row in read_metrics(run_dir)), COMMAND_S + SLACK_S
    )
    os.kill(start.ranks[2], signal.SIGSTOP)
    start.wait_until(lambda: "the run continues without it" in start.text, STORE_S + SLACK_S)
    said = next(line for line in start.text.splitlines() if "is lost" in line)
    assert re.search(r"rank 2 \(env\) .*was stopped \(SIGSTOP\)", said)
    before = start.step
    start.wait_until(lambda: start.step >= before + 3)
    os.kill(start.ranks[3], signal.SIGSTOP)
    assert_ended(start, ExitCode.DEADLINE, r"rank 3 \(env\) .*was stopped \(SIGSTOP\)", within_s=STORE_S)


def test_a_rank_cut_off_the_network_is_dropped_or_ends_the_run(runs: Runs) -> None:
    """Rank 0 and the rank each notice the loss of the other; the first one reports it."""
    silent = "(its host does not answer|the control store (is gone|has not answered))"
    start = runs.running("run", APART.format("env"), ENV)
    cut_off(start.ranks[2])
    start.wait_until(lambda: "the run continues without it" in start.text, STORE_S + SLACK_S)
    assert re.search(rf"rank 2 \(env\) on \S+ is lost: .*{silent}", start.text)
    before = start.step
    start.wait_until(lambda: start.step >= before + 3)
    cut_off(start.ranks[1])
    assert_ended(start, ExitCode.RANK_KILLED, rf"rank 1 \(.*\) .*is lost: .*{silent}", within_s=STORE_S)


FALLING = """env=scripted env.default.name=class env.default.class_path=tests.e2e.user_code:FallingEnv max_steps=8
rollout.save_rollouts=true rollout.restart_failed_episodes=true +env.default.options.folder="""


def waiting(start: Start, folder: Path) -> tuple[int, int]:
    """Once an episode waits to be killed: its rank, and the process that forked its own."""
    start.wait_until((folder / "waits").exists)
    rank, parent = (folder / "waits").read_text().split()
    return int(rank), int(parent)


def test_a_killed_env_rank_and_a_raising_episode_cost_no_prompt(runs: Runs) -> None:
    start = runs.start("run", APART.format("env"), f"{FALLING}{runs.folder}")
    rank, _ = waiting(start, runs.folder)
    os.kill(start.ranks[rank], signal.SIGKILL)
    assert start.wait() == ExitCode.DONE, start.text
    assert re.search(rf"rank {rank} \(env\) .* SIGKILL .*; the run continues without it", start.text), start.text
    rows = read_metrics(runs.folder / "run")
    assert [row["step"] for row in rows] == list(range(9))
    told = [[row[f"scheduler/{name}"] for row in rows[1:]] for name in ("score_errors", "restarted")]
    assert [sum(counts) for counts in told] == [1, 1], "the episode that raised was played again"
    assert [(row["env/default/failed"] or 0.0) > 0 for row in rows[1:]] == [count > 0 for count in told[0]]
    check_accounts(runs.folder / "run")


def test_losing_the_fork_server_of_environments_ends_the_run_which_resumes(runs: Runs) -> None:
    words = "layout=single", f"{FALLING}{runs.folder}", "env.default.runs_in=process"
    start = runs.start("run", *words)
    _, parent = waiting(start, runs.folder)
    os.kill(parent, signal.SIGKILL)
    cause = r"the process that forks environments of class has ended with code -9"
    assert_ended(start, ExitCode.RANK_FAILED, cause, within_s=COMMAND_S)
    start = runs.ended("run", *words)
    assert start.process.returncode == ExitCode.DONE, start.text
    check_accounts(runs.folder / "run")


ENDS = {
    "an environment that ends its process": (
        [ENV, "+env.default.options.how=exit", "+env.default.options.after=20"],
        ExitCode.RANK_KILLED,
        r"rank 0 \(controller, trainer, .*env\) is lost: process \d+ on \S+ exited with code 0 in .*, while a thread "
        r"ran env\.default, whose code may have ended it \(env\.default\.runs_in=process confines it",
    ),
    "an environment that always raises": (
        [ENV, "+env.default.options.how=sys.exit", "rollout.max_attempts=1"],
        ExitCode.STARVED,
        r"SystemExit: 0 .*: the environment of domain default failed so for each of the first 32 samples; mend it",
    ),
    "filters that reject everything": (
        ["rollout.filter_mean_low=.4 rollout.filter_mean_high=.45"],  # no mean of four rewards of 0 or 1
        ExitCode.STARVED,
        r": 80 groups were started and 0 of 4 needed groups .*filtered_mean_low .*relax rollout.filter_\*",
    ),
    "masks that leave nothing": (
        [f"algorithm.difficulty_{word}" for word in ("mask=true", "low_threshold=.4", "high_threshold=.45")],
        ExitCode.NO_PROGRESS,
        r"no progress in steps 1 to 20: masks left no response to learn from \(.*actor/difficulty_mask_ratio 0",
    ),
    "a learning rate that breaks the weights": (
        ["trainer.lr=1e30"],
        ExitCode.NO_PROGRESS,
        r"rank 0 .* failed in command DecodeChunk #\d+: .*not finite under weights version 1",
    ),
    "a loss that is not a number": (
        ["algorithm=reinforce", REWARD + "huge_reward", "max_steps=9"],
        ExitCode.NO_PROGRESS,
        r"no progress in steps 1 to 3: .*skipped",
    ),
}
SELDOM = {"a loss that is not a number"}


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [pytest.param(*end, id=name, marks=[pytest.mark.soak] * (name in SELDOM)) for name, end in ENDS.items()],
)
def test_the_reason_for_the_end_of_a_run_is_reported(runs: Runs, words: list[str], code: ExitCode, part: str) -> None:
    start = runs.ended("run", "layout=single", *words)
    assert_ended(start, code, part, within_s=0.0)


def test_too_large_a_mismatch_ends_the_run_which_resumes_under_another_bound(runs: Runs) -> None:
    """The generator rounds to bf16, the trainer does not; nothing from the refused step is kept."""
    words = "layout=single generator.dtype=bfloat16"
    first = runs.ended("run", words, "max_steps=2")
    assert first.wait(0.0) == ExitCode.DONE, first.text
    folder = runs.folder / "run"
    row = read_metrics(folder)[-1]
    assert row["mismatch/token_ratio"] == 1.0 and 1e-6 < row["mismatch/diff/mean"] < row["mismatch/diff/max"]
    refused = runs.ended("run", words, "max_steps=4 trainer.max_mismatch=1e-6")
    part = r"step 3: trainer and generator give the \d+ tokens that weights 2 wrote .*trainer.max_mismatch=1e-06"
    assert_ended(refused, ExitCode.MISMATCH, part, within_s=0.0)
    assert newest(folder) == 2
    last = runs.ended("run", words, "max_steps=4 trainer.max_mismatch=0.5")
    assert last.wait(0.0) == ExitCode.DONE and newest(folder) == 4, last.text


SOAK = {
    "generator killed": (4, signal.SIGKILL, ExitCode.RANK_KILLED, r"rank 4 \(generator\) .*SIGKILL"),
    "generator stopped": (3, signal.SIGSTOP, ExitCode.DEADLINE, r"rank 3 \(generator\) .*was stopped"),
    "reference killed": (5, signal.SIGKILL, ExitCode.RANK_KILLED, r"rank 5 \(reference\) .*SIGKILL"),
    "reference stopped": (5, signal.SIGSTOP, ExitCode.DEADLINE, r"rank 5 \(reference\) .*was stopped"),
    "trainer killed": (1, signal.SIGKILL, ExitCode.RANK_KILLED, r"rank 1 \(trainer\) .*SIGKILL"),
    "controller stopped": (0, signal.SIGSTOP, ExitCode.DEADLINE, r"rank 0 \(controller\) .*was stopped"),
    "last reward rank killed": (6, signal.SIGKILL, ExitCode.RANK_KILLED, r"rank 6 \(reward\) .*SIGKILL"),
    "last reward rank stopped": (6, signal.SIGSTOP, ExitCode.DEADLINE, r"rank 6 \(reward\) .*was stopped"),
}


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "number", "code", "part"), SOAK.values(), ids=SOAK)
def test_loss_of_any_rank_is_noticed(runs: Runs, rank: int, number: signal.Signals, code: ExitCode, part: str) -> None:
    start = runs.running("run", "layout=disaggregated", "algorithm.kl_loss_coef=0.1", "rollout.min_replicas=2")
    os.kill(start.ranks[rank], number)
    assert_ended(start, code, part, within_s=STORE_S + GRACE_S)
    assert find_latest(runs.folder / "run" / "checkpoints").path is not None
