"""Section `samples`: what the model writes, and why a response has its reward."""

from __future__ import annotations

from pathlib import Path

from hpcrl.report.run_files import RunFiles
from hpcrl.report.samples_pictures import PagePictures
from hpcrl.report.samples_rollouts import find_rollouts
from hpcrl.report.samples_text import num_bytes
from hpcrl.report.samples_tokens import SCALE, TOKENIZERS, TokenPieces, token_pieces
from hpcrl.report.samples_validation import find_episodes, find_validation
from hpcrl.report.section import ReportSection

BUDGET = 4_000_000
"""Bytes of the section in a page."""
PICTURES, VALIDATION, EPISODES = 0.2, 0.35, 0.05
"""Shares of the budget at most; training samples have the rest."""


def section(run: RunFiles, budget: int = BUDGET) -> ReportSection | None:
    """The samples of a run in about `budget` bytes; None if it has none."""
    pictures = PagePictures(run, int(budget * PICTURES))
    validation = find_validation(run, int(budget * VALIDATION))
    episodes = find_episodes(run, int(budget * EPISODES), pictures)
    used = sum(map(num_bytes, (validation.samples, validation.prompts, episodes)))
    pieces = _pieces(run)
    left = int(budget * (1 - PICTURES)) - used
    rollouts = find_rollouts(run, left, pieces, pictures)
    if not (rollouts.samples or rollouts.ended or validation.samples or episodes):
        return None
    data = {
        "training": rollouts.samples,
        "ended": rollouts.ended,
        "validation": validation.samples,
        "episodes": episodes,
        "prompts": rollouts.prompts | validation.prompts,
        "pictures": pictures.urls,
        "scale": SCALE,
        "about": {
            "training": {
                "total": rollouts.total,
                "steps": rollouts.steps,
                "num_steps": rollouts.num_steps,
                "choice": rollouts.choice,
                "outcomes": rollouts.counts,
            },
            "validation": {
                "total": validation.total,
                "steps": validation.steps,
                "num_steps": validation.num_steps,
                "choice": validation.choice,
            },
            "tokens": pieces is not None,
            "pictures_left_out": len(pictures.left_out),
        },
    }
    return ReportSection("samples", "Samples", data, "samples.js")


def _pieces(run: RunFiles) -> TokenPieces | None:
    """Of the tokenizer in a model of the run's folder, else in the folder from which the run began."""
    names = [f"{folder}/{name}" for folder in ("model", "hf") for name in TOKENIZERS]
    files = [path for name in names if (path := run.file(name)) is not None]
    if isinstance(given := run.key("model.path"), str) and not run.stays_inside:
        files += [Path(given) / name for name in TOKENIZERS]
    try:
        return token_pieces(files)
    except ValueError as error:
        run.problems.append(str(error))
        return None
