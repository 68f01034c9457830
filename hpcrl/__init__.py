"""hpcrl: reinforcement learning for large language models as a Slurm batch toolkit on torch.distributed.

From Python (docs/python.md): hpcrl.plan, train, evaluate, Run and Generator. Each is imported on access, so
`import hpcrl` costs nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrl.python.failure import RunFailed
    from hpcrl.python.handle import RunHandle as Run
    from hpcrl.python.planning import Plan, plan
    from hpcrl.python.prompting import GeneratedResponse, Generator
    from hpcrl.python.training import evaluate, train

__all__ = ["GeneratedResponse", "Generator", "Plan", "Run", "RunFailed", "evaluate", "plan", "train"]

__version__: str
"""The installed package's version, from pyproject.toml; read on access."""

if not TYPE_CHECKING:  # else mypy would accept every name as an attribute
    _PLACES = {
        "GeneratedResponse": ("prompting", "GeneratedResponse"),
        "Generator": ("prompting", "Generator"),
        "Plan": ("planning", "Plan"),
        "Run": ("handle", "RunHandle"),
        "RunFailed": ("failure", "RunFailed"),
        "evaluate": ("training", "evaluate"),
        "plan": ("planning", "plan"),
        "train": ("training", "train"),
    }

    def __getattr__(name: str) -> object:
        if name in _PLACES:
            from importlib import import_module

            module, its_name = _PLACES[name]
            return getattr(import_module(f"hpcrl.python.{module}"), its_name)
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hpcrl")
        except PackageNotFoundError:
            return "0+unknown"  # imported from a checkout without installation

    def __dir__() -> list[str]:
        return sorted([*globals(), *_PLACES])
