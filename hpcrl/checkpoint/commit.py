"""The commit protocol: a checkpoint under its final name is complete and verifiable, or does not exist.

Files only, no collectives. One save is

    begin (rank 0) -> every rank writes and seals its own files with seal_files
    -> the entries are sent to rank 0 -> commit (rank 0)

A kill at any point leaves earlier checkpoints untouched. No save writes into a committed folder, because a mix of two
saves would load without an error.
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

from hpcrl.checkpoint.best import Best, name_best
from hpcrl.checkpoint.failpoint import failpoint
from hpcrl.system.files import STEP_NAME, fsync_path, remove, rename_durably, step_name, steps_in, write_durably

FORMAT = 2
UNSEALED = 1
"""The format before manifests had their own checksum."""
MANIFEST = "manifest.json"
METADATA = ".metadata"
"""The index file of a torch.distributed.checkpoint checkpoint."""
LATEST = "LATEST"
LEFTOVER = re.compile(r"step_(\d{6,})\.(tmp|abandoned)-.+")
PRUNED = "pruned"
READ_BYTES = 16 << 20
HASH_THREADS = 4  # hashlib releases the GIL; sha256 takes 1-2 GB/s per core on CPUs with SHA instructions


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sealed file of a checkpoint; `path` is relative to the checkpoint, with forward slashes."""

    path: str
    size: int
    sha256: str


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts about a checkpoint. `world` is the layout of the ranks that wrote it, as any JSON object. Manifests of
    earlier versions also have config_hash and weight_version, which their checksum covers."""

    config_hash: str | msgspec.UnsetType = msgspec.UNSET
    weight_version: int | msgspec.UnsetType = msgspec.UNSET
    attempt: int
    world: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of manifest.json. `sha256` is the result of seal(); empty in format 1."""

    format: int
    step: int
    facts: Facts
    files: list[FileEntry]
    sha256: str = ""

    def seal(self) -> str:
        """SHA-256 of the manifest's compact JSON without the checksum."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, sha256=""))).hexdigest()


class Latest(NamedTuple):
    """Result of find_latest. `path` and `manifest` are None if there are no checkpoints; `problems` lists skipped
    checkpoints, extra files, and a LATEST that is not up to date."""

    path: Path | None
    manifest: Manifest | None
    problems: list[str]


def begin(root: Path, step: int, attempt: int) -> Path:
    """Create and return the folder `step_NNNNNN.tmp-<attempt>` into which all ranks write. Called by rank 0.

    Removes files of killed attempts at the same step. ValueError if the step is already committed.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / step_name(step)
    if final.is_symlink() and not final.exists():
        raise ValueError(f"{final} is a symbolic link to {os.readlink(final)}, which does not exist; remove or fix it")
    if final.exists():
        raise ValueError(f"{final} is already committed; a checkpoint is never written twice")
    for stale in root.glob(f"{step_name(step)}.tmp-*"):
        remove(stale)
    folder = root / f"{step_name(step)}.tmp-{attempt}"
    folder.mkdir()
    return folder


def list_files(folder: Path) -> list[str]:
    """Relative paths of all files under `folder` except the manifest, sorted. OSError if the folder is gone."""

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse)  # rglob would find nothing, without an error, if the folder is gone
    files = (Path(at, name).relative_to(folder).as_posix() for at, _, names in walk for name in names)
    return sorted(name for name in files if name != MANIFEST)


def seal_files(folder: Path, names: Iterable[str]) -> list[FileEntry]:
    """Sync a rank's files to disk and return their sizes and hashes, in the order given. Every rank calls this for its
    own files, because on a network file system only the writer's fsync reaches the disk. ValueError for a name that is
    missing or outside `folder`."""
    failpoint("shards_written")
    names = list(names)
    for name in names:
        if not _inside(name) or not (folder / name).is_file():
            raise ValueError(f"{name!r} is not a file of the checkpoint {folder}")

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
    best: Best | None = None,
) -> Path:
    """Turn a sealed folder into the checkpoint `step_NNNNNN` and return its path. Called by rank 0.

    Args:
        keep: The oldest checkpoints are deleted until this many remain.
        fence: Called immediately before the rename; it raises if another attempt owns the run.
        best: Named in BEST; its step's checkpoint is not deleted, whatever its age.

    ValueError if the entries do not match the folder's files exactly, since a file without an entry is never verified.
    """
    assert keep >= 2, f"keep={keep}: the previous checkpoint is the fallback for a damaged one"
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
    if best is not None:
        name_best(root, best)
    failpoint("best_named")
    _prune(root, step, keep, best.step if best is not None else step)
    failpoint("pruned")
    return final


def set_latest(root: Path, step: int) -> None:
    write_durably(root / LATEST, f"{step_name(step)}\n".encode())


def damage_of(folder: Path, entry: FileEntry, read: Callable[[int], None] = lambda _: None) -> str:
    """The damage of a checkpoint's file; empty if its content is as committed. `read` is called with the number of
    bytes after each part that is read; an exception that it raises ends the check."""
    try:
        same = _sha256(folder / entry.path, read) == entry.sha256
    except OSError as error:
        return f"{entry.path} cannot be read ({error})"
    return "" if same else f"{entry.path} is not what was committed (damaged, or from another save)"


def first_damage(folder: Path, entries: Sequence[FileEntry], read: Callable[[int], None] = lambda _: None) -> str:
    """The damage of the first damaged file; empty if all are intact. Reads all files, in several threads."""
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        return next(filter(None, threads.map(lambda entry: damage_of(folder, entry, read), entries)), "")


