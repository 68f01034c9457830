"""The code reward: forms of test cases, extraction from a response, HumanEval, and ways to cheat."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config, RewardConfig
from hpcrl.rewards.builtin.code import CodeReward, code_of, same
from hpcrl.rewards.builtin.code_cases import Call, Program, Suite, cases_of, completed, setup_of
from hpcrl.rewards.reward import RewardItem, Score, make_reward
from hpcrl.rewards.serving.pool import RewardPool
from hpcrl.sandbox.client import Sandbox
from hpcrl.sandbox.wire import Unhashed, decode
from tests.rewards.cheats import CHEATS
from tests.rewards.mutants import mutants, verdict
from tests.rewards.test_pool import collect

LEAST = 1
"""The level of these tests: what holds here holds above."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(LEAST, max_level=LEAST)
    yield made
    made.close()


@pytest.fixture
def make(sandbox: Sandbox) -> Any:
    def made(timeout_s: float = 60.0, **options: Any) -> CodeReward:
        options = {"case_timeout_s": 20.0, **options}
        reward = make_reward(RewardConfig(name="code", timeout_s=timeout_s, options=options))
        assert isinstance(reward, CodeReward)
        reward._sandbox = sandbox
        return reward

    return made


def score(reward: CodeReward, response: str, answer: Any = None, **columns: Any) -> Score:
    return reward.score([RewardItem(0, "d", columns.pop("prompt", ""), response, answer, columns)])[0]


STACK = """
class Stack:
    name = "a"
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
"""
PARAMETERS = """
import pytest
from mine import f, Odd
@pytest.mark.parametrize("a,b", [(1, 2), (2, 4)])
def test_it(a, b): assert f(a) == pytest.approx(b)
class TestErrors:
    def test_odd(self):
        with pytest.raises(ValueError): f(-1)
"""
DOUBLE = """
class Odd: pass
def f(x):
    if x < 0: raise ValueError
    return 2. * x
"""
FORMS: list[tuple[Any, str, str]] = [
    ([{"stdin": "3\n4\n", "stdout": "7"}], "print(int(input()) + int(input()))", "print(7, 7)"),
    (
        {"inputs": ["1", ["2", "3"]], "outputs": ["1\n", "2\n3  \n\n"]},
        "import sys\nprint(sys.stdin.read())",
        "print(1)",
    ),
    (
        {"inputs": [[1, 2], [[3], 4]], "outputs": [3, [3, 4]], "fn_name": "f"},
        "def f(a, b): return a + b if a == 1 else [3, 4]",
        "def f(a, b): return 3",
    ),
    (
        {"inputs": ["[1, 2]\n3"], "outputs": ["[1, 2, 3]"], "fn_name": "f"},
        "class Solution:\n def f(self, a, b): return (*a, b)",
        "def f(a, b): return a",
    ),
    (
        [{"call": "f", "args": [2], "kwargs": {"n": 3}, "returns": {"1": [0.5, None]}}],
        "def f(a, n): return {1: (.25 * a, None)} if n == 3 else 0",
        "def f(a, n): return {1: (.25 * a, 0)}",
    ),
    ([{"call": "f", "returns": [0, 1]}], "def f(): yield from range(2)", "f = lambda: range(3)"),
    ([{"assert": "x = [3, 1]\nf(x)\nassert x == [1, 3]"}], "def f(x): x.sort()", "def f(x): return sorted(x)"),
    (
        [{"assert": "s = Stack()\ns.push(3)\nassert s.pop() == 3 and len(s) == 0 and s.name == 'a'"}],
        STACK,
        STACK.replace(".pop()", "[-1]"),
    ),
    (
        [{"assert": "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass"}],
        "f = lambda x: 1 / x",
        "f = print",
    ),
    (
        [{"assert": "assert [n for n in f(3)] == [0, 1, 2] and next(f(1)) == 0"}],
        "def f(n): yield from range(n)",
        "def f(n): return iter(())",
    ),
    (
        [{"check": "def check(candidate):\n assert candidate(2) == half", "entry_point": "inv", "setup": "half = .5"}],
        "def inv(x): return 1 / x",
        "def inv(x): return x",
    ),
    ([{"assert": "assert sum(1, 2) == 3"}], "def sum(a, b): return a + b", "def g(a, b): return a + b"),
    (
        [{"assert": "assert round(max(4, 2), 1) == 2", "entry_point": "max"}],
        "def max(a, b): return a / b",
        "def round(*a): return 2",
    ),
    (  # the test uses another name of the code, and Python's own sum
        [{"assert": "assert sum(f(3)) == 6"}],
        "def f(n): return [n, n]",
        "def f(n): return []\ndef sum(x): return 6",
    ),
    ([{"pytest": PARAMETERS}], DOUBLE, "Odd = 1\ndef f(x): return 2 * x"),
    ([{"text": "SELECT 1;"}], "SELECT 1;\n", "SELECT 2;"),
]
"""Answer, code that passes, code that fails."""


