"""The commit protocol: a checkpoint is whole and verifiable under its final name, or it is not there.

Filesystem only, no collectives. One save is

    begin (rank 0) -> every rank writes its files -> seal_files (every rank, the files it wrote itself)
    -> the entries travel to rank 0 -> commit (rank 0)

A kill at any point leaves the checkpoints before it untouched, and the new one either complete or ignored. Writing into
an existing folder instead would mix two saves: it loads without an error and is wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from hpcrl.checkpoint.failpoint import failpoint
from hpcrl.files import STEP_NAME, fsync_path, remove, rename_durably, step_name, steps_in, write_durably

FORMAT = 2
UNSEALED = 1
"""The format before manifests had a checksum of their own."""
MANIFEST = "manifest.json"
LATEST = "LATEST"
LEFTOVER = re.compile(r"step_(\d{6,})\.(tmp|abandoned)-.+")
READ_BYTES = 16 << 20
HASH_THREADS = 4  # hashlib releases the GIL; sha256 runs at 1-2 GB/s per core where the CPU has the instructions


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint as it was when sealed. `path` is relative to the checkpoint, with forward slashes."""

    path: str
    size: int
    sha256: str


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says about itself. `world` is the layout that wrote it, free in form but JSON."""

    config_hash: str
    weight_version: int
    attempt: int
    world: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of manifest.json. `sha256` is that of the rest, as seal() makes it; empty in format 1."""

    format: int
    step: int
    facts: Facts
    files: list[FileEntry]
    sha256: str = ""

    def seal(self) -> str:
        """SHA-256 of what the manifest says, whatever its spacing: of its compact JSON without the checksum."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, sha256=""))).hexdigest()


class Latest(NamedTuple):
    """What find_latest found: `path` and `manifest` are None in a run without checkpoints; `problems` explains."""

    path: Path | None
    manifest: Manifest | None
    problems: list[str]


def begin(root: Path, step: int, attempt: int) -> Path:
    """Make and return the folder `step_NNNNNN.tmp-<attempt>` that all ranks write into. Called by rank 0.

    Removes what killed attempts left of the same step. ValueError when the step is already committed.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / step_name(step)
    if final.is_symlink() and not final.exists():
        raise ValueError(f"{final} is a symbolic link to {os.readlink(final)}, which is not there; remove or mend it")
    if final.exists():
        raise ValueError(f"{final} is already committed; a checkpoint is never written twice")
    for stale in root.glob(f"{step_name(step)}.tmp-*"):
        remove(stale)
    folder = root / f"{step_name(step)}.tmp-{attempt}"
    folder.mkdir()
    return folder


def list_files(folder: Path) -> list[str]:
    """Relative paths of all files under `folder` but the manifest, sorted."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != MANIFEST)


def seal_files(folder: Path, names: Iterable[str]) -> list[FileEntry]:
    """Push the files a rank wrote to the disk and return their sizes and hashes, in the order given.

    Every rank calls it for the files it wrote itself: only the writer's own fsync reaches the disk on a network
    filesystem. ValueError for a name that is missing or outside `folder`.
    """
    failpoint("shards_written")
    names = list(names)
    for name in names:
        if not _inside(name) or not (folder / name).is_file():
            raise ValueError(f"{name!r} is no file of the checkpoint {folder}")

    def seal(name: str) -> FileEntry:
        fsync_path(folder / name)
        return FileEntry(name, (folder / name).stat().st_size, _sha256(folder / name))

    with ThreadPoolExecutor(HASH_THREADS) as threads:
        entries = list(threads.map(seal, names))
    for part in {part for name in names for part in PurePosixPath(name).parents}:
        fsync_path(folder / part)
    failpoint("sealed")
    return entries


def commit(
    root: Path,
    step: int,
    tmp: Path,
    entries: Sequence[FileEntry],
    facts: Facts,
    *,
    keep: int,
    fence: Callable[[], None] | None = None,
) -> Path:
    """Turn a sealed folder into the checkpoint `step_NNNNNN` and return its path. Called by rank 0.

    Manifest, rename, LATEST, then the oldest are deleted until `keep` remain. `fence` raises when another attempt has
    taken the run over; it is asked last before the rename. ValueError when the entries of the ranks do not make up
    exactly the folder's files: a shard without an entry would never be verified.
    """
    assert keep >= 2, f"keep={keep}: the previous checkpoint is what a damaged one falls back to"
    files = sorted(entries, key=lambda entry: entry.path)
    sealed, present = [entry.path for entry in files], list_files(tmp)
    if sealed != present:
        odd = sorted(set(sealed) ^ set(present)) or sorted({name for name in sealed if sealed.count(name) > 1})
        raise ValueError(f"{tmp.name}: sealed files and files in the folder differ in {', '.join(odd[:5])}")
    manifest = Manifest(format=FORMAT, step=step, facts=facts, files=files)
    manifest = msgspec.structs.replace(manifest, sha256=manifest.seal())
    write_durably(tmp / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    failpoint("manifest_written")
    if fence is not None:
        fence()
    final = root / step_name(step)
    rename_durably(tmp, final)
    failpoint("renamed")
    set_latest(root, step)
    failpoint("latest_replaced")
    _prune(root, step, keep)
    failpoint("pruned")
    return final


def set_latest(root: Path, step: int) -> None:
    """Let LATEST name this step's checkpoint."""
    write_durably(root / LATEST, f"{step_name(step)}\n".encode())


