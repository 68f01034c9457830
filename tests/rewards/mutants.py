"""Programs with one small error each: a comparison, an operator, a constant or a returned value is changed."""

from __future__ import annotations

import ast
import contextlib
import io
import signal
from collections.abc import Iterator
from typing import Any, Literal

Verdict = Literal["passes", "fails", "hangs"]
LIMIT_S = 0.5  # CPU time of a program with its tests
SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Mod: ast.FloorDiv, ast.FloorDiv: ast.Mod,
}  # fmt: skip


class _Stopped(BaseException):
    """Not an Exception, which the program may catch."""


def mutants(program: str, function: str) -> Iterator[str]:
    """The programs that differ from this one at one place of a function, in the order of its syntax tree."""
    for place in range(len(_nodes(ast.parse(program), function))):
        tree = ast.parse(program)
        if _change(_nodes(tree, function)[place]):
            yield ast.unparse(ast.fix_missing_locations(tree))


def _nodes(tree: ast.Module, function: str) -> list[ast.AST]:
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return list(ast.walk(next(found)))


def _change(node: ast.AST) -> bool:
    """Change the node in place; returns whether it is of a kind that is changed."""
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in SWAPPED:
            node.ops = [SWAPPED[type(first)](), *rest]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            node.op = SWAPPED[type(operator)]()
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case ast.Return(value=ast.expr() as value):
            node.value = ast.List([value], ast.Load())
        case _:
            return False
    return True


def verdict(program: str, test: str, entry_point: str) -> Verdict:
    """The verdict of HumanEval's test on a trusted program, run in this process."""

    def stop(number: int, frame: object) -> None:
        raise _Stopped

    names: dict[str, Any] = {"__name__": "program"}
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(f"{program}\n{test}", names)
            names["check"](names[entry_point])
    except _Stopped:
        return "hangs"
    except Exception:
        return "fails"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return "passes"
