"""Rollouts of every step as immutable HDF5 files, and their reader. docs/rollouts.md describes the schema.

There is one file per (step, rank). A file is written under a temporary name and renamed, since it is unreadable if its
process dies while writing. Equal batches give bit-identical files, independent of time and host.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpcrl import __version__
from hpcrl.rollout.batch import STATUS, Batch, concat, place_rewards
from hpcrl.rollout.pictures import different, read_files, write_files
from hpcrl.rollout.step_files import OUTCOMES, SCHEMA_VERSIONS, OutcomeRecord, read_outcomes, reading, stored_texts
from hpcrl.rollout.types import PromptOutcome, split_sample_id
from hpcrl.spec.trajectory import FIELDS, TEXT, Field, Level, Origin, declare
from hpcrl.system.cli import ArgumentParser, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import STEP_NAME, committed_step, step_name, steps_in, write_durably

__all__ = ["OutcomeRecord", "RolloutReader", "StepRollouts", "describe", "main", "write_outcomes", "write_rollouts"]

CHUNK = 65536
STORED = {"bool": "uint8"}
"""Dtypes that are stored as another dtype."""


@dataclass(frozen=True)
class StepRollouts:
    """Rollouts of a step from all ranks, sorted by sample id. `facts` are the step's stored facts. `metrics` maps names
    to values for each row, such as the parts of a composed reward and the metrics of an environment."""

    step: int
    batch: Batch
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def messages(self, row: int) -> list[dict[str, Any]]:
        """A row's messages in chat form: its prompt, then per turn the model's answer and the message of the
        environment or tool. Empty if the file has none."""
        stored = self.texts.get("messages")
        return json.loads(stored[row]) if stored else []

    @property
    def texts(self) -> dict[str, list[str]]:
        return self.batch.texts


def write_rollouts(
    folder: Path,
    rank: int,
    num_ranks: int,
    batch: Batch,
    facts: Mapping[str, str | int | float],
) -> Path:
    """Write this rank's rows of a step to `<folder>/rank_NNNNN.h5` and return the path.

    Every rank of the step calls it once with its rows, maybe none. folder (run/rollouts/step_NNNNNN), num_ranks, facts
    and names of texts are equal on all ranks. ValueError if the file exists, or a text has not one string per row.
    """
    rows = batch.num_sequences
    for name, strings in batch.texts.items():
        if len(strings) != rows:
            raise ValueError(f"texts[{name!r}] has {len(strings)} strings for {rows} rows")
    if batch.images is not None:
        write_files(folder.parent, rank, batch.images.numpy(), batch.pictures)
    about = {"rank": rank, "num_ranks": num_ranks, "num_sequences": rows, "num_tokens": batch.num_tokens}
    with _new_file(folder / f"rank_{rank:05d}.h5", "rollouts", about) as file:
        _put(file, "cu_seqlens", batch.cu_seqlens.cpu().numpy())
        for spec in FIELDS.values():
            if spec.name in batch.columns and spec.stored:
                array = batch.columns[spec.name].detach().cpu().numpy()
                _put(file, spec.name, array.astype(STORED.get(spec.dtype, spec.dtype), copy=False))
                file[spec.name].attrs.update(_about(spec, *array.shape[1:]))
            elif spec.name in batch.texts:
                _put_texts(file, f"texts/{spec.name}", batch.texts[spec.name])
                file[f"texts/{spec.name}"].attrs.update(_about(spec))
        file.create_group("facts").attrs.update(sorted(facts.items()))
    return folder / f"rank_{rank:05d}.h5"


def write_outcomes(folder: Path, records: Iterable[OutcomeRecord]) -> Path:
    """Write how prompts ended to `<folder>/outcomes.h5`; returns the path. Controller only. ValueError if it exists."""
    records = list(records)
    kinds = list(PromptOutcome)
    with _new_file(folder / OUTCOMES, "outcomes", {"num_prompts": len(records)}) as file:
        _put(file, "uid", np.array([r.uid for r in records], np.int64))
        _put(file, "attempt", np.array([r.attempt for r in records], np.int32))
        _put(file, "outcome", np.array([kinds.index(r.outcome) for r in records], np.uint8))
        file["outcome"].attrs["meaning"] = ",".join(kinds)
        _put(file, "rewards/values", np.array([reward for r in records for reward in r.rewards], np.float64))
        _put(file, "rewards/offsets", _offsets([len(r.rewards) for r in records]))
        _put_texts(file, "reason", [r.reason for r in records])
        _put_texts(file, "domain", [r.domain for r in records])
        _put_texts(file, "metrics", [json.dumps(r.metrics, sort_keys=True) if any(r.metrics) else "" for r in records])
    return folder / OUTCOMES


class RolloutReader:
    """Rollouts of a run along its committed lineage, up to its newest checkpoint. With provisional=True also the later
    steps that are written; if the run is killed, these may still move to abandoned/."""

    def __init__(self, run_dir: str | Path, provisional: bool = False):
        self.run_dir = Path(run_dir)
        self._provisional = provisional

    def steps(self) -> list[int]:
        """Steps that can be read, ascending."""
        last = float("inf") if self._provisional else committed_step(self.run_dir)
        return [step for step in steps_in(self.run_dir / "rollouts") if step <= last]

    def read(self, step: int) -> StepRollouts:
        """All stored data of a step. ValueError if there is no such step, or a file is missing or damaged."""
        folder = self._folder(step)
        paths = sorted(folder.glob("rank_*.h5"))
        parts = [_read_rollouts(path, step) for path in paths]
        ranks = {num_ranks for _, num_ranks in parts}
        if ranks != {len(paths)}:
            raise ValueError(f"{folder} holds files of {len(paths)} ranks, they say there are {sorted(ranks)}")
        rollouts = [part for part, _ in parts if part.batch.num_sequences] or [parts[0][0]]
        joined = concat([part.batch for part in rollouts])
        batch = joined.select(torch.argsort(joined.sample_ids, stable=True).tolist())
        return StepRollouts(step, batch, parts[0][0].facts, self._metrics(folder, batch))

    @staticmethod
    def _metrics(folder: Path, batch: Batch) -> list[Mapping[str, float]]:
        """The metrics of each row, from the prompts' outcomes."""
        stored = {record.uid: record.metrics for record in read_outcomes(folder)}
        ids = batch.sample_ids.tolist()
        members: dict[int, list[int]] = {}
        for sample in sorted(ids, key=lambda sample: split_sample_id(sample)[2]):  # attempts of members may differ
            members.setdefault(split_sample_id(sample)[0], []).append(sample)
        found = {
            sample: metrics
            for uid, samples in members.items()
            for sample, metrics in zip(samples, stored.get(uid, ()), strict=False)
        }
        return [found.get(sample, {}) for sample in ids]

    def batch(self, step: int) -> Batch:
        return self.read(step).batch

    def sizes(self, step: int) -> dict[int, tuple[int, int]]:
        """Sample id -> (tokens with its prompt, tokens of the model), ascending. ValueError as for read()."""
        batch = self.batch(step)
        model = torch.zeros(batch.num_sequences, dtype=torch.int64).index_add(0, batch.row_ids, batch.loss_mask.long())
        pairs = zip(batch.lengths.tolist(), model.tolist(), strict=True)
        return dict(zip(batch.sample_ids.tolist(), pairs, strict=True))

    def rewards(self, step: int) -> dict[int, float]:
        """Sample id -> reward, without failed episodes. ValueError as for read()."""
        batch = self.batch(step)
        failed = [False] * batch.num_sequences if batch.failed is None else batch.failed.tolist()
        given = zip(batch.sample_ids.tolist(), batch.rewards.tolist(), failed, strict=True)
        return {sample: reward for sample, reward, has_failed in given if not has_failed}

    def domains(self, step: int) -> dict[str, list[int]]:
        """Domain -> its prompts that were trained on in this step; empty if the step has no outcomes."""
        found = dict[str, list[int]]()
        for record in read_outcomes(self._folder(step)):
            if record.outcome is PromptOutcome.TRAINED:
                found.setdefault(record.domain, []).append(record.uid)
        return found

    def outcomes(self) -> list[OutcomeRecord]:
        """How every prompt ended, in order of steps. ValueError if a prompt ended twice."""
        seen: dict[int, int] = {}
        records: list[OutcomeRecord] = []
        for step in self.steps():
            for record in read_outcomes(self._folder(step)):
                if record.uid in seen:
                    raise ValueError(f"prompt {record.uid} ended twice, in steps {seen[record.uid]} and {step}")
                seen[record.uid] = step
                records.append(record)
        return records

    def _folder(self, step: int) -> Path:
        folder = self.run_dir / "rollouts" / step_name(step)
        if step not in (steps := self.steps()):
            what = "step" if self._provisional else "committed step"
            known = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise ValueError(f"{self.run_dir} has no rollouts of {what} {step}; it has {known}")
        return folder


