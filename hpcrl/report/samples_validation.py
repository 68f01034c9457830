"""Responses of validations for a page: validation/step_NNNNNN.jsonl, else examples.json; and episodes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np

from hpcrl.data.identity import prompt_id
from hpcrl.metrics.responses import FOLDER, FORMAT
from hpcrl.report.run_files import RunFiles
from hpcrl.report.samples_pictures import PagePictures
from hpcrl.report.samples_text import as_messages, clean, cut, message, num_bytes

EXAMPLES, EPISODES = "examples.json", "episodes"
MAX_STEPS, MAX_EPISODE_STEPS = 8, 4
MAX_PROMPTS, MAX_RESPONSES = 300, 8
"""Prompts that are considered for the page, and responses of a prompt in a step."""
MAX_CHARS = 16000
MAX_EPISODE_SIDE = 1024
FILE = re.compile(r"step_(\d{6,})\.jsonl")

Key = tuple[str, str]
"""Set and prompt_id."""


@dataclass
class FoundValidation:
    """What a page shows of a run's validations: samples by prompt and step, the prompts' messages by id, the number of
    responses in the read steps, all steps, the shown ones, and how samples were chosen, in words."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    total: int = 0
    num_steps: int = 0
    steps: list[int] = field(default_factory=list)
    choice: str = ""


def find_validation(run: RunFiles, budget: int) -> FoundValidation:
    """Responses of the same prompts in several validations, in about `budget` bytes."""
    files = {int(match[1]): entry.name for entry in run.entries(FOLDER) if (match := FILE.fullmatch(entry.name))}
    found = FoundValidation(num_steps=len(files))
    if not files:
        return _from_examples(run, budget)
    steps = _spread(sorted(files), MAX_STEPS)
    scores = {step: _scores(run, files[step]) for step in (steps[0], steps[-1])}
    last = max((step for step in scores if scores[step]), default=steps[0])
    order = _order(scores[steps[0]], scores[last])[:MAX_PROMPTS]
    found.total = sum(count for _, count in scores[last].values())
    kept: dict[Key, list[dict[str, Any]]] = {key: [] for key in order}
    prompts: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        for line in _lines(run, files[step]):
            key = _key(line)
            if key in kept and sum(sample["step"] == step for sample in kept[key]) < MAX_RESPONSES:
                kept[key].append(_sample(step, line))
                prompts.setdefault(key[1], [message(one, MAX_CHARS) for one in as_messages(line.get("prompt"), "user")])
    _fill(found, order, kept, prompts, budget)
    shown = len({(sample["set"], sample["prompt"]) for sample in found.samples})
    found.choice = f"{shown} of {len(scores[last])} prompts"
    if shown < len(scores[last]):
        found.choice += f": half by the change of their scores from step {steps[0]} to {last}, half by their hash"
    return found


def find_episodes(run: RunFiles, budget: int, pictures: PagePictures) -> list[dict[str, Any]]:
    """The episodes that validations have written, with their pictures, in about `budget` bytes."""
    names = {
        int(match[1]): entry.name for entry in run.entries(EPISODES) if (match := re.match(r"step_(\d+)$", entry.name))
    }
    found: list[dict[str, Any]] = []
    used = 0
    for step in _spread(sorted(names), MAX_EPISODE_STEPS):
        for folder in run.entries(f"{EPISODES}/{names[step]}"):
            for path in run.entries(f"{EPISODES}/{names[step]}/{folder.name}"):
                if path.suffix != ".txt":
                    continue
                file = f"{EPISODES}/{names[step]}/{folder.name}/{path.name}"
                text = run.text(file, max_bytes=1 << 20)
                domain = clean(unquote(folder.name))[:80]
                shown = {"role": f"{path.stem} episode", **cut(text, MAX_CHARS)}
                if path.with_suffix(".png").is_file():
                    name = f"{step}/{folder.name}/{path.stem}"
                    pictures.add_file(name, file.removesuffix("txt") + "png", MAX_EPISODE_SIDE)
                    shown["pictures"] = [name]
                sample = {"id": f"e{step}/{domain}/{path.stem}", "step": step, "set": domain, "said": [shown]}
                used += num_bytes(sample)
                if used > budget:
                    return found
                found.append(sample)
    return found


def _from_examples(run: RunFiles, budget: int) -> FoundValidation:
    """The completions in examples.json, of runs without a file for each validation."""
    found = FoundValidation(choice="the first prompts, from examples.json")
    kept: dict[Key, list[dict[str, Any]]] = {}
    prompts: dict[str, list[dict[str, Any]]] = {}
    stored = run.json(EXAMPLES)
    known = sorted(int(step) for step in stored if step.isdecimal())
    found.num_steps = len(known)
    for step in _spread(known, MAX_STEPS):
        rows = stored[str(step)]
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, Mapping):
                continue
            found.total += 1
            asked = [{"role": "prompt", "content": str(row.get("prompt", ""))}]
            identity = prompt_id([*asked, {"row": row.get("row")}])
            line = {**row, "set": row.get("domain", ""), "prompt_id": identity, "greedy": True, "sample": 0}
            line |= {"answer": None, "gold": row.get("answer")}
            kept.setdefault(_key(line), []).append(_sample(step, line))
            prompts.setdefault(identity, [message(one, MAX_CHARS) for one in asked])
    _fill(found, list(kept), kept, prompts, budget)
    return found


