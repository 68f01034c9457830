"""Reading what a program sends to a pseudo-terminal."""

from __future__ import annotations

import os


def read_to_end(terminal: int) -> str:
    """Everything read from this end until the last process has closed the other end; closes this end."""
    sent = b""
    try:
        while block := os.read(terminal, 1 << 16):
            sent += block
    except OSError:  # how Linux reports that the other end is closed
        pass
    finally:
        os.close(terminal)
    return sent.decode()
