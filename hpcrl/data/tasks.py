"""Built-in prompt sources that generate their rows: `task:NAME` (sort_digits, sort_pairs, add, program, repeat,
shapes), `reasoning_gym:NAME`, and from environments (hpcrl.data.env_sources), `env:DOMAIN` and `expert:NAME`.

A row is a function of (seed, split, index) only. Rows have the keys of a jsonl file: prompt, answer, other columns.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from hpcrl.config import Positive, Section
from hpcrl.data.env_sources import ExpertTask, StartTask
from hpcrl.spec.benchmarks import BENCHMARK, SUITE, is_suite
from hpcrl.spec.fields import NUMBER
from hpcrl.spec.options import read_options

Split = Literal["train", "val"]
DEFAULT_SIZE: dict[Split, int] = {"train": 65536, "val": 1024}

WORDS = ("cat", "dog", "sun", "sea", "red", "ice", "oak", "bee", "fox", "owl", "rye", "ink")

SUITE_ROWS = 20  # of each data set in a suite, by default
MAX_SUITE_ROWS = 1024
VALIDATION_EVERY = 16  # one row content in this many belongs to val, the others to train

# These verifiers give wrong results for gold answers or for wrong answers (reasoning-gym 0.1.25).
BROKEN_REASONING_GYM = {
    **dict.fromkeys(
        ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"),
        "its verifier scores the gold answer 0",
    ),
    **dict.fromkeys(("game_of_life_halting", "spell_backward"), "its verifier scores wrong answers above 0"),
}


class Task(Protocol):
    """Rows generated on demand; `name` is their domain."""

    name: str
    size: int

    def row(self, index: int) -> dict[str, Any]: ...


class SortOptions(Section):
    """Options of the task sort_digits."""

    min_digits: Positive = 4
    """Minimum digits of a row."""
    max_digits: Positive = 7
    """Maximum digits of a row."""
    pairs: bool = False
    """Whether rows are pairs: `chosen` is the answer, `rejected` has two of its digits exchanged, or one replaced."""

    @model_validator(mode="after")
    def _in_order(self) -> SortOptions:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits={self.min_digits} is above max_digits={self.max_digits}")
        return self


class AddOptions(Section):
    """Options of the task add."""

    max_digits: Positive = 2
    """Maximum digits of a summand."""


class ProgramOptions(Section):
    """Options of the task program: a function that multiplies and adds."""

    max_digits: Positive = 2
    """Maximum digits of the summand."""


class RepeatOptions(Section):
    """Options of the task repeat: IFEval instructions to write each of two words a number of times."""

    max_times: Positive = 3
    """Maximum number of times for a word."""


class ShapesOptions(Section):
    """Options of the task shapes: questions about drawn images."""

    questions: list[Literal["colour", "number"]] = Field(default=["colour", "number"])
    """The questions that are asked; the answer is a letter (r, g, b, y, k, w) or a digit."""
    side: Annotated[int, Field(ge=28, le=1024), NUMBER] = 56
    """Pixels of an image's side."""
    other_image: bool = False
    """Show another image than the answer's: a control, in which a model that sees can only guess."""


def _sort_digits(rng: random.Random, options: SortOptions) -> dict[str, Any]:
    digits = [rng.randrange(10) for _ in range(rng.randint(options.min_digits, options.max_digits))]
    row = {"prompt": f"sort: {_spaced(digits)}", "answer": _spaced(sorted(digits))}
    if not options.pairs:
        return row
    rng = random.Random(row["prompt"])  # the other draws stay those of rows without pairs
    return row | {"chosen": row["answer"], "rejected": _spaced(_wrong(rng, digits))}


def _wrong(rng: random.Random, digits: list[int]) -> list[int]:
    """The sorted digits with two different ones exchanged; equal digits with the last one replaced."""
    ordered = sorted(digits)
    different = [(i, j) for j in range(len(ordered)) for i in range(j) if ordered[i] != ordered[j]]
    if not different:
        return [*ordered[:-1], (ordered[-1] + 1) % 10]
    i, j = rng.choice(different)
    ordered[i], ordered[j] = ordered[j], ordered[i]
    return ordered


