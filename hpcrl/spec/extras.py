"""Optional packages: their versions, and the command that installs them."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

EXTRAS = {
    "bitsandbytes": ("bitsandbytes==0.50.*",),
    "deepspeed": ("deepspeed==0.19.*",),
    "gymnasium": ("gymnasium==1.4.*",),
    "megatron": ("megatron-core==0.16.1",),
    "mlflow": ("mlflow-skinny>=3.17,<4",),
    "sglang": ("sglang==0.5.23",),
    "slurm": ("submitit", "hydra-submitit-launcher"),
    "swanlab": ("swanlab==0.10.*",),
    "vllm": ("vllm==0.32.*",),
    "wandb": ("wandb==0.31.*",),
}
"""Extra of hpcrl -> its packages, as in pyproject.toml: a package index knows them, but not this project."""

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""Beside hpcrl in a checkout. Not for SGLang, which takes another torch."""

DAMAGED = (OSError, ValueError, TypeError, KeyError)
"""What reading a package's metadata raises where they are missing in part or no text, by version of Python, and where
the package importlib_metadata has taken the place of Python's module."""


def install(names: Collection[str]) -> str:
    """The command that installs extras of hpcrl, or packages, for the interpreter that runs now."""
    packages = [package for name in names for package in EXTRAS.get(name, (name,))]
    pins = ["-c", str(CONSTRAINTS)] if CONSTRAINTS.exists() and "sglang" not in names else []
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join([*pins, *packages])}"


def packages_of(name: str) -> list[Distribution]:
    """The installed package of this name, or those that provide the module of this name; empty without one."""
    with contextlib.suppress(PackageNotFoundError):
        return [distribution(name)]
    return [distribution(owner) for owner in dict.fromkeys(packages_distributions().get(name, [])) if owner]


def version_of(name: str) -> str:
    """The version of the first of these packages; empty without one, or if its metadata do not say it."""
    with contextlib.suppress(*DAMAGED):
        return next((package.version or "" for package in packages_of(name)), "")
    return ""


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Import what is in the block as if these packages were not installed; one that is imported already is there."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: not to be found
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
