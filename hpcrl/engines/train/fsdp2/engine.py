"""The training engine on PyTorch FSDP2 (fully_shard): parameters, gradients and optimizer state are sharded.

One rank that computes in the type of its weights has nothing to gather or convert: its parameters are plain tensors,
used where they are.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from hpcrl.algorithms.base import Objective, Outputs
from hpcrl.checkpoint.writer import Files
from hpcrl.config import Config, TrainerConfig
from hpcrl.engines.routes import routes_of
from hpcrl.engines.train.fsdp2 import checkpoint
from hpcrl.engines.train.fsdp2.attention import PackedLayout, shared_prefixes
from hpcrl.engines.train.fsdp2.model import PackedCausalLM, empty_model, read_model, write_model
from hpcrl.engines.train.fsdp2.replay import RouterReplay
from hpcrl.engines.train.fsdp2.spec import SPEC, FSDP2Config
from hpcrl.engines.train.fsdp2.weights import NamedWeights, local, whole_copy
from hpcrl.engines.train.schedule import learning_rate
from hpcrl.metrics.stats import Stats, merge, scalar
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.spec.weights import Held

SMALL_MODEL_BYTES = 4 << 30
"""A model whose full parameters and fp32 gradients take less stays gathered during a command: one all-gather before it
and one reduce-scatter after it. A larger model gathers layer by layer and reduces the gradient of every micro-batch."""
PROBE_LENGTHS, PROBE_PREFIX = (13, 7, 19), 5  # the first and last sequence share a prefix
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # nats, mean over tokens

T = TypeVar("T")


def make(config: Config, model_path: Path, total_steps: int, trainable: bool) -> FSDP2Engine:
    """The trainer's engine, or a frozen one. Collective over the ranks of the default group."""
    return FSDP2Engine(
        config.trainer,
        model_path,
        own=config.trainer.section(FSDP2Config),
        dtype=getattr(torch, config.model.dtype),
        total_steps=total_steps,
        device="cuda" if torch.cuda.is_available() else "cpu",
        trainable=trainable,
        deterministic=config.deterministic,
        replay=trainable and routes_of(config, model_path) is not None,
    )


