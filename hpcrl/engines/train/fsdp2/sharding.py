"""Shard parameters over ranks with fully_shard, and fill the shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from hpcrl.engines.train.fsdp2.device_mesh import ParallelMesh
from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.mtp_layer import MTPLayers


def shard(
    model: PackedCausalLM,
    source: PreTrainedModel | None,
    mesh: ParallelMesh,
    *,
    mtp: MTPLayers | None = None,
    split_dims: Mapping[str, int],
    split_modules: Collection[str],
    device: torch.device,
    compute_dtype: torch.dtype,
    cpu_offload: bool,
    by_layer: bool,
) -> PackedCausalLM:
    """Shard an empty model, then fill it tensor by tensor from rank 0's copy, `source` and, if its MTP layers are
    trained, `mtp`, so no other rank holds a full model. With by_layer, each layer is gathered when it computes, instead
    of all layers at once. Collective.

    Args:
        split_dims: Maps the name (in `model.hf`) of a parameter of which a rank has a part to the split dimension.
        split_modules: Names (in `model.hf`) of the modules that are sharded over mesh.split_mesh.
    """

    def computed_in(dtype: torch.dtype) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    options: dict[str, Any] = {
        "mesh": mesh.mesh,
        "mp_policy": computed_in(compute_dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    names = [name for name, _ in model.named_parameters()]
    for name in split_modules:
        module = model.hf.get_submodule(name)
        fully_shard(module, reshard_after_forward=by_layer, **options | {"mesh": mesh.split_mesh})
    if by_layer:
        for module in list(model.modules()):
            if type(module).__name__ in (model.hf._no_split_modules or ()):
                fully_shard(module, **options)
    for module in model.in_float32():
        fully_shard(module, reshard_after_forward=False, **options | {"mp_policy": computed_in(torch.float32)})
    fully_shard(model, reshard_after_forward=False, **options)  # the head's backward comes next
    for method in model.other_forwards:
        register_fsdp_forward_method(model, method)
    # Losses are divided by global counts, so gradients are summed over ranks. Gloo has no pre-multiplied sum.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)  # on some ranks, an expert may get no tokens

    model.to_empty(device="cpu" if cpu_offload else device)
    parts = {"hf": source, "mtp": mtp}
    full = {f"{part}.{name}": p for part, held in parts.items() if held for name, p in held.named_parameters()}
    with torch.no_grad():
        for name in names:
            part = cast(DTensor, model.get_parameter(name))
            dim = split_dims.get(name.removeprefix("hf."))
            shape = mesh.as_part_of_whole(part, dim).shape
            whole = full[name].to(device) if full else torch.empty(shape, dtype=part.dtype, device=device)
            own = distribute_tensor(whole, *mesh.placements(dim)).to_local()
            if mesh.num_replicas > 1:
                dist.broadcast(own, group=mesh.replicas.group, group_src=0)
            part.to_local().copy_(own)
    fill_buffers(model, {part: held for part, held in parts.items() if held}, device)
    return model


@torch.no_grad()
def fill_buffers(model: PackedCausalLM, source: Mapping[str, nn.Module], device: torch.device) -> None:
    """Broadcast rank 0's buffers, of the modules of `model` with these names, to every rank. Collective."""
    buffers = {f"{part}.{name}": buffer for part, held in source.items() for name, buffer in held.named_buffers()}
    kinds = [{name: buffer.dtype for name, buffer in buffers.items()}]  # some stay in float32 when they are read
    dist.broadcast_object_list(kinds, 0)
    for name, buffer in list(model.named_buffers()):
        whole = buffers[name].to(device) if buffers else torch.empty_like(buffer, dtype=kinds[0][name], device=device)
        dist.broadcast(whole, 0)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, whole)


def zeros_for_missing_sums(model: nn.Module) -> None:
    """Before the last of several backward passes whose gradients are reduced together: give each trained parameter
    without a gradient so far a sum of zeros in float32. Of these, torch (2.13) would reduce a gradient in the compute
    dtype beside the others' sums, and refuses two dtypes."""
    groups = (g for m in model.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups)
    for each in (parameter for group in groups for parameter in group.fsdp_params):
        own, dtype = each.unsharded_param, each.reduce_dtype
        if own.requires_grad and dtype not in (None, own.dtype) and each.unsharded_accumulated_grad is None:
            each.unsharded_accumulated_grad = torch.zeros_like(own, dtype=dtype)
