"""Splits hidden tests' imports into the repository's modules, which run in the code's process, and other modules."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import PurePosixPath

from hpcrl.sandbox.pytest_form import problem_of_tests

PREFIX = "hpcrl_import_"
"""Prefix of names that tests import from the repository, in the code's process; no library uses it."""
CONFTEST = "conftest.py"


def test_files(tests: Mapping[str, str]) -> dict[str, str]:
    """Name -> source of each test file, preceded by conftest.py's fixtures."""
    shared = "\n\n".join(source for name, source in tests.items() if _is_conftest(name))
    return {
        name: f"{shared}\n\n{source}" if shared else source for name, source in tests.items() if not _is_conftest(name)
    }


def tops_of(files: Mapping[str, str]) -> set[str]:
    """The names of the repository's top-level modules."""
    return {PurePosixPath(name).parts[0].removesuffix(".py") for name in files}


def problem_of(tests: Mapping[str, str]) -> str:
    """Why hidden tests cannot judge the code, according to their source; empty if they can."""
    conftest = "\n\n".join(source for name, source in tests.items() if _is_conftest(name))
    for name, source in tests.items():
        problem = "" if _is_conftest(name) else problem_of_tests(source, conftest)
        if not problem and any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(source))):
            problem = "it has a relative import but is in no package"
        if problem:
            return f"hidden_tests: {name}: {problem}"
    return "" if test_files(tests) else "hidden_tests has no test file"


def split_imports(source: str, files: Mapping[str, str], name: str) -> tuple[str, str]:
    """Returns (imports of the repository's modules, for the code's process; the tests, which get the imported objects
    under other names). If a repository module imports an object from elsewhere, the tests import it directly from
    there, since the code does not define it. ValueError for tests that are not Python."""
    try:
        tree = ast.parse(source, name)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"hidden tests {name}: {error}") from error
    split = _Imports(files)
    tree = split.visit(tree)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    tree.body[:0] = split.foreign
    return "\n".join(split.own), ast.unparse(ast.fix_missing_locations(tree))


class _Imports(ast.NodeTransformer):
    """own: lines for the code; foreign: imports for the beginning of the tests."""

    def __init__(self, files: Mapping[str, str]):
        self._files, self._tops = files, tops_of(files)
        self._depth = 0
        self._modules: dict[str, str] = {}  # the tests' name of a repository module -> its name
        self.own: list[str] = []
        self.foreign: list[ast.stmt] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._inside(node)

    def _inside(self, node: ast.AST) -> ast.AST:
        self._depth += 1
        try:
            return self.generic_visit(node)
        finally:
            self._depth -= 1

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top not in self._tops:
                made.append(ast.Import([alias]))
                continue
            self._modules[alias.asname or alias.name] = alias.name
            key = self._key()
            whole = f"import {alias.name} as {key}" if alias.asname else f"import {alias.name}; import {top} as {key}"
            self._take(whole)
            made.append(_assign(alias.asname or top, key))
        return made

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt] | ast.AST:
        module = node.module or ""
        if node.level or module.partition(".")[0] not in self._tops:
            return node
        made: list[ast.stmt] = []
        for alias in node.names:
            if alias.name == "*":
                self._take(f"from {module} import *")
                made.append(ast.Pass())
                continue
            name = alias.asname or alias.name
            if (foreign := self._foreign(module, alias.name, name)) is not None:
                made.append(foreign)
                continue
            if self._file(f"{module}.{alias.name}") is not None:
                self._modules[name] = f"{module}.{alias.name}"
            key = self._key()
            self._take(f"from {module} import {alias.name} as {key}")
            made.append(_assign(name, key))
        return made

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        module = self._modules.get(ast.unparse(node.value))
        if module is not None and isinstance(node.ctx, ast.Load):
            key = self._key()
            if (foreign := self._foreign(module, node.attr, key)) is not None:
                self.foreign.append(foreign)
                return ast.copy_location(ast.Name(key, ast.Load()), node)
        return self.generic_visit(node)

    def _key(self) -> str:
        self._count = getattr(self, "_count", -1) + 1
        return f"{PREFIX}{self._count}"

    def _take(self, line: str) -> None:
        """Add an import line. If it fails within a function, only this function fails."""
        self.own.append(f"try:\n    {line}\nexcept Exception:\n    pass" if self._depth else line)

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((self._files[name] for name in (f"{path}.py", f"{path}/__init__.py") if name in self._files), None)

    def _foreign(self, module: str, name: str, bound: str) -> ast.stmt | None:
        """The import with which a repository module gets a name from elsewhere; None if the module defines the name."""
        try:
            body = ast.parse(self._file(module) or "").body
        except (SyntaxError, ValueError):
            return None
        found: ast.stmt | None = None
        for node in body:
            aliases = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
            for alias in aliases:
                if (alias.asname or alias.name) != name:
                    continue
                if isinstance(node, ast.Import):
                    inner = alias.name.partition(".")[0] in self._tops
                    found = None if inner else ast.Import([ast.alias(alias.name, bound)])
                elif isinstance(node, ast.ImportFrom):
                    inner = bool(node.level) or (node.module or "").partition(".")[0] in self._tops
                    found = None if inner else ast.ImportFrom(node.module, [ast.alias(alias.name, bound)], 0)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                found = None
        return found


def _assign(name: str, key: str) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], ast.Name(key, ast.Load()))


def _is_conftest(name: str) -> bool:
    return PurePosixPath(name).name == CONFTEST
