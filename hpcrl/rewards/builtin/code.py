"""The code reward: the share of a row's test cases that a response's code passes, in a sandbox."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.code_cases import Call, Case, Program, Suite, Text, cases_of, completed
from hpcrl.rewards.grading.extract import CODE_BLOCK, after_thinking
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import CodeOptions
from hpcrl.sandbox.client import ENVIRONMENT, Sandbox
from hpcrl.sandbox.jobs import ChildTask, JobOutcome, Limits
from hpcrl.sandbox.wire import Unhashed, decode, encode
from hpcrl.spec.options import read_options

logger = logging.getLogger(__name__)

NAMES = {"python": ("python", "py", "python3"), "cpp": ("cpp", "c++", "cc", "cxx"), "bash": ("bash", "sh", "shell")}
"""Language -> its names for fenced blocks."""
PROGRAMS = {"cpp": ("g++", "main.cpp"), "bash": ("bash", "main.sh")}
COMPILE = ("-O2", "-std=c++17", "-pipe", "-o", "main")
SHARE_OF_TIMEOUT = 0.8
"""Share of reward.*.timeout_s for all cases of a response, so slow code scores 0 instead of causing an error."""
MIN_S = 0.05
CLOSE = {"rel_tol": 1e-6, "abs_tol": 1e-9}


class CodeReward(PerResponse):
    """Score: 1 if the code passes all cases of its row, else 0. Reward: the score; with `partial`, the share of cases
    passed. Expected values stay outside the process that runs the code (docs/security.md)."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(CodeOptions, config.options)
        self._budget_s = SHARE_OF_TIMEOUT * config.timeout_s
        self._sandbox: Sandbox | None = None

    def start(self) -> None:
        """Start the sandbox. ValueError if it does not reach the level, or if the language cannot be run here."""
        options = self.options
        limits = Limits(
            memory_bytes=options.memory_mib << 20,
            file_bytes=options.max_file_mib << 20,
            processes=options.max_processes,
            output_bytes=options.max_output_kib << 10,
        )
        if options.language in PROGRAMS and self._command() is None:
            raise ValueError(
                f"language={options.language} needs {PROGRAMS[options.language][0]}, which is not installed"
            )
        self._sandbox = Sandbox(int(options.min_level[1]), limits)
        logger.info(self._sandbox.describe())

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports a row without test cases, or with cases of a wrong shape or another language."""
        try:
            self._check_language(cases_of(answer, extra))
        except ValueError as error:
            return str(error)
        return ""

    def _check_language(self, cases: Sequence[Case]) -> None:
        needs_python = any(not isinstance(case, Program | Text) for case in cases)
        if needs_python and self.options.language != "python":
            raise ValueError(f"cases with functions and tests need language=python, not {self.options.language}")

    def score_one(self, item: RewardItem) -> Score:
        cases = cases_of(item.answer, item.extra, item.prompt)
        self._check_language(cases)
        if self._sandbox is None:
            self.start()
        assert self._sandbox is not None
        metrics = {"sandbox_level": float(self._sandbox.level)}
        code = code_of(item.response, self.options.language)
        if not code.strip():
            return Score(0.0, 0.0, metrics=metrics | {"no_code": 1.0})
        run = _Run(self._sandbox, self.options, self._command(), self._budget_s)
        shares: list[float] = []
        for case in cases:
            shares.append(run.share(case, code))
            if shares[-1] < 1 and not self.options.partial:
                break
        passed = float(len(shares) == len(cases) and all(share == 1 for share in shares))
        share = sum(shares) / len(cases)
        if self.options.partial:
            metrics["cases_passed"] = share
        metrics |= {f"stopped_{name}": 1.0 for name in run.stopped}
        return Score(share if self.options.partial else passed, passed, metrics=metrics, extracted=code)

    def _command(self) -> str | None:
        name = PROGRAMS.get(self.options.language)
        return shutil.which(name[0], path=ENVIRONMENT["PATH"]) if name else None


class _Run:
    """The cases of one response."""

    def __init__(self, sandbox: Sandbox, options: CodeOptions, command: str | None, budget_s: float):
        self._sandbox, self._options, self._left_s = sandbox, options, budget_s
        self._command = command
        self._compiled: bool | None = None
        self.stopped: set[str] = set()
        """The limits that ended a case."""

    def share(self, case: Case, code: str) -> float:
        """1 if the code passes, 0 if not; for a case with several tests, the share that passes."""
        if isinstance(case, Text):
            return float(_lines(code) == _lines(case.text))
        if isinstance(case, Suite):
            return self._tested(case, code)
        if isinstance(case, Call):
            arguments = encode([list(case.arguments), dict(case.named)]).decode()
            ended = self._run([ChildTask({"kind": "call", "code": code, "name": case.name, "arguments": arguments})])
            return float(ended is not None and _is(ended.result, case.returns))
        ended = self._run_program(code, case.stdin.encode(errors="surrogatepass"))
        return float(ended is not None and _lines(ended.stdout.decode(errors="replace")) == _lines(case.stdout))

    def _run_program(self, code: str, stdin: bytes) -> JobOutcome | None:
        if self._command is None:
            return self._run([ChildTask({"kind": "program", "code": code}, stdin)])
        file = PROGRAMS[self._options.language][1]
        if self._options.language == "bash":
            return self._run([ChildTask(_execute([self._command, file], {file: code}), stdin)])
        if self._compiled is None:
            made = self._run([ChildTask(_execute([self._command, *COMPILE, file], {file: code}))], self._left_s)
            self._compiled = made is not None
        return self._run([ChildTask(_execute(["./main"], {}), stdin)], keep_files=True) if self._compiled else None

    def _tested(self, case: Suite, code: str) -> float:
        """Run tests and code in two processes; the share of tests that pass."""
        whole = completed(code, case.setup, case.entry_point) if case.style == "check" else f"{case.setup}\n{code}"
        what = {"kind": "tests", "style": case.style, "source": case.source, "setup": case.setup}
        tasks = [ChildTask({"kind": "serve", "code": whole}), ChildTask(what | {"entry_point": case.entry_point})]
        ended = self._run(tasks)
        verdict = _value(ended.result) if ended is not None else None
        if not isinstance(verdict, dict):
            return 0.0
        if verdict["problem"]:
            raise ValueError(f"the row's tests cannot judge: {verdict['problem']}")
        return verdict["passed"] / verdict["total"] if verdict["total"] else 0.0

    def _run(
        self, tasks: Sequence[ChildTask], most_s: float | None = None, keep_files: bool = False
    ) -> JobOutcome | None:
        """The tasks' outcome; None if they failed, or if no time is left."""
        limit_s = min(self._left_s, most_s or self._options.case_timeout_s)
        if limit_s < MIN_S:
            self.stopped.add("time")
            return None
        outcome = self._sandbox.run(tasks, limit_s, keep_files)
        self._left_s -= outcome.seconds
        self.stopped |= {outcome.stopped} - {""}
        return outcome if outcome.code == 0 and not outcome.stopped else None


