"""Small repositories with a bug, generated from a seed."""

from __future__ import annotations

import random
from typing import NamedTuple


class Repair(NamedTuple):
    """A task: the repository's files (path -> text), the request as `text`, hidden tests (path -> text), and the repair
    as `change`: (file, wrong line, right line)."""

    files: dict[str, str]
    text: str
    tests: dict[str, str]
    change: tuple[str, str, str]


class _Subject(NamedTuple):
    """A module with one or more functions, and calls with their correct values. bugs: right line -> wrong lines."""

    module: str
    code: str
    bugs: dict[str, list[str]]
    values: dict[str, str]


SUBJECTS = (
    _Subject(
        "stats",
        "def mean(numbers):\n    return sum(numbers) / len(numbers)\n\n\n"
        "def median(numbers):\n    ordered = sorted(numbers)\n    middle = len(ordered) // 2\n"
        "    if len(ordered) % 2:\n        return ordered[middle]\n"
        "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
        {
            "    ordered = sorted(numbers)": ["    ordered = list(numbers)", "    ordered = sorted(set(numbers))"],
            "    middle = len(ordered) // 2": ["    middle = (len(ordered) - 1) // 2"],
            "    return (ordered[middle - 1] + ordered[middle]) / 2": ["    return ordered[middle]"],
        },
        {"median([3, 1, 2])": "2", "median([4, 1, 3, 2])": "2.5", "median([1, 1, 1, 5])": "1.0", "mean([1, 2])": "1.5"},
    ),
    _Subject(
        "text",
        "def is_palindrome(text):\n    letters = [sign.lower() for sign in text if sign.isalpha()]\n"
        "    return letters == letters[::-1]\n\n\n"
        "def acronym(text):\n    return ''.join(word[0].upper() for word in text.split())\n",
        {
            "    letters = [sign.lower() for sign in text if sign.isalpha()]": [
                "    letters = [sign for sign in text if sign.isalpha()]",
                "    letters = [sign.lower() for sign in text]",
            ],
            "    return ''.join(word[0].upper() for word in text.split())": [
                "    return ''.join(word[0] for word in text.split())",
                "    return ''.join(word[-1].upper() for word in text.split())",
            ],
        },
        {"is_palindrome('Never odd or even')": "True", "is_palindrome('ab')": "False", "acronym('as far as')": "'AFA'"},
    ),
    _Subject(
        "intervals",
        "def merged(spans):\n    result = []\n    for start, end in sorted(spans):\n"
        "        if result and start <= result[-1][1]:\n"
        "            result[-1] = (result[-1][0], max(end, result[-1][1]))\n"
        "        else:\n            result.append((start, end))\n    return result\n",
        {
            "    for start, end in sorted(spans):": ["    for start, end in spans:"],
            "        if result and start <= result[-1][1]:": ["        if result and start < result[-1][1]:"],
            "            result[-1] = (result[-1][0], max(end, result[-1][1]))": [
                "            result[-1] = (result[-1][0], end)"
            ],
        },
        {
            "merged([(3, 4), (1, 2)])": "[(1, 2), (3, 4)]",
            "merged([(1, 2), (2, 3)])": "[(1, 3)]",
            "merged([(1, 9), (2, 3)])": "[(1, 9)]",
        },
    ),
    _Subject(
        "roman",
        "VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100}\n\n\n"
        "def number(text):\n    total = 0\n    for here, after in zip(text, text[1:] + ' '):\n"
        "        value = VALUES[here]\n"
        "        total += -value if value < VALUES.get(after, 0) else value\n    return total\n",
        {
            "VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100}": [
                "VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 100, 'C': 50}"
            ],
            "        total += -value if value < VALUES.get(after, 0) else value": [
                "        total += value",
                "        total += -value if value <= VALUES.get(after, 0) else value",
            ],
        },
        {"number('XIV')": "14", "number('III')": "3", "number('XLII')": "42", "number('XC')": "90"},
    ),
)


def repair(seed: int) -> Repair:
    """The task of a seed: a module with one of its bugs, and a request that names one failing call."""
    rng = random.Random(seed)
    subject = rng.choice(SUBJECTS)
    right = rng.choice([*subject.bugs])
    wrong = rng.choice(subject.bugs[right])
    folder, file = rng.choice(("lib", "core", "tools")), f"{subject.module}.py"
    package = f"{folder}_{rng.randrange(100)}"
    code = subject.code.replace(right, wrong, 1)
    failing = [call for call, value in subject.values.items() if not _gives(code, call, value)]
    call = rng.choice(failing)
    names = sorted({expression.partition("(")[0] for expression in subject.values})
    imported = f"from {package}.{subject.module} import {', '.join(names)}\n"
    tests = [f"def test_{n}():\n    assert {one} == {value}\n" for n, (one, value) in enumerate(subject.values.items())]
    return Repair(
        {
            f"{package}/__init__.py": "",
            f"{package}/{file}": code,
            "README.md": f"# {package}\n\n`{package}/{file}` has {' and '.join(names)}.\n",
        },
        f"`{call}` in {package}/{file} should be {subject.values[call]}, and is not. Repair the function.",
        {"test_hidden.py": "\n\n".join([imported, *tests])},
        (f"{package}/{file}", wrong, right),
    )


def _gives(code: str, call: str, value: str) -> bool:
    """Whether a call of this trusted code returns the value."""
    space: dict[str, object] = {}
    exec(code, space)
    return bool(eval(call, space) == eval(value))
