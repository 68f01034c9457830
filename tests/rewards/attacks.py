"""Programs that attack their sandbox; each prints REACHED if it got something that it must not get.

    python -m tests.rewards.attacks LEVEL [NAME...]      prints {name: [stopped, exit code, output, errors]} as JSON

Imports only the standard library, so any interpreter and any user can run it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from hpcrl.sandbox.client import Sandbox
from hpcrl.sandbox.jobs import ChildTask, Limits

LIMITS = Limits(memory_bytes=256 << 20, file_bytes=1 << 20, processes=16, output_bytes=1 << 16)
HEAD = """
import ctypes, errno, fcntl, json, os, resource, signal, socket, struct, subprocess, sys, threading, time
told = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
reached = lambda what="": print("REACHED", what, flush=True)
"""

REFUSED = {
    "shadow": "open('/etc/shadow').read(); reached()",
    "passwd": "open('/etc/passwd').read(); reached()",
    "home": "os.listdir(os.path.expanduser('~root')); reached()",
    "read outside": "open(told['file']).read(); reached()",
    "link outside": "os.symlink(told['file'], 'link'); open('link').read(); reached()",
    "hard link": "os.link(told['file'], 'link'); open('link').read(); reached()",
    "write outside": "open(told['folder'] + '/new', 'w').write('x'); reached()",
    "write to the libraries": "open(os.__file__, 'a').write('x'); reached()",
    "truncate": "os.truncate(told['file'], 0); reached()",
    "truncate as a reader": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC); reached()",
    "mode": "os.chmod(told['file'], 0o600); reached()",
    "mode of a library": "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o600); reached()",
    "times": "os.setxattr(told['file'], 'user.x', b'x'); reached()",
    "remove": "os.unlink(told['file']); reached()",
    "tcp": "socket.create_connection(('127.0.0.1', told['tcp']), 1); reached()",
    "udp": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', told['udp'])); reached()",
    "abstract socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + told['abstract']); reached()",
    "datagram pair": "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
    "a.sendto(b'x', chr(0) + told['datagram']); reached()",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); reached()",
    "signal a process": "os.kill(told['pid'], 0); reached()",
    "signal its server": "server = os.getppid()\nfor n in (15, 9): os.kill(server, n); time.sleep(0.05)\n"
    "told['level'] < 2 and reached()",
    "signal by a file": "r, w = os.pipe(); fcntl.fcntl(r, 8, told['pid']); reached()",
    "lower a limit": "resource.prlimit(told['pid'], resource.RLIMIT_NOFILE, (3, 3)); reached()",
    "affinity": "os.sched_setaffinity(told['pid'], {0}); reached()",
    "ptrace": "libc.ptrace(16, told['pid'], 0, 0) == 0 and reached()",
    "read memory": "b = ctypes.create_string_buffer(8); v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n"
    "libc.process_vm_readv(told['pid'], v, 1, v, 1, 0) > 0 and reached()",
    "command of a process": "open(f\"/proc/{told['pid']}/cmdline\").read(); reached()",
    "environment of a process": "open(f\"/proc/{told['pid']}/environ\").read(); reached()",
    "own environment": "'HPCRL_SECRET' in os.environ and reached()",
    "files of the server": "for n in range(5, 256):\n try: os.fstat(n); reached(n)\n except OSError: pass",
    "user namespace": "libc.unshare(0x10000000) == 0 and reached()",
    "cloned namespace": "clone = {'x86_64': 56, 'aarch64': 220}[os.uname().machine]\n"
    "libc.syscall(clone, 0x10000011, 0, 0, 0, 0) >= 0 and reached()",
    "mount": "libc.mount(b'none', b'/', None, 1 << 18, None) == 0 and reached()",
    "become root": "os.setuid(0); reached()",
    "capabilities": "libc.prctl(24, 0, 0, 0, 0) == 0 and reached()",
    "kernel rings": "libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0 and reached()",
    "open by handle": "libc.open_by_handle_at(3, ctypes.create_string_buffer(64), 0)\n"
    "ctypes.get_errno() == 1 or reached()",
    "memory file": "os.memfd_create('x'); reached()",
    "shared segment": "libc.shmget(1234, 4096, 0o1666) >= 0 and reached()",
    "message queue": "libc.msgget(1234, 0o1666) >= 0 and reached()",
    "calls of x32": "libc.syscall(0x40000000 + 41, 2, 1, 0) >= 0 and reached()",
    "big file": "open('big', 'wb').write(bytes(2 << 20)); reached()",
    "sparse file": "open('big', 'wb').truncate(2 << 20); reached()",
    "more memory": "x = bytearray(512 << 20); reached()",
    "raised limit": "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2); reached()",
    "sibling folder": "os.listdir('..'); reached()",
}
"""Name -> what ends with an exception, or without REACHED."""

STOPPED = {
    "endless loop": ("while True: pass", "time"),
    "sleep": ("time.sleep(60); reached()", "time"),
    "ignored signals": ("[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\nwhile True: time.sleep(1)", "time"),
    "output": ("while True: print('x' * 1000)", "output"),
    "errors": ("while True: print('x' * 1000, file=sys.stderr)", "output"),
    "fork bomb": ("while True:\n try: os.fork()\n except OSError: pass", ""),
    "detached bomb": ("while True:\n try: os.fork() or os.setsid()\n except OSError: pass", ""),
    "threads": (
        "threading.stack_size(65536)\nwhile True:\n try: threading.Thread(target=time.sleep, args=(9,)).start()\n"
        " except RuntimeError: time.sleep(9)",
        "",
    ),
    "memory of several": ("[os.fork() for _ in range(3)]\nx = b'x' * (120 << 20)\ntime.sleep(60)", "memory"),
    "shared memory": (
        "import mmap\nm = mmap.mmap(-1, 90 << 20); m[:] = b'x' * len(m)\n[os.fork() for _ in range(3)]\n"
        "n = mmap.mmap(-1, 70 << 20)\nfor i in range(0, len(n), 4096): n[i] = 1\ntime.sleep(60)",
        "memory",
    ),
    "many files": ("n = 0\nwhile True: n += 1; open(str(n), 'w').close()", "files"),
    "removed files": (
        "def more(n):\n f = open(str(n), 'wb'); f.write(bytes(1 << 20)); f.flush(); os.unlink(str(n)); return f\n"
        "kept = [more(n) for n in range(40)]\ntime.sleep(60)",
        "files",
    ),
    "removed and mapped files": (
        "import mmap\ndef more(n):\n with open(str(n), 'w+b') as f:\n"
        "  f.write(bytes(1 << 20)); f.flush(); os.unlink(str(n)); return mmap.mmap(f.fileno(), 4096)\n"
        "kept = [more(n) for n in range(40)]\nos.closerange(5, 64)\ntime.sleep(60)",
        "files",
    ),
    "files in sockets": (
        "a, b = socket.socketpair()\nfor n in range(40):\n f = open(str(n), 'wb'); f.write(bytes(1 << 20)); f.flush()\n"
        " os.unlink(str(n)); socket.send_fds(a, [b'x'], [f.fileno()]); f.close()\ntime.sleep(60)",
        "files",
    ),
    "much disk": ("n = 0\nwhile True: n += 1; open(str(n), 'wb').write(bytes(1 << 20))", "files"),
}
"""Name -> a program without an end, and the limit that ends it; empty: one of several. At L3 files end it with an
exception."""

LEFT = {
    "daemon": "if not os.fork():\n os.setsid()\n os.fork() or time.sleep(600)\n os._exit(0)\nos.wait(); reached()",
    "deep folders": "for _ in range(400): os.mkdir('d' * 200); os.chdir('d' * 200)\nreached()",
    "closed folder": "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.mkdir('a/shut', 0); reached()",
    "link to a folder": "os.symlink(told['folder'], 'out'); reached()",
}
"""Name -> what it leaves; it prints REACHED, and nothing of it may remain."""


def run(level: int, names: list[str]) -> dict[str, list[object]]:
    """Run attacks at a level; the folder that they attack stays as it was."""
    os.environ["HPCRL_SECRET"] = "secret"
    found: dict[str, list[object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = Path(folder, "canary")
        file.write_text("canary")
        file.chmod(0o666)
        tcp, udp, abstract, datagram = (
            socket.socket(family, kind)
            for family in (socket.AF_INET, socket.AF_UNIX)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        )
        for one in (tcp, udp):
            one.bind(("127.0.0.1", 0))
        for one in (abstract, datagram):
            one.bind("")  # the kernel chooses an abstract name
        tcp.listen()
        abstract.listen()
        told = {"file": str(file), "folder": folder, "pid": os.getpid(), "level": level}
        told |= {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        told |= {"abstract": abstract.getsockname()[1:].decode(), "datagram": datagram.getsockname()[1:].decode()}
        sandbox = Sandbox(level, LIMITS, max_level=level)
        try:
            for name in names:
                code = HEAD + (REFUSED | LEFT | {name: code for name, (code, _) in STOPPED.items()})[name]
                limit_s = 0.5 if STOPPED.get(name, ("", "-"))[1] in ("time", "") else 20.0
                ended = sandbox.run([ChildTask({"kind": "program", "code": code}, json.dumps(told).encode())], limit_s)
                found[name] = [ended.stopped, ended.code, ended.stdout.decode()[:200], ended.stderr.decode()[-300:]]
                assert file.read_text() == "canary" and file.stat().st_mode & 0o777 == 0o666, name
                assert os.listdir(folder) == ["canary"], name
            control = sandbox.run(
                [ChildTask({"kind": "program", "code": HEAD + "reached()"}, json.dumps(told).encode())], 20.0
            )
            assert control.stdout == b"REACHED \n", control
            for one in (udp, datagram):
                one.setblocking(False)
                try:
                    raise AssertionError(f"the sandbox sent {one.recv(100)!r}")
                except BlockingIOError:
                    pass
        finally:
            sandbox.close()
    return found


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2:])))
