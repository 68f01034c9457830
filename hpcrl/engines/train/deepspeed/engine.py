"""The training engine on DeepSpeed ZeRO: model, forward pass and losses are the FSDP2 engine's; DeepSpeed shards the
state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hpcrl.config import Config, TrainerConfig
from hpcrl.engines.expert_routes import routes_of
from hpcrl.engines.train.deepspeed import zero
from hpcrl.engines.train.deepspeed.checkpoint import ZeroCheckpoints
from hpcrl.engines.train.deepspeed.local_disk import LocalDisk
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.deepspeed.state_memory import HostOffload, move, optimizer_tensors, weight_tensors
from hpcrl.engines.train.fail_together import agreed
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine, arguments
from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.optimizer import make_optimizer
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.fsdp2.weights import fingerprint, is_frozen
from hpcrl.engines.train.schedule import learning_rate, update_stats
from hpcrl.metrics.stats import Stats
from hpcrl.spec.weight_layout import TensorShards


def make(config: Config, model_path: Path, total_steps: int, trainable: bool) -> ZeroEngine:
    """The trainer's engine, or a frozen engine. Collective over the default group."""
    own, replay = config.trainer.section(DeepSpeedConfig), trainable and routes_of(config, model_path) is not None
    given = arguments(config, total_steps)
    return ZeroEngine(config.trainer, model_path, zero=own, trainable=trainable, replay=replay, **given)


SHARED = ("packing", "attention", "activation_checkpointing", "aux_loss", "z_loss")
"""Keys that the section has in common with FSDP2's."""


