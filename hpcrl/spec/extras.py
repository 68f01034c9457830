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
    "otlp": ("opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-http>=1.30,<2"),
    "prometheus": ("prometheus-client>=0.20,<1",),
    "sglang": ("sglang==0.5.23",),
    "slurm": ("submitit", "hydra-submitit-launcher"),
    "swanlab": ("swanlab==0.10.*",),
    "vllm": ("vllm==0.32.*",),
    "wandb": ("wandb==0.31.*",),
}
"""hpcrl's extra -> its packages, as in pyproject.toml. Package indexes have these packages, but not hpcrl."""

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""Next to hpcrl in a checkout. Not used for SGLang, which needs another version of torch."""

DAMAGED = (OSError, ValueError, TypeError, KeyError)
"""Exceptions from reading a package's metadata that are incomplete or not text. The type depends on the Python version
and on whether the package importlib_metadata replaces Python's module."""


def install(names: Collection[str]) -> str:
    """The command that installs extras of hpcrl, or packages, for the running interpreter."""
    packages = [package for name in names for package in EXTRAS.get(name, (name,))]
    pins = ["-c", str(CONSTRAINTS)] if CONSTRAINTS.exists() and "sglang" not in names else []
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join([*pins, *packages])}"


def packages_of(name: str) -> list[Distribution]:
    """The installed package of this name, or else the packages that provide the module; empty without one."""
    with contextlib.suppress(PackageNotFoundError):
        return [distribution(name)]
    return [distribution(owner) for owner in dict.fromkeys(packages_distributions().get(name, [])) if owner]


def version_of(name: str) -> str:
    """The version of the first package from packages_of(); empty without one, or if its metadata lack a version."""
    with contextlib.suppress(*DAMAGED):
        return next((package.version or "" for package in packages_of(name)), "")
    return ""


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Hide these packages from imports in the block, as if not installed; packages already imported stay visible."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
