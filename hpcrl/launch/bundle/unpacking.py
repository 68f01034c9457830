"""Unpacks a bundle into a folder, which exists only when it is complete; one process of a node does it, others wait."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcrl.config import ConfigError
from hpcrl.config.config_file import read_config_file, write_config
from hpcrl.launch.bundle.archive import BundleArchive
from hpcrl.launch.bundle.collecting import has_modules, versions
from hpcrl.launch.bundle.layout import (
    CACHES,
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    MODULES,
    BundleManifest,
    config_in,
    decoded,
    texts,
)
from hpcrl.launch.bundle.pace import Pace
from hpcrl.launch.bundle.writing import BLOCK, with_digests
from hpcrl.launch.resources import size
from hpcrl.node.caches import kind_of_node, own_folder, place_of_caches
from hpcrl.system.clock import AwakeClock
from hpcrl.system.files import backed_off_s, find_room, is_storage_error, naming, rename_durably

GROUP = re.compile(r"__grp__.*\.json")
"""Files of Triton's cache with the absolute paths of a kernel's other files, which it does not find elsewhere."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables with which Hugging Face's libraries ask no server."""


def unpack(path: Path, folder: Path, wait_s: float) -> str:
    """Unpack an archive into `folder`, unless this was done; returns what was done, in one line.

    ValueError: the archive is damaged or no bundle, the folder holds something else or has changed, there is no space,
    or another process has not finished after `wait_s` seconds. OSError names a file that cannot be written. Then the
    folder does not exist, or is as before.
    """
    folder = folder.expanduser().absolute()
    if not folder.parent.is_dir():
        raise ValueError(f"--to {folder}: no folder {folder.parent}")
    with BundleArchive(path) as archive:
        if done := _done(archive, folder):
            return done
        with _alone(folder, wait_s):
            if done := _done(archive, folder):
                return done
            return _unpack(archive, folder)


