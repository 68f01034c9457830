"""The training engine on PyTorch FSDP2 (fully_shard): parameters, gradients and optimizer state are sharded.

A single rank whose compute dtype is its weights' dtype has nothing to gather or convert, so its parameters are plain
tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.checkpoint.writer import Files
from hpcrl.config import Config, TrainerConfig
from hpcrl.engines.expert_routes import routes_of
from hpcrl.engines.hf_folder import mtp_files
from hpcrl.engines.train import offloading
from hpcrl.engines.train.dcp import Base
from hpcrl.engines.train.fail_together import agreed
from hpcrl.engines.train.fsdp2 import checkpoint
from hpcrl.engines.train.fsdp2.device_mesh import ParallelMesh, check_heads
from hpcrl.engines.train.fsdp2.expert_parallel import ExpertParallel
from hpcrl.engines.train.fsdp2.frozen import freeze
from hpcrl.engines.train.fsdp2.images import blocks_of, image_inputs, positions_of
from hpcrl.engines.train.fsdp2.lora import Adapters
from hpcrl.engines.train.fsdp2.model import Inputs, PackedCausalLM, empty_model, read_model, write_model
from hpcrl.engines.train.fsdp2.model_kind import CAUSAL, SEEING, Kind
from hpcrl.engines.train.fsdp2.mtp_layer import (
    MTPLayers,
    MTPTraining,
    empty_layers,
    read_layers,
    tensors_in_files,
)
from hpcrl.engines.train.fsdp2.optimizer import make_optimizer
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.train.fsdp2.probe import probe_packing
from hpcrl.engines.train.fsdp2.replay import RouterReplay
from hpcrl.engines.train.fsdp2.router_training import RouterTraining, is_trained
from hpcrl.engines.train.fsdp2.routers import ObservedRouter, RouterTable, named_routers, router_table
from hpcrl.engines.train.fsdp2.sharding import shard, zeros_for_missing_sums
from hpcrl.engines.train.fsdp2.spec import SPEC, SPLITS, FSDP2Config
from hpcrl.engines.train.fsdp2.taught import taught_of, without_taught
from hpcrl.engines.train.fsdp2.teacher_top_k import check_top_k
from hpcrl.engines.train.fsdp2.tensor_parallel import TensorParallel
from hpcrl.engines.train.fsdp2.trial import idle_parameters, try_architecture
from hpcrl.engines.train.fsdp2.weights import NamedWeights, full_tensor, local
from hpcrl.engines.train.router_keys import ROUTER_KEYS
from hpcrl.engines.train.schedule import learning_rate, update_stats
from hpcrl.engines.train.training_engine import assemble_rows, check_micro_batches
from hpcrl.metrics.stats import Stats, merge
from hpcrl.models.families import vision_of
from hpcrl.models.mtp import ModelMTP, num_trained, untrainable
from hpcrl.rollout.batch import Batch, MicroBatches, Norms
from hpcrl.rollout.batch_images import keys_of
from hpcrl.rollout.device_copies import to_device, to_host
from hpcrl.spec.weight_layout import TensorShards

SMALL_MODEL_BYTES = 4 << 30
"""A model whose full parameters and fp32 gradients have at most this many bytes stays gathered during a command, with
one all-gather before and one reduce-scatter after it. A larger model gathers by layer and reduces in each micro-batch.
"""


def make(config: Config, model_path: Path, total_steps: int, trainable: bool) -> FSDP2Engine:
    """The trainer's engine, or a frozen engine. Collective over the default group."""
    own, replay = config.trainer.section(FSDP2Config), trainable and routes_of(config, model_path) is not None
    given = arguments(config, total_steps)
    return FSDP2Engine(config.trainer, model_path, own=own, trainable=trainable, replay=replay, **given)


def arguments(config: Config, total_steps: int) -> dict[str, Any]:
    """Arguments of the constructor from the configuration, except the engine's section."""
    return {
        "dtype": getattr(torch, config.model.dtype),
        "total_steps": total_steps,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "deterministic": config.deterministic,
        "seed": config.seed,
        "mtp": config.model.mtp,
    }


