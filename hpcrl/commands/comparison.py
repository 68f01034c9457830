"""Joins the responses of two sides by set and prompt, and compares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from hpcrl.metrics.compared_side import By, ComparedResponse, ComparedSide
from hpcrl.metrics.paired import PairedDifference, mcnemar, paired_difference

MAX_NAMED = 8
SETTINGS = ("samples", "temperature", "max_new_tokens", "metric")
"""How a set is answered and scored: what must be equal for a fair comparison."""


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt that both sides answered: its set's name, key, and responses."""

    set: str
    key: str
    a: list[ComparedResponse]
    b: list[ComparedResponse]

    @property
    def means(self) -> tuple[float, float]:
        """Mean scores of A and B."""
        return fmean(each.score for each in self.a), fmean(each.score for each in self.b)

    @property
    def change(self) -> float:
        """Mean score of B minus that of A."""
        before, after = self.means
        return after - before


@dataclass(frozen=True)
class ComparedSet:
    """A set of both sides. `p_value` is McNemar's, None unless both sides have one response to each prompt; `responses`
    are the numbers of responses of A and B to each prompt, (fewest, most)."""

    name: str
    only_a: int
    only_b: int
    prompts: list[ComparedPrompt]
    result: PairedDifference | None
    p_value: float | None
    responses: tuple[tuple[int, int], tuple[int, int]]
    failed: tuple[int, int]


@dataclass(frozen=True)
class Comparison:
    """All sets that both sides have, all their prompts together, and the sets that one side has, with their sizes."""

    a: ComparedSide
    b: ComparedSide
    by: By
    sets: list[ComparedSet]
    overall: ComparedSet
    only_a: dict[str, int]
    only_b: dict[str, int]

    def most_changed(self, count: int) -> list[ComparedPrompt]:
        """The prompts with the largest change, in the files' order if equal; none that did not change."""
        changed = [prompt for prompt in self.overall.prompts if prompt.change]
        return sorted(changed, key=lambda prompt: -abs(prompt.change))[:count]

    def differing_settings(self) -> Iterator[str]:
        """What differs in how a set was answered and scored, a text each."""
        for each in self.sets:
            name_a, _, name_b = each.name.partition(" = ")
            was, now = self.a.settings.get(name_a, {}), self.b.settings.get(name_b or name_a, {})
            for key in SETTINGS:
                if key in was and key in now and was[key] != now[key]:
                    yield f"{each.name}: {key} is {was[key]} in A and {now[key]} in B"


def compared(a: ComparedSide, b: ComparedSide, wanted: str | None = None, by: By = "prompt") -> Comparison:
    """Compare all sets that both sides have, or the `wanted` one (NAME, or NAME_A=NAME_B).

    ValueError if a wanted set does not exist, and why there is no common prompt.
    """
    pairs = _pairs(a, b, wanted)
    sides = f"A ({a.path}) has {_names(a)}; B ({b.path}) has {_names(b)}"
    if not pairs:
        raise ValueError(f"no common set: {sides}; --set NAME_A=NAME_B compares sets of different names")
    if a.origin != b.origin and by == "prompt":
        raise ValueError(
            "hpcrl and lm-evaluation-harness identify prompts differently: --by row compares rows with documents by "
            "their number, if both sides read the same file in the same order"
        )
    sets = [_of_set(a, b, *pair) for pair in pairs]
    every = [prompt for each in sets for prompt in each.prompts]
    if not every:
        if by == "row":
            raise ValueError(f"no common row: {sides}")
        raise ValueError(
            f"no common prompts in {_listed([each.name for each in sets])}: {sides}; their prompts differ: other data, "
            "another system prompt or another prompt template; --by row compares rows by their number"
        )
    overall = _result("all", sum(each.only_a for each in sets), sum(each.only_b for each in sets), every)
    left_a, left_b = (
        {name: len(prompts) for name, prompts in side.prompts.items() if name not in other.prompts and not wanted}
        for side, other in ((a, b), (b, a))
    )
    return Comparison(a, b, by, sets, overall, left_a, left_b)


def _pairs(a: ComparedSide, b: ComparedSide, wanted: str | None) -> list[tuple[str, str]]:
    """The names of each set in A and in B."""
    if wanted is None:
        return [(name, name) for name in a.prompts if name in b.prompts]
    name_a, equals, name_b = wanted.partition("=")
    if not equals or wanted in a.prompts:
        name_a = name_b = wanted
    for side, name, which in ((a, name_a, "A"), (b, name_b, "B")):
        if name not in side.prompts:
            raise ValueError(f"--set {wanted}: {which} ({side.path}) has no set {name}; it has {_names(side)}")
    return [(name_a, name_b)]


def _of_set(a: ComparedSide, b: ComparedSide, name_a: str, name_b: str) -> ComparedSet:
    ours, theirs = a.prompts[name_a], b.prompts[name_b]
    name = name_a if name_a == name_b else f"{name_a} = {name_b}"
    common = [ComparedPrompt(name, key, ours[key], theirs[key]) for key in ours if key in theirs]
    return _result(name, len(ours) - len(common), len(theirs) - len(common), common)


def _result(name: str, only_a: int, only_b: int, prompts: list[ComparedPrompt]) -> ComparedSet:
    if not prompts:
        return ComparedSet(name, only_a, only_b, [], None, None, ((0, 0), (0, 0)), (0, 0))
    means = [prompt.means for prompt in prompts]
    result = paired_difference([mean for mean, _ in means], [mean for _, mean in means])
    sides = [prompt.a for prompt in prompts], [prompt.b for prompt in prompts]
    (counts_a, failed_a), (counts_b, failed_b) = (_counts(side) for side in sides)
    p_value = mcnemar(result.lost, result.gained) if counts_a == counts_b == (1, 1) else None
    return ComparedSet(name, only_a, only_b, prompts, result, p_value, (counts_a, counts_b), (failed_a, failed_b))


def _counts(answered: list[list[ComparedResponse]]) -> tuple[tuple[int, int], int]:
    """The fewest and most responses to a prompt, and the number of responses whose reward failed."""
    sizes = [len(responses) for responses in answered]
    return (min(sizes), max(sizes)), sum(each.failed for responses in answered for each in responses)


def _names(side: ComparedSide) -> str:
    return _listed([f"{name} ({_prompts(len(prompts))})" for name, prompts in side.prompts.items()])


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count} prompts"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
