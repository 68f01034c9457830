"""The path of a user's reward function or environment class, `file.py:name` or `module:name`, by which every process of
a run imports it. Nothing is pickled: what only this process has is refused."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

GUARD = 'if __name__ == "__main__":'
IN_FILE = (
    "write it to a file (in a notebook: a cell that begins with %%writefile my_parts.py) and give 'my_parts.py:{}'"
)
FIND = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s and (s.origin or '') or '')"
"""Prints the file of a top-level module, without importing it."""
FIND_S = 60.0


def path_of(part: Callable[..., Any]) -> str:
    """`file.py:name` for a part of a single file, `module:name` for a part of a package or an installed module.
    ValueError says why other processes cannot import the part, and what to do."""
    name, module_name = getattr(part, "__qualname__", None), getattr(part, "__module__", None)
    if not isinstance(name, str) or not isinstance(module_name, str):
        kind = type(part).__name__
        raise ValueError(f"{part!r}: {kind} has no name by which a run imports it; give a function or class of a file")
    if "<lambda>" in name or "<locals>" in name:
        what = "a lambda" if "<lambda>" in name else "made inside a function"
        raise ValueError(f"{name}: {what}, so no other process can import it; {IN_FILE.format('NAME')}")
    module = sys.modules.get(module_name)
    file = Path(found) if (found := getattr(module, "__file__", None)) else None
    if file is None or file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{name}: defined in no file, so no other process can import it; {IN_FILE.format(name)}")
    if "." in name:
        raise ValueError(f"{name}: below a class; a run imports a name of the file itself, such as {file.name}:NAME")
    if name not in set(_names(ast.parse(file.read_bytes()).body)):
        raise ValueError(f"{name}: {file} does not define it at its top level; {IN_FILE.format(name)}")
    if getattr(module, name, None) is not part:
        raise ValueError(f"{name}: not what {file} defines now; import it again, or give '{file}:{name}'")
    if module_name == "__main__":
        _check_guarded(file, name)
        return f"{file.resolve()}:{name}"
    if "." in module_name or hasattr(module, "__path__") or _is_installed(file):
        _check_found(module_name, name)
        return f"{module_name}:{name}"
    return f"{file.resolve()}:{name}"


def _names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, without those below the guard of a script."""
    for node in statements:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            case ast.Assign():
                yield from (
                    leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)
                )
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If() if not is_guard(node):
                yield from _names([*node.body, *node.orelse])
            case ast.Try():
                handled = [inner for handler in node.handlers for inner in handler.body]
                yield from _names([*node.body, *handled, *node.orelse, *node.finalbody])
            case ast.With():
                yield from _names(node.body)


def is_guard(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and {"__name__", "'__main__'"} <= set(ast.unparse(node.test).split())


def _check_guarded(file: Path, name: str) -> None:
    """ValueError if the running script would train again in each process that runs its file for a part."""
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None:  # called in a thread; hpcrl.train refuses a call inside a run
        return
    for node in ast.parse(file.read_bytes()).body:
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno) and not is_guard(node):
            raise ValueError(
                f"{name}: each process of a run runs {file} to get it, and would train again; move line "
                f"{frame.f_lineno}, which calls hpcrl, below {GUARD}, or {name} to a file of its own"
            )


def _is_installed(file: Path) -> bool:
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")}
    return any(file.resolve().is_relative_to(Path(folder).resolve()) for folder in folders if folder)


def _check_found(module_name: str, name: str) -> None:
    """ValueError if a new process does not find the part's package where this process has found it."""
    top = module_name.partition(".")[0]
    done = subprocess.run(
        [sys.executable, "-c", FIND, top], capture_output=True, text=True, timeout=FIND_S, check=False
    )
    here = getattr(sys.modules.get(top), "__file__", None) or ""
    found = done.stdout.strip()
    if done.returncode or not found or (here and Path(found).resolve() != Path(here).resolve()):
        folder = Path(here).parent.parent if here else "its folder"
        raise ValueError(
            f"{name}: a new process does not find the package {top} of {folder}; install it, start in that folder "
            "or add it to PYTHONPATH"
        )
