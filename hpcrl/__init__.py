"""hpcrl: reinforcement learning for large language models as a Slurm batch toolkit on torch.distributed."""

from typing import TYPE_CHECKING

__version__: str
"""The installed package's version, from pyproject.toml; read on access."""

if not TYPE_CHECKING:  # else mypy would accept every name as an attribute

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hpcrl")
        except PackageNotFoundError:
            return "0+unknown"  # imported from a checkout without installation