def damage_of(folder: Path, entry: FileEntry, read: Callable[[int], None] = lambda _: None) -> str:
    """What is wrong with the content of a checkpoint's file, empty where it is as it was committed.

    `read` is told of the bytes of every part that was read; what it raises ends the reading.
    """
    try:
        same = _sha256(folder / entry.path, read) == entry.sha256
    except OSError as error:
        return f"{entry.path} cannot be read ({error})"
    return "" if same else f"{entry.path} is not what was committed (damaged, or from another save)"


def first_damage(folder: Path, entries: Sequence[FileEntry]) -> str:
    """damage_of the first file that has any, empty where all are whole; this process reads them all."""
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        return next(filter(None, threads.map(lambda entry: damage_of(folder, entry), entries)), "")


def find_latest(root: Path, damage: Callable[[Path, Sequence[FileEntry]], str] = first_damage) -> Latest:
    """The newest checkpoint whose every file has the size and hash it was committed with. Writes nothing.

    damage: compares the contents of the files, which are there and have their sizes; says what is wrong with them.
    A damaged one is passed over for the one before it, whatever the damage; `problems` says in plain words what was
    passed over and why. A committed folder that LATEST does not name yet (killed in between) counts. ValueError when
    there are checkpoints but none is usable: starting over in silence would throw the run away.
    """
    steps = steps_in(root)
    problems: list[str] = []
    if steps and (named := _named(root)) != step_name(steps[-1]):
        problems.append(f"LATEST names {named}, the newest committed folder is {step_name(steps[-1])}")
    for step in reversed(steps):
        path = root / step_name(step)
        manifest, problem = _verify(path, step)
        if manifest is not None:
            problem = damage(path, manifest.files)
        if manifest is None or problem:
            problems.append(f"{path.name} is passed over: {problem}")
            continue
        extra = sorted(set(list_files(path)) - {entry.path for entry in manifest.files})
        if extra:
            problems.append(f"{path.name} holds files that are not part of it, ignored: {', '.join(extra[:5])}")
        return Latest(path, manifest, problems)
    if steps:
        raise ValueError(
            f"no checkpoint in {root} is usable ({'; '.join(problems)}); restore one, or start over with resume=fresh"
        )
    return Latest(None, None, problems)


def _named(root: Path) -> str:
    """What LATEST says, for a message; any bytes may stand there after a crash of the machine."""
    try:
        text = (root / LATEST).read_text(errors="backslashreplace").strip()
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        return f"nothing (it cannot be read: {error})"
    return text if STEP_NAME.fullmatch(text) else repr(text[:40])


def _verify(path: Path, step: int) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint whose files are there with their sizes, or None and what is wrong with it."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        sealed = manifest.seal()
    except FileNotFoundError:
        return None, f"it has no {MANIFEST}"
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: bytes that are no text
        return None, f"{MANIFEST} cannot be read ({error})"
    if manifest.step != step or manifest.format not in (UNSEALED, FORMAT):
        return None, f"{MANIFEST} says format {manifest.format}, step {manifest.step}; expected {FORMAT} and {step}"
    if (manifest.format != UNSEALED or manifest.sha256) and manifest.sha256 != sealed:
        return None, f"{MANIFEST} is not what was committed (its checksum does not fit what it says)"
    for entry in manifest.files:
        file = path / entry.path
        try:
            size = file.stat().st_size if _inside(entry.path) and file.is_file() else None
        except (OSError, ValueError) as error:  # a name that no file can have
            return None, f"{entry.path!r} cannot be read ({error})"
        if size is None:
            return None, f"{entry.path} is missing"
        if size != entry.size:
            return None, f"{entry.path} has {size} bytes, {entry.size} were committed"
    return manifest, ""


def _prune(root: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what killed or abandoned saves left."""
    for old in steps_in(root)[:-keep]:
        # Renamed first: half a deleted checkpoint must not look like a committed one.
        os.rename(root / step_name(old), root / f"{step_name(old)}.tmp-pruned")
    for entry in list(root.iterdir()):
        match = LEFTOVER.fullmatch(entry.name)
        if match and entry.is_dir() and (match[2] == "abandoned" or int(match[1]) <= step):
            remove(entry)  # of a link to where a user has moved it the link alone


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name != MANIFEST


def _sha256(path: Path, read: Callable[[int], None] = lambda _: None) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            read(num_bytes)
    return digest.hexdigest()
