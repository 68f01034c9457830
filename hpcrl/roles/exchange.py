"""Commands that move bulk between ranks: rollouts to trainers, log-probs back, weights to generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from hpcrl.algorithms.base import RewardTable
from hpcrl.batch import DTYPES, Batch
from hpcrl.dist.messages import Done, HandOver, Logprobs, Move, Pull, SendTokens
from hpcrl.dist.weights import receive_buckets, send_buckets
from hpcrl.roles.generator import BEHAVIOUR_FIELD, ROW_FIELDS, TOKEN_FIELDS, GeneratorRole
from hpcrl.roles.trainer import ReferenceRole, TrainerRole
from hpcrl.rollout.types import split_sample_id

if TYPE_CHECKING:
    from hpcrl.roles.worker import Worker

_FLOAT = np.dtype(np.float32)


class Exchange:
    """Every rank has it; which of its roles take part follows from the command."""

    def __init__(self, worker: Worker):
        self._worker = worker

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            HandOver: self._hand_over,
            Logprobs: self._logprobs,
            SendTokens: self._send_tokens,
            Pull: self._pull,
        }

    def _hand_over(self, command: HandOver, seq: int) -> Done:
        worker = self._worker
        fields = [*TOKEN_FIELDS, BEHAVIOUR_FIELD] if command.truncated else TOKEN_FIELDS

        def pick(samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
            return cast(GeneratorRole, worker.roles["generator"]).pick(samples)

        received = worker.fabrics[command.group].exchange(worker.world.rank, command.moves, fields, ROW_FIELDS, pick)
        if worker.world.rank not in command.dests:
            return Done(seq)
        ids = torch.tensor(command.samples, dtype=torch.int64)
        rewards = torch.frombuffer(bytearray(command.rewards), dtype=torch.float32)
        scores = torch.frombuffer(bytearray(command.scores), dtype=torch.float32)
        groups = torch.tensor([split_sample_id(s)[0] for s in command.samples], dtype=torch.int64)
        worker.tables[command.batch] = RewardTable(rewards, groups, ids, scores)
        worker.batches[command.batch] = _to_batch(received, fields, worker.tables[command.batch], scores)
        return Done(seq)

    def _logprobs(self, command: Logprobs, seq: int) -> Done:
        return cast(TrainerRole | ReferenceRole, self._worker.roles[command.role]).logprobs(command, seq)

    def _send_tokens(self, command: SendTokens, seq: int) -> Done:
        worker, batch = self._worker, self._worker.batches[command.batch]
        rows = {sample: row for row, sample in enumerate(batch.sample_ids.tolist())}
        starts = batch.cu_seqlens.tolist()

        def pick(samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
            values = getattr(batch, command.field).numpy()
            return {command.field: [values[starts[rows[s]] : starts[rows[s] + 1]] for s in samples]}

        received = worker.fabrics[command.group].exchange(
            worker.world.rank, command.moves, [(command.field, _FLOAT)], [], pick
        )
        if "trainer" in worker.roles:  # also one without rows: what the batch has is the same on all of them
            values = torch.zeros(batch.num_tokens)
            for move, fields in received:
                parts = torch.from_numpy(fields[command.field].copy()).split(move.lengths)
                for sample, part in zip(move.samples, parts, strict=True):
                    values[starts[rows[sample]] : starts[rows[sample] + 1]] = part
            setattr(batch, command.field, values)
        return Done(seq)

    def _pull(self, command: Pull, seq: int) -> Done:
        worker = self._worker
        rank, generator = worker.world.rank, cast(GeneratorRole | None, worker.roles.get("generator"))
        fabric = worker.fabrics.get(command.group)
        if rank == command.source:
            version, buckets = cast(TrainerRole, worker.roles["trainer"]).staged
            assert version == command.version, f"staged {version}, asked for {command.version}"
            if fabric is not None:
                send_buckets(fabric.group, buckets, fabric.ranks.index(rank))
        elif fabric is not None:
            buckets = list(receive_buckets(fabric.group, fabric.ranks.index(command.source)))
        if rank in command.ranks and generator is not None:
            generator.engine.load_weights((named for bucket in buckets for named in bucket.tensors()), command.version)
        return Done(seq)


def _to_batch(
    received: list[tuple[Move, dict[str, np.ndarray]]], fields: Any, table: RewardTable, scores: Any
) -> Batch:
    """The rank's rows, sorted by sample id."""
    ids = torch.tensor([s for move, _ in received for s in move.samples], dtype=torch.int64)
    lengths = torch.tensor([n for move, _ in received for n in move.lengths], dtype=torch.int64)

    def column(name: str) -> torch.Tensor:
        dtype = DTYPES.get(name, torch.float32)
        parts = [torch.from_numpy(values[name].copy()).to(dtype) for _, values in received]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

    rows = torch.searchsorted(table.sample_ids, ids)
    batch = Batch(
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()] or [torch.empty(0, dtype=torch.int64)]),
        rewards=table.rewards[rows],
        scores=scores[rows],
        group_ids=table.group_ids[rows],
        sample_ids=ids,
        status=column("status"),
        weights=torch.ones(len(ids)),
        **{name: column(name) for name, _ in fields},
    )
    return batch.select(torch.argsort(ids).tolist()).check()