@contextlib.contextmanager
def _new_file(path: Path, kind: str, about: Mapping[str, int]) -> Iterator[h5py.File]:
    """An HDF5 file that appears under its name once it is complete and on disk, or not at all. It is built in memory:
    HDF5 crashes the process (segmentation fault) if it cannot write its buffers, as on a full disk."""
    match = STEP_NAME.fullmatch(path.parent.name)
    if path.exists() or not match:
        raise ValueError(f"{path} exists already, rollouts are immutable" if match else f"{path} is in no step_NNNNNN")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path.name, "w", libver=("v110", "v110"), driver="core", backing_store=False) as file:
        file.attrs["schema"] = f"hpcrl.{kind}"
        file.attrs.update(
            {"schema_version": SCHEMA_VERSIONS[kind], "hpcrl_version": __version__, "step": int(match[1])}
        )
        file.attrs.update(about)
        yield file
        file.flush()
        image = file.id.get_file_image()
    write_durably(path, image)


def _put(file: h5py.File, name: str, array: np.ndarray) -> None:
    """An array in checksummed, compressed chunks; gzip -1 with shuffle takes .2 s per million tokens."""
    chunk = (min(max(1, CHUNK // max(1, array[:1].size)), len(array)), *array.shape[1:])
    filters = {"chunks": chunk, "compression": 1, "shuffle": True, "fletcher32": True}
    file.create_dataset(name, data=array, track_times=False, **(filters if array.size else {}))


def _put_texts(file: h5py.File, name: str, strings: Sequence[str]) -> None:
    encoded = [string.encode() for string in strings]
    _put(file, f"{name}/utf8", np.frombuffer(b"".join(encoded), np.uint8))
    _put(file, f"{name}/offsets", _offsets([len(e) for e in encoded]))


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _about(spec: Field, width: int = 1) -> dict[str, str | int]:
    about: dict[str, str | int] = {"level": str(spec.level), "dtype": spec.dtype, "origin": str(spec.origin)}
    about["meaning"] = spec.meaning
    about |= {"width": width} if width != 1 else {}
    return about | ({"ragged": 1} if spec.ragged else {})


def _learn(name: str, about: Mapping[str, Any], dtype: str = "") -> None:
    """Declare a field that this process does not have, by its description in the file."""
    if name in FIELDS:
        return
    if not about and dtype != TEXT:
        raise ValueError(f"the field {name} is unknown and not described")
    origin = Origin(about.get("origin", Origin.TRAINING))
    level = Level(about.get("level", Level.ROW))
    kind, meaning, width = dtype or about["dtype"], about.get("meaning", ""), int(about.get("width", 1))
    ragged = bool(about.get("ragged", False))
    declare(Field(name, kind, level, origin, meaning, optional=True, width=width, ragged=ragged))


def _read_rollouts(path: Path, step: int) -> tuple[StepRollouts, int]:
    """Content of one rank's file, and the step's number of ranks according to the file."""

    def read(file: h5py.File) -> tuple[StepRollouts, int]:
        batch = Batch(torch.from_numpy(file["cu_seqlens"][()]))
        stored = {name: data for name, data in file.items() if isinstance(data, h5py.Dataset) and name != "cu_seqlens"}
        for name, data in stored.items():
            _learn(name, data.attrs)
            batch.columns[name] = torch.from_numpy(data[()]).to(getattr(torch, FIELDS[name].dtype))
        for name, group in file.get("texts", {}).items():
            _learn(name, group.attrs, TEXT)
            batch.texts[name] = stored_texts(file, f"texts/{name}")
        if batch.turn_rewards is not None and batch.token_rewards is None:  # as written before tokens had rewards
            batch.token_rewards = place_rewards(None, batch)
        if (batch.num_sequences, batch.num_tokens) != (file.attrs["num_sequences"], file.attrs["num_tokens"]):
            raise ValueError(f"it has {batch.num_sequences} rows of {batch.num_tokens} tokens and says otherwise")
        facts = {name: value.item() if hasattr(value, "item") else value for name, value in file["facts"].attrs.items()}
        batch.check_shapes()
        if batch.images is not None:
            batch.pictures = read_files(path.parents[1], different(batch.images.numpy()).values())
        return StepRollouts(step, batch, facts), int(file.attrs["num_ranks"])

    return reading(path, "rollouts", read)


def describe(rollouts: StepRollouts, row: int, decode: Callable[[list[int]], str] | None) -> str:
    """One sample in a few lines: its facts, prompt and response."""
    batch = rollouts.batch
    start, end = batch.cu_seqlens[row].item(), batch.cu_seqlens[row + 1].item()
    ids, mask = batch.token_ids[start:end], batch.loss_mask[start:end]
    num_prompt = int((batch.turn_ids[start:end] < 0).long().cumprod(0).sum())
    uid, attempt, member = split_sample_id(int(batch.sample_ids[row]))
    versions = [version for version in batch.versions[start:end][mask].tolist() if version >= 0]
    lines = [
        f"prompt {uid} attempt {attempt} member {member}: "
        f"reward {batch.rewards[row]:.4g}, score {batch.scores[row]:.4g}, "
        f"{num_prompt} + {end - start - num_prompt} tokens, ended by {STATUS[int(batch.status[row])]}, "
        f"weights {min(versions, default=-1)} to {max(versions, default=-1)}"
    ]
    if decode is not None:
        lines += [
            f"  prompt:   {decode(ids[:num_prompt].tolist())!r}",
            f"  response: {decode(ids[num_prompt:].tolist())!r}",
        ]
    elif messages := rollouts.messages(row):
        lines += [f"  {message['role']}: {message['content']!r}" for message in messages]
    elif "response" not in rollouts.texts:
        lines += [f"  prompt:   {ids[:num_prompt].tolist()}", f"  response: {ids[num_prompt:].tolist()}"]
    others = {name: strings[row] for name, strings in rollouts.texts.items() if strings[row] and name != "messages"}
    lines += [f"  {name}: {text!r}" for name, text in others.items()]
    if metrics := rollouts.metrics[row]:
        lines += ["  metrics:  " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print samples of a run; returns the exit code."""
    parser = ArgumentParser("hpcrl.rollout.store", "Print rollouts of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--tokenizer", help="folder of a tokenizer to decode with; default: stored texts or token ids")
    parser.add_argument("--num", type=int, default=5, help="samples to print (default 5)")
    try:
        options = parser.parse_args(argv)
        reader = RolloutReader(options.run_dir, provisional=True)
        step = options.step if options.step is not None else max(reader.steps(), default=0)
        rollouts = reader.read(step)
    except ValueError as error:
        print(f"{error} (--help tells more)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    decode = None
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        decode = lambda ids: str(tokenizer.decode(ids))  # noqa: E731
    batch = rollouts.batch
    note = "" if step <= committed_step(options.run_dir) else ", past the newest checkpoint"
    print(f"step {step}{note}: {batch.num_sequences} samples, {batch.num_tokens} tokens, {rollouts.facts}")
    for row in range(min(options.num, batch.num_sequences)):
        print(describe(rollouts, row, decode))
    return ExitCode.DONE


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
