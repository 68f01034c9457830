"""Cut a process off the network, like a failing switch: nothing sent to it arrives or is answered."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from pathlib import Path

SYS_PIDFD_GETFD = 438
SO_ATTACH_FILTER = 26
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0, of every packet


def cut_off(pid: int, is_off: bool = False) -> int:
    """Let every socket that the process has drop what arrives; how many there are. Needs the right to trace it. is_off:
    its host is off. Else its kernel probes idle connections, and resets them, perhaps before the others notice."""
    libc, cut = ctypes.CDLL(None, use_errno=True), 0
    own = os.pidfd_open(pid)
    program = ctypes.create_string_buffer(DROP)
    attached = struct.pack("HxxxxxxQ", 1, ctypes.addressof(program))
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            handle = libc.syscall(SYS_PIDFD_GETFD, own, int(entry.name), 0)
            assert handle >= 0, os.strerror(ctypes.get_errno())
            with socket.socket(fileno=handle) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attached)
                    if is_off:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
                    cut += 1
    os.close(own)
    return cut