class FSDP2Engine:
    """TrainEngine on the default process group, which must have exactly the engine's ranks. Between commands,
    parameters are sharded and there are no gradients."""

    computes = SPEC.computes
    name = "fsdp2"
    kind: Kind = CAUSAL
    trains_routers = True  # a mixture's losses and biases, besides the objective
    model_class: type[PackedCausalLM] = PackedCausalLM
    tried_class: type[PackedCausalLM] = PackedCausalLM

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
        seed: int = 0,
        mtp: ModelMTP = "keep",
    ):
        """Load an HF folder and shard the model. Collective. ValueError on every rank if the folder cannot be used.

        Args:
            config: With config.lora, the folder's weights are frozen in config.param_dtype (the compute dtype); only
                adapters, initialized from `seed`, are trained and saved. They are published or, with
                config.lora.are_merged, weights in which they are merged.
            dtype: float32 or bfloat16, for the parameters that the optimizer updates.
            total_steps: Optimizer steps of the whole run, for the learning-rate schedule.
            trainable: False for a frozen model (the reference): no gradients, no optimizer.
            replay: Route tokens to the experts in the batch's field `routes`.
            mtp: Whether exports have the folder's multi-token prediction layers, or a trainable engine trains them.
        """
        self.config, self.model_path, self.total_steps = config, Path(model_path), total_steps
        self.mtp: ModelMTP = "drop" if "values" in self.computes else mtp
        self.vision = vision_of(self.model_path)
        if self.vision is not None and self.kind is CAUSAL:
            self.kind = SEEING
        self.own = own or FSDP2Config()
        self.device, self.trainable = torch.device(device), trainable
        self.mesh = ParallelMesh(self.own, self.device)
        self.data_parallel_rank = self.mesh.rank // self.mesh.tokens.all.size
        self.data_parallel_size = self.mesh.num_data_parallel
        self.optimizer_step = 0
        self._lent = False  # whether the parameters are also a generator's tensors
        self._sums: dict[Tensor, Tensor] | None = None
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses matrix products
            torch.use_deterministic_algorithms(True)
        self.dtype, self.compute_dtype = dtype, getattr(torch, config.param_dtype)
        self.lora = Adapters(config.lora) if config.lora.rank and trainable else None
        kept = self.compute_dtype if self.lora else dtype  # with adapters, the optimizer updates only adapters
        self.sharded = self._is_sharded(kept)
        # Only rank 0 reads the weights. All problems with the folder are detected before sharding begins.
        hf = agreed(lambda: self._to_train(self._empty_model(kept), seed))
        ranks = self.mesh.tokens
        agreed(lambda: check_heads(self.own, hf.config.get_text_config()))
        obstacle = agreed(lambda: try_architecture(self, hf.config, ranks))
        table = agreed(lambda: self._routers(hf, replay))
        source = agreed(lambda: self._to_train(self._read_model(kept), seed) if self.mesh.rank == 0 else None)
        self.mtp_training, self._empty_mtp, self._read_mtp = agreed(lambda: self._further_layers(hf.config, kept))
        self.num_parameters = sum(p.numel() for p in hf.parameters())
        self.num_trained = sum(p.numel() for p in hf.parameters() if p.requires_grad)
        self.tensor_parallel_plan = agreed(lambda: TensorParallel(hf, ranks.tensor)) if ranks.tensor.size > 1 else None
        divided, experts = self.mesh.experts.size > 1, self.mesh.experts
        self.expert_parallel = agreed(lambda: ExpertParallel(hf, experts)) if divided else None
        plan = self.expert_parallel or self.tensor_parallel_plan
        self._split_dims: Mapping[str, int] = {} if plan is None else plan.dims
        of_rank = list(hf.parameters())
        gathered_bytes = self.compute_dtype.itemsize * sum(p.numel() for p in of_rank)
        gathered_bytes += 4 * sum(p.numel() for p in of_rank if p.requires_grad)
        self.keep_gathered = gathered_bytes <= SMALL_MODEL_BYTES
        # A PackedCausalLM; if it is sharded, fully_shard has also made it an FSDPModule.
        self.model: Any = self._sharded(hf, source) if source is None or self.sharded else self._whole(source)
        routers = [] if table is None else table.of(self.model.hf)
        self.replay = RouterReplay(routers) if replay else None
        self.router_training = None if table is None else agreed(lambda: self._router_training(routers, table))
        self.shards = list(self.model.parameters())  # walking the modules takes a twentieth of a small step
        self._of_mtp = [] if self.model.mtp is None else list(self.model.mtp.parameters())
        self._common = [p for name, p in self.model.named_parameters() if self._split_dim(name) is None]
        experts_of = () if self.expert_parallel is None else self.expert_parallel.modules
        self._kept_gathered: list[Any] = [self.model, *(self.model.hf.get_submodule(name) for name in experts_of)]
        del source, self._empty_mtp, self._read_mtp
        self.packing = probe_packing(self, ranks, obstacle)
        self.model.set_head_dtype(config.head_dtype)
        self.weights = NamedWeights(self.model.hf, self.mesh, self._split_dims, self.lora)
        self.optimizer = self._make_optimizer() if trainable else None
        self._base = Base(str(model_path), self._fingerprint()) if self.lora is not None else None
        self._snapshots = self._make_snapshots()
        self._host = offloading.HostMemory(self.device)

    # ---- building

    def _is_sharded(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype need FSDP2 instead of plain tensors."""
        return self.mesh.size > 1 or dtype != self.compute_dtype or self.own.cpu_offload

    def _empty_model(self, dtype: torch.dtype) -> PreTrainedModel:
        return empty_model(self.model_path, dtype, self.kind)

    def _read_model(self, dtype: torch.dtype) -> PreTrainedModel:
        return read_model(self.model_path, dtype, self.kind)

    def _routers(self, hf: PreTrainedModel, replay: bool) -> RouterTable | None:
        """The routers that replay or are measured, if any. ValueError if a key needs some that are not supported."""
        used = [f"{self.name}.{key}" for key in ROUTER_KEYS if getattr(self.own, key)] if self._trains_routers else []
        if not replay and not used and (not self._trains_routers or not any(named_routers(hf))):
            return None
        try:
            table = router_table(self, hf.config)
            if used and any(router.sigmoid is None for router in table.found):
                raise ValueError(f"the routers of {hf.config.model_type} have neither sigmoids nor a softmax as scores")
        except ValueError as error:
            if replay:
                raise ValueError(f"trainer.router_replay: {error}; set it to false") from error
            if used:
                raise ValueError(f"trainer.{used[0]}: {error}; use 0") from error
            return None
        if used and not any(is_trained(hf, router.name) for router in table.found):
            raise ValueError(f"trainer.{used[0]}: it trains routers, and trainer.freeze has all of them; use 0")
        return table

    @property
    def _trains_routers(self) -> bool:
        return self.trainable and self.trains_routers and self.lora is None

    def _router_training(self, routers: Sequence[ObservedRouter], table: RouterTable) -> RouterTraining | None:
        """ValueError if biases cannot move."""
        if not self._trains_routers:
            return None
        ranks, factor = self.mesh.tokens, self._loss_factor()
        try:
            return RouterTraining(self.model.hf, routers, table, self.own, ranks, self.device, factor)
        except ValueError as error:
            raise ValueError(f"trainer.{self.name}.expert_bias_rate: {error}; use 0") from error

    def _to_train(self, hf: PreTrainedModel, seed: int) -> PreTrainedModel:
        """Set requires_grad for trained parameters; returns the model."""
        if self.lora is not None:
            return self.lora.add(hf, self.dtype, seed)
        hf.requires_grad_(self.trainable)
        if self.trainable and self.config.freeze:
            freeze(hf, self.config.freeze)
        return hf

    def _fingerprint(self) -> str:
        return self.weights.fingerprint()

    def _earlier_fingerprint(self) -> str:
        """The fingerprint of earlier versions. Collective."""
        return self.weights.fingerprint(earlier=True)

    def _split_dim(self, name: str) -> int | None:
        """The dimension along which tensor or expert parallelism splits a parameter, or None."""
        return self._split_dims.get(name.removeprefix("hf."))

    def _as_part_of_whole(self, name: str, tensor: Tensor) -> Tensor:
        return self.mesh.as_part_of_whole(tensor, self._split_dim(name))

    def _further_layers(
        self, model: PreTrainedConfig, dtype: torch.dtype
    ) -> tuple[MTPTraining | None, MTPLayers | None, MTPLayers | None]:
        """(their loss, the empty MTP layers, on rank 0 those with weights), if they are trained. ValueError if they
        cannot be."""
        if self.mtp != "train" or not self.trainable:
            return None, None, None
        divided = self.mesh.tokens.all.size * self.mesh.experts.size > 1
        if divided or self.lora is not None or self.config.freeze or self.vision is not None:
            text = "tensor_parallel, context_parallel, expert_parallel, trainer.lora, trainer.freeze and images"
            raise ValueError(f"model.mtp=train: MTP layers are trained without {text}; use keep")
        content, names = self._config_json(), list(mtp_files(self.model_path))
        if why := untrainable(content, names):
            raise ValueError(f"model.mtp=train: {why}; use keep")
        read = read_layers(self.model_path, model, content, dtype) if self.mesh.rank == 0 else None
        training = MTPTraining(self.own.mtp_loss, num_trained(content), self.own.attention, self.device)
        return training, empty_layers(model, content, dtype), read

    def _config_json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.model_path / "config.json").read_text())
        return content

    def _wrapped(self, hf: PreTrainedModel, mtp: MTPLayers | None = None) -> PackedCausalLM:
        hf.eval()  # no dropout: it would add noise to the ratio of two forward passes
        model = self.model_class(hf, self.config.logits_chunk_tokens, self.tensor_parallel_plan)
        model.mtp = mtp
        if self.own.activation_checkpointing and self.trainable:
            model.checkpoint_activations(self.name)
        return model

    def _whole(self, source: PreTrainedModel) -> PackedCausalLM:
        """A single rank's unsharded model. Gradients of micro-batches are summed in fp32, as in FSDP2."""
        model = self._wrapped(source, self._read_mtp).to(self.device)
        if self.trainable and self.dtype != torch.float32:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.register_post_accumulate_grad_hook(self._sum_in_fp32)
        return model

    def _sharded(self, hf: PreTrainedModel, source: PreTrainedModel | None) -> PackedCausalLM:
        return shard(
            self._wrapped(hf, self._empty_mtp),
            source,
            self.mesh,
            mtp=self._read_mtp,
            split_dims=self._split_dims,
            split_modules=() if self.expert_parallel is None else self.expert_parallel.modules,
            device=self.device,
            compute_dtype=self.compute_dtype,
            cpu_offload=self.own.cpu_offload,
            by_layer=not self.keep_gathered,
        )

    def _sum_in_fp32(self, parameter: Tensor) -> None:
        """Add a gradient to the fp32 sums if there are several micro-batches."""
        if self._sums is None or parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter] += parameter.grad
        else:
            self._sums[parameter] = parameter.grad.float()
        parameter.grad = None

    def _make_optimizer(self) -> torch.optim.AdamW:
        idle = self._idle(self.model.hf.config) if self.sharded else frozenset[str]()
        return make_optimizer(
            self.model.hf, self.config, self.compute_dtype, lambda parameter: parameter.ndim >= 2, idle, self.model.mtp
        )

    def _idle(self, model: PreTrainedConfig) -> frozenset[str]:
        """Parameters of which sharding takes missing gradients for zeros, and which must not decay. A model that takes
        images computes with its tower in any case."""
        idle = idle_parameters(self, model) if self.config.weight_decay else frozenset[str]()
        towers = () if self.vision is None else self.vision.towers
        return frozenset(name for name in idle if not name.startswith(towers))

    def _make_snapshots(self) -> Any:
        return checkpoint.Snapshots(
            self.model,
            self.optimizer,
            self._as_part_of_whole,
            self.model_path,
            self._base,
            self._earlier_fingerprint,
        )

    # ---- forward

    def _reshard(self) -> None:
        """Free parameters gathered by forward passes without a backward pass."""
        for module in self._kept_gathered if self.sharded else ():
            module.reshard()

    def _forward(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(log-probs, entropies or None), float32 [T], 0 outside loss_mask."""
        inputs, places = self._inputs(batch)
        logprobs, entropies, _ = self.model(*inputs, _targets(inputs, places), temperature, entropy)
        return spread(logprobs, places, batch), None if entropies is None else spread(entropies, places, batch)

    def _inputs(self, batch: Batch) -> tuple[Inputs, Tensor]:
        """The model's inputs, and the indices (int64 [N]) of the tokens to predict, on the device. They are computed on
        the host, where the batch is, without waiting for the device.

        Without rows or tokens in loss_mask, one token with weight zero is predicted. So every parameter is in the graph
        and its gradient can be reduced over ranks.
        """
        lengths = batch.segment_lengths.tolist() or [1]
        token_ids = batch.token_ids if batch.num_tokens else batch.token_ids.new_zeros(1)
        vision = None if batch.images is None else self.vision
        positions = batch.position_ids if vision is None else positions_of(batch, vision)
        if not batch.num_tokens:
            positions = positions.new_zeros((1, *positions.shape[1:]))
        places = batch.loss_mask.nonzero()[:, 0]
        before = places - 1 if places.numel() else places.new_zeros(1)
        layout = None
        if self.packing or self.mesh.tokens.all.size > 1:
            keys = keys_of(batch) if vision is not None and batch.num_tokens else token_ids
            limits = None
            if positions.dim() > 1 and vision is None:  # the positions of equal tokens may differ
                limits = [0] * len(lengths)
            elif self.replay is not None:  # the generator may have chosen other experts for equal response tokens
                limits = batch.prefix_lengths().tolist() or [0]
            shared = share_prefixes(keys, lengths, limits)
            layout = PackedLayout(
                lengths,
                self.device,
                shared,
                self.own.attention,
                self.mesh.tokens,
                blocks_of(batch) if vision is not None and vision.both_ways != "none" else None,
                vision is not None and vision.both_ways == "windows",
            )
        elif len(lengths) > 1:
            raise ValueError("a row of several sequences (an episode by steps) needs a model that can be packed")
        if self.replay is not None:
            self.replay.replay_of(batch.to(self.device), None if layout is None else layout.kept)
        if self.router_training is not None and torch.is_grad_enabled():
            self.router_training.see(batch, layout)
        token_ids, positions, before, places = (
            to_device(tensor, self.device) for tensor in (token_ids, positions, before, places)
        )
        images = None
        if vision is not None:
            kept = torch.arange(len(token_ids)) if layout is None else layout.on_host
            images = image_inputs(batch, vision, kept).to(self.device)
        return Inputs(token_ids, positions, layout, before, images), places

    def _outputs(self, batch: Batch, objective: Objective) -> Outputs:
        inputs, places = self._inputs(batch)
        return _outputs_of(
            objective, places, batch, self.model(*inputs, *self._asked(batch, objective, inputs, places))
        )

    def _asked(self, batch: Batch, objective: Objective, inputs: Inputs, places: Tensor) -> tuple[Any, ...]:
        """The further arguments of PackedCausalLM.forward()."""
        taught = taught_of(objective, batch, batch.loss_mask.nonzero()[:, 0], self.device, invent=True)
        entropy = "entropy" in objective.outputs | objective.logged
        return _targets(inputs, places), objective.temperature, entropy, taught

    def _outputs_and_mtp(self, batch: Batch, objective: Objective, norms: Norms) -> tuple[Outputs, Tensor, Stats]:
        """As _outputs(), with the MTP layers' loss and its statistics."""
        assert self.mtp_training is not None
        inputs, places = self._inputs(batch)
        limits = None if self.replay is None else batch.prefix_lengths().tolist()
        further = self.mtp_training.inputs(batch, inputs.layout, limits)
        given = (*inputs, *self._asked(batch, objective, inputs, places), further)
        *found, of_mtp, hits = self.model.with_mtp(*given)
        outputs = _outputs_of(objective, places, batch, found)
        return outputs, *self.mtp_training.loss(of_mtp, hits, further, norms)

    def _split(self, micro_batches: MicroBatches, num_rows: int) -> MicroBatches:
        """The micro-batches to run: the given ones or, without packing, one per row and empty ones up to the same
        number on every rank (collective)."""
        rows = check_micro_batches(micro_batches, num_rows)
        if self.packing:
            return micro_batches
        count = torch.tensor([len(rows)], device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return [[row] for row in rows] + [[]] * (int(count.item()) - len(rows))

    @torch.no_grad()
    def logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor:
        """See TrainEngine."""
        return self._by_row(batch, micro_batches, lambda part: self._forward(part, temperature, False)[0])

    @torch.no_grad()
    def entropies(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor:
        """See ComputesEntropies."""
        return self._by_row(batch, micro_batches, lambda part: cast(Tensor, self._forward(part, temperature, True)[1]))

    def _by_row(self, batch: Batch, micro_batches: MicroBatches, compute: Callable[[Batch], Tensor]) -> Tensor:
        """float32 [T, ...] on the host: the values computed for each micro-batch's tokens, 0 for rows in no
        micro-batch."""
        split = self._split(micro_batches, batch.num_sequences)
        computed = [compute(batch.select(rows)) for rows in split]
        self._reshard()
        found = to_host(computed)
        return assemble_rows(batch, split, found, found[0] if found else torch.zeros(0))

    # ---- teaching

    @torch.no_grad()
    def top_k(self, batch: Batch, micro_batches: MicroBatches, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """See Teaches."""
        check_top_k(k, self.model.hf.config.get_text_config().vocab_size)
        split = self._split(micro_batches, batch.num_sequences)
        computed = [self._told(batch.select(rows), self.model.top_k, k, temperature) for rows in split]
        self._reshard()
        ids, logprobs = zip(*computed, strict=True) if computed else ((), ())
        kinds = torch.zeros(0, k, dtype=torch.int32), torch.zeros(0, k)
        return assemble_rows(batch, split, ids, kinds[0]), assemble_rows(batch, split, logprobs, kinds[1])

    @torch.no_grad()
    def final_states(self, batch: Batch, micro_batches: MicroBatches) -> Tensor:
        """See Teaches."""
        split = self._split(micro_batches, batch.num_sequences)
        computed = [self._told(batch.select(rows), self.model.final_states)[0].float() for rows in split]
        self._reshard()
        width = self.model.hf.config.get_text_config().hidden_size
        return assemble_rows(batch, split, computed, computed[0] if computed else torch.zeros(0, width))

    def _told(self, batch: Batch, tell: Callable[..., Any], *asked: Any) -> list[Tensor]:
        """Wide values of a micro-batch's tokens, 0 outside loss_mask, on the host: one after another, they take no
        memory of the device."""
        inputs, places = self._inputs(batch)
        found = tell(*inputs, *asked)
        return to_host(spread(some, places, batch) for some in ((found,) if isinstance(found, Tensor) else found))

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See TrainsAdapters."""
        assert self.lora is not None, "the engine was built without adapters"
        with self.lora.off(), contextlib.nullcontext() if self.replay is None else self.replay.off():
            yield

    def reference_logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor:
        """See TrainsAdapters."""
        with self.without_adapters():
            return self.logprobs(batch, micro_batches, temperature)

    # ---- training

    def train_step(self, batch: Batch, micro_batches: MicroBatches, objective: Objective, norms: Norms) -> Stats:
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
        """The first half of train_step: add the mini-batch's gradient, summed over ranks. Collective.

        Returns this rank's loss stats. `discard_gradients` frees the gradient.
        """
        assert self.optimizer is not None, "the engine was built with trainable=False"
        if objective.compares_rows and not self.packing:
            raise ValueError(
                f"the objective {type(objective).__name__} compares the rows of a micro-batch, and without packing "
                f"{self.model.hf.config.model_type} is trained one row at a time; it needs a model that can be packed "
                f"and trainer.{self.name}.packing=auto or require"
            )
        split = self._split(micro_batches, batch.num_sequences)
        self._sums = {} if len(split) > 1 else None
        if self.router_training is not None:
            self.router_training.see_mini_batch(norms)
        collected: list[Stats] = []
        for number, rows in enumerate(split):
            if self.sharded:
                self._prepare_backward(is_last=number == len(split) - 1)
                if self.keep_gathered and 0 < number == len(split) - 1:
                    zeros_for_missing_sums(self.model)
            with self._dropping(number):
                collected += self._train_on(batch.select(rows), objective, norms)
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)
        self._sum_over_tensor_ranks()
        if self.router_training is not None:
            collected.append(self.router_training.stats(batch, check_micro_batches(micro_batches, batch.num_sequences)))
        return merge(collected)

    def _train_on(self, micro_batch: Batch, objective: Objective, norms: Norms) -> list[Stats]:
        """Forward and backward pass; the stats of the loss, if the micro-batch has rows."""
        collected: list[Stats] = []
        mtp_loss: Tensor | float = 0.0
        if self.mtp_training is None:
            outputs = self._outputs(micro_batch, objective)
        else:
            outputs, mtp_loss, stats = self._outputs_and_mtp(micro_batch, objective, norms)
            collected.append(stats)
        # Every rank runs the same backward pass.
        computed = (outputs.logprobs, outputs.entropy, outputs.values, outputs.divergence)
        loss: Any = sum(some.sum() for some in computed if some is not None and some.requires_grad)  # no rows: zero
        if micro_batch.num_sequences:
            anchor = 0.0 * loss  # keeps the graph even if the objective drops masked tokens
            loss, stats = objective.loss(outputs, without_taught(micro_batch).to(self.device), norms)
            loss = loss + anchor
            collected.append(stats)
        if self.router_training is not None:
            self.router_training.repeat()
        self._backward(loss if self.mtp_training is None else loss + mtp_loss)
        if self.router_training is not None:
            self.router_training.stop()
        return collected

    def _dropping(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """Context in which adapters drop inputs, if trainer.lora.dropout is above 0."""
        if self.lora is None:
            return contextlib.nullcontext()
        return self.lora.dropping(self.optimizer_step, micro_batch, self.mesh.rank)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _loss_factor(self) -> float:
        """What a loss is multiplied by before the backward pass."""
        return 1.0

    def _sum_over_tensor_ranks(self) -> None:
        """Sum common parameters' gradients: each tensor-parallel rank has its tokens' or heads' part. Collective."""
        if self.tensor_parallel_plan is None:
            return
        for parameter in self._common:
            if parameter.grad is not None and (gradient := local(parameter.grad)).numel():
                total = gradient.to(self.device)
                dist.all_reduce(total, group=self.tensor_parallel_plan.axis.group)
                gradient.copy_(total)

    def _prepare_backward(self, is_last: bool) -> None:
        # If every backward pass reduces gradients, no pass must defer its last buffer (the vocabulary matrices).
        self.model.set_is_last_backward(is_last or not self.keep_gathered)
        self.model.set_requires_all_reduce(is_last)  # over the model's replicas, after the reduction within a replica
        if self.keep_gathered:
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_reshard_after_backward(is_last)

    def _update(self) -> Stats:
        """Clip, step and free the gradients. Stats only on rank 0, so they count once. Collective."""
        assert self.optimizer is not None
        self._clip_mtp()
        own = {id(p) for p in self._of_mtp}
        gradients = [local(p.grad) for p in self.shards if p.grad is not None and id(p) not in own]
        norm = _square(gradients)
        if self.tensor_parallel_plan is not None:  # all tensor-parallel ranks count the gradients of common parameters
            common = [local(p.grad) for p in self._common if p.grad is not None]
            norm -= (1 - 1 / self.mesh.num_parts) * _square(common)
        norm = norm.to(self.device) / self.mesh.num_replicas
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
            if self.router_training is not None:
                self.router_training.move_biases()
        self.discard_gradients()
        return update_stats(rate, grad_norm) if self.mesh.rank == 0 else {}

    def _clip_mtp(self) -> None:
        """Clip the MTP layers' gradients by their own norm, so they do not change the policy's step. The layers keep
        their weights if they are not finite. Collective."""
        if not self._of_mtp:
            return
        gradients = [local(p.grad) for p in self._of_mtp if p.grad is not None]
        square = _square(gradients).to(self.device) / self.mesh.num_replicas
        dist.all_reduce(square)
        norm = math.sqrt(square.item())
        if not math.isfinite(norm):
            for parameter in self._of_mtp:
                parameter.grad = None
        elif norm > self.config.max_grad_norm:
            torch._foreach_mul_(gradients, self.config.max_grad_norm / norm)

    def discard_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.shards:
            parameter.grad = None

    # ---- weights and state

    def named_weights(
        self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), without: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine. The tensors are on the engine's device."""
        return self._gathered([name for name in self.weights.published if name not in without], dtypes, merge=True)

    def _gathered(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], merge: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Copies of full weights; with `merge`, as they are published."""
        kinds = {name: dtypes.get(name, self._dtype_of(name)) for name in names}
        wanted = {kinds[name] for name in names if isinstance(self.weights[name], nn.Parameter)}
        most = self.lora is None or names == self.weights.all_names
        if self.sharded and self.keep_gathered and most and wanted == {self.compute_dtype}:
            for module in self._kept_gathered:  # a collective for each, in the compute dtype, not one per tensor
                module.unshard()
        try:
            for name in names:
                yield name, self.weights.full_tensor(name, kinds[name], merge)
        finally:
            self._reshard()

    def _dtype_of(self, name: str) -> torch.dtype:
        """The type in which a weight is published and exported; buffers, such as routers' biases, keep theirs."""
        tensor = self.weights[name]
        return self.dtype if isinstance(tensor, nn.Parameter) else tensor.dtype

    def local_weights(self) -> dict[str, Tensor]:
        """See LocalWeights."""
        return {name: tensor.detach() for name, tensor in self.weights.items()}

    def move_into(self, tensors: Mapping[str, Tensor]) -> None:
        """See LocalWeights."""
        for name in self.weights.all_names:
            parameter, tensor = self.weights[name], tensors.get(name)
            if tensor is not None and tensor.dtype == parameter.dtype:
                tensor.copy_(parameter.detach())
                parameter.data = tensor
        self._lent = True

    def weight_layout(self) -> list[TensorShards]:
        """See TrainEngine."""
        return self.weights.layout()

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine. Collective only if adapters are merged."""
        return self.weights.local_shards()

    def offload(self, weights: bool = True) -> None:
        """See TrainEngine. Does nothing if parameters are on the host, and does not move a generator's tensors."""
        if self.device.type != "cpu" and not self.own.cpu_offload:
            self._move(self._host.to_host, weights and not self._lent)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See TrainEngine."""
        if self.device.type != "cpu" and not self.own.cpu_offload:
            self._move(self._host.to_device, not self._lent)

    def _move(self, move: Callable[[dict[str, Tensor]], dict[str, Tensor]], weights: bool) -> None:
        """`move` is a method of self._host."""
        self._reshard()
        states = list(self.optimizer.state.values()) if self.optimizer is not None else []
        parameters = dict(self.model.named_parameters()) if weights else {}
        buffers = dict(self.model.named_buffers()) if weights else {}
        of_states = {f"{n}.{key}": value for n, state in enumerate(states) for key, value in state.items()}
        moved = move({**parameters, **buffers, **of_states})
        new = {id(tensor): moved[name] for name, tensor in (*parameters.items(), *buffers.items())}
        if weights:
            # A tied parameter, which belongs to two modules, is changed in place the first time.
            self.model._apply(lambda t: new.pop(id(t), t) if isinstance(t, nn.Parameter) else new[id(t)])
        for n, state in enumerate(states):
            state.update({key: moved[f"{n}.{key}"] for key in state})

    def snapshot(self, copy: bool = True) -> Files:
        """See TrainEngine. OSError on every rank if a rank lacks host memory for the first copy."""
        files: Files = self._snapshots.take(self.optimizer_step, copy)
        return files

    def load(self, folder: Path) -> list[str]:
        """See TrainEngine. ValueError if the folder is not a trainer's checkpoint."""
        self.optimizer_step, warned = self._snapshots.load(Path(folder))
        return list(warned)

    def export_hf(self, folder: Path) -> None:
        """See TrainEngine. Rank 0 holds the whole model in host memory during the call."""
        is_writer, names = self.mesh.rank == 0, self.weights.all_names
        named = self._gathered(names, {}) if self.sharded else ((name, self.weights[name].detach()) for name in names)
        kinds = {name: self._dtype_of(name) for name in names}
        weights = {name: t.to("cpu", kinds[name], copy=self.sharded) for name, t in named if is_writer}
        mtp: Any = "keep" if self.mtp == "train" else self.mtp
        if self.model.mtp is not None:
            layers: dict[str, Tensor] = {}
            for name, tensor in self.model.mtp.state_dict(keep_vars=True).items():
                whole = full_tensor(tensor, self.dtype if isinstance(tensor, nn.Parameter) else tensor.dtype)
                layers |= {name: whole.cpu()} if is_writer else {}
            given = (self.model_path, self.model.hf.config, self._config_json(), layers, weights)
            mtp = tensors_in_files(*given) if is_writer else mtp
        if is_writer:
            write_model(self.model.hf, weights, self.model_path, Path(folder), mtp, self.lora)
        dist.barrier()

    def config_summary(self) -> dict[str, Any]:
        """See TrainEngine."""
        return {
            "engine": self.name,
            "architecture": self.model.hf.config.model_type,
            "num_parameters": self.num_parameters,
            "num_trained": self.num_trained,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "head_dtype": self.config.head_dtype or str(self.compute_dtype).removeprefix("torch."),
            "packing": self.packing,
            "num_ranks": self.mesh.size,
            "device": str(self.device),
            **self._split_summary(),
        }

    def _split_summary(self) -> dict[str, Any]:
        split = {key: getattr(self.own, key) for key in SPLITS}
        return {"gathered_for_a_step": self.sharded and self.keep_gathered, **split}


def spread(values: Tensor, places: Tensor, batch: Batch) -> Tensor:
    """[T, ...]: the values scattered to these indices of the batch, 0 elsewhere."""
    zeros = values.new_zeros(batch.num_tokens, *values.shape[1:])
    return zeros.index_copy(0, places, values) if places.numel() else zeros + (0 * values.sum()).to(values.dtype)


def _targets(inputs: Inputs, places: Tensor) -> Tensor:
    """int64 [N]: the tokens to predict, or one token if there is none."""
    return inputs.token_ids[places] if places.numel() else inputs.token_ids[:1]


def _outputs_of(objective: Objective, places: Tensor, batch: Batch, found: Sequence[Tensor | None]) -> Outputs:
    """The objective's inputs from log-probs, entropies and divergences of the tokens `places`."""
    logprobs, entropy, divergence = (None if values is None else spread(values, places, batch) for values in found)
    assert logprobs is not None
    if entropy is not None and "entropy" not in objective.outputs:
        entropy = entropy.detach()
    if divergence is not None and "divergence" not in objective.outputs:
        divergence = divergence.detach()
    return Outputs(logprobs, entropy, divergence=divergence)


def _square(gradients: list[Tensor]) -> Tensor:
    """The gradients' squared norm, float32."""
    return torch.nn.utils.get_total_norm(gradients).float().square()
