"""The built-in tools: Python in the sandbox, a calculator, a number to find, and crops of the row's images."""

from __future__ import annotations

import ast
import operator
import queue
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hpcrl.envs.tools.crop import CropTool
from hpcrl.envs.tools.spec import ToolOptions
from hpcrl.envs.tools.tool import Result, Tool, schema
from hpcrl.sandbox.client import Sandbox
from hpcrl.sandbox.jobs import ChildTask, Limits, SandboxError

MAX_CHARS = 500
MAX_BITS = 10_000
Number = int | float

_idle: defaultdict[tuple[int, Limits], queue.Queue[Sandbox]] = defaultdict(queue.Queue)
"""Idle sandboxes of this process, by minimum level and limits: as many as there were concurrent calls."""


class PythonTool:
    """Runs a program in a sandbox (docs/security.md), without state from earlier calls."""

    schema = schema(
        "python",
        "Run a Python program and return what it prints. Nothing is kept between calls.",
        code={"type": "string", "description": "The program. Print what you want to see."},
    )

    def __init__(self, options: ToolOptions):
        self._needs = int(options.min_level[1]), Limits(memory_bytes=options.memory_mib << 20)

    def begin(self, seed: int) -> None:
        """Nothing of an episode is kept."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        """ValueError if no sandbox works here."""
        idle = _idle[self._needs]
        try:
            sandbox = idle.get_nowait()
        except queue.Empty:
            sandbox = Sandbox(*self._needs)
        try:
            ended = sandbox.run([ChildTask({"kind": "program", "code": arguments["code"]})], timeout_s)
        except SandboxError as error:
            return Result(f"the program was lost: {error}", error=True)
        finally:
            idle.put(sandbox)
        told = ended.stdout.decode(errors="replace")
        if ended.stopped:
            limit = f" of {timeout_s:g} s" if ended.stopped == "time" else ""
            return Result(f"{told}\nThe program was stopped by the {ended.stopped} limit{limit}.".strip(), error=True)
        if ended.code:
            problem = (
                _own(ended.stderr.decode(errors="replace")).strip() or f"The program ended with code {ended.code}."
            )
            return Result(f"{told.rstrip()}\n{problem}".strip(), error=True)
        return Result(told.strip("\n") or "The program printed nothing.")


def _own(stderr: str) -> str:
    """A traceback without the sandbox's own frames."""
    head, place, tail = stderr.partition('  File "solution.py"')
    before, line, _ = head.rpartition("Traceback (most recent call last):\n")
    return before + line + place + tail if place and line else stderr


class CalculatorTool:
    """Numbers, + - * / // % **, brackets."""

    schema = schema(
        "calculator",
        "Compute an arithmetic expression of numbers, + - * / // % ** and brackets.",
        expression={"type": "string", "description": "Such as (3 + 4) * 2.5"},
    )

    def begin(self, seed: int) -> None:
        """Nothing of an episode is kept."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        """The value; an error for invalid expressions and for too large numbers."""
        text = arguments["expression"].strip()
        if len(text) > MAX_CHARS:
            return Result(f"an expression has at most {MAX_CHARS} characters", error=True)
        try:
            return Result(str(_value(ast.parse(text, mode="eval").body)))
        except (ArithmeticError, ValueError) as error:
            return Result(str(error), error=True)
        except (SyntaxError, RecursionError, MemoryError):
            return Result(f"{text!r} is not an arithmetic expression", error=True)


OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _value(node: ast.expr) -> Number:
    """The value of an expression. ArithmeticError or ValueError if there is none."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            one, other = _value(left), _value(right)
            bits = one.bit_length() * other if isinstance(one, int) and isinstance(other, int) else 0
            if isinstance(op, ast.Pow) and bits > MAX_BITS:
                raise OverflowError(f"the number has more than {MAX_BITS} bits")
            found = OPERATIONS[type(op)](one, other)
            if isinstance(found, complex):
                raise ValueError("the value is not a real number")
            return found
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not a number or an operation of numbers")


class GuessTool:
    """The episode's number, to be found by "higher" and "lower"; finding it gives reward 1 and ends the episode."""

    schema = schema(
        "guess",
        "Guess the hidden number; the result says whether the number is higher or lower.",
        number={"type": "integer"},
    )

    def __init__(self, options: ToolOptions):
        self._highest = options.highest

    def begin(self, seed: int) -> None:
        self._number = random.Random(seed).randint(1, self._highest)
        self._least, self._most = 1, self._highest  # the range that the answers so far allow

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        guess = arguments["number"]
        if guess == self._number:
            return Result("found", reward=1.0, success=True, ended=True)
        if guess < self._number:
            self._least = max(self._least, guess + 1)
            return Result("higher", success=False)
        self._most = min(self._most, guess - 1)
        return Result("lower", success=False)

    def advised(self, rng: random.Random, noise: float) -> dict[str, Any]:
        """Arguments that halve the range left by the answers so far; with probability `noise` any number."""
        middle = (self._least + self._most) // 2
        return {"number": rng.randint(1, self._highest) if rng.random() < noise else middle}


BUILTIN: dict[str, Callable[[ToolOptions, Sequence[Any]], Tool]] = {
    "python": lambda options, _: PythonTool(options),
    "calculator": lambda *_: CalculatorTool(),
    "guess": lambda options, _: GuessTool(options),
    "crop": CropTool,
}
"""Name -> a new tool, from the options and the row's images."""
