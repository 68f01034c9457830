"""The training engine on Megatron-Core: tensor, sequence, pipeline, context, expert and data parallelism."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.checkpoint.writer import Files
from hpcrl.config import Config, TrainerConfig
from hpcrl.engines.compiling import part_by_processor
from hpcrl.engines.expert_routes import routes_of
from hpcrl.engines.train import dcp
from hpcrl.engines.train.fail_together import agreed
from hpcrl.engines.train.fsdp2.taught import taught_of
from hpcrl.engines.train.fsdp2.teacher_top_k import check_top_k
from hpcrl.engines.train.megatron import checkpoint, cpu
from hpcrl.engines.train.megatron.adapted_layers import MegatronAdapters
from hpcrl.engines.train.megatron.export import export
from hpcrl.engines.train.megatron.gpt_model import (
    Description,
    LogprobsModel,
    Prediction,
    build,
    check_layers,
    describe,
    initialize_parallel,
    transformer_config,
)
from hpcrl.engines.train.megatron.optimizer import Optimizer, distribute
from hpcrl.engines.train.megatron.packing import Packed, pack, padded_lengths
from hpcrl.engines.train.megatron.replay import ChosenExperts
from hpcrl.engines.train.megatron.router_bias import RouterBias
from hpcrl.engines.train.megatron.router_losses import MegatronRouterLosses
from hpcrl.engines.train.megatron.spec import SPEC, MegatronConfig
from hpcrl.engines.train.megatron.weights import HFWeights
from hpcrl.engines.train.offloading import HostMemory
from hpcrl.engines.train.router_keys import ROUTER_KEYS
from hpcrl.engines.train.schedule import learning_rate, update_stats
from hpcrl.engines.train.stored_state import is_megatron
from hpcrl.engines.train.training_engine import assemble_rows, check_micro_batches
from hpcrl.metrics.stats import Stats, merge
from hpcrl.models.mtp import MTP
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.rollout.device_copies import to_host
from hpcrl.spec.weight_layout import TensorShards


def make(config: Config, model_path: Path, total_steps: int, trainable: bool) -> MegatronEngine:
    """The trainer's engine, or a frozen engine. Collective over the default group."""
    return MegatronEngine(
        config.trainer,
        model_path,
        own=config.trainer.section(MegatronConfig),
        total_steps=total_steps,
        trainable=trainable,
        deterministic=config.deterministic,
        replay=trainable and routes_of(config, model_path) is not None,
        mtp=config.model.mtp if config.model.mtp != "train" else "keep",
        seed=config.seed,
    )


