"""Pairs of a policy's own answers: `python -m tests.bench.own_pairs RUN FILE` writes a good and a bad answer of each
group of a run's stored rollouts (rollout.save_rollouts=true) as a row of pipeline=dpo."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcrl.rollout.store import RolloutReader

Pair = dict[str, str]


def grouped_pairs(run: Path) -> list[list[Pair]]:
    """For each group with answers of different scores the first of its best answers with each of its different worst
    ones, in the order in which they are stored; groups without such a pair are left out."""
    found: list[list[Pair]] = []
    reader = RolloutReader(run)
    for step in reader.steps():
        rollouts = reader.read(step)
        groups: dict[int, dict[float, dict[str, str]]] = {}  # group -> score -> answer -> prompt
        scores, ids = rollouts.batch.scores.tolist(), rollouts.batch.group_ids.tolist()
        for row, (group, score) in enumerate(zip(ids, scores, strict=True)):
            *_, asked, answer = rollouts.messages(row)
            groups.setdefault(group, {}).setdefault(score, {}).setdefault(answer["content"], asked["content"])
        for answers in groups.values():
            good, prompt = next(iter(answers[max(answers)].items()))
            bad = answers[min(answers)] if len(answers) > 1 and good.strip() else {}
            rows = [{"prompt": prompt, "chosen": good, "rejected": text} for text in bad if text.strip()]
            rows = [row for row in rows if row["rejected"].strip() != good.strip()]
            found += [rows] if rows else []
    return found


def corrupted_pairs(number: int, left_out: Iterable[str], seed: int) -> Iterator[Pair]:
    """Pairs for the task sort_digits of prompts not in `left_out`, whose wrong answers are made up, like most of a warm
    policy's: sorted digits of which one to four are others than the prompt's. One in eight is shuffled, one in twelve
    has a digit too many or too few."""
    rng, left_out = random.Random(seed), set(left_out)
    while number:
        digits = [rng.randrange(10) for _ in range(rng.randint(4, 7))]
        wrong, prompt = list(right := sorted(digits)), f"sort: {_spaced(digits)}"
        for at in rng.sample(range(len(wrong)), rng.choice((1, 1, 1, 2, 2, 3, 4))):
            near = min(9, max(0, wrong[at] + rng.choice((-1, 1))))
            wrong[at] = rng.randrange(10) if rng.random() < 0.5 else near
        length = rng.random()
        wrong += [rng.randrange(10)] if length < 0.04 else []
        wrong = sorted(wrong[1:] if length > 0.96 else wrong)
        if rng.random() < 0.125:
            rng.shuffle(wrong)
        if wrong != right and prompt not in left_out:
            yield {"prompt": prompt, "chosen": _spaced(right), "rejected": _spaced(wrong)}
            number -= 1


def _spaced(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def write_pairs(file: Path, rows: Iterable[Pair]) -> None:
    """As JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    first = [rows[0] for rows in grouped_pairs(given.run)]
    write_pairs(given.file, first)
    print(f"{len(first)} pairs")