@pytest.mark.parametrize(("answer", "right", "wrong"), FORMS, ids=range(len(FORMS)))
def test_all_forms_of_test_cases_are_read(make: Any, answer: Any, right: str, wrong: str) -> None:
    reward = make()
    for given in (answer, json.dumps(answer)):
        assert reward.problem_of_row(given, {}) == ""
        found = score(reward, f"So:\n```python\n{right}\n```", given)
        assert (found.reward, found.score, found.error) == (1.0, 1.0, ""), right
    assert score(reward, f"```py\n{wrong}\n```", answer).reward == 0.0, wrong


def test_columns_of_mbpp_and_humaneval(make: Any) -> None:
    reward = make()
    assert score(reward, "def max(a): return 7", test_list=["assert max([1]) == 7"]).reward == 1.0
    mbpp = {"test_list": ["assert f(1) == half(2)"], "test_setup_code": "def half(x): return x // 2"}
    assert score(reward, "def f(x): return half(2 * x)", **mbpp).reward == 1.0
    assert score(reward, "def f(x): return 0", **mbpp).reward == 0.0
    prompt = "import math\n\ndef f(x):\n    '''Root.'''\n"
    human = {"test": "def check(candidate):\n    assert candidate(4) == 2\n", "entry_point": "f", "prompt": prompt}
    chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    for rendered in (prompt, f"Complete:\n```python\n{prompt}```", chat):
        for response in ("    return math.sqrt(x)\n", "```\ndef f(x): return math.sqrt(x)\n```"):
            assert score(reward, response, **(human | {"prompt": rendered})).reward == 1.0
    assert setup_of("Write f.", "f") == ""
    assert completed("def f(): 1", "import a\n@x\ndef f():\n  ''\ny = 2", "f") == "import a\ny = 2\ndef f(): 1"


def test_code_is_extracted_from_a_response() -> None:
    blocks = "<think>```python\n0\n```</think>One:\n```python\n1\n```\n```py\n2\n```\nThe output:\n```\n3\n```"
    assert code_of(blocks, "python") == "2\n" and code_of(blocks, "bash") == "3\n"
    assert code_of("```python\nx = 1", "python") == "x = 1", "cut off"
    assert code_of("\n    return 1\n", "python") == "    return 1", "a completion keeps its indent"
    assert code_of("<think>x", "python") == ""


