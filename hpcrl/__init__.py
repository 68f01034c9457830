"""hpcrl: reinforcement learning for large language models as a Slurm batch toolkit on torch.distributed."""

from typing import TYPE_CHECKING

__version__: str
"""The version of the installed package, which pyproject.toml says; read when it is asked for."""

if not TYPE_CHECKING:  # else mypy would take every name for an attribute

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hpcrl")
        except PackageNotFoundError:
            return "0+unknown"  # imported from a checkout that is not installed
