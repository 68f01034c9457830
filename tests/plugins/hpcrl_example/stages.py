"""A training engine whose model is cut into stages, and a generation engine for the same model.

The model is a product of two matrices, A [V, WIDTH] and B [WIDTH, V]: the logits of the next token are A[token] @ B.
With two stages the first rank of a data-parallel rank holds A and the second B, as pipeline stages hold layers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hpcrl_example.specs import STAGES, StagesConfig
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.config import Config
from hpcrl.engines.gen.checks import check_requests
from hpcrl.engines.gen.generation_engine import Output, ReplicaRanks, Request
from hpcrl.engines.gen.sampling import stream_origin, uniforms
from hpcrl.engines.train.schedule import learning_rate
from hpcrl.metrics.stats import Stats, merge, scalar
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.rollout.types import FinishReason
from hpcrl.spec.weight_layout import TensorShards

NAMES = ("A", "B")
WIDTH = 8


def make_trainer(config: Config, model_path: Path, total_steps: int, trainable: bool) -> StagesEngine:
    """The engine of trainer.engine=stages."""
    from transformers import AutoTokenizer

    return StagesEngine(config, len(AutoTokenizer.from_pretrained(model_path)), total_steps)


class StagesEngine:
    """TrainEngine in float64, updated by plain SGD."""

    computes = STAGES.computes

    def __init__(self, config: Config, vocab_size: int, total_steps: int):
        self._config, self._total_steps, self.optimizer_step = config.trainer, total_steps, 0
        num, rank, size = config.trainer.section(StagesConfig).num, dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        self._shapes = shapes = {"A": (vocab_size, WIDTH), "B": (WIDTH, vocab_size)}
        drawn = {name: torch.randn(*shapes[name], generator=generator, dtype=torch.float64) for name in NAMES}
        self.is_first, self.is_last = rank % num == 0, rank % num == num - 1
        mine = NAMES if num == 1 else (NAMES[rank % num],)
        self.weights = {name: drawn[name].requires_grad_() for name in mine}
        self._rank, self._copy, self._num_copies = rank, rank // num, size // num
        copies = [list(range(first, first + num)) for first in range(0, size, num)]
        stages = [list(range(stage, size, num)) for stage in range(num)]
        self._inside = dist.new_subgroups_by_enumeration(copies)[0]
        self._across = dist.new_subgroups_by_enumeration(stages)[0]

    def _same_rows(self, batch: Batch) -> None:
        """RuntimeError if the stages of a copy were given different rows."""
        sums = torch.stack(
            [batch.token_ids.sum(), batch.sample_ids.sum(), (batch.loss_mask * batch.position_ids).sum()]
        )
        found = [torch.empty_like(sums) for _ in range(dist.get_world_size(self._inside))]
        dist.all_gather(found, sums, group=self._inside)
        if any(not other.equal(sums) for other in found):
            raise RuntimeError(f"rank {self._rank} has other rows than the other stages: {found}")

    def _hidden(self, batch: Batch) -> Tensor:
        """A[previous token], of this rank or received; a leaf of its own graph on the last stage of several."""
        if self.is_first:
            hidden = self.weights["A"][batch.token_ids.roll(1)]
            if not self.is_last:
                dist.send(hidden.detach().contiguous(), self._rank + 1)
            return hidden
        hidden = torch.empty(batch.num_tokens, WIDTH, dtype=torch.float64)
        dist.recv(hidden, self._rank - 1)
        return hidden.requires_grad_()

    def _outputs(self, hidden: Tensor, batch: Batch, temperature: float) -> Outputs:
        log_p = (hidden @ self.weights["B"] / temperature).log_softmax(-1)
        logprobs = log_p.gather(1, batch.token_ids[:, None].long())[:, 0] * batch.loss_mask
        return Outputs(logprobs.float(), -(log_p.exp() * log_p).sum(-1).float() * batch.loss_mask)

    @torch.no_grad()
    def logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """See TrainEngine."""
        self._same_rows(batch)
        hidden = self._hidden(batch)
        return self._outputs(hidden, batch, temperature).logprobs if self.is_last else None

    @torch.no_grad()
    def entropies(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """See ComputesEntropies."""
        self._same_rows(batch)
        hidden = self._hidden(batch)
        return self._outputs(hidden, batch, temperature).entropy if self.is_last else None

    def train_step(self, batch: Batch, micro_batches: MicroBatches, objective: Objective, norms: Norms) -> Stats:
        """See TrainEngine."""
        collected: list[Stats] = []
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        for rows in micro_batches:
            if rows:
                collected.append(self._micro_step(batch.select(rows), objective, norms))
        square = torch.zeros((), dtype=torch.float64)
        for weight in self.weights.values():
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=self._across)
            square += weight.grad.square().sum()
        dist.all_reduce(square, group=self._inside)
        rate, norm = learning_rate(self._config, self.optimizer_step, self._total_steps), square.sqrt()
        with torch.no_grad():
            for weight in self.weights.values():
                weight -= rate * weight.grad * (self._config.max_grad_norm / norm).clamp(max=1.0)
        self.optimizer_step += 1
        if self._copy == 0:
            collected.append({"actor/lr": scalar(rate), "actor/grad_norm": scalar(norm.item())})
        return merge(collected)

    def _micro_step(self, batch: Batch, objective: Objective, norms: Norms) -> Stats:
        self._same_rows(batch)
        hidden = self._hidden(batch)
        if self.is_last:
            loss, stats = objective.loss(self._outputs(hidden, batch, objective.temperature), batch, norms)
            loss.backward()
            if not self.is_first:
                assert hidden.grad is not None
                dist.send(hidden.grad, self._rank - 1)
            return stats
        gradient = torch.empty(batch.num_tokens, WIDTH, dtype=torch.float64)
        dist.recv(gradient, self._rank + 1)
        hidden.backward(gradient)
        return {}

    def named_weights(self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        for name, weight in self.weights.items():
            yield name, weight.detach().to(dtypes.get(name, weight.dtype), copy=True)

    def weight_layout(self) -> list[TensorShards]:
        """See TrainEngine."""
        size, num = dist.get_world_size(), self._config.section(StagesConfig).num
        return [
            TensorShards.unsharded(name, "float64", self._shapes[name], range(stage % num, size, num))
            for stage, name in enumerate(NAMES)
        ]

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine."""
        yield from self.weights.values()

    def offload(self, weights: bool = True) -> None:
        """See TrainEngine: it lives on the host."""

    def onload(self) -> None:
        """See TrainEngine."""

    def snapshot(self, copy: bool = True) -> dict[str, Any]:
        """See TrainEngine. The ranks of the first copy write, a file for each matrix."""
        files: dict[str, Any] = {}
        for name, weight in self.weights.items() if self._copy == 0 else ():
            buffer = io.BytesIO()
            torch.save({"weight": weight.detach(), "step": self.optimizer_step}, buffer)
            files[f"{name}.pt"] = buffer.getvalue()
        return files

    def load(self, folder: Path) -> list[str]:
        """See TrainEngine."""
        for name, weight in self.weights.items():
            state = torch.load(folder / f"{name}.pt", weights_only=True)
            with torch.no_grad():
                weight.copy_(state["weight"])
            self.optimizer_step = state["step"]
        return []

    def export_hf(self, folder: Path) -> None:
        """See TrainEngine: a file for each matrix, which no library loads."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, weight in self.weights.items() if self._copy == 0 else ():
            save_file({name: weight.detach().contiguous()}, folder / f"model-{name}.safetensors")
        if self._rank == 0:
            (folder / "config.json").write_text(json.dumps({"model_type": "stages"}) + "\n")
        dist.barrier()

    def config_summary(self) -> dict[str, Any]:
        """See TrainEngine."""
        return {"engine": "stages", "num_copies": self._num_copies}


class _Growing:
    """A request and the tokens that it has so far."""

    def __init__(self, request: Request):
        self.request, self.origin = request, stream_origin(request.seed, 0)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []


class StagesGenerator:
    """GenEngine that samples from the product; the ranks of a replica share the columns of B."""

    def __init__(self, config: Config, vocab_size: int, eos_id: int, replica: ReplicaRanks):
        self.version, self.max_num_seqs = -1, config.generator.max_num_seqs
        self._max_length, self._vocab_size, self._eos_id = config.max_sequence_tokens, vocab_size, eos_id
        self._place, self._num_ranks, self._group = replica.index, len(replica.ranks), replica.group
        self._growing: dict[int, _Growing] = {}
        self._weights: dict[str, Tensor] = {}

    def add(self, requests: Sequence[Request]) -> None:
        """See GenEngine."""
        sizes = {"max_length": self._max_length, "vocab_size": self._vocab_size}
        check_requests(requests, self._growing.keys(), has_tokenizer=True, **sizes)
        self._growing |= {request.id: _Growing(request) for request in requests}

    def abort(self, ids: Sequence[int]) -> list[Output]:
        """See GenEngine."""
        return [_output(self._growing.pop(i), FinishReason.ABORT) for i in ids if i in self._growing]

    def step(self, num_tokens: int) -> list[Output]:
        """See GenEngine."""
        finished = []
        for _ in range(num_tokens):
            live = list(self._growing.values())[: self.max_num_seqs]
            if not live:
                break
            last = torch.tensor([(growing.token_ids or list(growing.request.prompt_ids))[-1] for growing in live])
            temperatures = torch.tensor([[growing.request.params.temperature or 1.0] for growing in live])
            log_p = (self._logits(last) / temperatures).log_softmax(-1)
            for growing, row in zip(live, log_p, strict=True):
                params = growing.request.params
                uniform = float(uniforms(np.array([growing.origin]), len(growing.token_ids))[0])
                token = int((row.exp().cumsum(0) < uniform).sum()) if params.temperature else int(row.argmax())
                token = min(token, self._vocab_size - 1)
                growing.token_ids.append(token)
                growing.logprobs.append(float(row[token]))
                growing.versions.append(self.version)
                stops = token == self._eos_id and not params.ignore_eos
                if stops or len(growing.token_ids) == params.max_new_tokens:
                    reason = FinishReason.STOP if stops else FinishReason.LENGTH
                    finished.append(_output(self._growing.pop(growing.request.id), reason))
        return finished

    def _logits(self, last: Tensor) -> Tensor:
        """[R, V] after these tokens; every rank of the replica computes its columns, and all ranks get all columns."""
        width = -(-self._vocab_size // self._num_ranks)
        columns = self._weights["B"][:, self._place * width : (self._place + 1) * width]
        own = torch.nn.functional.pad(self._weights["A"][last] @ columns, (0, width - columns.shape[1]))
        if self._num_ranks == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self._num_ranks)]
        self._group.allgather([parts], [own.contiguous()]).wait()
        return torch.cat(parts, dim=1)[:, : self._vocab_size]

    def progress(self) -> dict[int, int]:
        """See GenEngine."""
        return {i: len(growing.token_ids) for i, growing in self._growing.items()}

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See GenEngine."""
        weights = {name: tensor.clone() for name, tensor in named}
        if tuple(weights) != NAMES:
            raise ValueError(f"the weights are {', '.join(weights)}, not {', '.join(NAMES)}")
        self._weights, self.version = weights, version

    def recompute(self) -> None:
        """See GenEngine: there is no cache."""

    def sleep(self) -> None:
        """See GenEngine."""
        self._weights, self.version = {}, -1

    def wake(self) -> None:
        """See GenEngine."""

    def close(self) -> None:
        """See GenEngine."""


def _output(growing: _Growing, reason: FinishReason) -> Output:
    arrays = np.array(growing.token_ids, np.int32), np.array(growing.logprobs, np.float32)
    return Output(growing.request.id, *arrays, np.array(growing.versions, np.int32), reason)


def make_generator(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> StagesGenerator:
    """The engine of generator.engine=columns."""
    return StagesGenerator(config, len(tokenizer), tokenizer.eos_token_id, replica)
