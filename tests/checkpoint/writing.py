"""Files of a checkpoint written in this process: no writer, no pushing to the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from hpcrl.checkpoint.commit import FileEntry
from hpcrl.checkpoint.writer import SharedFile


def write_files(folder: Path, files: Mapping[str, bytes | SharedFile]) -> list[FileEntry]:
    """Write files into a folder; returns their sizes and hashes."""
    entries = []
    for name, content in files.items():
        written = content if isinstance(content, bytes) else bytes(content.buffer)
        (folder / name).write_bytes(written)
        entries.append(FileEntry(name, len(written), hashlib.sha256(written).hexdigest()))
    return entries
