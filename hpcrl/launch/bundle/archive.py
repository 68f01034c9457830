"""Reads a bundle that may come from anybody, in one pass, in bounded memory; creates nothing."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcrl.launch.bundle.layout import MANIFEST, MAX_MANIFEST_BYTES, OBJECTS, decoded
from hpcrl.launch.bundle.pace import Pace
from hpcrl.launch.bundle.writing import BLOCK, TAR_BLOCK
from hpcrl.system.files import open_regular

ZSTD = b"\x28\xb5\x2f\xfd"
MAX_END_BYTES = 1 << 20
"""Zeros after the last member: tar programs fill a record, usually 10 KiB."""


class BundleArchive:
    """An open archive with its `manifest`, and the manifest's bytes (`head`). ValueError names the archive and what is
    wrong with it: cut short, damaged, or a member that no bundle has."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; give an archive that hpcrl bundle has made") from error
        try:
            self._stream = self._opened()
            size = self._next(MANIFEST)
            if size > MAX_MANIFEST_BYTES:
                raise ValueError(f"{path}: {MANIFEST} has {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
            self.head = b"".join(self._blocks(size, MANIFEST))
            try:
                self.manifest = decoded(self.head)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BundleArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def contents(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """SHA-256 and blocks of each content, in order; read a content to its end before the next one. ValueError after
        its last block if the content is not what its name says."""
        for digest, entry in self.manifest.contents.items():
            name = f"{OBJECTS}{digest}"
            if (size := self._next(name)) != entry.size:
                raise ValueError(f"{self.path}: {name} has {size} bytes, {MANIFEST} says {entry.size}")
            yield digest, self._verified(size, digest)
        if any(self._read(2 * TAR_BLOCK, "the end")):
            raise ValueError(f"{self.path}: members after those of {MANIFEST}")
        after = 0
        while block := self._some(TAR_BLOCK):
            after += len(block)
            if any(block) or after > MAX_END_BYTES:
                raise ValueError(f"{self.path}: {'data' if any(block) else 'too many zeros'} after the last member")

    def _verified(self, size: int, digest: str) -> Iterator[bytes]:
        found = hashlib.sha256()
        for block in self._blocks(size, f"{OBJECTS}{digest}"):
            found.update(block)
            yield block
        if found.hexdigest() != digest:
            raise ValueError(f"{self.path}: {OBJECTS}{digest} is damaged: its SHA-256 is {found.hexdigest()}")

    def _opened(self) -> Any:
        start = self._file.peek(len(ZSTD))  # type: ignore[attr-defined]
        if not start.startswith(ZSTD):
            return self._file
        import pyarrow as arrow  # slow to import

        return arrow.CompressedInputStream(self._file, "zstd")

    def _next(self, wanted: str) -> int:
        """Read a header, which must be of the file `wanted`; returns its size."""
        header = self._read(TAR_BLOCK, wanted)
        try:
            entry = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise ValueError(f"{self.path}: no header of {wanted}: damaged, or not made by hpcrl bundle") from error
        if entry.type != tarfile.REGTYPE or entry.name != wanted:
            kind = "" if entry.type == tarfile.REGTYPE else f" of type {entry.type!r}"
            raise ValueError(f"{self.path}: a member {entry.name[:100]!r}{kind} where {wanted} should be")
        if entry.mode != 0o644 or entry.size < 0:
            raise ValueError(f"{self.path}: {wanted} has the mode {entry.mode:o}, size {entry.size}")
        return int(entry.size)

    def _blocks(self, size: int, name: str) -> Iterator[bytes]:
        left = size
        while left:
            block = self._read(min(BLOCK, left), name)
            left -= len(block)
            yield block
        self._read(-size % TAR_BLOCK, name)

    def _read(self, size: int, name: str) -> bytes:
        """This many bytes."""
        found = self._some(size)
        while len(found) < size and (more := self._some(size - len(found))):
            found += more
        if len(found) < size:
            raise ValueError(f"{self.path}: cut short: it ends in {name}; copy or make it again")
        return found

    def _some(self, size: int) -> bytes:
        if not size:
            return b""
        try:
            return bytes(self._stream.read(size))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path}: cannot be read: {' '.join(str(error).split())[:200]}") from error


def verify(path: Path) -> int:
    """Read an archive to its end; returns the bytes of its contents. ValueError as for BundleArchive."""
    with BundleArchive(path) as archive:
        pace = Pace("verifying", archive.manifest.num_bytes)
        for _, blocks in archive.contents():
            for block in blocks:
                pace.add(len(block))
        return archive.manifest.num_bytes
