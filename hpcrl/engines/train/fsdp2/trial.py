"""Try an architecture with a small model (hpcrl.engines.train.fsdp2.small_model) before weights are read: whether its
log-probs can be trained at all, packed, and split over ranks.

The small model computes in float32 with weights so large that every part of it matters, and rows are longer than its
windows, chunks and numbers of selected keys. So a correct computation differs only by rounding, a wrong one by tenths
of nats.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hpcrl.engines.train.fsdp2.exchange import Axis, TokenRanks
from hpcrl.engines.train.fsdp2.model import PackedCausalLM
from hpcrl.engines.train.fsdp2.model_kind import Kind
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.train.fsdp2.small_model import small_model
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.fsdp2.tensor_parallel import TensorParallel

LENGTHS, PREFIX, AFTER, DRAWS = (37, 21, 45), 5, 8, 3
"""Tokens of the rows, of the prefix that the first and last row share, and appended to a row; number of draws."""
TOLERANCE, SEEN = 1e-4, 1e-2
"""Nats, mean over tokens: the maximum difference due to rounding, and the minimum difference if rows attend to each
other."""


class Tried(Protocol):
    """What a trial needs of an engine."""

    name: str
    kind: Kind
    tried_class: type[PackedCausalLM]
    model_path: Path
    own: FSDP2Config
    device: torch.device


_outcomes: dict[tuple[object, ...], str] = {}
"""Results of try_architecture() for a single rank, because policy and reference have the same architecture."""


def try_architecture(engine: Tried, config: PreTrainedConfig, ranks: TokenRanks) -> str:
    """Why rows of this config's model cannot be packed and split over `ranks`; empty if they can. ValueError if the
    model cannot be trained. Collective over the default group; all ranks get equal results."""
    if dist.get_world_size() > 1:
        return _try(engine, config, ranks)
    key = (config.to_json_string(), engine.tried_class, str(engine.device), engine.own.packing == "off")
    if key not in _outcomes:
        _outcomes[key] = _try(engine, config, ranks)
    return _outcomes[key]


def idle_parameters(engine: Tried, config: PreTrainedConfig) -> frozenset[str]:
    """Names of the parameters that no gradient of text log-probs reaches, such as a vision tower's or a key indexer's;
    a critic's head, which is no part of these, is not idle. Empty if no small model can be tried."""
    try:
        with torch.enable_grad():
            model = engine.tried_class(small_model(config, engine.kind, engine.device).requires_grad_(), 64)
            model.set_packing(False)
            for seed in range(DRAWS):  # with many experts, a row may leave some unused
                for row in make_rows(model, LENGTHS, PREFIX, engine.device, AFTER, seed)[0]:
                    run(model, [row], None).sum().backward()
    except Exception:  # an error of a model's own code
        return frozenset()
    idle = frozenset(name for name, parameter in model.hf.named_parameters() if parameter.grad is None)
    return idle - engine.kind.may_lack


@torch.no_grad()
def _try(engine: Tried, config: PreTrainedConfig, ranks: TokenRanks) -> str:
    family = config.model_type
    refused = f"model.path {engine.model_path}: {family} cannot be trained: "
    try:
        hf = small_model(config, engine.kind, engine.device, (ranks.tensor.size, ranks.context.size))
        model = engine.tried_class(hf, 64)
        model.set_packing(False)
        finite = model.own_logprobs(make_rows(model, LENGTHS, PREFIX, engine.device, AFTER)[0][0]).isfinite().all()
    except Exception as error:  # an error of a model's own code
        return f"no small model of it can be tried: {one_line(error)}"
    if not finite:
        return "log-probs of a small model of it are not finite"
    rows, _ = make_rows(model, LENGTHS, PREFIX, engine.device, AFTER)
    try:
        run(model, rows[:1], None)
    except Exception as error:
        raise ValueError(f"{refused}its decoder fails ({one_line(error)}); take a model of another family") from error
    obstacle, packer = model.packing_obstacle(), None
    if not obstacle and (engine.own.packing != "off" or ranks.all.size > 1):
        packer = model if ranks.tensor.size == 1 else engine.tried_class(*_split(hf, ranks.tensor))
        try:
            _pack(packer, rows, ranks)
        except Exception as error:
            obstacle, packer = f"its packed forward fails: {one_line(error)}", None
    followed, single, packed, seen = _deviations(engine, model, packer, ranks)
    if followed > TOLERANCE:
        raise ValueError(
            f"{refused}log-probs change by {followed:.2g} nats with the tokens that follow, so it is no causal "
            "language model; take another one"
        )
    if single > TOLERANCE:
        raise ValueError(
            f"{refused}log-probs from its hidden states differ by {single:.2g} nats from its own logits; its output "
            "head is not supported; take a model of another family"
        )
    if packed > TOLERANCE:
        return f"packed log-probs differ by {packed:.2g} nats from single sequences"
    if packer is not None and seen < SEEN:
        return "a small model of it does not show whether sequences attend to each other"
    return obstacle


