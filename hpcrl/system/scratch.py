"""Folders for temporary files: those of a process that was killed go when the next one makes its own."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import socket
import tempfile
import time
import uuid
from pathlib import Path

RANDOM = "[!-]" * 8
"""What mkdtemp() adds: no name of another node that begins as this one's."""
JUST_MADE_S = 60.0
"""Folders of other processes are not locked in their first moment."""


def own_folder(above: str, prefix: str) -> str:
    """A new folder in `above`, locked as long as this process or one that it forks lives. Those of the same user and
    prefix that processes on this node have left there are removed."""
    prefix = f"{prefix}-{socket.gethostname()}-"  # locks may not reach other nodes
    for old in Path(above).glob(f"{glob.escape(prefix)}{RANDOM}"):
        with contextlib.suppress(OSError):
            place = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                known = os.fstat(place)
                if known.st_uid == os.geteuid() and time.time() - known.st_mtime > JUST_MADE_S:
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(str(old))
            finally:
                os.close(place)
    folder = tempfile.mkdtemp(prefix=prefix, dir=above)
    with contextlib.suppress(OSError):  # a file system without locks, where none is removed
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def remove_tree(folder: str) -> None:
    """Remove a folder whose content is hostile: of any depth and with any modes."""
    waiting = [folder]
    while waiting:
        at = waiting[-1]
        with contextlib.suppress(OSError):
            os.chmod(at, 0o700)
        inside = []
        try:
            for name in os.listdir(at):
                path = f"{at}/{name}"
                if not os.path.islink(path) and os.path.isdir(path):
                    with contextlib.suppress(OSError):
                        os.chmod(path, 0o700)
                    if at != folder:  # brought up, so that no path grows too long
                        path, old = f"{folder}/{uuid.uuid4().hex}", path
                        os.rename(old, path)
                    inside.append(path)
                else:
                    os.unlink(path)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return
        if inside:
            waiting += inside
        else:
            waiting.pop()
            with contextlib.suppress(OSError):
                os.rmdir(at)