def manifest_in(folder: Path) -> BundleManifest:
    """The manifest of an unpacked bundle. ValueError if there is none."""
    try:
        return decoded((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: not an unpacked bundle: {error}") from error


def verify_folder(folder: Path) -> int:
    """Compare all files of an unpacked bundle with its manifest; returns the bytes of its contents. ValueError names
    the first file that is missing or has changed."""
    manifest = manifest_in(folder)
    _check_sizes(folder, manifest)
    found = with_digests(manifest, {file.path: folder / file.path for file in manifest.files}).files
    if changed := next((file.path for file, now in zip(manifest.files, found, strict=True) if file != now), None):
        raise ValueError(f"{folder / changed}: changed since it was unpacked; remove {folder} and unpack again")
    return manifest.num_bytes


def _done(archive: BundleArchive, folder: Path) -> str:
    """What to say if the folder holds this bundle; empty if it does not exist."""
    if not os.path.lexists(folder):
        return ""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"--to {folder}: exists and is not a folder")
    if status.st_uid != os.getuid():  # code would be loaded from it
        raise ValueError(f"--to {folder}: belongs to another user; give another folder")
    there = folder / MANIFEST
    if not there.is_file():
        raise ValueError(f"--to {folder}: exists and holds no bundle; give a new folder")
    if there.read_bytes() != archive.head:
        raise ValueError(f"--to {folder}: holds another bundle than {archive.path}; remove it, or give a new folder")
    _check_sizes(folder, archive.manifest)
    _check_own_files(folder, archive.manifest)
    return f"{folder} holds {archive.path} already"


def _check_sizes(folder: Path, manifest: BundleManifest) -> None:
    for file in manifest.files:
        place = folder / file.path
        now = place.stat().st_size if place.is_file() else None
        if now != file.size:
            how = "is missing" if now is None else f"has {now} bytes instead of {file.size}"
            raise ValueError(f"{place}: {how}; remove {folder} and unpack again")


def _check_own_files(folder: Path, manifest: BundleManifest) -> None:
    """ValueError if a file of _own_files() is missing, or its paths are in the folder from which this one was moved."""
    for name in (CONFIG, ENVIRONMENT):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: is missing; remove {folder} and unpack again")
    try:
        config = read_config_file(folder / CONFIG).data
    except ConfigError:
        return  # edited, as a user may; the launch names the problem
    paths = [text for key, text in texts(config) if list(key) in manifest.paths]
    if paths and not any(Path(text).resolve().is_relative_to(folder.resolve()) for text in paths):
        raise ValueError(f"{folder}: was moved: {CONFIG} names {paths[0]}; remove {folder} and unpack again")


def _unpack(archive: BundleArchive, folder: Path) -> str:
    manifest, partial = archive.manifest, folder.with_name(f".{folder.name}.partial")
    _remove_partial(partial)
    _check_room(manifest, folder)
    pace = Pace("unpacking", manifest.num_bytes)
    paths: dict[str, list[str]] = {}
    for file in manifest.files:
        paths.setdefault(file.sha256, []).append(file.path)
    try:
        partial.mkdir()
        for digest, blocks in archive.contents():
            first, *others = (partial / path for path in paths[digest])
            _write(first, blocks, pace)
            for other in others:
                other.parent.mkdir(parents=True, exist_ok=True)
                _link(first, other)
        for name, content in _own_files(manifest, folder).items():
            _write(partial / name, iter([content]), pace)
        _write(partial / MANIFEST, iter([archive.head]), pace)
        rename_durably(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # partial files would keep a full disk full
        raise
    return f"{archive.path} -> {folder}: {len(manifest.files)} files, {size(manifest.num_bytes)} in {pace.summary()}"


def _own_files(manifest: BundleManifest, folder: Path) -> dict[str, bytes]:
    """Files that depend on the folder, by name."""
    lines = ["# Source this file before a launch from this bundle: no library asks a server of Hugging Face."]
    lines.append(f"export {' '.join(f'{name}={value}' for name, value in OFFLINE.items())}")
    if has_modules(manifest):
        lines.append(f"export PYTHONPATH={shlex.quote(f'{folder}/{MODULES}')}${{PYTHONPATH:+:$PYTHONPATH}}")
    # Without words, a launch compares the configuration by its values, and not by the words of the bundle.
    config = write_config(config_in(manifest, folder), None)
    return {CONFIG: config, ENVIRONMENT: "".join(f"{line}\n" for line in lines).encode()}


def _write(path: Path, blocks: Iterator[bytes], pace: Pace) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with naming(path), open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
        for block in blocks:
            rest = memoryview(block)
            while rest:
                rest = rest[file.write(rest) :]
            pace.add(len(block))
        os.fsync(file.fileno())


def _link(first: Path, other: Path) -> None:
    """A second name of a file; on a file system without hard links, a copy."""
    try:
        os.link(first, other)
    except OSError:
        with naming(other):
            shutil.copyfile(first, other)


def _remove_partial(partial: Path) -> None:
    """Remove what a killed process has left."""
    if not os.path.lexists(partial):
        return
    status = os.lstat(partial)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ValueError(f"{partial}: not left by an unpacking of yours; remove it, or give another folder")
    shutil.rmtree(partial)


def _check_room(manifest: BundleManifest, folder: Path) -> None:
    """ValueError if bytes or files do not fit."""
    place, needed = folder.parent, manifest.num_bytes + len(manifest.contents) * 4096
    free, refused = find_room(place, needed, reserve=True)
    if free < needed or refused:
        why = refused or f"{size(free)} are free"
        raise ValueError(f"--to {folder}: {size(needed)} are needed in {place}: {why}; give another folder")
    inodes, wanted = os.statvfs(place), len(manifest.files) + 100
    if inodes.f_files and inodes.f_favail < wanted:
        raise ValueError(f"--to {folder}: {wanted} files are to be created, and {place} has room for {inodes.f_favail}")


@contextlib.contextmanager
def _alone(folder: Path, wait_s: float) -> Iterator[None]:
    """Wait until no other process unpacks into the folder. The lock ends with its process."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if is_storage_error(error):
            raise
        raise ValueError(f"--to {folder}: {lock} cannot be made: {error.strerror}; give another place") from error
    try:
        clock = AwakeClock(wait_s)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NO_LOCKS:
                    raise ValueError(f"--to {folder}: {folder.parent} has no file locks; give another place") from error
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if clock.now() > wait_s:
                raise ValueError(f"--to {folder}: another process has not finished after {wait_s:g} s (--wait-s)")
            time.sleep(backed_off_s(clock.now()))
        yield
    finally:
        os.close(descriptor)


def install_caches(folder: Path, environ: Mapping[str, str]) -> str:
    """Copy the compiled code for this kind of node to where its ranks look for it; returns what was done, in one line.
    Files that exist are kept. OSError names a file that cannot be written."""
    kind, place_of_all = kind_of_node(environ), place_of_caches(environ)
    source = folder / CACHES / kind
    if not source.is_dir():
        return f"note: the bundle has no compiled code for this kind of node ({kind})"
    if (target := own_folder(environ)) is None:
        return f"note: no compiled code copied: {place_of_all} cannot be created (TMPDIR), or is another user's"
    number = 0
    for file in sorted(source.rglob("*"), key=lambda file: (bool(GROUP.fullmatch(file.name)), file)):  # lists last
        place = target / kind / file.relative_to(source)
        if not file.is_file() or place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name[:200]}.{os.getpid()}.tmp")
        content = _moved_group(file, place.parent) if GROUP.fullmatch(file.name) else None
        with naming(place), file.open("rb") as opened:
            blocks = iter(lambda: opened.read(BLOCK), b"") if content is None else iter([content])
            try:
                _write(temporary, blocks, Pace("copying", 0))
                os.rename(temporary, place)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        number += 1
    return f"compiled code: {number} new files in {place_of_all}"


def _moved_group(file: Path, folder: Path) -> bytes | None:
    """The list of a kernel's files with their paths in `folder`; None if the file is no such list."""
    try:
        paths: dict[str, str] = json.loads(file.read_bytes())["child_paths"]
        moved = {name: str(folder / Path(path).name) for name, path in paths.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return json.dumps({"child_paths": moved}).encode()


def differences_of_versions(manifest: BundleManifest) -> Iterator[str]:
    """A note for each version that is not that of the bundle."""
    here = versions()
    for name, then in manifest.versions.items():
        if (now := here.get(name, "none")) != then:
            yield f"note: the bundle was made with {name[:40]} {then[:40]}, here is {now}"
