"""Writes a bundle: complete under its name, or not at all; never over another file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.data.row_files import publish
from hpcrl.launch.bundle.layout import MANIFEST, OBJECTS, BundleFile, BundleManifest, check_path, encoded
from hpcrl.launch.bundle.pace import Pace
from hpcrl.launch.resources import size
from hpcrl.system.files import find_room, fsync_path, naming, open_regular

BLOCK = 4 << 20
TAR_BLOCK = 512
SUFFIXES = (".tar", ".tar.zst")
THREADS = 4
"""Files whose digests are computed at once."""


def check_target(out: Path) -> None:
    """ValueError if an archive cannot be written there."""
    if not out.name.endswith(SUFFIXES) or out.name in SUFFIXES:
        raise ValueError(f"--out {out}: a name that ends in {' or '.join(SUFFIXES)} is needed")
    if os.path.lexists(out):
        raise ValueError(f"--out {out}: exists already; remove it, or give another name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: no folder {out.absolute().parent}")


def with_digests(manifest: BundleManifest, files: Mapping[str, Path]) -> BundleManifest:
    """The manifest with size and SHA-256 of each file, path in the bundle -> file. OSError names an unreadable file."""
    for path in files:
        check_path(path)
    unique = sorted({file.resolve() for file in files.values()})
    pace = Pace("reading", sum(file.stat().st_size for file in unique))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        found = dict(zip(unique, threads.map(lambda file: _digest(file, pace), unique), strict=True))
    entries = [BundleFile(path, *found[file.resolve()]) for path, file in sorted(files.items())]
    return msgspec.structs.replace(manifest, files=entries)


def _digest(file: Path, pace: Pace) -> tuple[int, str]:
    digest, num_bytes = hashlib.sha256(), 0
    with naming(file), open_regular(file) as opened:
        while block := opened.read(BLOCK):
            digest.update(block)
            num_bytes += len(block)
            pace.add(len(block))
    return num_bytes, digest.hexdigest()


def write_bundle(out: Path, manifest: BundleManifest, files: Mapping[str, Path]) -> str:
    """Write the archive and sync it to disk; returns the time as text.

    ValueError: there is no space, the name is taken, or a file has changed since its digest was computed. OSError names
    the file that cannot be written. Then nothing is left.
    """
    check_target(out)
    head, contents = encoded(manifest), manifest.contents
    needed = sum(TAR_BLOCK + num + -num % TAR_BLOCK for num in (len(head), *_sizes(contents)))
    free, refused = find_room(out.absolute().parent, needed, reserve=True)
    if free < needed or refused:
        why, place = refused or f"{size(free)} are free", out.absolute().parent
        raise ValueError(f"--out {out}: up to {size(needed)} are needed in {place}: {why}; give another place")
    pace = Pace("writing", manifest.num_bytes)
    temporary = out.with_name(f".{out.name}.tmp")
    with _alone(temporary, out) as opened:
        try:
            with naming(out), _compressed(opened, out) as stream:
                stream.write(_header(MANIFEST, len(head)))
                stream.write(head)
                stream.write(_padding(len(head)))
                for digest, entry in contents.items():
                    stream.write(_header(f"{OBJECTS}{digest}", entry.size))
                    for block in _unchanged(files[entry.path], entry):
                        stream.write(block)
                        pace.add(len(block))
                    stream.write(_padding(entry.size))
                stream.write(bytes(2 * TAR_BLOCK))
            with naming(out):
                fsync_path(temporary)
            publish(temporary, out)
        except FileExistsError as error:
            temporary.unlink(missing_ok=True)
            raise ValueError(f"--out {out}: exists by now; nothing was overwritten") from error
        except BaseException:
            temporary.unlink(missing_ok=True)  # a partial archive would keep the disk full
            raise
    return pace.summary()


def _sizes(contents: Mapping[str, BundleFile]) -> Iterator[int]:
    yield from (entry.size for entry in contents.values())


def _unchanged(file: Path, entry: BundleFile) -> Iterator[bytes]:
    """The content of a file. ValueError if it is not what the manifest says."""
    digest, left = hashlib.sha256(), entry.size
    with naming(file), open_regular(file) as opened:
        while left and (block := opened.read(min(BLOCK, left))):
            digest.update(block)
            left -= len(block)
            yield block
        if left or opened.read(1) or digest.hexdigest() != entry.sha256:
            raise ValueError(f"{file}: changed while it was bundled; start again when nothing writes it")


@contextlib.contextmanager
def _alone(temporary: Path, out: Path) -> Iterator[io.BufferedRandom]:
    """The temporary file, empty and open, while this process alone has it. ValueError if another process writes it."""
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(descriptor, "r+b") as opened:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ValueError(f"--out {out}: another process is writing it") from error
            # The file system has no locks: the archive is written without this check.
        mine = temporary.exists() and os.path.samestat(os.fstat(descriptor), os.stat(temporary))
        if not mine or os.path.lexists(out):
            raise ValueError(f"--out {out}: another process has just written it")
        opened.truncate()
        yield opened


@contextlib.contextmanager
def _compressed(opened: io.BufferedRandom, out: Path) -> Iterator[Any]:
    """A stream into the file, through zstd if the name asks for it."""
    if not out.name.endswith(".zst"):
        yield opened
        opened.flush()
        return
    import pyarrow as arrow  # slow to import

    sink = _Kept(opened)
    stream = arrow.CompressedOutputStream(arrow.PythonFile(sink, mode="w"), "zstd")
    try:
        yield stream
    finally:
        stream.close()
    opened.flush()


class _Kept:
    """A file for Arrow, which would close it."""

    closed = False

    def __init__(self, opened: io.BufferedRandom):
        self.write, self.flush, self.tell = opened.write, opened.flush, opened.tell

    def close(self) -> None:
        self.flush()


def _header(name: str, num_bytes: int) -> bytes:
    """The header of a regular file; it depends on name and size only, so equal inputs make equal archives."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = num_bytes, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % TAR_BLOCK)
