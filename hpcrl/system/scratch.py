"""Folders for temporary files: a killed process's folder is removed when the next process creates its own."""

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
"""Pattern of mkdtemp()'s suffix, which excludes folders of nodes whose names begin with this node's name."""
JUST_MADE_S = 60.0
"""Younger folders are kept: their processes may not have locked them yet."""


def own_folder(above: str, prefix: str) -> str:
    """Create a folder in `above`, locked while this process, or one that it forks, lives. Removes folders of the same
    user and prefix that processes of this node, which have ended, left there."""
    prefix = f"{prefix}-{socket.gethostname()}-"  # locks may not work across nodes
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
    with contextlib.suppress(OSError):  # a file system without locks, on which no folder is removed
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
                    if at != folder:  # moved up, since a path could grow too long
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
