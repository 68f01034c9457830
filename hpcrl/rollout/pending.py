"""Pending rollouts in a checkpoint: one safetensors file per generator rank, with flat arrays and offsets."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hpcrl.rollout.pictures import joined, split
from hpcrl.rollout.types import Sample
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import IMAGES
from hpcrl.spec.trajectory import FIELDS, Field, Level
from hpcrl.system.files import write_durably

PICTURES = "pictures"  # the pixels of the different images of a file's responses
PATTERN, PATTERN_UNTIL_0_6 = "pending_rank*.safetensors", "held_rank*.safetensors"


def write_pending(folder: Path, rank: int, samples: Sequence[Sample]) -> str:
    """Write a rank's responses, at least one; returns the file's name."""
    columns = {name: np.concatenate([sample.columns[name] for sample in samples]) for name in samples[0].columns}
    texts = [sample.text() for sample in samples]
    columns["messages"] = np.frombuffer(b"".join(texts), dtype=np.uint8)
    columns["message_offsets"] = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    if IMAGES.name in columns:
        pictures = {digest: pixels for sample in samples for digest, pixels in sample.pictures.items()}
        columns[PICTURES] = joined(columns[IMAGES.name], pictures)
    columns["ids"] = np.array([sample.id for sample in samples], dtype=np.int64)
    columns["offsets"] = np.cumsum([0, *(len(sample.token_ids) for sample in samples)], dtype=np.int64)
    name = PATTERN.replace("*", f"{rank:04d}")
    write_durably(folder / name, save(columns))
    return name


def drop_others(folder: Path, names: Collection[str]) -> None:
    """Delete the files of responses that are not in `names`: lost replicas wrote them."""
    for path in folder.glob(PATTERN):
        if path.name not in names:
            path.unlink()


def read_pending(folder: Path, names: Iterable[str], wanted: Collection[int]) -> dict[int, Sample]:
    """The wanted responses by sample id, from the files `names`. ValueError if one is missing or a file unreadable."""
    found: dict[int, Sample] = {}
    for path in sorted(
        folder / name for name in names if any(fnmatch(name, pattern) for pattern in (PATTERN, PATTERN_UNTIL_0_6))
    ):
        try:
            columns = load_file(path)
            ids, offsets = columns.pop("ids").tolist(), columns.pop("offsets").tolist()
            messages, parts = columns.pop("messages").tobytes(), columns.pop("message_offsets").tolist()
            pixels = columns.pop(PICTURES, None)
            fields = {FIELDS[name]: column for name, column in columns.items()}
            starts = {field: _starts(field, columns, offsets) for field in fields}
            pictures = {} if pixels is None else split(columns[IMAGES.name], pixels)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        for i, sample_id in enumerate(ids):
            if sample_id in wanted:
                sample = found[sample_id] = Sample(sample_id, messages=json.loads(messages[parts[i] : parts[i + 1]]))
                sample.columns = {
                    field.name: column[starts[field][i] : starts[field][i + 1]].copy()
                    for field, column in fields.items()
                }
                if pictures:
                    own = image_spans(sample.columns[IMAGES.name])
                    sample.pictures = {span.digest: pictures[span.digest] for span in own}
    if missing := sorted(set(wanted) - found.keys()):
        raise ValueError(f"{folder} lacks {len(missing)} responses that its state has, e.g. sample {missing[0]}")
    return found


def _starts(field: Field, columns: Mapping[str, np.ndarray], offsets: list[int]) -> list[int]:
    """The start of each response's values, and the end of the last."""
    if field.level is Level.TOKEN:
        return offsets
    counts = columns[field.counts.name] if field.ragged else np.ones(len(offsets) - 1, np.int64)
    return np.cumsum([0, *counts]).tolist()