def problem_of(path: Path, damage: Callable[[Path, Sequence[FileEntry]], str] = first_damage) -> str:
    """How the checkpoint in a folder differs from its committed state; empty if it does not. The folder may be a copy
    under another name; `damage` is as for find_latest."""
    match = STEP_NAME.fullmatch(path.name)
    manifest, problem = _verify(path, int(match[1]) if match else None)
    return damage(path, manifest.files) if manifest is not None else problem


def newest_whole(root: Path) -> int | None:
    """Step of the newest checkpoint whose files have their committed sizes; their content is not read."""
    return next((step for step in reversed(steps_in(root)) if _verify(root / step_name(step), step)[0]), None)


def find_latest(root: Path, damage: Callable[[Path, Sequence[FileEntry]], str] = first_damage) -> Latest:
    """The newest checkpoint whose files have their committed sizes and hashes. Writes nothing.

    `damage` verifies the contents of files whose sizes are right. Damaged checkpoints are skipped. A kill may have left
    LATEST behind the newest committed folder, so LATEST is only compared. ValueError if there are checkpoints but none
    is usable, since the run would otherwise silently start over.
    """
    steps = steps_in(root)
    problems: list[str] = []
    if steps and (named := _named(root)) != step_name(steps[-1]):
        problems.append(f"LATEST names {named}, but the newest committed folder is {step_name(steps[-1])}")
    for step in reversed(steps):
        path = root / step_name(step)
        manifest, problem = _verify(path, step)
        if manifest is not None:
            problem = damage(path, manifest.files)
        if manifest is None or problem:
            problems.append(f"skipping {path.name}: {problem}")
            continue
        extra = sorted(set(list_files(path)) - {entry.path for entry in manifest.files})
        if extra:
            problems.append(f"{path.name} contains extra files, ignored: {', '.join(extra[:5])}")
        return Latest(path, manifest, problems)
    if steps:
        raise ValueError(
            f"no checkpoint in {root} is usable ({'; '.join(problems)}); restore one, or start over with resume=fresh"
        )
    return Latest(None, None, problems)


def find_step(
    root: Path, step: int, damage: Callable[[Path, Sequence[FileEntry]], str] = first_damage
) -> tuple[Path, Manifest]:
    """The checkpoint of this step, if its files are as committed; `damage` is as for find_latest. ValueError names its
    damage, and the steps of the other checkpoints."""
    path = root / step_name(step)
    manifest, problem = _verify(path, step)
    if manifest is not None:
        problem = damage(path, manifest.files)
    if manifest is None or problem:
        others = ", ".join(str(other) for other in steps_in(root) if other != step) or "none"
        text = f"{path.name}, from which the branch begins, is damaged: {problem}; nothing was moved"
        raise ValueError(f"{text}; choose another with resume_from (checkpoints of steps {others})")
    return path, manifest


def _named(root: Path) -> str:
    """Content of LATEST, for a message; after a node crash, the file may contain any bytes."""
    try:
        text = (root / LATEST).read_text(errors="backslashreplace").strip()
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        return f"nothing (it cannot be read: {error})"
    return text if STEP_NAME.fullmatch(text) else repr(text[:40])


def _verify(path: Path, step: int | None) -> tuple[Manifest | None, str]:
    """(manifest, "") if the checkpoint's files exist with the right sizes, else (None, error). If `step` is given, the
    manifest's step must equal it."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        sealed = manifest.seal()
    except FileNotFoundError:
        return None, f"it has no {MANIFEST}"
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: bytes that are not text
        return None, f"{MANIFEST} cannot be read ({error})"
    if step not in (None, manifest.step) or manifest.format not in (UNSEALED, FORMAT):
        return None, f"{MANIFEST} has format {manifest.format}, step {manifest.step}; expected {FORMAT} and {step}"
    if (manifest.format != UNSEALED or manifest.sha256) and manifest.sha256 != sealed:
        return None, f"{MANIFEST} is not what was committed (its checksum does not match its content)"
    for entry in manifest.files:
        file = path / entry.path
        try:
            size = file.stat().st_size if _inside(entry.path) and file.is_file() else None
        except (OSError, ValueError) as error:  # an invalid file name
            return None, f"{entry.path!r} cannot be read ({error})"
        if size is None:
            return None, f"{entry.path} is missing"
        if size != entry.size:
            return None, f"{entry.path} has {size} bytes, but {entry.size} were committed"
    return manifest, ""


def _prune(root: Path, step: int, keep: int, best: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best, and leftovers of killed or abandoned saves."""
    for old in steps_in(root)[:-keep]:
        if old != best:
            _set_aside(root, old)
    for entry in list(root.iterdir()):
        match = LEFTOVER.fullmatch(entry.name)
        if match and entry.is_dir() and (match[2] == "abandoned" or int(match[1]) <= step):
            remove(entry)  # if a user has replaced the folder by a link, this removes only the link


def remove_checkpoint(root: Path, step: int) -> None:
    """Delete a checkpoint, or the link by which a user has replaced it."""
    remove(_set_aside(root, step))


def _set_aside(root: Path, step: int) -> Path:
    """Rename first, since a partly deleted checkpoint must not look like a committed one."""
    pruned = root / f"{step_name(step)}.tmp-{PRUNED}"
    os.rename(root / step_name(step), pruned)
    return pruned


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
