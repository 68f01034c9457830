"""Commands that transfer rollouts between ranks: responses to trainers, and token fields such as log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace

from hpcrl.comm.transfer import PeerLost, from_ragged, picture_name
from hpcrl.messaging.messages import Done, DropBatch, Logprobs, Move, SendTokens, TransferRollouts
from hpcrl.models.families import vision_of
from hpcrl.rollout.batch import Batch, on_policy, pack
from hpcrl.rollout.types import TOKEN_REWARD
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import IMAGES
from hpcrl.spec.trajectory import FIELDS, TEXT, Field, Level, Origin
from hpcrl.workers.generator import GeneratorRole
from hpcrl.workers.role import Rank, without
from hpcrl.workers.trainer import ReferenceRole, TrainerRole


@dataclass
class _Share:
    """This rank's part of a batch during its transfer."""

    received: list[tuple[Move, dict[str, np.ndarray]]] = field(default_factory=list)
    scored: dict[str, list[np.ndarray]] = field(default_factory=dict)  # ROW fields in chunks, other fields per row

    def add(self, received: list[tuple[Move, dict[str, np.ndarray]]], scored: Mapping[str, bytes]) -> None:
        """Add the data of one TransferRollouts command."""
        self.received += received
        count = sum(len(move.samples) for move, _ in received)
        for name, data in scored.items():
            dtype = TOKEN_REWARD if FIELDS[name].level is Level.TOKEN else FIELDS[name].travels_as
            whole = FIELDS[name].level is Level.ROW
            self.scored.setdefault(name, []).extend(
                [np.frombuffer(data, dtype)] if whole else from_ragged(data, count, dtype)
            )