class ZeroEngine(FSDP2Engine):
    """TrainEngine on the default process group, which must have exactly the engine's ranks.

    The optimizer updates fp32 weights, even with dtype=bfloat16; parameters have the compute dtype. A frozen engine
    shards its parameters with ZeRO-3; with ZeRO-1 and 2, every rank has all parameters and DeepSpeed is not used.
    """

    name = "deepspeed"
    model_class: type[PackedCausalLM] = zero.ZeroCausalLM

    def __init__(self, config: TrainerConfig, model_path: Path, *, zero: DeepSpeedConfig | None = None, **others: Any):
        """As FSDP2Engine. Collective. ValueError on every rank if the folder cannot be used."""
        self.zero = zero or DeepSpeedConfig()
        shared = {key: getattr(self.zero, key) for key in SHARED}
        super().__init__(config, model_path, own=FSDP2Config(**shared), **others)

    # ---- building

    def _is_sharded(self, dtype: torch.dtype) -> bool:
        return True

    def _sharded(self, hf: PreTrainedModel, source: PreTrainedModel | None) -> Any:
        self.module = self._wrapped(hf)
        zero.connect()
        reduced = self.num_trained or self.num_parameters  # a frozen model reduces no gradients
        settings = zero.settings(self.zero, self.config.max_grad_norm, self.compute_dtype, reduced)
        self._disk = agreed(lambda: LocalDisk(self.zero.nvme_path)) if self.zero.nvme_path else None
        is_divided = self.zero.zero_stage == 3
        zero.fill(self.module, source, self.device, self.compute_dtype, settings if is_divided else None)
        self.shards = list(self.module.parameters())
        self._adamw = self._make_adamw() if self.trainable else None
        if self._adamw is None and not is_divided:
            return self.module
        engine = zero.start(self.module, self._adamw, settings)
        agreed(lambda: self._place_state(engine.optimizer))
        if self._adamw is not None and self.dtype != self.compute_dtype:
            self._fill_masters(source)
        return engine

    def _place_state(self, optimizer: Any) -> None:
        """Create the moments; move tensors to the disk as configured. ValueError if the disk is full."""
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like
        if self._disk is not None and self.zero.offload_parameters == "nvme":
            move(weight_tensors(self.module, optimizer), self._disk.copy)
        if self._adamw is not None:
            if self._disk is not None and self.zero.offload_optimizer == "nvme":
                move(optimizer_tensors(self.module, optimizer, self._adamw), self._disk.copy)
                zeros_like = self._disk.zeros_like
            zero.make_moments(optimizer, self._adamw, zeros_like)

    def _fill_masters(self, source: PreTrainedModel | None) -> None:
        """Set the fp32 weights from the folder's weights, since compute parameters have lost precision."""
        full = dict(source.named_parameters()) if source is not None else {}
        trained = ((name, p) for name, p in self.module.hf.named_parameters() if p.requires_grad)
        for name, parameter in trained:
            values = (
                full[name].detach().to(self.device)
                if full
                else torch.empty(zero.shape_of(parameter), dtype=self.dtype, device=self.device)
            )
            dist.broadcast(values, 0)
            zero.set_state(parameter, "", values.float())

    def _make_adamw(self) -> torch.optim.AdamW:
        hf = self.module.hf
        return make_optimizer(
            hf,
            self.config,
            self.compute_dtype,
            lambda parameter: len(zero.shape_of(parameter)) >= 2,
            self._idle(hf.config),
        )

    def _make_optimizer(self) -> torch.optim.AdamW:
        assert self._adamw is not None
        return self._adamw

    def _make_snapshots(self) -> ZeroCheckpoints | None:
        if self.optimizer is None:
            return None
        return ZeroCheckpoints(self.module, self.optimizer, self.model_path, self._base, self._earlier_fingerprint)

    def _fingerprint(self) -> str:
        return self._fingerprint_in({name: self.weights[name].dtype for name in self.weights.frozen_names})

    def _earlier_fingerprint(self) -> str:
        """See FSDP2Engine. They converted buffers, such as routers' biases."""
        return self._fingerprint_in(dict.fromkeys(self.weights.frozen_names, self.compute_dtype))

    def _fingerprint_in(self, dtypes: Mapping[str, torch.dtype]) -> str:
        tensors = (zero.full_tensor(self.weights[name], dtype) for name, dtype in dtypes.items())
        return fingerprint(self._layout(dtypes), tensors)

    def _reshard(self) -> None:
        """DeepSpeed frees gathered parameters itself."""

    # ---- training

    def _prepare_backward(self, is_last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(is_last)

    def _backward(self, loss: Tensor) -> None:
        self.model.backward(loss * self._loss_factor(), scale_wrt_gas=False)

    def _loss_factor(self) -> float:
        # Compensates DeepSpeed's division of the sum over ranks by the number of ranks.
        return float(self.data_parallel_size)

    def _update(self) -> Stats:
        """Clip, step and drop the gradients. Stats on data-parallel rank 0 only, so they count once. Collective."""
        assert self.optimizer is not None
        rate = learning_rate(self.config, self.optimizer_step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.step()
        if self._disk is not None:
            self._disk.release()
        finite = not self.model.optimizer.overflow
        self.optimizer_step += finite
        if self.data_parallel_rank != 0:
            return {}
        return update_stats(rate, float(self.model.get_global_grad_norm()) if finite else math.inf)

    def discard_gradients(self) -> None:
        """See FSDP2Engine."""
        zero.discard_gradients(self.model.optimizer)

    # ---- weights and state

    def _gathered(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], merge: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            parameter, wanted = self.weights[name], dtypes.get(name, self._dtype_of(name))
            if merge and name in self.weights.adapters_of:
                assert self.lora is not None
                which = self.weights.adapters_of[name]
                pair = [tensor for _, tensor in self._gathered(which, {})]
                matrix = zero.full_tensor(parameter, self.compute_dtype)
                yield name, self.lora.merge(self.module.hf, which[0], matrix, *pair).to(wanted)
            elif parameter.requires_grad and wanted.itemsize > self.compute_dtype.itemsize:
                yield name, zero.master(parameter).to(wanted)
            else:
                yield name, zero.full_tensor(parameter, wanted)

    def weight_layout(self) -> list[TensorShards]:
        """See TrainEngine. ZeRO-3 splits a parameter as a flat vector, not by rows: every rank gathers it."""
        layout = self._layout({name: self._dtype_of(name) for name in self.weights.published})
        return [self.weights.as_merged(held, self.dtype) for held in layout]

    def _layout(self, dtypes: Mapping[str, torch.dtype]) -> list[TensorShards]:
        ranks, found = range(self.data_parallel_size), []
        for name, dtype in dtypes.items():
            kind = str(dtype).removeprefix("torch.")
            shards = TensorShards.unsharded(name, kind, zero.shape_of(self.weights[name]), ranks)
            found.append(msgspec.structs.replace(shards, frozen=is_frozen(self.weights[name])))
        return found

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine. Collective."""
        return (tensor for _, tensor in self.named_weights())

    def offload(self, weights: bool = True) -> None:
        """See TrainEngine. Does nothing on a CPU."""
        if self.device.type != "cpu":
            self._turns.offload(weights)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See TrainEngine."""
        if self.device.type != "cpu":
            self._turns.onload()

    @functools.cached_property
    def _turns(self) -> HostOffload:
        return HostOffload(self.module, getattr(self.model, "optimizer", None), self.optimizer, self.device)

    def _split_summary(self) -> dict[str, Any]:
        places = {"optimizer": self.zero.offload_optimizer, "parameters": self.zero.offload_parameters}
        return {"zero_stage": self.zero.zero_stage} | {
            key: ", ".join(what for what, where in places.items() if where == place)
            for key, place in (("on_host", "cpu"), ("on_disk", "nvme"))
        }
