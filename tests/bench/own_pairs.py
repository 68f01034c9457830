"""Pairs of a policy's own answers: `python -m tests.bench.own_pairs RUN FILE` writes a good and a bad answer of each
group of a run's stored rollouts (rollout.save_rollouts=true) as a row of pipeline=dpo."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hpcrl.rollout.store import RolloutReader


def pairs(run: Path) -> list[dict[str, str]]:
    """One row per group with answers of different scores: the first of the best and of the worst ones."""
    rows: list[dict[str, str]] = []
    reader = RolloutReader(run)
    for step in reader.steps():
        rollouts = reader.read(step)
        groups: dict[int, dict[float, tuple[str, str]]] = {}
        scores, ids = rollouts.batch.scores.tolist(), rollouts.batch.group_ids.tolist()
        for row, (group, score) in enumerate(zip(ids, scores, strict=True)):
            *_, asked, answer = rollouts.messages(row)
            groups.setdefault(group, {}).setdefault(score, (asked["content"], answer["content"]))
        for found in groups.values():
            (prompt, good), (_, bad) = found[max(found)], found[min(found)]
            if max(found) > min(found) and good.strip() and bad.strip() and good.strip() != bad.strip():
                rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    found = pairs(given.run)
    given.file.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{len(found)} pairs")