class Exchange:
    """A rank's handlers of transfer commands. Every rank has one; the command determines which of the rank's roles take
    part."""

    def __init__(self, worker: Rank):
        self._worker = worker
        self._shares: dict[int, _Share] = {}

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            TransferRollouts: self._transfer_rollouts,
            DropBatch: self._drop_batch,
            Logprobs: self._logprobs,
            SendTokens: self._send_tokens,
        }

    def _transfer_rollouts(self, command: TransferRollouts, seq: int) -> Done:
        worker = self._worker
        fields = {level: _travelling(command.fields, level) for level in Level}
        ragged = _ragged(command.fields)

        def pick(samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
            return cast(GeneratorRole, worker.roles["generator"]).pick(samples)

        def pictures(samples: Sequence[int]) -> dict[bytes, bytes]:
            return cast(GeneratorRole, worker.roles["generator"]).pictures(samples)

        exchange, moves = worker.transfer_groups[command.group].exchange, command.moves
        try:
            received = exchange(
                worker.world.rank, moves, fields[Level.TOKEN], fields[Level.ROW], pick, TEXT, ragged, pictures
            )
        except PeerLost as lost:
            return without(worker, (lost.peer,), seq, lost)
        if not received and not command.forms:
            return Done(seq)
        share = self._shares.setdefault(command.batch, _Share())
        share.add(received, command.scored)
        if not command.forms:
            return Done(seq)
        batch = worker.batches[command.batch] = _formed(self._shares.pop(command.batch), command.fields)
        if batch.images is not None and (vision := vision_of(worker.model_path)) is not None:
            batch.loss_mask &= batch.token_ids != vision.image_token_id  # the model can write the placeholder itself
        if worker.config.debug != "rollout_only":  # there, the weights never change
            rollout, trained = worker.config.rollout, command.batch - 1
            batch.on_policy = on_policy(batch, trained, rollout.on_new_weights == "recompute")
            oldest = trained - math.ceil(rollout.max_staleness)
            versions = batch.versions[batch.loss_mask & (batch.versions >= 0)]  # others are an expert's
            if bool((versions < oldest).any()):
                text = f"step {command.batch} got a token of weights {int(versions.min())}"
                raise RuntimeError(f"{text}; rollout.max_staleness allows {oldest}")
        return Done(seq)

    def _drop_batch(self, command: DropBatch, seq: int) -> None:
        self._shares.pop(command.batch, None)
        self._worker.batches.pop(command.batch, None)

    def _logprobs(self, command: Logprobs, seq: int) -> Done:
        # A reference without ranks of its own is part of the trainer.
        role = self._worker.roles.get(command.role) or self._worker.roles["trainer"]
        return cast(TrainerRole | ReferenceRole, role).logprobs(command, seq)

    def _send_tokens(self, command: SendTokens, seq: int) -> Done:
        """What training computes is 0 outside loss_mask, and is sent only for tokens in it."""
        worker, batch = self._worker, self._worker.batches[command.batch]
        field = FIELDS[command.field]
        dtype = np.dtype((field.travels_as, (command.width,))) if command.width else _dtype(field)
        starts = batch.cu_seqlens.tolist()
        of_rows = enumerate(batch.sample_ids.tolist())
        places: dict[int, Any] = {sample: slice(starts[row], starts[row + 1]) for row, sample in of_rows}
        moves: Sequence[Move] = command.moves
        if field.origin is Origin.TRAINING:
            places = {s: part.start + batch.loss_mask[part].nonzero()[:, 0] for s, part in places.items()}
            moves = [replace(move, lengths=[len(places[s]) for s in move.samples]) for move in moves]

        def pick(samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
            values = getattr(batch, command.field)
            return {command.field: [values[places[sample]].numpy() for sample in samples]}

        received = worker.transfer_groups[command.group].exchange(
            worker.world.rank, moves, [(field.name, dtype)], [], pick
        )
        if command.dest in worker.roles:  # also without rows: a batch must have the same fields filled on all ranks
            values = getattr(batch, command.field)
            if values is None:
                values = torch.zeros((batch.num_tokens, *dtype.shape), dtype=getattr(torch, field.dtype))
            for move, fields in received:
                parts = torch.from_numpy(fields[command.field].copy()).split(move.lengths)
                for sample, part in zip(move.samples, parts, strict=True):
                    values[places[sample]] = part
            setattr(batch, command.field, values)
        return Done(seq)


def _travelling(names: Sequence[str], level: Level) -> list[tuple[str, np.dtype]]:
    """The named non-ragged fields of this level with their transfer dtypes (subarray dtypes for wide fields).
    ValueError for a field that is not declared on this rank."""
    if unknown := sorted(set(names) - FIELDS.keys()):
        text = f"fields {', '.join(unknown)} are sent to a rank that has not declared them"
        raise ValueError(f"{text}: declare them (hpcrl.spec.trajectory) in a module that every rank imports")
    fields = [FIELDS[name] for name in names if FIELDS[name].level is level and not FIELDS[name].ragged]
    return [(field.name, _dtype(field)) for field in fields]


def _ragged(names: Sequence[str]) -> list[tuple[str, np.dtype, str]]:
    """The named ragged fields with their transfer dtypes and the fields that hold their numbers of values."""
    return [(name, _dtype(FIELDS[name]), FIELDS[name].counts.name) for name in names if FIELDS[name].ragged]


def _dtype(field: Field) -> np.dtype:
    return np.dtype((field.travels_as, field.shape(1)[1:]))


def _formed(share: _Share, fields: Sequence[str]) -> Batch:
    """The batch of this rank's rows, sorted by sample id."""
    ids = [sample for move, _ in share.received for sample in move.samples]
    lengths = [length for move, _ in share.received for length in move.lengths]
    columns = {name: [values[name] for _, values in share.received] for name in fields}
    columns |= {name: parts for name, parts in share.scored.items() if FIELDS[name].level is Level.ROW}
    flat = {name: np.concatenate(parts or [np.empty(FIELDS[name].shape(0))]) for name, parts in columns.items()}
    messages: list[str] = []
    for move, values in share.received:
        ends = np.cumsum(move.text_bytes, dtype=np.int64)[:-1]
        messages += [part.tobytes().decode() for part in np.split(values[TEXT], ends)] if TEXT in values else []
    texts = {"messages": messages} if len(messages) == len(ids) else {}
    batch = pack(ids, lengths, flat, texts, share.scored.get("turn_rewards"), share.scored.get("token_rewards"))
    if batch.images is not None:
        batch.pictures = _pictures(share.received)
    return batch.select(sorted(range(len(ids)), key=ids.__getitem__)).check()


def _pictures(received: Sequence[tuple[Move, Mapping[str, np.ndarray]]]) -> dict[bytes, bytes]:
    """The received pixels by digest."""
    return {
        span.digest: values[picture_name(span.digest)].tobytes()
        for _, values in received
        for span in image_spans(values[IMAGES.name])
    }
