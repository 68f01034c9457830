"""A comparison as a table for the terminal, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hpcrl.commands.comparison import ComparedPrompt, ComparedSet, Comparison
from hpcrl.metrics.compared_side import ComparedSide, ResponseTexts
from hpcrl.metrics.lm_eval_samples import sample_texts
from hpcrl.metrics.paired import LEVEL, RESAMPLES, RIGHT, SEED
from hpcrl.metrics.validation_files import validation_texts

HEADINGS = ("set", "prompts", "only A", "only B", "A", "B", "B - A", "95 % interval", "s.e.", "lost", "gained", "p")
BEGIN_CHARS, END_CHARS = 400, 1200
"""Characters shown of the beginning and the end of a longer text; the answer is usually at the end."""
LEGEND = f"""\
A, B: mean scores of the prompts that both sides have
95 % interval: of B - A, by a paired bootstrap over prompts ({RESAMPLES} resamples, fixed seed)
s.e.: standard error of B - A over prompts
lost, gained: prompts that A alone has right, that B alone has right (right: mean score of at least {RIGHT:g})
p: McNemar's exact test of lost and gained; for one response to each prompt only"""


def as_table(found: Comparison, num_shown: int) -> str:
    """The comparison for a terminal: control characters of names and texts are shown as escapes."""
    rows = [HEADINGS, *map(_cells, found.sets)]
    if len(found.sets) > 1:
        rows.append(_cells(found.overall))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_named("A", found.a), _named("B", found.b), ""]
    lines += [
        "  ".join(cell.ljust(width) if n == 0 else cell.rjust(width) for n, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    notes = [one_line(note) for note in _notes(found)]
    lines += ["", *LEGEND.splitlines(), *(["", *notes] if notes else [])]
    for number, prompt in enumerate(found.most_changed(num_shown), 1):
        lines += ["", *_prompt(found, prompt, number)]
    return "\n".join(lines)


def as_json(found: Comparison, num_shown: int) -> str:
    """The comparison as one JSON object."""
    shown = [
        {
            "set": prompt.set,
            found.by: prompt.key,
            "score": dict(zip("ab", prompt.means, strict=True)),
            **{name: texts._asdict() for name, texts in zip("ab", _texts(found, prompt), strict=True)},
        }
        for prompt in found.most_changed(num_shown)
    ]
    content = {
        "a": _facts(found.a),
        "b": _facts(found.b),
        "by": found.by,
        "interval": {"method": "paired bootstrap", "level": LEVEL, "resamples": RESAMPLES, "seed": SEED},
        "right_from": RIGHT,
        "sets": {each.name: _values(each) for each in found.sets},
        "overall": _values(found.overall),
        "sets_only_in": {"a": found.only_a, "b": found.only_b},
        "notes": list(_notes(found)),
        "shown": shown,
    }
    return json.dumps(content)


def printable(text: str) -> str:
    """A text that cannot control a terminal: other characters than line breaks, tabs and printable ones as escapes."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1] for sign in text)


def one_line(text: str) -> str:
    """A text in one line that cannot control a terminal."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _cells(each: ComparedSet) -> tuple[str, ...]:
    result, name = each.result, one_line(each.name)
    if result is None:
        return (name, "0", str(each.only_a), str(each.only_b), *["-"] * 8)
    low_high = "-" if result.interval is None else f"[{result.interval[0]:+.4f}, {result.interval[1]:+.4f}]"
    return (
        name,
        str(result.num_prompts),
        str(each.only_a),
        str(each.only_b),
        f"{result.mean_a:.4f}",
        f"{result.mean_b:.4f}",
        f"{result.difference:+.4f}",
        low_high,
        "-" if result.stderr is None else f"{result.stderr:.4f}",
        str(result.lost),
        str(result.gained),
        "-" if each.p_value is None else f"{each.p_value:.3g}",
    )


def _values(each: ComparedSet) -> dict[str, Any]:
    (fewest_a, most_a), (fewest_b, most_b) = each.responses
    told: dict[str, Any] = {"only_a": each.only_a, "only_b": each.only_b, "prompts": 0}
    if each.result is None:
        return told
    result = each.result
    return told | {
        "prompts": result.num_prompts,
        "mean_a": result.mean_a,
        "mean_b": result.mean_b,
        "difference": result.difference,
        "interval": result.interval,
        "stderr": result.stderr,
        "lost": result.lost,
        "gained": result.gained,
        "mcnemar_p": each.p_value,
        "responses_a": [fewest_a, most_a],
        "responses_b": [fewest_b, most_b],
        "reward_errors_a": each.failed[0],
        "reward_errors_b": each.failed[1],
    }


def _facts(side: ComparedSide) -> dict[str, Any]:
    return {"path": str(side.path), "origin": side.origin, "model": side.model, "step": side.step}


def _named(letter: str, side: ComparedSide) -> str:
    if side.step:  # weights that the run trained; at step 0, and in an evaluation alone, the model's own
        model = f" (step {side.step}, trained from {side.model})" if side.model else f", step {side.step}"
    else:
        step = "" if side.step is None else f", step {side.step}"
        model = f" ({side.model}{step})" if side.model else step
    return one_line(f"{letter}  {side.path}{model}")


def _notes(found: Comparison) -> Iterator[str]:
    """What a reader of the figures should know, a text each."""
    for letter, left in (("A", found.only_a), ("B", found.only_b)):
        if left:
            yield f"only in {letter}: " + ", ".join(f"{name} ({count} prompts)" for name, count in left.items())
    yield from found.differing_settings()
    for place, (letter, side) in enumerate((("A", found.a), ("B", found.b))):
        if failed := found.overall.failed[place]:
            yield f"responses of {letter} whose reward failed: {failed}; they count with their score"
        for each in found.sets:
            fewest, most = each.responses[place]
            if most > 1:
                yield f"{each.name}: {_range(fewest, most)} responses of {letter} to each prompt"
        if side.torn is not None:
            yield f"{side.torn}: the last line is incomplete and was left out"


def _range(fewest: int, most: int) -> str:
    return str(most) if fewest == most else f"{fewest} to {most}"


def _texts(found: Comparison, prompt: ComparedPrompt) -> tuple[ResponseTexts, ResponseTexts]:
    """The texts of the first response of both sides."""
    a, b = (
        (validation_texts if side.origin == "hpcrl" else sample_texts)(responses[0])
        for side, responses in ((found.a, prompt.a), (found.b, prompt.b))
    )
    return a, b


def _prompt(found: Comparison, prompt: ComparedPrompt, number: int) -> Iterator[str]:
    before, after = prompt.means
    a, b = _texts(found, prompt)
    yield one_line(f"-- {number}. {prompt.set}, {found.by} {prompt.key}: A {before:.4g}, B {after:.4g}")
    parts = {
        "prompt": a.prompt,
        "prompt of B": "" if b.prompt == a.prompt else b.prompt,
        "gold answer": a.gold or b.gold,
    }
    for letter, texts in (("A", a), ("B", b)):
        parts |= {letter: texts.response or "(empty)", f"answer of {letter}": texts.answer}
    for name, text in parts.items():
        if text:
            yield f"[{name}]"
            yield printable(_cut(text))


def _cut(text: str) -> str:
    if len(text) <= BEGIN_CHARS + END_CHARS:
        return text
    left_out = len(text) - BEGIN_CHARS - END_CHARS
    return f"{text[:BEGIN_CHARS]}\n[... {left_out} characters ...]\n{text[-END_CHARS:]}"