def code_of(response: str, language: str) -> str:
    """A response's code: after the thinking, the last block of the language, else the last block, else everything. An
    unclosed block extends to the end."""
    text = after_thinking(response)
    blocks = CODE_BLOCK.findall(text)
    named = [code for name, code in blocks if name.lower() in NAMES[language]]
    return named[-1] if named else blocks[-1][1] if blocks else text.strip("\n")


def _execute(command: Sequence[str], files: Mapping[str, str]) -> dict[str, Any]:
    return {"kind": "execute", "command": list(command), "files": dict(files)}


def _lines(text: str) -> list[str]:
    """The text's lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _value(result: bytes) -> Any:
    """The value that a process has sent; None if it is not a valid value."""
    try:
        return decode(result)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError):
        return None


def _is(result: bytes, expected: Any) -> bool:
    try:
        return same(decode(result, hashed=False), expected)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError):
        return False


def same(given: Any, expected: Any) -> bool:
    """Whether a result, decoded without hashing, equals a row's expected value of JSON types: a tuple equals a list,
    floats have a relative tolerance of 1e-6, a number is not a bool, and keys are compared as text."""
    if isinstance(given, bool) or isinstance(expected, bool) or given is None or expected is None:
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        either = isinstance(given, float) or isinstance(expected, float)
        return math.isclose(given, expected, **CLOSE) if either else given == expected
    if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(given, Unhashed) and given.kind == "dict" and isinstance(expected, Mapping):
        own = {str(key): value for key, value in given.parts}  # model code cannot choose hashes of str
        return own.keys() == expected.keys() and all(same(own[key], expected[key]) for key in own)
    return type(given) is type(expected) and bool(given == expected)
