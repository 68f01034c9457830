"""A sandbox's self-test: a program inside it tries what it must refuse."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrl.sandbox.jobs import ChildTask, JobOutcome

PROBE_S = 30.0

PROGRAM = """
import ctypes, json, os, signal, socket, sys
told = json.loads(sys.stdin.read())
done = []

def attempt(name, act):
    try:
        act()
        done.append(name)
    except OSError:
        pass

def write(path):
    with open(path, "w") as file:
        file.write("x")

def connect():
    with socket.socket() as other:
        other.settimeout(2)
        other.connect(("127.0.0.1", told["port"]))

attempt("read a file outside", lambda: open(told["file"]).read())
attempt("list a folder outside", lambda: os.listdir(told["folder"]))
attempt("write a file outside", lambda: write(told["folder"] + "/written"))
attempt("change the mode of a file outside", lambda: os.chmod(told["file"], 0o644))
attempt("truncate a file outside", lambda: os.truncate(told["file"], 0))
attempt("read the command of another process", lambda: open(f"/proc/{told['pid']}/cmdline").read())
attempt("connect", connect)
attempt("signal another process", lambda: os.kill(told["pid"], 0))
attempt("signal the parent", lambda: os.kill(os.getppid(), 0) if os.getppid() else os.kill(-9, 0))
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) == 0:
    done.append("make a user namespace")
write("own")
json.dump({"own": open("own").read(), "done": done}, sys.stdout)
"""


def problem(run: Callable[[Sequence[ChildTask], float], JobOutcome]) -> str:
    """What the sandbox with this run() fails to refuse, or why nothing runs in it; empty if it works."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        os.chmod(folder, 0o777)
        file = Path(folder, "canary")
        file.write_text("canary")
        file.chmod(0o666)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        told = {"file": str(file), "folder": folder, "port": listener.getsockname()[1], "pid": os.getpid()}
        outcome = run([ChildTask({"kind": "program", "code": PROGRAM}, json.dumps(told).encode())], PROBE_S)
    try:
        found = json.loads(outcome.stdout)
    except ValueError:
        ended = outcome.stopped or outcome.code
        return f"the self-test ended with {ended}: {outcome.stderr.decode(errors='replace').strip()[-300:]}"
    return f"the self-test could {', '.join(found['done'])}" if found["done"] else ""
