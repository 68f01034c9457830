"""`hpcrl logs`: all log files of a run merged by time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.commands import logs
from hpcrl.commands.logs import main
from hpcrl.launch.job import OPENED
from hpcrl.run_folder import CONFIG
from hpcrl.system.exit_codes import ExitCode

Show = Callable[..., list[str]]


def at(second: float, host: str, who: str, text: str, level: str = "INFO") -> str:
    """A message at 19:00:SECOND."""
    return f"2020-11-28T19:00:{second:06.3f}+00:00 {host} {who} {level} {text}\n"


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts on two hosts, in a job."""
    folder = tmp_path / "run"
    write(folder / CONFIG)
    first, second = (folder / "logs" / f"attempt_000{n}" for n in (1, 2))
    lost = "rank 1 is lost: SIGSEGV"
    write(
        first / "rank_0000.log",
        at(1, "n1", "rank 0", "step 1/9"),
        at(5, "n1", "rank 0", lost, "WARNING"),
        at(6, "n1", "rank 0", "the run ends", "ERROR"),
        "  Traceback (most recent call last):\n",
        "  RankLost\n",
    )
    write(
        first / "rank_0001.log",
        "a library is imported\n",
        at(2, "n2", "rank 1", "process 9"),
        "Fatal Python error: Segmentation fault\n",
    )
    write(first / "agent_0001.log", at(4.5, "n2", "agent", lost, "WARNING"), at(4, "n2", "agent", "clock set back"))
    write(second / "rank_0000.log", at(20, "n1", "rank 0", "resumed from step_000001"))
    write(
        folder / "slurm" / "job-7.log",
        at(0, "n1", "launch", OPENED.format(1, 7, 0)),
        at(1, "n1", "rank 0", "step 1/9"),
        "srun: error: n2: task 1: Killed\n",
        "0: " + at(5, "n1", "rank 0", lost, "WARNING"),  # srun --label
        at(8, "n1", "launch", "attempt 1 ended (rank_killed): crash 1", "ERROR"),
        at(15, "n1", "launch", OPENED.format(2, 7, 1)),
        at(20, "n1", "rank 0", "resumed from step_000001"),
    )
    return folder