class FSDP2Engine:
    """TrainEngine on the default process group, which must contain exactly the engine's ranks. Between commands
    parameters are sharded and there are no gradients."""

    computes = SPEC.computes

    def __init__(
        self,
        config: TrainerConfig,
        model_path: Path,
        *,
        own: FSDP2Config | None = None,
        dtype: torch.dtype,
        total_steps: int,
        device: str = "cpu",
        trainable: bool = True,
        deterministic: bool = False,
        replay: bool = False,
    ):
        """Load an HF folder and shard it. Collective.

        dtype (float32, bfloat16): of the parameters that the optimizer updates; config.param_dtype: of the computation.
        total_steps: optimizer steps of the whole run, for the schedule. trainable=False: no gradients, no optimizer
        (the reference policy). replay: choose the experts in the batch's field `routes`. ValueError on every rank if
        the folder cannot be used.
        """
        self.config, self.model_path, self.total_steps = config, Path(model_path), total_steps
        self.own = own or FSDP2Config()
        self.device, self.trainable = torch.device(device), trainable
        self.data_parallel_rank, self.data_parallel_size = dist.get_rank(), dist.get_world_size()
        self.optimizer_step = 0
        self._lent = False  # parameters are tensors of a generator
        self._sums: dict[Tensor, Tensor] | None = None
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses matrix products
            torch.use_deterministic_algorithms(True)
        self.dtype, self.compute_dtype = dtype, getattr(torch, config.param_dtype)
        self.sharded = self.data_parallel_size > 1 or dtype != self.compute_dtype or self.own.cpu_offload
        # Only rank 0 reads the weights; every problem with the folder is found before the first shard.
        hf = _agreed(lambda: empty_model(self.model_path, self.dtype))
        source = _agreed(lambda: read_model(self.model_path, self.dtype) if self.data_parallel_rank == 0 else None)
        self.num_parameters = sum(p.numel() for p in hf.parameters())
        gathered_bytes = self.num_parameters * (self.compute_dtype.itemsize + 4 * trainable)
        self.keep_gathered = gathered_bytes <= SMALL_MODEL_BYTES
        # A PackedCausalLM that fully_shard, if sharded, also made an FSDPModule.
        self.model: Any = self._shard(hf, source) if source is None or self.sharded else self._whole(source)
        self.replay = RouterReplay(self.model.hf) if replay else None
        self.shards = list(self.model.parameters())  # walking the modules takes a twentieth of a small step
        del source
        self.packing = self._probe_packing()
        self.model.set_head_dtype(config.head_dtype)
        self.weights = NamedWeights(self.model.hf)
        self.optimizer = self._make_optimizer() if trainable else None
        self._snapshots = checkpoint.Snapshots(self.model, self.optimizer)

    # ---- building

    def _wrapped(self, hf: PreTrainedModel) -> PackedCausalLM:
        hf.requires_grad_(self.trainable)
        hf.eval()  # no dropout: it would add noise to the ratio of two forwards
        model = PackedCausalLM(hf, self.config.logits_chunk_tokens)
        if self.own.activation_checkpointing and self.trainable:
            model.checkpoint_activations()
        return model

    def _whole(self, source: PreTrainedModel) -> PackedCausalLM:
        """The model of the only rank. Gradients of several micro-batches are summed in fp32, as FSDP2 does."""
        model = self._wrapped(source).to(self.device)
        if self.trainable and self.dtype != torch.float32:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(self._sum_in_fp32)
        return model

    def _sum_in_fp32(self, parameter: Tensor) -> None:
        """Move a gradient to the sums, while there is more than one micro-batch."""
        if self._sums is None or parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter] += parameter.grad
        else:
            self._sums[parameter] = parameter.grad.float()
        parameter.grad = None

    def _shard(self, hf: PreTrainedModel, source: PreTrainedModel | None) -> PackedCausalLM:
        """Shard an empty model, then fill it tensor by tensor from rank 0's copy: no other rank holds a full model."""
        model = self._wrapped(hf)
        mesh = init_device_mesh(self.device.type, (self.data_parallel_size,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if self.own.cpu_offload
            else OffloadPolicy(),
        }
        names = [name for name, _ in model.named_parameters()]
        if not self.keep_gathered:
            for module in list(hf.modules()):
                if type(module).__name__ in (hf._no_split_modules or ()):
                    fully_shard(module, **options)
        fully_shard(model, reshard_after_forward=False, **options)  # the head's backward comes next
        register_fsdp_forward_method(model, "own_logprobs")
        # Losses are divided by global counts, so gradients are summed over ranks. Gloo has no pre-multiplied sum.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_reduce_scatter_unused_params(True)  # an expert that no token of one rank visits

        model.to_empty(device="cpu" if self.own.cpu_offload else self.device)
        full = dict(source.named_parameters()) if source is not None else {}
        buffers = dict(source.named_buffers()) if source is not None else {}
        with torch.no_grad():
            for name in names:
                shard = cast(DTensor, model.get_parameter(name))
                whole = full[name.removeprefix("hf.")] if full else torch.empty(shard.shape, dtype=self.dtype)
                shard.to_local().copy_(distribute_tensor(whole.to(self.device), mesh, [Shard(0)]).to_local())
            for name, buffer in list(model.named_buffers()):
                whole = buffers[name.removeprefix("hf.")].to(self.device) if buffers else buffer.to(self.device)
                dist.broadcast(whole, 0)
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, whole)
        return model

    def _probe_packing(self) -> bool:
        """Whether packed log-probs equal the model's own log-probs of single sequences, on random tokens; the same on
        all ranks.

        The measure is the mean deviation, relative to that of a forward in which the sequences attend to each other.
        ValueError if not even single sequences agree, or packing is required and fails.
        """
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.hf.get_input_embeddings().num_embeddings
        sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in PROBE_LENGTHS]
        sequences[-1][:PROBE_PREFIX] = sequences[0][:PROBE_PREFIX]
        shared = shared_prefixes(torch.cat(sequences), PROBE_LENGTHS, [PROBE_PREFIX] * len(PROBE_LENGTHS))
        sequences = [tokens.to(self.device) for tokens in sequences]
        obstacle, kernel = self.model.packing_obstacle(), self.own.attention
        with torch.no_grad():
            self.model.set_packing(False)
            own = torch.cat([self.model.own_logprobs(tokens) for tokens in sequences])
            single = torch.cat([self._run([tokens], None) for tokens in sequences])
            deviations = [(single - own).abs().mean(), own.new_tensor(math.inf), own.new_tensor(0.0)]
            if not obstacle:
                self.model.set_packing(True)
                packed = self._run(sequences, PackedLayout(PROBE_LENGTHS, self.device, shared, kernel))
                leaking = self._run(sequences, PackedLayout([sum(PROBE_LENGTHS)], self.device, None, kernel))
                deviations[1:] = [(packed - own).abs().mean(), -(leaking - own).abs().mean()]
        self._reshard()
        agreed = torch.stack(deviations).nan_to_num(nan=math.inf)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        single_deviation, packed_deviation, leak = agreed.tolist()
        allowed = max(PROBE_TOLERANCE[self.compute_dtype], -0.1 * leak)
        kind, mode = self.model.hf.config.model_type, self.own.packing
        if math.isinf(single_deviation):
            raise ValueError(f"model.path {self.model_path}: its log-probs are not finite, so its weights are damaged")
        if single_deviation > allowed:
            raise ValueError(
                f"model.path {self.model_path}: log-probs of {kind} from its hidden states differ by "
                f"{single_deviation:.2g} nats from its own logits; its output head is not supported"
            )
        agrees = packed_deviation <= allowed
        why = obstacle or f"packed log-probs differ by {packed_deviation:.2g} nats from single sequences"
        if mode == "require" and not agrees:
            raise ValueError(
                f"trainer.fsdp2.packing=require, but {kind} cannot be packed: {why}; set trainer.fsdp2.packing=auto to "
                "train one sequence at a time"
            )
        if mode == "auto" and not agrees and self.data_parallel_rank == 0:
            warnings.warn(
                f"{kind} cannot be packed ({why}): training goes one sequence at a time, which is slow",
                stacklevel=3,
            )
        packing = agrees and mode != "off"
        self.model.set_packing(packing)
        return packing

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW with weight decay on matrices only, not on biases and norms."""
        config, parameters = self.config, [p for p in self.shards if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    # ---- forward

    def _reshard(self) -> None:
        """Free what forwards without a backward have gathered."""
        if self.sharded:
            self.model.reshard()

    def _run(self, sequences: list[Tensor], layout: PackedLayout | None) -> Tensor:
        """float32: log-probs of all but the first token of each sequence, at temperature 1 (the probe's forward)."""
        tokens = torch.cat(sequences)
        positions = torch.cat([torch.arange(len(s), device=self.device) for s in sequences])
        targets = (positions > 0).nonzero()[:, 0]
        return self.model(tokens, positions, layout, targets - 1, tokens[targets], 1.0, False)[0]

    def _forward(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(log-probs, entropies or None), float32 [T], 0 outside loss_mask.

        Without masked tokens or rows, one token with weight zero is predicted, so that every parameter is in the graph:
        its gradient is reduced over ranks.
        """
        lengths = batch.lengths.tolist() or [1]
        token_ids = batch.token_ids if batch.num_tokens else batch.token_ids.new_zeros(1)
        positions = batch.position_ids if batch.num_tokens else batch.position_ids.new_zeros(1)
        places = batch.loss_mask.nonzero()[:, 0]
        before = places - 1 if places.numel() else places.new_zeros(1)
        targets = token_ids[places] if places.numel() else token_ids[:1]
        layout = None
        if self.packing:
            prefixes = batch.prefix_lengths().tolist() or [0]
            shared = shared_prefixes(token_ids.cpu(), lengths, prefixes)
            layout = PackedLayout(lengths, self.device, shared, self.own.attention)
        if self.replay is not None:
            self.replay.replay_of(batch, None if layout is None else layout.kept)
        logprobs, entropies = self.model(token_ids, positions, layout, before, targets, temperature, entropy)

        def spread(values: Tensor) -> Tensor:
            zeros = values.new_zeros(batch.num_tokens)
            return zeros.index_copy(0, places, values) if places.numel() else zeros + 0.0 * values.sum()

        return spread(logprobs), None if entropies is None else spread(entropies)

    def _outputs(self, batch: Batch, objective: Objective) -> Outputs:
        gradient = "entropy" in objective.outputs
        logprobs, entropies = self._forward(batch, objective.temperature, gradient or "entropy" in objective.logged)
        return Outputs(logprobs, entropies if gradient or entropies is None else entropies.detach())

    def _split(self, micro_batches: MicroBatches, num_rows: int) -> MicroBatches:
        """The micro-batches to run: as given or, without packing, one per row, equally many on every rank
        (collective)."""
        rows = sorted(row for micro_batch in micro_batches for row in micro_batch)
        if len(set(rows)) < len(rows) or (rows and not 0 <= rows[0] <= rows[-1] < num_rows):
            raise ValueError(f"micro-batches must hold rows below {num_rows}, each once, got {rows[:8]}...")
        if self.packing:
            return micro_batches
        count = torch.tensor([len(rows)], device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return [[row] for row in rows] + [[]] * (int(count.item()) - len(rows))

    @torch.no_grad()
    def logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor:
        """See TrainEngine."""
        pieces = [torch.zeros(n, device=batch.token_ids.device) for n in batch.lengths.tolist()]
        for rows in self._split(micro_batches, batch.num_sequences):
            micro_batch = batch.select(rows).to(self.device)
            values = self._forward(micro_batch, temperature, False)[0].to(batch.token_ids.device)
            for row, piece in zip(rows, values.split(micro_batch.lengths.tolist()), strict=True):
                pieces[row] = piece
        self._reshard()
        return torch.cat(pieces) if pieces else torch.zeros(0, device=batch.token_ids.device)

    # ---- training

    def train_step(
        self,
        batch: Batch,
        micro_batches: MicroBatches,
        objective: Objective,
        norms: Norms,
    ) -> Stats:
        """See TrainEngine."""
        stats = self.accumulate(batch, micro_batches, objective, norms)
        return merge([stats, self._update()])

    def accumulate(
        self,
        batch: Batch,
        micro_batches: MicroBatches,
        objective: Objective,
        norms: Norms,
    ) -> Stats:
        """The first half of train_step: add the gradient of the mini-batch, summed over ranks. Collective.

        Returns this rank's loss stats. `discard_gradients` drops the result.
        """
        assert self.optimizer is not None, "the engine was built with trainable=False"
        if objective.compares_rows and not self.packing:
            raise ValueError(
                f"the objective {type(objective).__name__} compares the rows of a micro-batch, and without packing "
                f"{self.model.hf.config.model_type} is trained one row at a time; it needs a model that can be packed "
                "and trainer.fsdp2.packing=auto or require"
            )
        split = self._split(micro_batches, batch.num_sequences)
        self._sums = {} if len(split) > 1 else None
        collected: list[Stats] = []
        for number, rows in enumerate(split):
            if self.sharded:
                self._prepare_backward(is_last=number == len(split) - 1)
            micro_batch = batch.select(rows).to(self.device)
            outputs = self._outputs(micro_batch, objective)
            loss = outputs.logprobs.sum()  # no rows: zero
            if rows:
                anchor = 0.0 * loss  # keeps the graph if the objective drops masked tokens
                loss, stats = objective.loss(outputs, micro_batch, norms)
                loss = loss + anchor
                collected.append(stats)
            loss.backward()
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)
        return merge(collected)

    def _prepare_backward(self, is_last: bool) -> None:
        # If each backward reduces, none passes its last buffer, of the vocabulary's matrices, to the next backward.
        self.model.set_is_last_backward(is_last or not self.keep_gathered)
        if self.keep_gathered:
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_reshard_after_backward(is_last)

    def _update(self) -> Stats:
        """Clip, step and drop the gradients. Stats on data-parallel rank 0 only, to count once. Collective."""
        assert self.optimizer is not None
        gradients = [local(p.grad) for p in self.shards if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).float().square().to(self.device)
        dist.all_reduce(norm)
        grad_norm, rate = math.sqrt(norm.item()), learning_rate(self.config, self.optimizer_step, self.total_steps)
        finite = math.isfinite(grad_norm)
        if finite:
            if grad_norm > self.config.max_grad_norm:
                torch._foreach_mul_(gradients, self.config.max_grad_norm / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer_step += 1
        self.discard_gradients()
        if self.data_parallel_rank != 0:
            return {}
        stats = {"actor/lr": scalar(rate), "actor/skipped_update": scalar(not finite)}
        return stats | ({"actor/grad_norm": scalar(grad_norm)} if finite else {})

    def discard_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.shards:
            parameter.grad = None

    # ---- weights and state

    def named_weights(self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine. The tensors are on the engine's device."""
        wanted = {dtypes.get(name, self.dtype) for name in self.weights.names}
        if self.sharded and self.keep_gathered and wanted == {self.compute_dtype}:
            self.model.unshard()  # one collective, in the type of the computation, instead of one per tensor
        try:
            for name, tensor in self.weights.items():
                yield name, whole_copy(tensor, dtypes.get(name, self.dtype))
        finally:
            self._reshard()

    def local_weights(self) -> dict[str, Tensor]:
        """See LocalWeights."""
        return {name: tensor.detach() for name, tensor in self.weights.items()}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See LocalWeights."""
        for name, tensor in tensors.items():
            parameter = self.weights[name]
            tensor.copy_(parameter.detach())
            parameter.data = tensor
        self._lent = True

    def weight_layout(self) -> list[Held]:
        """See TrainEngine."""
        return self.weights.layout(self.data_parallel_size)

    def held_weights(self) -> Iterator[Tensor]:
        """See TrainEngine. No collective."""
        return self.weights.held()

    def offload(self, weights: bool = True) -> None:
        """See TrainEngine. Does nothing if the parameters are on the host; parameters shared with a generator stay."""
        self._move(torch.device("cpu"), weights and not self._lent)

    def onload(self) -> None:
        """See TrainEngine."""
        self._move(self.device, not self._lent)

    def _move(self, device: torch.device, weights: bool) -> None:
        if self.device.type == "cpu" or self.own.cpu_offload:
            return
        if weights:
            self.model.to(device)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for name, value in state.items():
                state[name] = value.to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def snapshot(self, copy: bool = True) -> Files:
        """See TrainEngine. OSError on every rank if any rank lacks memory for the first copy."""
        return self._snapshots.take(self.optimizer_step, copy)

    def load(self, folder: Path) -> list[str]:
        """See TrainEngine. ValueError if the folder is not a trainer's checkpoint."""
        self.optimizer_step, warned = checkpoint.load(Path(folder), self.model, self.optimizer)
        return warned

    def export_hf(self, folder: Path) -> None:
        """See TrainEngine. Rank 0 holds the whole model in host memory during the call."""
        is_writer = self.data_parallel_rank == 0
        named = self.named_weights() if self.sharded else self.local_weights().items()
        weights = {name: t.to("cpu", copy=self.sharded) for name, t in named if is_writer}
        if is_writer:
            write_model(self.model.hf, weights, self.model_path, Path(folder))
        dist.barrier()

    def config_summary(self) -> dict[str, Any]:
        """See TrainEngine."""
        return {
            "engine": "fsdp2",
            "architecture": self.model.hf.config.model_type,
            "num_parameters": self.num_parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "head_dtype": self.config.head_dtype or str(self.compute_dtype).removeprefix("torch."),
            "packing": self.packing,
            "gathered_for_a_step": self.sharded and self.keep_gathered,
            "num_ranks": self.data_parallel_size,
            "device": str(self.device),
        }


def _agreed(work: Callable[[], T]) -> T:
    """The result of work(); a ValueError of any rank is raised on every rank. Collective."""
    result, message = None, None
    try:
        result = work()
    except ValueError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    if failed := [m for m in messages if m is not None]:
        raise ValueError(failed[0])
    return result  # type: ignore[return-value]
