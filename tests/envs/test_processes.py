"""Environments in separate processes: a failing one affects only its own calls and leaves nothing behind."""

from __future__ import annotations

import io
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from hpcrl.config import EnvConfig
from hpcrl.envs import processes
from hpcrl.envs.processes import EnvProcess, EnvProcessError, EnvProcesses
from tests.children import runs

SCARCE = """
import os
from tests.envs.rough_env import RoughEnv as Env
fork = os.fork
def once():
    os.fork = fork
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = once
"""
ROUGH = {"name": "class", "class_path": "tests.envs.rough_env:RoughEnv"}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def step(env: EnvProcess) -> str:
    """Take a step; returns its error."""
    try:
        env.step("x")
    except EnvProcessError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def several() -> Iterator[EnvProcesses]:
    made = EnvProcesses(EnvConfig.model_validate(ROUGH))
    yield made
    made.close()


def make(several: EnvProcesses, how: str, folder: Path) -> EnvProcess:
    return several.make({"answer": how, "extra": {"folder": str(folder)}})


def test_an_episode_runs_in_its_own_process(several: EnvProcesses, tmp_path: Path) -> None:
    env = make(several, "plain", tmp_path)
    assert env.reset(7) == ["start 7", {"tools": [], "hpcrl_unread": ["own"]}]
    played = env.step("left")
    assert played == ["left?", 0.25, True, False, {"metrics": {"success": 1.0}}]
    assert type(played[1]) is float and played[2] is True
    other = make(several, "plain", tmp_path)
    assert other.reset(8)[0] == "start 8"
    env.close()
    env.close()
    until((tmp_path / "closed").exists)
    assert other.step("right")[0] == "right?", "the others go on"
    other.close()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", "KeyError: '\\\\udcff'"),
        ("leaves by sys.exit", "SystemExit: 3"),
        ("no text", "UnicodeEncodeError"),
        ("an object", "object cannot be sent"),
        ("no image", r"images\[0\] of a message: an array must be uint8 \[height, width, 3\], not float64 \[2, 3, 3\]"),
        ("large images", r"of 8388\d{4} bytes, 83886080 of them images, exceeds the limit of 67108864"),
        ("endless", r"the environment's process returned 120\d{6} bytes, more than the limit of 67108864"),
        ("exits", "the environment's process has ended"),
        ("crashes", "the environment's process has ended"),
    ],
)
def test_a_failing_step_is_an_error_of_the_call(several: EnvProcesses, tmp_path: Path, how: str, error: str) -> None:
    env = make(several, how, tmp_path)
    env.reset(1)
    with pytest.raises(EnvProcessError, match=error):
        env.step("x")
    env.close()


def test_images_of_an_observation_arrive_as_bytes(several: EnvProcesses, tmp_path: Path) -> None:
    env = make(several, "an image", tmp_path)
    env.reset(1)
    (message,) = env.step("x")[0]
    drawn, file = message["images"]
    image = Image.open(io.BytesIO(drawn))
    assert (image.format, image.size, image.getpixel((2, 1))) == ("PNG", (3, 2), (255, 0, 0)) and file == b"file"
    env.close()


@pytest.mark.slow
def test_an_endless_observation_is_shortened_if_configured(tmp_path: Path) -> None:
    several = EnvProcesses(EnvConfig.model_validate(ROUGH | {"long_observation": "shorten"}))
    env = make(several, "endless", tmp_path)
    env.reset(1)
    text = env.step("x")[0]
    assert text.startswith("again again ") and " characters left out]\n" in text and len(text) < processes.MAX_BYTES
    env.close()
    several.close()


def test_an_environment_that_cannot_be_constructed_is_an_error(several: EnvProcesses, tmp_path: Path) -> None:
    env = make(several, "cannot be made", tmp_path)
    with pytest.raises(EnvProcessError, match="OSError: no game"):
        env.reset(1)
    env.close()


def test_a_hanging_environment_is_killed_with_its_children(several: EnvProcesses, tmp_path: Path) -> None:
    env, raised = make(several, "hangs", tmp_path), []
    env.reset(1)
    thread = threading.Thread(target=lambda: raised.append(step(env)), daemon=True)
    thread.start()
    until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text().split()) == 2)
    pids = [int(word) for word in (tmp_path / "started").read_text().split()]
    assert all(map(runs, pids))
    env.close()
    thread.join(20)
    assert raised == ["the environment's process has ended"] and not (tmp_path / "closed").exists()
    until(lambda: not any(map(runs, pids)))


def test_a_leaking_environment_reaches_only_its_own_memory_limit(tmp_path: Path) -> None:
    several = EnvProcesses(EnvConfig.model_validate(ROUGH | {"runs_in": "process", "memory_mib": 512}))
    leaks, other = make(several, "leaks", tmp_path), make(several, "plain", tmp_path)
    leaks.reset(1)
    other.reset(1)
    with pytest.raises(EnvProcessError, match="MemoryError: it needs more than memory_mib=512"):
        leaks.step("x")
    assert other.step("x")[0] == "x?"
    for env in (leaks, other):
        env.close()
    several.close()