def _sort_pairs(rng: random.Random, options: SortOptions) -> dict[str, Any]:
    """A row of sort_digits as a pair: the rejected answer has two digits exchanged, a digit changed, left out or twice,
    or is the unsorted prompt."""
    row = _sort_digits(rng, options)
    right = [int(digit) for digit in row["answer"].split()]
    while True:
        wrong, (at, other) = list(right), (rng.randrange(len(right)) for _ in range(2))
        match rng.randrange(5):
            case 0:
                wrong[at], wrong[other] = wrong[other], wrong[at]
            case 1:
                wrong[at] = rng.randrange(10)
            case 2:
                del wrong[at]
            case 3:
                wrong.insert(at, wrong[at])
            case 4:
                wrong = [int(digit) for digit in row["prompt"].removeprefix("sort: ").split()]
        if wrong and wrong != right:
            return {**row, "chosen": row["answer"], "rejected": _spaced(wrong)}


def _add(rng: random.Random, options: AddOptions) -> dict[str, Any]:
    a, b = (rng.randrange(10 ** rng.randint(1, options.max_digits)) for _ in range(2))
    return {"prompt": f"add: {a} + {b}", "answer": str(a + b)}


def _program(rng: random.Random, options: ProgramOptions) -> dict[str, Any]:
    factor, summand = rng.randrange(2, 10), rng.randrange(10**options.max_digits)
    cases = [{"call": "f", "args": [x], "returns": factor * x + summand} for x in (rng.randrange(10), 100)]
    return {
        "prompt": f"code: {factor} x + {summand}",
        "answer": cases,
        "response": f"f=lambda x:{factor}*x+{summand}",
    }


def _repeat(rng: random.Random, options: RepeatOptions) -> dict[str, Any]:
    words = rng.sample(WORDS, 2)
    counts = [rng.randint(1, options.max_times) for _ in words]
    told = [{"keyword": word, "frequency": n, "relation": "at least"} for word, n in zip(words, counts, strict=True)]
    most = {"num_words": sum(counts) + 1, "relation": "less than"}
    return {
        "prompt": "write: " + ", ".join(f"{n} {word}" for word, n in zip(words, counts, strict=True)),
        "instruction_id_list": [*["keywords:frequency"] * len(words), "length_constraints:number_words"],
        "kwargs": [*told, most],
        "response": " ".join(word for word, n in zip(words, counts, strict=True) for _ in range(n)),
    }


