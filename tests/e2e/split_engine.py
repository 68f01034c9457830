"""The engine of tests.e2e.split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcrl.config import Config
from hpcrl.engines.gen.generation_engine import Output, ReplicaRanks, Request
from hpcrl.engines.gen.native.engine import make as make_native


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> SplitEngine:
    """See SplitEngine. In the tests the default group always consists of the replica's ranks."""
    if len(replica.ranks) > 1:
        assert (dist.get_world_size(), dist.get_rank()) == (len(replica.ranks), replica.index)
    return SplitEngine(make_native(config, model_path, tokenizer, replica), replica)


class SplitEngine:
    """Like an engine with a split model, it needs every rank of the replica to do the same: each call is a collective,
    which raises if arguments or results of the ranks differ."""

    def __init__(self, whole: Any, replica: ReplicaRanks):
        self._whole, self._replica = whole, replica
        self.max_num_seqs = whole.max_num_seqs

    @property
    def version(self) -> int:
        return self._whole.version

    def add(self, requests: Sequence[Request]) -> None:
        self._compare("add", [(r.id, list(r.prompt_ids), r.params, r.seed) for r in requests])
        self._whole.add(requests)

    def abort(self, ids: Sequence[int]) -> list[Output]:
        self._compare("abort", list(ids))
        return self._compared("abort", self._whole.abort(ids))

    def step(self, num_tokens: int) -> list[Output]:
        self._compare("step", (num_tokens, self._whole.version, self._whole.progress()))
        return self._compared("step", self._whole.step(num_tokens))

    def progress(self) -> dict[int, int]:
        return self._whole.progress()

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._whole.load_weights(named, version)

    def loaded_weights(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return self._whole.loaded_weights(names)

    def recompute(self) -> None:
        self._whole.recompute()

    def sleep(self) -> None:
        self._whole.sleep()

    def wake(self) -> None:
        self._whole.wake()

    def close(self) -> None:
        self._whole.close()

    def _compared(self, call: str, outputs: list[Output]) -> list[Output]:
        facts = [(o.id, o.token_ids.tolist(), o.gen_logprobs.tolist(), o.versions.tolist()) for o in outputs]
        self._compare(f"results of {call}", facts)
        return outputs

    def _compare(self, what: str, facts: Any) -> None:
        if self._replica.group is None:
            return
        digest = hashlib.blake2b(repr((what, facts)).encode(), digest_size=7).digest()
        digests = torch.zeros(len(self._replica.ranks), dtype=torch.int64)
        digests[self._replica.index] = int.from_bytes(digest, "little")
        self._replica.group.allreduce([digests], dist.AllreduceOptions()).wait()
        if len(set(digests.tolist())) > 1:
            raise RuntimeError(f"the ranks {self._replica.ranks} of a replica differ in {what}: {facts}")
