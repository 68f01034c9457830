"""Whether a model can be packed: its packed log-probs against its own, tried when it is loaded."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hpcrl.engines.train.fsdp2.attention import PackedLayout, shared_prefixes
from hpcrl.engines.train.fsdp2.exchange import TokenRanks
from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.spec import FSDP2Config

PROBE_LENGTHS, PROBE_PREFIX = (13, 7, 19), 5  # the first and last sequence share a prefix
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # nats, mean over tokens


def probe_packing(
    model: PackedCausalLM,
    model_path: Path,
    own: FSDP2Config,
    device: torch.device,
    compute_dtype: torch.dtype,
    ranks: TokenRanks,
    engine: str,
) -> bool:
    """Whether packed log-probs equal the model's own log-probs of single sequences, on random tokens; the same on
    all ranks. The model is set accordingly. Collective. Ranks that divide tokens use the attention over packed
    sequences for single ones, too.

    The measure is the mean deviation, relative to that of a forward in which the sequences attend to each other.
    ValueError if not even single sequences agree, or packing is required and fails.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = cast(Any, model.hf.get_input_embeddings()).num_embeddings
    sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in PROBE_LENGTHS]
    sequences[-1][:PROBE_PREFIX] = sequences[0][:PROBE_PREFIX]
    shared = shared_prefixes(torch.cat(sequences), PROBE_LENGTHS, [PROBE_PREFIX] * len(PROBE_LENGTHS))
    sequences = [tokens.to(device) for tokens in sequences]
    obstacle, kernel = model.packing_obstacle(), own.attention
    with torch.no_grad():
        model.set_packing(False)
        single_own = torch.cat([model.own_logprobs(tokens) for tokens in sequences])
        single = torch.cat([_run(model, [tokens], None) for tokens in sequences])
        deviations = [(single - single_own).abs().mean(), single_own.new_tensor(math.inf), single_own.new_tensor(0.0)]
        if not obstacle:
            model.set_packing(True)
            packed = _run(model, sequences, PackedLayout(PROBE_LENGTHS, device, shared, kernel, ranks))
            leaking = _run(model, sequences, PackedLayout([sum(PROBE_LENGTHS)], device, None, kernel, ranks))
            deviations[1:] = [(packed - single_own).abs().mean(), -(leaking - single_own).abs().mean()]
    if isinstance(model, FSDPModule):
        model.reshard()
    agreed = torch.stack(deviations).nan_to_num(nan=math.inf)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    single_deviation, packed_deviation, leak = agreed.tolist()
    allowed = max(PROBE_TOLERANCE[compute_dtype], -0.1 * leak)
    kind, mode = model.hf.config.model_type, own.packing
    if math.isinf(single_deviation):
        raise ValueError(f"model.path {model_path}: its log-probs are not finite, so its weights are damaged")
    if single_deviation > allowed:
        raise ValueError(
            f"model.path {model_path}: log-probs of {kind} from its hidden states differ by "
            f"{single_deviation:.2g} nats from its own logits; its output head is not supported"
        )
    agrees = packed_deviation <= allowed
    why = obstacle or f"packed log-probs differ by {packed_deviation:.2g} nats from single sequences"
    divides = ranks.all.size > 1
    if divides and not agrees:
        keys = f"tensor_parallel={ranks.tensor.size} context_parallel={ranks.context.size}"
        raise ValueError(f"trainer.fsdp2: {keys} needs a model that can be packed; {kind} cannot: {why}; set both to 1")
    if mode == "require" and not agrees:
        raise ValueError(
            f"trainer.{engine}.packing=require, but {kind} cannot be packed: {why}; set trainer.{engine}.packing=auto "
            "to train one sequence at a time"
        )
    if mode == "auto" and not agrees and dist.get_rank() == 0:
        warnings.warn(
            f"{kind} cannot be packed ({why}): training goes one sequence at a time, which is slow",
            stacklevel=3,
        )
    packing = agrees and mode != "off"
    model.set_packing(packing or divides)
    return packing


def _run(model: PackedCausalLM, sequences: list[Tensor], layout: PackedLayout | None) -> Tensor:
    """float32: log-probs of all but the first token of each sequence, at temperature 1."""
    tokens = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(s), device=tokens.device) for s in sequences])
    targets = (positions > 0).nonzero()[:, 0]
    logprobs: Tensor = model(tokens, positions, layout, targets - 1, tokens[targets], 1.0, False)[0]
    return logprobs