def _fill(
    found: FoundValidation,
    order: Iterable[Key],
    kept: Mapping[Key, list[dict[str, Any]]],
    prompts: Mapping[str, list[dict[str, Any]]],
    budget: int,
) -> None:
    """Add prompts with all of their responses while they fit."""
    used = 0
    for key in order:
        if not kept[key]:
            continue
        size = sum(map(num_bytes, kept[key])) + num_bytes(prompts[key[1]])
        if used and used + size > budget:
            continue  # a shorter one may fit
        used += size
        found.samples += kept[key]
        found.prompts[key[1]] = prompts[key[1]]
    found.steps = sorted({sample["step"] for sample in found.samples})


def _lines(run: RunFiles, name: str) -> Iterator[dict[str, Any]]:
    """The responses in a file; none, and a problem of the run, if it has another format."""
    lines = run.lines(f"{FOLDER}/{name}")
    head = next(lines, {})
    if head.get("format") != FORMAT:
        problem = f"{FOLDER}/{name}: format {head.get('format')}, this version reads {FORMAT}"
        run.problems += [problem] if problem not in run.problems else []
        return
    yield from lines


def _scores(run: RunFiles, name: str) -> dict[Key, tuple[float, int]]:
    """The mean score and number of responses of each prompt in a file."""
    sums: dict[Key, tuple[float, int]] = {}
    for line in _lines(run, name):
        total, count = sums.get(_key(line), (0.0, 0))
        sums[_key(line)] = total + (_number(line.get("score")) or 0.0), count + 1
    return {key: (total / count, count) for key, (total, count) in sums.items()}


def _order(first: Mapping[Key, tuple[float, int]], last: Mapping[Key, tuple[float, int]]) -> list[Key]:
    """Prompts by turns in the order of their hash, which is the same in all steps and runs, and by the change of their
    score: the most improved, the most worsened, and so on."""
    by_hash = sorted(last, key=lambda key: (key[1], key[0]))
    change = {key: last[key][0] - first[key][0] for key in last if key in first}
    ranked = sorted(change, key=lambda key: (change[key], key))
    worse, better = [key for key in ranked if change[key] < 0], [key for key in ranked[::-1] if change[key] > 0]
    changed = [key for pair in _by_turns(better, worse) for key in pair]
    return list(dict.fromkeys(key for pair in _by_turns(by_hash, changed) for key in pair))


def _by_turns(left: list[Key], right: list[Key]) -> Iterator[list[Key]]:
    for place in range(max(len(left), len(right))):
        yield [*left[place : place + 1], *right[place : place + 1]]


def _key(line: Mapping[str, Any]) -> Key:
    return clean(str(line.get("set", "")))[:80], clean(str(line.get("prompt_id", "")))[:64]


def _sample(step: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """A response as the page shows it."""
    name, prompt = _key(line)
    number, greedy = line.get("sample", 0), bool(line.get("greedy"))
    place = f"{line['row']}-" if isinstance(line.get("row"), int) else ""  # several rows may have one prompt
    said = [message(one, MAX_CHARS) for one in as_messages(line.get("response"), "assistant")]
    shown = {
        "id": f"v{step}/{name}/{prompt}/{place}{number}{'g' if greedy else ''}",
        "step": step,
        "set": name,
        "prompt": prompt,
        "member": number if isinstance(number, int) else 0,
        "greedy": greedy,
        "score": _number(line.get("score")),
        "finish": "length" if line.get("truncated") else "",
        "tokens": line["tokens"] if isinstance(line.get("tokens"), int) else None,
        "said": said,
    }
    parts = line.get("rewards")
    if isinstance(parts, Mapping) and parts:
        shown["parts"] = {clean(str(name))[:80]: _number(value) for name, value in parts.items()}
    for key, label in (("answer", "extracted"), ("gold", "answer")):
        if line.get(key) is not None:
            shown[label] = cut(str(line[key]), 400)["text"]
    if line.get("error"):
        shown["error"] = cut(str(line["error"]), 2000)["text"]
    if isinstance(tags := line.get("tags"), list) and tags:
        shown["tags"] = [clean(str(tag))[:80] for tag in tags[:20]]
    return shown


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(f"{value:.6g}") if is_number else None


def _spread(known: list[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spread, with the first and the last."""
    if len(known) <= most:
        return known
    return [known[place] for place in np.linspace(0, len(known) - 1, most).round().astype(int)]