@pytest.fixture
def show(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Show:
    """The command's lines, without the common part of the headers."""

    def call(*words: str) -> list[str]:
        assert main([str(run), *words]) == ExitCode.DONE
        text = capfdbinary.readouterr().out.decode()
        return text.replace("2020-11-28T19:00:", "").replace("+00:00", "").splitlines()

    return call


def test_all_messages_are_shown_in_order_of_time(show: Show) -> None:
    assert show() == [
        "00.000 n1 launch INFO attempt 1 in job 7, restart 0",
        "01.000 n1 rank 0 INFO step 1/9",
        "srun: error: n2: task 1: Killed",  # the message before it is there already
        "02.000 - rank 1 INFO rank_0001.log begins without a header",
        "a library is imported",
        "02.000 n2 rank 1 INFO process 9",
        "Fatal Python error: Segmentation fault",
        "04.500 n2 agent WARNING rank 1 is lost: SIGSEGV",
        "04.000 n2 agent INFO clock set back",  # a file keeps its order
        "05.000 n1 rank 0 WARNING rank 1 is lost: SIGSEGV",
        "06.000 n1 rank 0 ERROR the run ends",
        "  Traceback (most recent call last):",
        "  RankLost",
        "08.000 n1 launch ERROR attempt 1 ended (rank_killed): crash 1",
        "15.000 n1 launch INFO attempt 2 in job 7, restart 1",
        "20.000 n1 rank 0 INFO resumed from step_000001",
    ]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("--level warning", "04.500 05.000 06.000 08.000"),
        ("--level error", "06.000 08.000"),
        ("--rank 1", "02.000 02.000"),
        ("--rank agent", "04.500 04.000"),
        ("--rank launch", "00.000 08.000 15.000"),
        ("--rank 0,agent --level warning", "04.500 05.000 06.000"),
        ("--since 2020-11-28T19:00:05", "05.000 06.000 08.000 15.000 20.000"),
        ("--since 2020-11-28T20:00:15+01:00", "15.000 20.000"),
        ("--since 1s", ""),
        ("--attempt 2", "15.000 20.000"),
        ("--attempt 1 --rank launch", "00.000 08.000"),
        ("--lines 2", "15.000 20.000"),
        ("--lines 1 --attempt 1", "08.000"),
    ],
)
def test_messages_can_be_selected(show: Show, words: str, seconds: str) -> None:
    headers = [line for line in show(*words.split()) if line[0].isdigit()]
    assert [line.split()[0] for line in headers] == seconds.split()
    assert ("  RankLost" in show(*words.split())) == ("06.000" in seconds)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RUN --level loud", "--level loud: one of debug, info, warning, error, critical"),
        ("RUN --since yesterday", "--since yesterday: a duration (90s, 10m, 2h, 3d) or a time in UTC"),
        ("RUN --since 99999999999d", "--since 99999999999d: a duration"),
        ("RUN --rank 0-3", "--rank 0-3: ranks separated by commas (0,3), agent or launch"),
        ("RUN --rank 0,9", "--rank 9: no log of this rank; the last one is rank 1"),
        ("RUN --attempt 3", "--attempt 3: no logs of this attempt; there are 1, 2"),
        ("RUN --attempt 0", "--attempt 0: a number above 0"),
        ("RUN --lines many", "--lines many: a number above 0"),
        ("RUN --colour", "unrecognized arguments: --colour"),
        ("nowhere", "nowhere is not a run folder"),
        ("", "the following arguments are required: RUN"),
        ("EMPTY", "has no logs yet"),
    ],
)
def test_invalid_arguments_are_one_line(run: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    write(run.with_name("empty") / CONFIG)
    places = {"RUN": str(run), "EMPTY": str(run.with_name("empty"))}
    assert main([places.get(word, word) for word in words.split()]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hpcrl: ") and said in err and err.count("\n") == 1 and "--help" in err


def test_since_is_found_in_a_long_file(run: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the file is not read; long messages and unterminated lines are handled."""
    monkeypatch.setattr(logs, "MAX_BYTES", 4096)
    path = run / "logs" / "attempt_0002" / "rank_0001.log"
    lines = [at(21 + i / 1000, "n2", "rank 1", f"line {i} " + "x" * (i % 300)) for i in range(9000)]
    lines[7000] += "raw\n" * 5000
    lines[8000] = lines[8000].replace("\n", "y" * 20_000 + "\n")
    write(path, *lines)
    read = 0
    begin = logs.LogFile._begin

    def counting(self: logs.LogFile, *arguments: object) -> None:
        nonlocal read
        read += self.path == path
        begin(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(logs.LogFile, "_begin", counting)
    shown = show("--since", "2020-11-28T19:00:28.500", "--rank", "1")
    assert next(line for line in shown if line.startswith(("2", "raw"))).endswith("line 7500 ")
    assert len([line for line in shown if " rank 1 INFO line " in line]) == 1500 and read < 1700
    assert sum(map(len, shown)) > 20_000, "the long line is whole"
    assert show("--since", "2020-11-28T19:00:28", "--rank", "1").count("raw") == 5000


def test_new_messages_are_followed_until_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "hpcrl", "logs", str(run), "--follow", "--lines", "1", "--level", "warning"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a background job ignores it
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "attempt 1 ended" in process.stdout.readline()
        with open(run / "logs" / "attempt_0002" / "rank_0000.log", "a") as file:
            file.write(at(30, "n1", "rank 0", "not shown") + at(31, "n1", "rank 0", "half of", "WARNING")[:-1])
            file.flush()
            time.sleep(3 * logs.POLL_S)
            file.write(" a line\n  and more\n")
        assert process.stdout.readline().endswith("rank 0 WARNING half of a line\n")
        assert process.stdout.readline() == "  and more\n"
        write(run / "logs" / "attempt_0003" / "agent_0000.log", at(40, "n1", "agent", "a new attempt", "ERROR"))
        assert process.stdout.readline().endswith("agent ERROR a new attempt\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == ExitCode.INTERRUPTED and process.stderr.read() == ""


def test_a_closed_pipe_ends_the_command_silently(run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "hpcrl", "logs", str(run)], stdout=nobody, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (ExitCode.DONE, b"")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "logs RUN --level warning --since 10m" in capsys.readouterr().out
