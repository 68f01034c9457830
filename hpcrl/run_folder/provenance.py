"""Facts about the machine and packages of an attempt."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

from hpcrl.run_folder.records import now
from hpcrl.spec.extras import version_of

PACKAGES = ("hpcrl", "torch", "transformers", "tokenizers", "safetensors", "numpy", "h5py", "msgspec", "pydantic")


def machine_facts() -> dict[str, Any]:
    """Host, CPU, package versions and commit of this attempt."""
    return {
        "start": now(),
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        "git_commit": _git_commit(),
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Commit of hpcrl's source tree, with `+changes` if files differ; None for an installed package."""
    source = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no", ".") else "")
