"""Files of a checkpoint written in this process: no writer, no pushing to the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpcrl.checkpoint.commit import FileEntry
from hpcrl.checkpoint.writer import Files, Pieces


def write_files(folder: Path, files: Files) -> list[FileEntry]:
    """Write files into a folder; returns their sizes and hashes."""
    entries = []
    for name, content in files.items():
        if isinstance(content, Pieces):
            written = b"".join(content.parts)
            assert len(written) == content.size
        else:
            written = content if isinstance(content, bytes) else bytes(content.buffer)
        (folder / name).write_bytes(written)
        entries.append(FileEntry(name, len(written), hashlib.sha256(written).hexdigest()))
    return entries