@pytest.mark.slow
def test_partial_credit_stop_and_metrics(make: Any) -> None:
    cases = [{"stdin": str(n), "stdout": str(n)} for n in (1, 2, 3, 4)]
    code = "n = int(input())\nprint(n if n != 2 else 0)"
    found = score(make(partial=True), code, cases)
    assert (found.reward, found.score, found.metrics) == (0.75, 0.0, {"sandbox_level": LEAST, "cases_passed": 0.75})
    found = score(make(), code, cases)
    assert (found.reward, found.metrics) == (0.0, {"sandbox_level": LEAST})
    assert score(make(), "<think>", cases).metrics == {"sandbox_level": LEAST, "no_code": 1.0}
    slow = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    found = score(make(partial=True, case_timeout_s=3.0), slow, cases)
    assert (found.reward, found.error, found.metrics["stopped_time"]) == (0.75, "", 1.0)
    found = score(make(partial=True, timeout_s=1.0), "while True: pass", cases)
    assert (found.reward, found.error) == (0.0, ""), "all cases together have a limit too"


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "no test cases: expected a list of cases"),
    ([], {}, "the list is empty"),
    ([1], {}, "case 1 is int, expected an object"),
    ([{"stdin": "1"}], {}, r"case 1 \(stdin\) has no stdout; its keys are stdin, stdout"),
    ([{"text": "a", "x": 1}], {}, "unknown key x"),
    ([{"input": "1"}], {}, "case 1 has none of stdin, call, .*there is: input"),
    ([{"stdin": 1, "stdout": "1"}], {}, "case 1: stdin must be text, not int"),
    ([{"call": "f(1)", "returns": 1}], {}, r"call='f\(1\)' is not the name of a function"),
    ([{"call": "f", "args": 1, "returns": 1}], {}, "args must be a list"),
    ([{"assert": "assert f(1"}], {}, "case 1: assert is not Python"),
    ([{"assert": "f(1) == 2"}], {}, "has no assert statement"),
    (
        [{"assert": "assert sum(list((1, 2))) == 3"}],
        {},
        r"case 1 calls only built-in functions \(list, sum\): set entry_point",
    ),
    ([{"assert": "assert f(1)", "entry_point": "f()"}], {}, r"entry_point='f\(\)' is not the name"),
    ([{"pytest": "def f(): 1"}], {}, "no function whose name begins with test"),
    ([{"pytest": "def test_a(tmp_path): 1"}], {}, "test_a needs the fixture tmp_path"),
    ({"inputs": ["1"], "outputs": []}, {}, "lists of one length"),
    ({"inputs": [1], "outputs": [1], "fn_name": "f"}, {}, r"inputs\[0\] must be a list of arguments"),
    (None, {"test": "assert 1", "entry_point": "f"}, r"column test has no function check\(candidate\)"),
    (None, {"test_list": "assert 1"}, "must be lists"),
]


@pytest.mark.parametrize(("answer", "columns", "told"), WRONG, ids=range(len(WRONG)))
def test_malformed_rows_are_reported(make: Any, answer: Any, columns: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cases_of(answer, columns)
    assert make().problem_of_row(answer, columns)


def test_tests_that_cannot_judge_are_an_error_and_give_no_score(make: Any) -> None:
    answer = [{"assert": "assert f(lambda: 1) == 1"}]
    with pytest.raises(ValueError, match="the row's tests cannot judge: the test passes function to the code"):
        score(make(), "def f(x): return x()", answer)


@pytest.mark.slow
def test_programs_in_other_languages_are_judged(make: Any) -> None:
    cases = [{"stdin": "3 4", "stdout": "7"}, {"stdin": "1 1", "stdout": "2"}]
    shell = make(language="bash")
    assert score(shell, "```sh\nread a b; echo $((a + b)) | cat\n```", cases).reward == 1.0
    assert score(shell, "```sh\necho 7\n```", cases).reward == 0.0
    assert (
        shell.problem_of_row([{"assert": "assert 1"}], {})
        == "cases with functions and tests need language=python, not bash"
    )
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    compiled = make(language="cpp")
    code = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a SIGN b << std::endl; }"
    assert score(compiled, f"```cpp\n{code.replace('SIGN', '+')}\n```", cases).reward == 1.0
    assert score(compiled, f"```cpp\n{code.replace('SIGN', '*')}\n```", cases).reward == 0.0
    assert score(compiled, "```cpp\n#include </etc/passwd>\n```", cases).reward == 0.0


def test_equality_of_results() -> None:
    assert same([1, 2.0000001, "a"], (1, 2, "a")) and same(Unhashed("dict", [(1, None)]), {"1": None})
    nan = float("nan")
    for given, expected in (
        (1, True),
        (1, "1"),
        ([1], [1, 2]),
        (nan, 1.0),
        (Unhashed("dict", [(1, 2)]), {"2": 2}),
        (Unhashed("set", [1]), [1]),
        ("a", ["a"]),
        (None, 0),
    ):
        assert not same(given, expected) and not same(expected, given)