@pytest.mark.slow
def test_temporary_files_are_removed_with_their_process(tmp_path: Path) -> None:
    """Files of a killed process are removed before the next begins."""
    several = EnvProcesses(EnvConfig.model_validate(ROUGH))
    made, files = [], []
    for how in ("writes", "writes and hangs"):
        (tmp_path / how).mkdir()
        made.append(make(several, how, tmp_path / how))
        made[-1].reset(1)
        threading.Thread(target=step, args=(made[-1],), daemon=True).start()
        written = tmp_path / how / "written"
        until(lambda written=written: written.exists() and written.read_text())  # it may exist before its text
        files.append(Path(written.read_text()))
    (own, killed), bases = (file.parents[1] for file in files), {file.parents[2] for file in files}
    assert own != killed and killed.exists() and len(bases) == 1
    until(lambda: not made[0]._at_work)
    made[0].close()
    until(lambda: not own.exists())
    made[1].close()
    until(lambda: not psutil.pid_exists(made[1]._pid))
    make(several, "plain", tmp_path).reset(1)
    assert not killed.exists()
    several.close()
    assert not any(base.exists() for base in bases)


def test_children_of_an_environment_end_with_it(several: EnvProcesses, tmp_path: Path) -> None:
    env = make(several, "starts another", tmp_path)
    env.reset(1)
    env.step("x")
    pids = [int(word) for word in (tmp_path / "started").read_text().split()]
    env.close()
    until(lambda: not any(map(runs, pids)))
    assert (tmp_path / "closed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("begins_another", [True, False])
def test_an_escaped_child_process_ends_before_the_next_episode_begins(tmp_path: Path, begins_another: bool) -> None:
    """At the latest when all end; not before its own episode ends."""
    several = EnvProcesses(EnvConfig.model_validate(ROUGH))
    env, other = (make(several, how, tmp_path) for how in ("leaves one", "plain"))
    env.reset(1)
    env.step("x")
    own, left = (int(word) for word in (tmp_path / "started").read_text().split())
    other.reset(1)
    assert runs(left)
    env.close()
    until(lambda: not runs(own))
    if begins_another:
        (third := make(several, "plain", tmp_path)).reset(1)
        until(lambda: not runs(left))
        assert other.step("right")[0] == "right?"
        third.close()
    other.close()
    several.close()
    until(lambda: not runs(left))


@pytest.mark.slow
def test_a_hanging_close_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CLOSE_S", 1)
    several = EnvProcesses(EnvConfig.model_validate(ROUGH))
    env = make(several, "close hangs", tmp_path)
    env.reset(1)
    env.close()
    until((tmp_path / "closed").exists)
    several.close()
    assert not runs(several._zygote.pid)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("no_such_module:Env", "importing no_such_module failed: ModuleNotFoundError"),
        ("tests.envs.rough_env:leaves", "tests.envs.rough_env:leaves: SystemExit: 3"),
        ("threading:Timer", r"'threading:Timer' is not an environment: no reset\(\) and no step\(\)"),
    ],
)
def test_a_class_that_is_not_an_environment_is_refused(path: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        EnvProcesses(EnvConfig.model_validate(ROUGH | {"class_path": path}))


@pytest.mark.slow
def test_the_next_start_removes_files_of_killed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But no files of a living one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    killed, alive = (EnvProcesses(EnvConfig.model_validate(ROUGH)) for _ in range(2))
    folders = sorted(tmp_path.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    assert all(folder.name.startswith(f"hpcrl-env-{socket.gethostname()}-") for folder in folders)
    folders.append(tmp_path / f"hpcrl-env-{socket.gethostname()}-2-abcdefgh")  # of another node
    killed._zygote.kill()
    killed._zygote.wait()
    for folder in folders:
        (folder / "1" / "deep").mkdir(parents=True)
        os.utime(folder, (1.0, 1.0))
    following = EnvProcesses(EnvConfig.model_validate(ROUGH))
    assert [folder.exists() for folder in folders] == [False, True, True]
    shutil.rmtree(folders[-1])
    for one in (killed, alive, following):
        one.close()
    assert not [*tmp_path.iterdir()]


def test_no_episode_begins_without_the_fork_server(tmp_path: Path) -> None:
    several = EnvProcesses(EnvConfig.model_validate(ROUGH))
    env: Any = make(several, "plain", tmp_path)
    several._zygote.kill()
    until(lambda: not runs(env._pid))
    several._zygote.wait()  # its children are killed after its sockets are closed
    with pytest.raises(EnvProcessError, match="no process for the environment"):
        make(several, "plain", tmp_path)
    with pytest.raises(EnvProcessError, match="has ended"):
        env.step("x")
    with pytest.raises(RuntimeError, match="that forks environments of class has ended with code -9"):
        several.check()
    several.close()


def test_a_failing_fork_costs_one_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scarce.py").write_text(SCARCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    several = EnvProcesses(EnvConfig.model_validate(ROUGH | {"class_path": "scarce:Env"}))
    with pytest.raises(EnvProcessError, match="no process for the environment: Resource temporarily unavailable"):
        make(several, "plain", tmp_path)
    several.check()
    assert make(several, "plain", tmp_path).reset(3)[0] == "start 3"
    several.close()