class MegatronEngine:
    """TrainEngine on the default process group, which must have exactly the engine's ranks. Parameters have
    trainer.param_dtype; the optimizer has fp32 copies of parameters that are not fp32. Gradients are summed in fp32."""

    computes = SPEC.computes
    chunk_class: type[GPTModel] = LogprobsModel
    head_bias, num_heads = True, 1  # of a value head

    def __init__(
        self,
        config: TrainerConfig,
        model_path: Path,
        *,
        own: MegatronConfig | None = None,
        total_steps: int,
        trainable: bool = True,
        deterministic: bool = False,
        replay: bool = False,
        mtp: MTP = "keep",
        seed: int = 0,
    ):
        """Build this rank's part of an HF folder's model and read its weights. Collective.

        Args:
            config: With config.lora, the folder's weights are frozen; only adapters, initialized from `seed`, are
                trained, published and saved.
            total_steps: Optimizer steps of the whole run, for the learning-rate schedule.
            trainable: False for a frozen model (the reference): no gradients, no optimizer.
            replay: Route tokens to the experts in the batch's field `routes`.
            mtp: Whether exports have the folder's multi-token prediction layers.

        ValueError on every rank if the folder cannot be used, or a GPU's rank lacks Transformer Engine.
        """
        cpu.install()
        part_by_processor(os.environ)
        self.config, self.own, self.model_path, self.mtp = config, own or MegatronConfig(), Path(model_path), mtp
        self.total_steps, self.trainable, self.optimizer_step = total_steps, trainable, 0
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses matrix products
            os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
            torch.use_deterministic_algorithms(True)
        self.dtype = getattr(torch, config.param_dtype)
        agreed(lambda: check_layers(on_gpu=self.device.type == "cuda"))
        self.description = agreed(self._describe)
        initialize_parallel(self.own)
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        core = transformer_config(self.description, self.own, self.dtype, deterministic=deterministic)
        chunks = build(self.description, self.own, core, self.chunk_class)
        values = "values" in self.computes
        given = (self.description, self.own, chunks, dist.get_world_size(), values)
        self.weights = HFWeights(*given, bias=self.head_bias, heads=self.num_heads)
        for chunk in chunks:
            chunk.requires_grad_(trainable)
        if trainable and config.freeze:
            agreed(lambda: self.weights.freeze(config.freeze))
            used = [key for key in ROUTER_KEYS if getattr(self.own, key)]
            if used and self.weights.routers_frozen:
                text = "it trains routers, and trainer.freeze has all of them; use 0"
                raise ValueError(f"trainer.megatron.{used[0]}: {text}")
        if trainable and (config.freeze or config.lora.rank):
            for chunk in chunks:  # Megatron's recomputation has gradients only if the layer's input has
                if (embedding := getattr(chunk, "embedding", None)) is not None:
                    embedding.register_forward_hook(lambda module, given, output: output.requires_grad_())
        agreed(lambda: self.weights.read(self.model_path))
        self.lora = None
        if trainable and config.lora.rank:
            self.lora = MegatronAdapters(config.lora, self.model_path, self.weights, chunks, seed)
        self.published = self.weights if self.lora is None else self.lora.weights
        part = parallel_state.get_tensor_model_parallel_rank() if self.own.sequence_parallel else 0
        self.routing: list[ChosenExperts | MegatronRouterLosses | RouterBias] = []
        self.replay = None
        if replay:
            layers = sorted(self.description.shape.expert_layers)
            self.replay = ChosenExperts(chunks, layers, self._split()[2], part)
            self.routing.append(self.replay)
        self.router_losses = None
        if trainable and self.description.shape.expert_layers and self.lora is None and not values:
            self.router_losses = MegatronRouterLosses(chunks, self.own, self._split()[2], part)
            self.routing.append(self.router_losses)
        self.router_bias = None
        if trainable and self.own.expert_bias_rate:
            self.router_bias = RouterBias(chunks, self.own.expert_bias_rate, self._split()[2], part)
            self.routing.append(self.router_bias)
        # The gradient buffers take over the parameters' memory, so the optimizer is created after the weights.
        self.chunks: list[Any] = distribute(chunks, core, self.own) if trainable else list(chunks)
        self.optimizer = Optimizer(self.chunks, config, self.own, self.dtype) if trainable else None
        self._host = HostMemory(self.device)
        self._base = self.lora.base if self.lora is not None else None
        self._snapshots = (
            checkpoint.TorchDistSnapshots(self.chunks, self.optimizer, self._base)
            if self.optimizer is not None
            else None
        )
        self.num_parameters = sum(map(math.prod, self.weights.table.shapes.values()))
        if self.lora is not None:
            self.num_parameters += sum(map(math.prod, self.published.table.shapes.values()))

    def _describe(self) -> Description:
        """The folder's model. ValueError if it cannot be trained."""
        return describe(self.model_path)

    # ---- forward and backward

    def _run(
        self,
        batch: Batch,
        micro_batches: MicroBatches,
        temperature: float,
        use: Callable[..., tuple[Tensor, Any]],
        *,
        forward_only: bool,
        ask: Callable[[Batch, Packed], dict[str, Any]] = lambda micro_batch, tokens: {},
        everywhere: bool = False,
    ) -> list[Any]:
        """Run the micro-batches; on ranks of the last stage, returns the results of `use` for each one. `use` gets the
        micro-batch and the model's outputs ([T, ...], 0 outside loss_mask), which are log-probs and what the further
        fields of Prediction that `ask` returns request, and returns (loss, result). Collective over the engine's
        ranks."""
        check_micro_batches(micro_batches, batch.num_sequences)
        plan = [*micro_batches] or [[]]
        while self.own.virtual_pipeline > 1 and len(plan) % self.own.pipeline_parallel:
            plan.append([])  # the interleaved schedule runs micro-batches in groups

        split = self._split()
        # The interleaved schedule exchanges tensors of one length.
        least = 0
        if self.own.virtual_pipeline > 1:
            lengths = [batch.select(rows).segment_lengths.tolist() for rows in plan]
            least = max(sum(padded_lengths(numbers, split[0], split[2])) for numbers in lengths)

        def packed() -> Iterator[tuple[Batch, Packed]]:
            for micro_batch in plan:
                selected = batch.select(list(micro_batch))
                yield selected.to(self.device), pack(selected, *split, least).to(self.device)

        def step(batches: Iterator[tuple[Batch, Packed]], chunk: Any) -> Any:
            micro_batch, tokens = next(batches)
            for routers in self.routing:
                routers.see(micro_batch, tokens)
            prediction = Prediction(
                tokens.before,
                tokens.targets,
                temperature,
                self.config.logits_chunk_tokens,
                float32_head=self.config.head_dtype == "float32",
                **ask(micro_batch, tokens),
            )
            output = chunk(
                tokens.token_ids[None],
                tokens.positions[None],
                None,
                labels=prediction,
                packed_seq_params=tokens.sequences,
            )

            def finish(found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Any]:
                loss, result = use(micro_batch, *(self._spread(values, tokens, micro_batch) for values in found))
                return loss, torch.zeros((), dtype=torch.int, device=self.device), result

            return output, finish

        for routers in self.routing:
            routers.expect_recomputation(self.own.recompute == "full" and not forward_only)
        data = [packed() for _ in self.chunks]
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks,
            num_microbatches=len(plan),
            seq_length=max(1, least),  # in the other schedule, each tensor between stages comes with its length
            micro_batch_size=1,
            forward_only=forward_only,
            force_all_reduce=everywhere,
        )
        return list(results)

    def _split(self) -> tuple[int, int, int]:
        """(number of context-parallel ranks, this rank's number, number of ranks that share its tokens)."""
        shared = self.own.tensor_parallel if self.own.sequence_parallel else 1
        return self.own.context_parallel, parallel_state.get_context_parallel_rank(), shared

    def _spread(self, values: Tensor, tokens: Packed, batch: Batch) -> Tensor:
        """[T, ...]: the values for tokens that all context-parallel ranks have predicted, 0 elsewhere. A value's
        gradient goes to the rank that has computed it."""
        spread = values.new_zeros(batch.num_tokens, *values.shape[1:]).index_copy(0, tokens.places[tokens.own], values)
        return _SumOverRanks.apply(spread, parallel_state.get_context_parallel_group())  # type: ignore[no-any-return]

    def logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """See TrainEngine. None on ranks before the last stage."""
        return self._by_row(batch, micro_batches, temperature)

    def entropies(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """See ComputesEntropies. None on ranks before the last stage."""
        return self._by_row(batch, micro_batches, temperature, entropy=True)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See TrainsAdapters."""
        assert self.lora is not None, "the engine was built without adapters"
        with self.lora.off(), contextlib.nullcontext() if self.replay is None else self.replay.off():
            yield

    def reference_logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """See TrainsAdapters. None on ranks before the last stage."""
        with self.without_adapters():
            return self.logprobs(batch, micro_batches, temperature)

    @torch.no_grad()
    def _by_row(
        self, batch: Batch, micro_batches: MicroBatches, temperature: float, entropy: bool = False
    ) -> Tensor | None:
        """float32 [T, ...] on the host: the model's first output per token, or its entropy; None on ranks before the
        last stage."""

        def use(micro_batch: Batch, *computed: Tensor) -> tuple[Tensor, Any]:
            values = computed[1 if entropy else 0]
            return values.sum(), values

        asked = {"entropy": entropy}
        found = self._run(batch, micro_batches, temperature, use, forward_only=True, ask=lambda *_: asked)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        values = to_host(found)
        return assemble_rows(batch, micro_batches, values, values[0])

    # ---- teaching

    def top_k(
        self, batch: Batch, micro_batches: MicroBatches, k: int, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """See Teaches. None on ranks before the last stage."""
        check_top_k(k, self.description.shape.vocab_size)
        found = self._told(batch, micro_batches, temperature, {"top_k": k})
        if found is None:
            return None
        ids, logprobs = zip(*found, strict=True)
        kinds = torch.zeros(0, k, dtype=torch.int32), torch.zeros(0, k)
        return assemble_rows(batch, micro_batches, ids, kinds[0]), assemble_rows(
            batch, micro_batches, logprobs, kinds[1]
        )

    def final_states(self, batch: Batch, micro_batches: MicroBatches) -> Tensor | None:
        """See Teaches. None on ranks before the last stage."""
        found = self._told(batch, micro_batches, 1.0, {"states": True})
        if found is None:
            return None
        states = [own.float() for (own,) in found]
        return assemble_rows(batch, micro_batches, states, states[0])

    @torch.no_grad()
    def _told(
        self, batch: Batch, micro_batches: MicroBatches, temperature: float, asked: dict[str, Any]
    ) -> list[list[Tensor]] | None:
        """The wide values of each micro-batch's tokens, on the host: one micro-batch after another, they take no memory
        of the device. None on ranks before the last stage."""

        def use(micro_batch: Batch, *told: Tensor) -> tuple[Tensor, Any]:
            return torch.zeros((), device=self.device), to_host(told)

        found = self._run(batch, micro_batches, temperature, use, forward_only=True, ask=lambda *_: asked)
        return found if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None

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
        everywhere: bool = False,
    ) -> Stats:
        """The first half of train_step: compute the mini-batch's gradient, summed over ranks, in the parameters'
        main_grad. With `everywhere`, every rank gets the full gradient, even with the distributed optimizer. Returns
        this rank's loss stats. Collective."""
        assert self.optimizer is not None, "the engine was built with trainable=False"
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.force_all_reduce = everywhere
        for routers in (self.router_losses, self.router_bias):
            if routers is not None:
                routers.see_mini_batch(norms)

        def use(micro_batch: Batch, *found: Tensor) -> tuple[Tensor, Any]:
            outputs, used = self._outputs(objective, *found)
            anchor = 0.0 * used  # keeps the graph even without rows, or if the objective drops masked tokens
            if not micro_batch.num_sequences:
                return anchor, {}
            loss, stats = objective.loss(outputs, micro_batch, norms)
            return loss + anchor, stats

        def ask(micro_batch: Batch, tokens: Packed) -> dict[str, Any]:
            entropy = "entropy" in objective.outputs | objective.logged
            taught = taught_of(objective, micro_batch, tokens.places[tokens.own], self.device)
            return {"entropy": entropy, "taught": taught}

        found = self._run(
            batch,
            micro_batches,
            objective.temperature,
            use,
            forward_only=False,
            ask=ask,
            everywhere=everywhere,
        )
        if self.router_losses is not None:
            rows = [row for micro_batch in micro_batches for row in micro_batch]
            num_layers = len(self.description.shape.expert_layers)
            found.append(self.router_losses.stats(batch, rows, num_layers))
        return merge(found)

    def _outputs(self, objective: Objective, *found: Tensor) -> tuple[Outputs, Tensor]:
        """The objective's inputs, and the sum of all tensors that may have a gradient."""
        names = ("entropy", "divergence")
        asked = [name for name in names if name in objective.outputs | objective.logged]
        logprobs, *others = found
        values = {
            name: value if name in objective.outputs else value.detach()
            for name, value in zip(asked, others, strict=True)
        }
        return Outputs(logprobs, **values), logprobs.sum() + sum(value.sum() for value in values.values())

    def _update(self) -> Stats:
        """Clip and step. Stats on data-parallel rank 0 only, so they count once. Collective."""
        assert self.optimizer is not None
        rate = learning_rate(self.config, self.optimizer_step, self.total_steps)
        norm = self.optimizer.step(rate)
        finite = math.isfinite(norm)
        self.optimizer_step += finite
        if finite and self.router_bias is not None:
            self.router_bias.update()
        return update_stats(rate, norm) if self.data_parallel_rank == 0 else {}

    # ---- weights and state

    def named_weights(
        self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), without: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine. The tensors are on the engine's device."""
        self._gather()
        named = self.published.full_tensors(self.published.parameters, dtypes)
        yield from ((name, tensor) for name, tensor in named if name not in without)

    def weight_layout(self) -> list[TensorShards]:
        """See TrainEngine."""
        return self.published.layout(self.dtype)

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine. Collective."""
        self._gather()
        yield from self.published.local_shards()

    def _gather(self) -> None:
        """Gather the updated parameters now if the optimizer has left this to the next forward pass. Collective."""
        for chunk in self.chunks if self.trainable and self.own.overlap_parameters else ():
            chunk.start_param_sync(force_sync=True)

    def offload(self, weights: bool = True) -> None:
        """See TrainEngine. Does nothing if the parameters are on the host."""
        self._gather()
        if self.device.type != "cpu":
            self._to_host(weights)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See TrainEngine."""
        if self.device.type != "cpu":
            self._to_device()

    def _to_host(self, weights: bool) -> None:
        if self.optimizer is not None:
            self.optimizer.move(self._host.to_host)
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=weights, move_grads=True)
        if weights:
            self._move_parameters(self._host.to_host)

    def _to_device(self) -> None:
        for buffer in self._buffers():
            buffer.reload_from_cpu()
        self._move_parameters(self._host.to_device)
        if self.optimizer is not None:
            self.optimizer.move(self._host.to_device)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks if self.trainable else ():
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _move_parameters(self, move: Callable[[dict[Any, Tensor]], dict[Any, Tensor]]) -> None:
        """Move the parameters that are in no buffer with `move`, a method of self._host. The distributed optimizer's
        parameters are in buffers."""
        in_buffers = self.trainable and self.own.distributed_optimizer
        every = (parameter for chunk in self.chunks for parameter in chunk.parameters())
        parameters = {id(parameter): parameter for parameter in every if not (in_buffers and parameter.requires_grad)}
        if parameters:
            for key, tensor in move({key: parameter.data for key, parameter in parameters.items()}).items():
                parameters[key].data = tensor

    def snapshot(self, copy: bool = True) -> Files:
        """See TrainEngine. OSError if this rank lacks memory for the first copy."""
        assert self._snapshots is not None, "the engine was built with trainable=False"
        for buffer in self._buffers():  # offloaded parameters have no memory on the device
            buffer.reload_from_cpu(move_params=True, move_grads=False)
        self._gather()
        return self._snapshots.take(self.optimizer_step, copy)

    def load(self, folder: Path) -> list[str]:
        """See TrainEngine. ValueError on every rank if the folder is not a trainer's checkpoint, or belongs to another
        model."""
        optimizer, path = self.optimizer, Path(folder)
        assert optimizer is not None, "the engine was built with trainable=False"
        names = checkpoint.weight_names(self.chunks)
        others = not is_megatron(path)

        def read() -> None:
            if others:
                checkpoint.read_named(path, self.published, optimizer, self.model_path)
            else:
                checkpoint.read(path, self.chunks, optimizer, names)

        self.optimizer_step, warned = dcp.restore(path, read, self._base, of_other_engine=others)
        optimizer.set_step(self.optimizer_step)
        return warned

    def export_hf(self, folder: Path) -> None:
        """See TrainEngine. Rank 0 holds one file's tensors at a time."""
        self._gather()
        export(self.weights, self.model_path, Path(folder), self.dtype, self.mtp, adapters=self.lora)

    def config_summary(self) -> dict[str, Any]:
        """See TrainEngine."""
        return {
            "engine": "megatron",
            "architecture": self.description.shape.family,
            "num_parameters": self.num_parameters,
            "compute_dtype": self.config.param_dtype,
            "head_dtype": self.config.head_dtype or self.config.param_dtype,
            "packing": True,
            "num_ranks": dist.get_world_size(),
            "device": str(self.device),
        }


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group. Every rank gets the sum's gradient, which is also the gradient of each term."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        total = own.clone()
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