def _deviations(engine: Tried, model: PackedCausalLM, packer: PackedCausalLM | None, ranks: TokenRanks) -> list[float]:
    """The largest differences, over all ranks, from the model's own log-probs: if more tokens follow; if log-probs are
    computed from its hidden states; of packed rows; of rows that attend to each other. Rounding may select another
    expert or key if two are equally good, so the best of several draws of rows counts."""
    best = torch.full((3,), math.inf, device=engine.device)
    for seed in range(DRAWS):
        rows, longer = make_rows(model, LENGTHS, PREFIX, engine.device, AFTER, seed)
        model.set_packing(False)
        wanted = torch.cat([model.own_logprobs(row) for row in rows])
        followed = torch.cat([model.own_logprobs(row)[:-AFTER] for row in longer])
        single = torch.cat([run(model, [row], None) for row in rows])
        packed, leaking = (wanted, wanted) if packer is None else _pack(packer, rows, ranks)
        found = torch.stack([deviation(some, wanted) for some in (followed, single, packed, leaking)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        best = torch.minimum(best, found[:3])
        if best.max() <= TOLERANCE:
            break
    return [*best.tolist(), found[3].item()]


def _pack(packer: PackedCausalLM, rows: list[Tensor], ranks: TokenRanks) -> tuple[Tensor, Tensor]:
    """Log-probs of the packed rows, and of the same rows if they attend to the rows before them."""
    lengths, device = [len(row) for row in rows], rows[0].device
    shared = share_prefixes(torch.cat(rows).cpu(), lengths)
    packer.set_packing(True)
    packed = run(packer, rows, PackedLayout(lengths, device, shared, "sdpa", ranks))
    return packed, run(packer, rows, PackedLayout([sum(lengths)], device, None, "sdpa", ranks))


def _split(hf: PreTrainedModel, axis: Axis) -> tuple[PreTrainedModel, int, TensorParallel]:
    """Arguments of PackedCausalLM for a copy of the model that is split over the ranks."""
    split = copy.deepcopy(hf)
    tensor_parallel_plan = TensorParallel(split, axis)
    for name, dim in tensor_parallel_plan.dims.items():
        split.get_parameter(name).copy_(hf.get_parameter(name).chunk(axis.size, dim)[axis.rank])
    return split, 64, tensor_parallel_plan


def make_rows(
    model: PackedCausalLM, lengths: tuple[int, ...], prefix: int, device: torch.device, after: int, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Random tokens, equal on all ranks, and these rows with `after` more tokens, which fit into the model's
    positions. The first and the last row share a prefix. A row has no token twice, if there are enough: where the best
    keys are chosen, keys of equal tokens may be equally good."""
    text = model.hf.config.get_text_config()
    longest = (getattr(text, "max_position_embeddings", None) or math.inf) - after
    generator = torch.Generator().manual_seed(seed)
    embedded: Any = model.hf.get_input_embeddings().num_embeddings
    vocabulary = min(embedded, getattr(text, "vocab_size", None) or embedded)  # some embed more than they predict
    sizes = [int(max(2, min(n, longest))) + after for n in lengths]
    drawn = [
        (torch.randperm(min(vocabulary, 1 << 16), generator=generator).repeat(1 + n // vocabulary))[:n] for n in sizes
    ]
    others = drawn[-1][~torch.isin(drawn[-1], drawn[0][:prefix])]
    drawn[-1] = torch.cat([drawn[0][:prefix], others, drawn[0]])[: sizes[-1]]
    longer = [row.to(device) for row in drawn]
    return [row[:-after] for row in longer], longer


def deviation(found: Tensor, wanted: Tensor) -> Tensor:
    """The mean absolute difference in nats; infinite if a value is not finite."""
    return (found - wanted).abs().mean().nan_to_num(nan=math.inf)


def one_line(error: Exception) -> str:
    """The type and the beginning of the text of an error in a model's own code."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def run(model: PackedCausalLM, rows: list[Tensor], layout: PackedLayout | None) -> Tensor:
    """float32: log-probs of all but the first token of each row, at temperature 1."""
    tokens = torch.cat(rows)
    positions = torch.cat([torch.arange(len(s), device=tokens.device) for s in rows])
    targets = (positions > 0).nonzero()[:, 0]
    logprobs: Tensor = model(tokens, positions, layout, targets - 1, None, tokens[targets], 1.0, False)[0]
    return logprobs
