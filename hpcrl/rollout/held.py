"""Responses that wait to be trained, in a checkpoint: one safetensors file per generator rank, flat with offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hpcrl.files import write_durably
from hpcrl.rollout.types import FinishReason, Sample

PATTERN = "held_rank*.safetensors"
TOKEN_FIELDS = ("token_ids", "loss_mask", "gen_logprobs", "versions", "turn_ids")
BEHAVIOUR = "gen_logprobs_behaviour"
REASONS = tuple(FinishReason)


def write_held(folder: Path, rank: int, samples: Sequence[Sample]) -> str:
    """Write a rank's responses, of which there is at least one; returns the file's name."""
    fields = [*TOKEN_FIELDS, *([BEHAVIOUR] if samples[0].gen_logprobs_behaviour is not None else [])]
    columns = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in fields}
    columns["ids"] = np.array([sample.id for sample in samples], dtype=np.int64)
    columns["offsets"] = np.cumsum([0, *(len(sample.token_ids) for sample in samples)], dtype=np.int64)
    columns["reasons"] = np.array([REASONS.index(sample.finish_reason) for sample in samples], dtype=np.uint8)
    name = PATTERN.replace("*", f"{rank:04d}")
    write_durably(folder / name, save(columns))
    return name


def drop_others(folder: Path, names: Collection[str]) -> None:
    """Delete the folder's files of responses that are none of `names`: of ranks that were lost, and of those whose
    responses went with them."""
    for path in folder.glob(PATTERN):
        if path.name not in names:
            path.unlink()


def read_held(folder: Path, names: Iterable[str], wanted: Collection[int]) -> dict[int, Sample]:
    """The wanted responses by sample id, from those of the checkpoint's files, `names`, that hold any. ValueError when
    one is missing or unreadable."""
    found: dict[int, Sample] = {}
    for path in sorted(folder / name for name in names if fnmatch(name, PATTERN)):
        try:
            columns = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        fields = [name for name in (*TOKEN_FIELDS, BEHAVIOUR) if name in columns]
        for i, sample_id in enumerate(columns["ids"].tolist()):
            if sample_id in wanted:
                at = slice(columns["offsets"][i], columns["offsets"][i + 1])
                reason = REASONS[columns["reasons"][i]]
                arrays: dict[str, Any] = {name: columns[name][at].copy() for name in fields}
                found[sample_id] = Sample(sample_id, finish_reason=reason, **arrays)
    if missing := sorted(set(wanted) - found.keys()):
        raise ValueError(f"{folder} lacks {len(missing)} responses that its state has, e.g. sample {missing[0]}")
    return found
