"""The process that forks a section's environment processes: `python -m hpcrl.envs.zygote PARENT_PID DESCRIPTOR`.

It has one thread and imports neither torch nor rank code. Its children have their own sessions and die with it; user
code's output goes to the rank's log. Processes that a child leaves running are killed at its end or before the next
fork. Each child has a folder for temporary files, which is removed when the child ends, or before the next fork if the
child was killed; if this process is killed, the next such process removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config import EnvConfig
from hpcrl.envs.environment import begin, checked_reset, checked_step, cut, expert_response, num_image_bytes
from hpcrl.envs.factory import env_class, make_env
from hpcrl.envs.processes import (
    CLOSE_S,
    MAX_BYTES,
    PID,
    AskExpert,
    EnvCall,
    EnvReturned,
    MakeEnv,
    ResetEnv,
    read,
    write,
)
from hpcrl.rewards.serving.guarded import describe
from hpcrl.system.scratch import own_folder, remove_tree
from hpcrl.system.signals import adopt_orphans, die_with, let_signals_pass
from hpcrl.system.stacks import new_page, register_stacks


def main() -> None:
    """Fork until the other side closes."""
    die_with(int(sys.argv[1]))
    adopt_orphans()
    let_signals_pass()
    register_stacks(new_page(), forks=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended children
    control = socket.socket(fileno=int(sys.argv[2]))
    config, section = EnvConfig.model_validate_json(read(control)), read(control).decode()
    try:
        env_class(config, section)
    except ValueError as error:
        write(control, str(error).encode())
        return
    folder = Path(own_folder(tempfile.gettempdir(), "hpcrl-env"))
    write(control, b"")
    _fork_episodes(config, control, folder)
    remove_tree(str(folder))


def _fork_episodes(config: EnvConfig, control: socket.socket, folder: Path) -> None:
    """Fork until the other side closes, then wait for the children. folder: the parent of the children's folders."""
    own, episodes = os.getpid(), set[int]()
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            break
        _end_left(episodes)
        _remove_left(folder)
        try:
            pid = os.fork()
        except OSError as error:  # no memory or too many processes, for now
            pid = -(error.errno or errno.EAGAIN)
        if not pid:
            control.close()
            os.setsid()
            die_with(own)
            adopt_orphans()  # so background processes remain its descendants
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                with _settled(config, folder / str(os.getpid())):
                    _serve(config, socket.socket(fileno=descriptors[0]))
            finally:
                os.killpg(0, signal.SIGKILL)  # including the environment's child processes
        episodes.add(pid)
        os.close(descriptors[0])
        control.sendall(PID.pack(pid))
    while _end_left(episodes):
        time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all children, if the kernel does not list them


def _end_left(episodes: set[int]) -> bool:
    """Kill processes left running by ended episodes: children not in `episodes`. Returns whether there are children;
    False on a kernel that does not list them."""
    try:
        children = {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return False
    for left in children - episodes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    episodes &= children
    return bool(children)


def _remove_left(folder: Path) -> None:
    """Remove the folders of children that were killed."""
    for left in folder.iterdir() if folder.exists() else ():  # a cleaner of /tmp may have removed the folder
        if not Path(f"/proc/{left.name}").exists():
            remove_tree(str(left))


@contextlib.contextmanager
def _settled(config: EnvConfig, folder: Path) -> Iterator[None]:
    """Set the configured memory limit, and this folder for temporary files."""
    folder.mkdir(parents=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if config.memory_mib is not None:
        # Not a limit on address space, of which libraries reserve more than they use.
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = config.memory_mib << 20
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        yield
    finally:
        remove_tree(str(folder))


def _serve(config: EnvConfig, connection: socket.socket) -> None:
    """Answer calls until the other side closes, then close the environment."""
    env: Any = None
    value: Any
    runner = asyncio.Runner()

    def returned(value: Any) -> Any:
        return runner.run(value) if inspect.iscoroutine(value) else value

    while True:
        try:
            call = msgspec.msgpack.decode(read(connection), type=EnvCall)
        except (EOFError, OSError):
            break
        try:
            if isinstance(call, MakeEnv):
                env = make_env(config, call.row, call.chat_template)
                value = bool(getattr(env, "special_tokens", False))
            elif isinstance(call, ResetEnv):
                value = [*checked_reset(returned(begin(env, call.seed)))]
            elif isinstance(call, AskExpert):
                value = returned(expert_response(env, call.seed))
            else:
                observation, reward, terminated, truncated, info = checked_step(returned(env.step(call.action)))
                value = [observation, float(reward), bool(terminated), bool(truncated), info]
            body = msgspec.msgpack.encode(EnvReturned(value), enc_hook=_plain)
            if len(body) > MAX_BYTES and isinstance(value, list) and config.long_observation == "shorten":
                value[0] = cut(value[0], MAX_BYTES // 16)
                body = msgspec.msgpack.encode(EnvReturned(value), enc_hook=_plain)
            if len(body) > MAX_BYTES and isinstance(value, list) and (images := num_image_bytes(value[0])):
                told = f"an observation of {len(body)} bytes, {images} of them images"
                raise ValueError(f"{told}, exceeds the limit of {MAX_BYTES}")
        except BaseException as error:  # user code may call sys.exit
            text = describe(error)
            if isinstance(error, MemoryError) and config.memory_mib is not None:
                text = f"MemoryError: it needs more than memory_mib={config.memory_mib}"
            body = msgspec.msgpack.encode(EnvReturned(error=text))
        write(connection, body)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(CLOSE_S)
    if hasattr(env, "close"):
        returned(env.close())


def _plain(value: Any) -> Any:
    """Converts numbers of numpy and torch."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"{type(value).__name__} cannot be sent to the rank")


if __name__ == "__main__":
    main()
