"""Log-probs of the trained tokens of many sequences, in a folder: one file of values, an index, and the parts that
ranks wrote and that are not merged yet."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import socket
import time
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpcrl.system.files import fsync_path, naming, write_durably

logger = logging.getLogger(__name__)

INDEX = "index.npz"
PART = "part_*.npz"
LOCK = ".lock"
LOCK_S = 60.0
"""How long to wait for another run, whose merge reads and writes all values once."""
CHUNK_BYTES = 64 << 20
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
"""Errors of files that are missing, cut or changed."""


class StoredLogprobs:
    """The merged values of a folder, which is only read. ValueError if there are none, or if their files do not fit.

    Args:
        check: Compare all values with their checksum.
    """

    def __init__(self, folder: Path, check: bool = False):
        try:
            with np.load(folder / INDEX, allow_pickle=False) as index:
                self.sequences, self._starts = index["sequences"], index["starts"]
                self.path, expected = folder / str(index["name"]), int(index["crc"])
            if not self._starts[-1]:
                raise ValueError("the index is empty")
            self._values = np.memmap(self.path, np.float32, "r", shape=(int(self._starts[-1]),))
            if self.path.stat().st_size != self._values.nbytes or (check and checksum(self._values) != expected):
                raise ValueError(f"{self.path} is damaged")
        except DAMAGED as error:
            raise ValueError(f"{folder} has no usable log-probs: {error}") from error
        self._places = {int(sequence): n for n, sequence in enumerate(self.sequences)}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._places

    def values(self, sequence: int) -> np.ndarray:
        """float32 [trained tokens] of a sequence. KeyError if it is not stored."""
        place = self._places[sequence]
        return self._values[self._starts[place] : self._starts[place + 1]]


def checksum(values: np.ndarray) -> int:
    """CRC-32 of the values' bytes."""
    found, data = 0, values.view(np.uint8)
    for start in range(0, len(data), CHUNK_BYTES):
        found = zlib.crc32(data[start : start + CHUNK_BYTES].data, found)
    return found


def write_part(folder: Path, step: int, writer: int, sequences: Sequence[int], values: Sequence[np.ndarray]) -> None:
    """Write the values, float32 [trained tokens] each, of some sequences of a step. `writer` is the process's rank."""
    if sequences:
        starts, joined = np.cumsum([0, *map(len, values)]), np.concatenate(values, dtype=np.float32)
        _save(folder / f"part_{step:08d}_{writer:05d}.npz", sequences, starts, values=joined)


def merge(folder: Path) -> StoredLogprobs | None:
    """Merge the parts of a folder into its values; called by one process of a run, while other runs may do the same.
    Damaged files are removed, so their sequences are missing. None if nothing is stored. A folder without parts is only
    read."""
    if not any(folder.glob(PART)):
        return _merge(folder, [])
    with open(folder / LOCK, "ab") as file:
        _lock(file)
        return _merge(folder, sorted(folder.glob(PART)))


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed. Without a lock after LOCK_S, or on a file system without locks, go on."""
    deadline = time.monotonic() + LOCK_S
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return


def _merge(folder: Path, parts: Sequence[Path]) -> StoredLogprobs | None:
    try:
        old: StoredLogprobs | None = StoredLogprobs(folder, check=True)
    except ValueError as error:
        old = None
        if (folder / INDEX).exists():
            logger.warning("%s; computing them again", error)
    if not parts:
        return old
    found: dict[int, np.ndarray] = {}
    for path in reversed(parts):  # of a sequence's values, those of its earliest step stay
        found |= _read_part(path)
    if old is not None:
        found |= {int(sequence): old.values(int(sequence)) for sequence in old.sequences}
    if any(map(len, found.values())):
        ordered = sorted(found)
        values = np.concatenate([found[sequence] for sequence in ordered])
        name = f"values_{checksum(values):08x}_{len(ordered)}.f32"
        with naming(folder / name), open(folder / f".{name}.tmp", "wb") as file:
            file.write(values.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / f".{name}.tmp", folder / name)
        fsync_path(folder)
        starts = np.cumsum([0, *(len(found[sequence]) for sequence in ordered)])
        _save(folder / INDEX, ordered, starts, name=np.array(name), crc=np.array(checksum(values)))
    for path in parts:
        path.unlink(missing_ok=True)
    merged = StoredLogprobs(folder) if any(map(len, found.values())) else None
    for path in folder.glob("values_*.f32"):
        if merged is None or path != merged.path:
            path.unlink(missing_ok=True)
    return merged


def _save(path: Path, sequences: Iterable[int], starts: np.ndarray, **arrays: np.ndarray) -> None:
    file = io.BytesIO()
    np.savez(file, **{"sequences": np.array(list(sequences), np.int64), "starts": starts, **arrays})  # type: ignore[arg-type]
    write_durably(path, file.getvalue(), writer=f"{socket.gethostname()}.{os.getpid()}")


def _read_part(path: Path) -> dict[int, np.ndarray]:
    """Sequence -> values; empty if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as part:
            sequences, starts, values = part["sequences"], part["starts"], part["values"]
            if len(values) != starts[-1] or values.dtype != np.float32:
                raise ValueError("its sizes do not fit")
    except DAMAGED as error:
        logger.warning("%s is damaged (%s); computing its log-probs again", path, error)
        return {}
    return dict(zip(sequences.tolist(), np.split(values, starts[1:-1]), strict=True))
