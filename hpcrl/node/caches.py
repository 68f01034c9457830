"""Compile caches of libraries: on the node's own disk, where later attempts find them, instead of in the home folder,
which all nodes share and whose quota is small."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""Libraries' variables -> cache folders. Ranks may share a folder: files are renamed into place, or locked."""
ABANDONED_S = 1800.0
"""Torch extensions are locked by a file that a killed process leaves behind; the next process would wait forever."""


def cache_folders(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The variables that `environ` lacks, with folders created in its TMPDIR: one set for each user and kind of node.
    Empty if they cannot be created or belong to another user. `root` is the folder that contains /proc."""
    names = {name: folder for name, folder in FOLDERS.items() if not environ.get(name)}
    if (own := own_folder(environ)) is None:
        return {}
    there = own / kind_of_node(environ, root)
    try:
        for folder in names.values():
            (there / folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    for lock in (there / "extensions").glob("*/lock"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > ABANDONED_S:
                lock.unlink()
    return {name: str(there / folder) for name, folder in names.items()}


def place_of_caches(environ: Mapping[str, str]) -> Path:
    """The path of this user's caches on this node."""
    return Path(environ.get("TMPDIR", "/tmp")) / f"hpcrl-caches-{os.getuid()}"


def own_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of this user's caches, which is created; None if it cannot be created or belongs to another user."""
    own = place_of_caches(environ)
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        if own.is_symlink() or own.stat().st_uid != os.getuid():  # code is loaded from this folder
            return None
        own.chmod(0o700)
    except OSError:
        return None
    return own


def kind_of_node(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """A folder name with a hash of everything on which compiled code depends, but which some libraries omit from their
    cache keys: CPU instruction sets, GPU models, torch version."""
    facts = {environ.get("ATEN_CPU_CAPABILITY", "")}
    for path, label in ((root / "proc/cpuinfo", "flags"), *((p, "Model:") for p in _gpus(root))):
        with contextlib.suppress(OSError):
            facts |= {line for line in path.read_text().splitlines() if line.startswith(label)}
    with contextlib.suppress(PackageNotFoundError):
        facts.add(version("torch"))
    return f"{platform.machine()}-{hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:12]}"


def _gpus(root: Path) -> list[Path]:
    return sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
