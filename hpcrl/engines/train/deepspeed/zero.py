"""DeepSpeed's part of the engine: its configuration, wrapping a model, and the state of one parameter.

If DeepSpeed finds a compiler, it compiles extensions: one for all-reduce in shared memory on CPUs, one for its own
Adam. hpcrl uses gloo and torch's fused AdamW instead, so nothing is compiled before or during a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.engines.train.deepspeed.spec import BUCKET_NUMBERS, DeepSpeedConfig
from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.model_kind import decoder_of
from hpcrl.engines.train.fsdp2.sharding import fill_buffers
from hpcrl.spec.extras import without

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

with without("mlflow", "wandb"):  # if they are installed, importing them would cost every rank a second and 90 MiB
    import deepspeed  # its first import reads the variable
    from deepspeed.comm import comm
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
    from deepspeed.utils import groups, logger

logger.setLevel(logging.WARNING)

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroCausalLM(PackedCausalLM):
    """All forward passes in one method, because DeepSpeed gathers parameters only when the module is called."""

    def forward(self, *given: Any, of: str = "forward") -> Any:
        """The method `of` of PackedCausalLM, with its arguments."""
        return getattr(super(), of)(*given)

    def own_logprobs(self, *given: Any) -> Any:
        return self(*given, of="own_logprobs")

    def top_k(self, *given: Any) -> Any:
        return self(*given, of="top_k")

    def final_states(self, *given: Any) -> Any:
        return self(*given, of="final_states")


class _Engine(DeepSpeedEngine):  # type: ignore[misc]
    """A DeepSpeedEngine whose optimizer for ZeRO-1 in bfloat16 is the same as in all other cases."""

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> str:
        super()._do_optimizer_sanity_check(basic_optimizer)
        return str(ZERO_OPTIMIZATION)


def connect() -> None:
    """Make DeepSpeed communicate in the current default process group, within its timeout."""
    world = dist.group.WORLD
    if comm.cdb is not None and groups._WORLD_GROUP is not world:  # a group that was destroyed
        comm.cdb = None
        groups._release_process_group_references(None)
    if comm.cdb is None:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see above
        deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    groups._WORLD_GROUP = world  # otherwise DeepSpeed would clone the group with a timeout of 30 minutes
    os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device() if torch.cuda.is_available() else 0))
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # mpirun's number, which DeepSpeed requires to equal LOCAL_RANK


def settings(own: DeepSpeedConfig, max_grad_norm: float, dtype: torch.dtype, num_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for the compute dtype `dtype`. Gradients are reduced and summed in float32."""
    bucket = min(BUCKET_NUMBERS, num_parameters + num_parameters % 2)
    options = dict(own.options)
    pinned = torch.cuda.is_available()

    def place(where: str) -> dict[str, Any]:
        # local_disk.py moves such state from host memory to files.
        return {"device": "cpu" if where == "nvme" else where, "pin_memory": pinned and where == "cpu"}

    zero = {
        "stage": own.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": torch.cuda.is_available(),
        "memory_efficient_linear": False,  # True would replace torch.nn.functional.linear in the whole process
        "offload_optimizer": place(own.offload_optimizer),
    }
    if own.zero_stage == 3:
        zero |= {"offload_param": place(own.offload_parameters)}
    zero |= options.pop("zero_optimization", {})
    fixed = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the engine sets the end of a mini-batch itself
        "gradient_clipping": max_grad_norm if max_grad_norm != float("inf") else 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if dtype == torch.bfloat16:
        fixed["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return {"steps_per_print": None} | options | fixed


def fill(
    model: PackedCausalLM,
    source: PreTrainedModel | None,
    device: torch.device,
    dtype: torch.dtype,
    divided: dict[str, Any] | None,
) -> None:
    """Fill an empty model with rank 0's weights in `dtype`, tensor by tensor. `divided` is DeepSpeed's configuration if
    each parameter is sharded before the next one is created. Collective."""
    full = dict(source.named_parameters(remove_duplicate=False)) if source is not None else {}
    init = deepspeed.zero.Init(config_dict_or_path=divided) if divided is not None else None
    made: dict[int, nn.Parameter] = {}
    for prefix, module in list(model.named_modules(remove_duplicate=False)):
        for name, empty in list(module._parameters.items()):
            if empty is None or (id(empty) in made and made[id(empty)] is empty):
                continue
            if id(empty) not in made:
                values = torch.empty(empty.shape, dtype=dtype, device=device)
                if full:
                    values.copy_(full[f"{prefix}.{name}".removeprefix("hf.")].detach())
                parameter = nn.Parameter(values, requires_grad=empty.requires_grad)
                if init is None:
                    dist.broadcast(values, 0)
                else:
                    init._convert_to_zero_parameters([parameter])  # also broadcasts
                made[id(empty)] = made[id(parameter)] = parameter
            module._parameters[name] = made[id(empty)]
    fill_buffers(model, {} if source is None else {"hf": source}, device)


def start(model: PackedCausalLM, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> _Engine:
    """Wrap the model with DeepSpeed, which without an optimizer only gathers its parameters. Collective."""
    if config["zero_optimization"]["stage"] == 3:
        # Each call of a module gathers its parameters, so all ranks must make the same calls.
        model.row_mixers.in_one_block = True
        decoder = set(decoder_of(model.hf).modules())
        for module in model.modules():
            three = any(len(shape_of(parameter)) == 3 for parameter in module.parameters(recurse=False))
            if three and module in decoder and not isinstance(module, nn.Conv1d):
                # A layer's experts are one leaf module, since it depends on a rank's tokens which experts are called,
                # and how often. A tower's table of positions (Gemma 4) fails in the backward pass of a leaf module.
                deepspeed.utils.set_z3_leaf_module(module, True)
            # Layers with a recurrent state read their convolution's weights without calling it.
            for convolution in (child for child in module.children() if isinstance(child, nn.Conv1d)):
                for weight in convolution.parameters():
                    deepspeed.zero.register_external_parameter(module, weight)
            # Adapters are used by their linear layer, not by their own modules.
            for adapter in (getattr(module, name, None) for name in ("lora_A", "lora_B")):
                if isinstance(adapter, nn.Linear):
                    deepspeed.zero.register_external_parameter(module, adapter.weight)
        for parameter in model.projection():
            if parameter is not None:  # used by the model, not by its own module
                deepspeed.zero.register_external_parameter(model, parameter)
    parsed = deepspeed.DeepSpeedConfig(config)
    return _Engine(args=None, model=model, optimizer=optimizer, config=config, config_class=parsed)


def make_moments(zero: Any, optimizer: torch.optim.Optimizer, zeros_like: Callable[[Tensor], Tensor]) -> None:
    """Create AdamW's state, which AdamW would otherwise create in its first step. `zeros_like` makes a moment for fp32
    weights."""
    for flat in flat_weights(zero):
        # A fused AdamW keeps its step counter on the device.
        state = {"step": torch.zeros((), dtype=torch.float32, device=flat.device)}
        optimizer.state[flat] = state | {name: zeros_like(flat.detach()) for name in MOMENTS}
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._lazy_init_hp_params_optimizer_state()


def flat_weights(zero: Any) -> list[Tensor]:
    """This rank's fp32 weights, in AdamW's layout."""
    by_stage = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    return cast(list[Tensor], by_stage)


def discard_gradients(zero: Any) -> None:
    """Drop the gradients, as DeepSpeed does when it skips a step."""
    if hasattr(zero, "_overflow_clean_up"):
        zero._pre_step()
        zero._overflow_clean_up(zero.loss_scale)
        return
    zero.micro_step_id = INITIAL_MICRO_STEP_ID
    zero.zero_grad(set_to_none=True)
    zero._release_preflattened_grad_buffers()
    if zero.cpu_offload:
        zero.reset_cpu_buffers()
    else:
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the full compute parameter, converted before it is gathered. Collective if it is sharded."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().to(dtype, copy=True)
    divided = cast(Any, parameter)
    part = divided.ds_tensor.detach().to(device=parameter.device, dtype=dtype).contiguous()
    gathered = part.new_empty(part.numel() * dist.get_world_size())
    dist.all_gather_single(gathered, part)
    return gathered[: divided.ds_numel].view(divided.ds_shape)


def master(parameter: Tensor) -> Tensor:
    """A parameter's full fp32 weights. Collective."""
    values: Tensor = deepspeed.utils.safe_get_full_fp32_param(parameter)
    return values


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape of the full parameter."""
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


def set_whole(parameter: Tensor, values: Tensor) -> None:
    """Set a compute parameter to these values, equal on all ranks."""
    if not hasattr(parameter, "ds_id"):
        parameter.detach().copy_(values)
        return
    part = cast(Any, parameter).ds_tensor
    part.detach().copy_(_part(part, values))
    if parameter.numel():  # DeepSpeed keeps small parameters gathered
        parameter.detach().copy_(values)


def state_of(parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter's full fp32 weights and two moments; a frozen one's weights. Collective."""
    if not parameter.requires_grad:
        yield "", full_tensor(parameter, torch.float32)
        return
    yield "", master(parameter)
    for name in MOMENTS:
        yield name, deepspeed.utils.safe_get_full_optimizer_state(parameter, name)


def set_state(parameter: Tensor, name: str, values: Tensor) -> None:
    """Set one tensor of state_of(), equal on all ranks; the weights also in the compute dtype."""
    if not parameter.requires_grad:
        set_whole(parameter, values)
        return
    if hasattr(parameter, "ds_id"):  # the counterpart of safe_get_full_* needs a size divisible by the ranks
        mine = _part(cast(Any, parameter).ds_tensor, values)
        if name:
            deepspeed.utils.safe_set_local_optimizer_state(parameter, mine, name)
        else:
            deepspeed.utils.safe_set_local_fp32_param(parameter, mine)
    elif name:
        deepspeed.utils.safe_set_full_optimizer_state(parameter, values, name)
    else:
        deepspeed.utils.safe_set_full_fp32_param(parameter, values)
    if not name:
        set_whole(parameter, values)


def _part(part: Tensor, values: Tensor) -> Tensor:
    """This rank's shard of a parameter. The last rank's shard may have fewer numbers, and is padded with zeros."""
    first = part.numel() * dist.get_rank()
    mine = values.reshape(-1)[first : first + part.numel()]
    return nn.functional.pad(mine, (0, part.numel() - mine.numel()))