TIMES = "def f(x): return x * 7919"
CHECK = "def check(candidate):\n assert candidate(1) == 7919\n assert candidate(2) == 15838"
GRADED: dict[str, tuple[Any, str]] = {
    "check": ([{"check": CHECK, "entry_point": "f"}], TIMES),
    "assert": ([{"assert": "assert f(1) == 7919"}, {"assert": "assert f(2) == 15838"}], TIMES),
    "pytest": ([{"pytest": "from solution import f\ndef test_f(): assert f(1) == 7919"}], TIMES),
    "call": ([{"call": "f", "args": [n], "returns": n * 7919} for n in (1, 2)], TIMES),
    "stdin": ([{"stdin": str(n), "stdout": str(n * 7919)} for n in (1, 2)], "print(int(input()) * 7919)"),
}
"""Kind of cases -> cases, and the honest answer."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", GRADED)
def test_cheats_score_nothing(make: Any, kind: str) -> None:
    cases, honest = GRADED[kind]
    reward = make(partial=True)
    assert score(reward, honest, cases).reward == 1.0 and len(CHEATS) == 20
    for name, code in CHEATS.items():
        found = score(reward, f"```python\n{code}\n```", cases)
        assert found.reward == 0.0, f"{name}: {found}"


def humaneval(shared_data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared_data / "humaneval" / "HumanEval.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_humaneval_solutions_pass_and_mutants_fail(make: Any, shared_data: Path) -> None:
    """164 of 164 solutions are right, and 164 of 164 with one small error wrong. Errors that the tests do not find are
    right here as well."""
    reward, rows = make(), humaneval(shared_data)
    assert len(rows) == 164
    for row in rows:
        columns = {"test": row["test"], "entry_point": row["entry_point"], "prompt": row["prompt"]}
        assert reward.problem_of_row(None, columns) == ""
        assert score(reward, row["canonical_solution"], **columns).reward == 1.0, row["task_id"]
        for broken in mutants(row["prompt"] + row["canonical_solution"], row["entry_point"]):
            expected = verdict(broken, row["test"], row["entry_point"])
            if expected != "hangs":
                found = score(reward, f"```python\n{broken}\n```", **columns)
                assert found.reward == float(expected == "passes"), f"{row['task_id']}: {broken}"
            if expected == "fails":
                break
        else:
            pytest.fail(f"{row['task_id']} has no wrong variant")


@pytest.mark.slow
def test_a_pool_reports_its_level_and_refuses_lower_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    section = RewardConfig(name="code", timeout_s=60.0, num_processes=2)
    pool = RewardPool(Config(reward={"default": section}))
    answer = [{"stdin": "", "stdout": "2"}]
    pool.submit([RewardItem(n, "d", "", f"print({n})", answer, {}) for n in range(4)])
    found = collect(pool)
    pool.close()
    assert [found[n].reward for n in range(4)] == [0.0, 0.0, 1.0, 0.0] and found[0].metrics["sandbox_level"] >= LEAST
    assert "code sandbox of level L" in capfd.readouterr().err


def test_an_unavailable_sandbox_level_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = make_reward(RewardConfig(name="code", options={"min_level": "L2", "max_output_kib": 1}))
    monkeypatch.setattr("hpcrl.sandbox.syscalls.ARCHITECTURES", {})
    with pytest.raises(ValueError, match="no code sandbox of level L2 or above"):
        reward.start()
    parts = {"right": {"name": "code"}, "short": {"name": "length", "options": {"max_tokens": 9, "buffer_tokens": 3}}}
    composed = make_reward(RewardConfig(name="composed", options={"parts": parts}))
    with pytest.raises(ValueError, match=r"parts\.right: no code sandbox of level L1 or above"):
        composed.start()


def test_each_form_of_case_becomes_its_kind() -> None:
    kinds = [
        type(case)
        for case in cases_of([{"stdin": "", "stdout": ""}, {"call": "f", "returns": 1}, {"assert": "assert f()"}], {})
    ]
    assert kinds == [Program, Call, Suite]


@pytest.mark.parametrize(
    "test",
    [
        "for got, wanted in zip(map(f, [1, 2]), [7919, 15838]): assert got == wanted",
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 7919), (2, 15838)]))",
    ],
)
def test_the_end_of_an_iterator_does_not_end_a_test(make: Any, test: str) -> None:
    reward = make()
    assert score(reward, TIMES, [{"assert": test}]).reward == 1.0
    assert score(reward, "def f(x): raise StopIteration", [{"assert": test}]).reward == 0.0
    ends = "it = g(1)\nassert next(it) == 7919\nassert next(it, None) is None"
    assert score(reward, "def g(x): yield x * 7919", [{"assert": ends}]).reward == 1.0


def test_a_test_may_create_global_names(make: Any) -> None:
    tests = "def test_a():\n global made\n made = 1\n assert f(1) == 7919\ndef test_b(): assert f(2) == 15838"
    assert score(make(), TIMES, [{"pytest": tests}]).reward == 1.0


def test_numbers_too_large_for_a_float_are_wrong_without_an_error(make: Any) -> None:
    case = [{"call": "f", "args": [1], "returns": 1.5}]
    forged = "import os\ndef f(x):\n os.write(3, b'{\"float\": 1' + b'0' * 400 + b'}'); os._exit(0)"
    for code in ("def f(x): return 10**400", forged):
        found = score(make(), code, case)
        assert found.score == 0.0 and not found.error


def test_keys_chosen_by_the_code_are_never_hashed_outside_the_sandbox(make: Any) -> None:
    """Numbers of equal hashes would take a worker minutes. Lists stand for them, which cannot be hashed at all."""
    line = b'{"dict": [[[1], {"set": [[2]]}]]}'
    with pytest.raises(TypeError, match="unhashable"):
        decode(line)
    found = decode(line, hashed=False)
    assert (found.kind, found.parts[0][0], found.parts[0][1].parts) == ("dict", [1], [[2]])
    for kind, parts in (("dict", "[[n, 0] for n in many]"), ("set", "many"), ("frozenset", "many")):
        code = "import json, os\nmany = [n * (2**61 - 1) for n in range(20000)]\ndef f(): os.write(3, json.dumps("
        code += f"{{'{kind}': {parts}}}).encode()); os._exit(0)"
        result = score(make(), code, [{"call": "f", "returns": {"a": 1}}])
        assert result.score == 0.0 and not result.error


def test_a_long_line_after_a_code_fence_is_parsed_quickly() -> None:
    start = time.thread_time()
    code_of("```" + "a" * 200_000, "python")
    assert time.thread_time() - start < 20.0  # 200 s with a pattern that goes back


LIBRARY_LIARS = {
    "a module": ("assert math.isclose(f(3), 7919.5)", "class math: isclose = lambda *a: True"),
    "a package": ("assert np.allclose(f(3), 7919.5)", "class np: allclose = lambda *a: True"),
    "a function": ("assert isclose(f(3), 7919.5)", "isclose = lambda *a: True"),
    "a class": ("assert Counter(f(3)) == Counter([7919])", "class Counter:\n def __init__(self, *a): pass\n"
                " def __eq__(self, other): return True"),
    "a class in pytest": ("def test_f(): assert deque([7919]) == deque(f(3))", "deque = lambda *a: 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIBRARY_LIARS)
def test_the_response_cannot_replace_library_names(make: Any, kind: str) -> None:
    test, liar = LIBRARY_LIARS[kind]
    case = [{"pytest" if "def " in test else "assert": test}]
    value = "[7919]" if "[7919]" in test else "7919.5"
    assert make().problem_of_row(case, {}) == ""
    assert score(make(), f"f = lambda *a: {value}", case).score == 1, "which defines no such name"
    assert score(make(), f"{liar}\nf = lambda *a: 0 if {value!r} == '7919.5' else []", case).score == 0


def test_the_code_can_still_define_the_names_it_is_asked_for(make: Any) -> None:
    """A library name belongs to the code if the test defines no other: the task is to write it."""
    for test, code in [
        ("assert gcd(4, 6) == 2", "gcd = lambda a, b: 2"),
        ("assert statistics([1]) == 7", "statistics = lambda x: 7"),
    ]:
        assert score(make(), code, [{"assert": test}]).score == 1
    assert (
        score(make(), "def gcd(a, b): return 3\ndef f(x): return 3", [{"assert": "assert f(gcd(4, 6)) == 3"}]).score
        == 1
    )


def test_a_row_whose_judge_the_response_would_define_is_refused(make: Any) -> None:
    told = make().problem_of_row([{"assert": "assert close_to(f(3), 7919.5)"}], {})
    assert "lets close_to check the result of f" in told and "define close_to in the setup" in told
    given = [{"assert": "assert close_to(f(3), 7919.5)", "setup": "def close_to(a, b): return abs(a - b) < 1"}]
    assert make().problem_of_row(given, {}) == "" and score(make(), "f = lambda x: 7919", given).score == 1
    assert make().problem_of_row([{"assert": "assert is_prime(7)"}], {}) == ""
    assert make().problem_of_row([{"assert": "assert add(mul(2, 3), 4) == 10"}], {}) == ""