def _spaced(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def _shapes(rng: random.Random, options: ShapesOptions) -> dict[str, Any]:
    from hpcrl.data.drawn import shapes_row  # imports Pillow

    return shapes_row(rng, list(options.questions), options.side, options.other_image)


Make = Callable[[random.Random, Any], dict[str, Any]]
TASKS: dict[str, tuple[Make, type[Section], str]] = {
    "sort_digits": (_sort_digits, SortOptions, "sort_digits"),
    "sort_pairs": (_sort_pairs, SortOptions, "sort_digits"),
    "add": (_add, AddOptions, "exact_match"),
    "program": (_program, ProgramOptions, "code"),
    "repeat": (_repeat, RepeatOptions, "ifeval"),
    "shapes": (_shapes, ShapesOptions, "exact_match"),
}

EPISODES: dict[str, Callable[..., Task]] = {"env": StartTask, "expert": ExpertTask}
GENERATED = ("task:", "reasoning_gym:", *(f"{kind}:" for kind in EPISODES))


class GeneratedTask:
    """A task of `TASKS`. Only a row's content decides its split, so train and val are disjoint under any two seeds."""

    def __init__(self, name: str, options: dict[str, Any], size: int, seed: int, split: Split):
        self.name = name
        self._make, schema, _ = TASKS[name]
        self._options = read_options(schema, options)
        self.size = size
        self._key = f"{name}/{seed}/{split}"
        self._validation = split == "val"

    def row(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._key}/{index}")
        for _ in range(1000):
            row = self._make(rng, self._options)
            content = row["prompt"].encode() + b"".join(image["bytes"] for image in row.get("images", ()))
            if (_hash(content) % VALIDATION_EVERY == 0) == self._validation:
                return row
        raise ValueError(f"task:{self.name} has too few different rows under {self._options!r} to hold some out")


class ReasoningGymTask:
    """A data set of reasoning-gym (arXiv 2505.24760). Item i comes from seed + i; the splits' seeds are far apart."""

    def __init__(self, name: str, options: dict[str, Any], size: int, seed: int, split: Split):
        self.name = name
        self.size = size
        half = 1 << 30
        first = _hash(f"{name}/{seed}".encode()) % (half - size) + (half if split == "val" else 0)
        self._recipe: dict[str, Any] = {"name": name, "size": size, "seed": first, "options": options}
        self._dataset: Any = None

    def row(self, index: int) -> dict[str, Any]:
        if self._dataset is None:
            self._dataset = make_reasoning_gym(**self._recipe)
        entry = self._dataset[index]
        recipe = {**self._recipe, "index": index}
        return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": recipe}


class SuiteTask:
    """A category of reasoning-gym: a row of each of its data sets in turn, the same rows in every run."""

    def __init__(self, name: str, size: int | None):
        """`size` of None: SUITE_ROWS of each data set. ValueError if it is above MAX_SUITE_ROWS of each."""
        self.name = name
        sets = _data_sets(name.removeprefix(SUITE))
        self.size = size or SUITE_ROWS * len(sets)
        if self.size > (most := MAX_SUITE_ROWS * len(sets)):
            raise ValueError(f"{BENCHMARK}{name}: size={size} is above {most}, {MAX_SUITE_ROWS} of each data set")
        # A data set's items depend on its size, so all suites have the same.
        self._tasks = [ReasoningGymTask(each, {}, MAX_SUITE_ROWS, 0, "val") for each in sets]

    def row(self, index: int) -> dict[str, Any]:
        place, task = divmod(index, len(self._tasks))
        return {**self._tasks[task].row(place), "tags": [self._tasks[task].name]}


def _data_sets(category: str) -> list[str]:
    """The names of a category's data sets, in order, without those whose verifier is wrong."""
    from reasoning_gym.factory import DATASETS  # slow

    found = {name for name, (kind, _) in DATASETS.items() if f".{category}." in kind.__module__}
    return sorted(found - BROKEN_REASONING_GYM.keys())


def make_reasoning_gym(name: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    """The data set; ValueError gives the reason if it cannot be created."""
    import reasoning_gym  # slow

    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym:{name} with options {json.dumps(options)}: {error}") from error


def make_task(path: str, options: dict[str, Any], size: int | None, seed: int, split: Split) -> Task:
    """The task of a generated source, with epochs of `size` rows (None: 65536, for val 1024). ValueError describes an
    error of name, options or size."""
    kind, _, name = path.partition(":")
    if is_suite(path):
        if options:
            raise ValueError(f"{path}: no options; reasoning_gym:NAME takes those of a data set")
        if split == "train":
            raise ValueError(f"{path}: for data.val; reasoning_gym:NAME has other rows for data.train")
        return SuiteTask(name, size)
    rows = size or DEFAULT_SIZE[split]
    if kind in EPISODES:
        return EPISODES[kind](name, options, rows, seed, split)
    if kind == "reasoning_gym":
        if name in BROKEN_REASONING_GYM:
            raise ValueError(f"{path} is not supported: {BROKEN_REASONING_GYM[name]}")
        if rows >= 1 << 24:
            raise ValueError(f"{path}: size={rows} must be below {1 << 24}")
        return ReasoningGymTask(name, options, rows, seed, split)
    if name not in TASKS:
        raise ValueError(f"{path}: there is no task {name!r}; built in are {', '.join(sorted(TASKS))}")
    try:
        return GeneratedTask(name, options, rows, seed, split)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def built_in_reward(path: str) -> tuple[str, str | None]:
    """(domain, name of the reward) of a generated source; no reward if an environment gives rewards."""
    kind, _, name = path.partition(":")
    if kind in EPISODES:
        return name, None
    return name, "reasoning_gym" if kind == "reasoning_gym" or name not in TASKS else TASKS[name][2]


def is_generated(path: str) -> bool:
    """Whether a data path names a generated source rather than a file."""
    return path.startswith(GENERATED) or is_suite(path)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
