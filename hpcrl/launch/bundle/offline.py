"""Runs a command with the network off: in a network namespace that has the loopback interface only, where the kernel
permits it. `python -m hpcrl.launch.bundle.offline FILE COMMAND [WORD ...]` writes to FILE how the network is off."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
OFF = "the network was off (a network namespace)"
ASKED = "a network namespace is not permitted here, so only variables told libraries to stay offline"


def leave_network() -> bool:
    """Move this process, which must have one thread, into a network namespace whose only interface is loopback. False
    if the kernel does not permit it; then nothing has changed, or only the user namespace, which has the same ids."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET):
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    return True


def main(argv: Sequence[str]) -> int:
    """Replace this process by the command; returns only if the command cannot be started."""
    try:
        off = leave_network()
    except OSError as error:  # in the namespace, without its loopback interface: no run could start
        print(f"the network cannot be switched off: {error}", file=sys.stderr)
        return 1
    Path(argv[0]).write_text(OFF if off else ASKED)
    os.execvp(argv[1], list(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
