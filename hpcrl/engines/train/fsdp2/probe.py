"""Check the loaded model: compare log-probs of packed and of single sequences with the model's own and each other."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hpcrl.engines.train.fsdp2.exchange import TokenRanks
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout
from hpcrl.engines.train.fsdp2.prefix_tree import share_prefixes
from hpcrl.engines.train.fsdp2.trial import Tried, make_rows, one_line, run

PROBE_LENGTHS, PROBE_PREFIX, PROBE_AFTER = (13, 7, 19), 5, 26
"""Tokens of the rows, of the common prefix of the first and the last, and tokens appended to a row to measure rounding:
matrix products are then about as large as for packed rows."""
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Tolerance in nats, mean over tokens, if both sides compute the same way."""
OTHER_WAY = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Tolerance if attention or the head is computed in another way, which the small model has shown to be right."""
NOISE = 4.0
"""Each tolerance is at least this many times the measured rounding."""


class Probed(Tried, Protocol):
    """What the probe needs of an engine with weights."""

    model: Any
    compute_dtype: torch.dtype


def probe_packing(engine: Probed, ranks: TokenRanks, obstacle: str) -> bool:
    """Decide whether to pack the engine's sequences, equally on all ranks, and set the model accordingly. Ranks that
    split tokens use packed attention for single sequences, too. Collective.

    `obstacle` is why sequences of this architecture cannot be packed (hpcrl.engines.train.fsdp2.trial); empty if they
    can. Without an obstacle, sequences packed together are compared with sequences packed singly, which may differ only
    by rounding. Rounding is measured as the difference between a sequence and the same beginning of a longer one.
    ValueError if not even single sequences have the model's own log-probs, or if packing is required and fails.
    """
    model, device, own, mode = engine.model, engine.device, engine.own, engine.own.packing
    rows, longer = make_rows(model, PROBE_LENGTHS, PROBE_PREFIX, device, PROBE_AFTER)
    lengths = [len(row) for row in rows]
    shared = share_prefixes(torch.cat(rows).cpu(), lengths)
    divides = ranks.all.size > 1

    def layout(lengths: list[int], shared: Any = None) -> PackedLayout:
        return PackedLayout(lengths, device, shared, own.attention, ranks)

    kind, at = model.hf.config.model_type, f"model.path {engine.model_path}: "
    with torch.no_grad():
        model.set_packing(False)
        with _said(f"{at}{kind} cannot be trained: "):
            wanted = torch.cat([model.own_logprobs(row) for row in rows])
            single = torch.cat([run(model, [row], None) for row in rows])
            followed = torch.cat([run(model, [row], None)[:-PROBE_AFTER] for row in longer])
        found = [single - wanted, followed - single]
        if not obstacle and (mode != "off" or divides):
            model.set_packing(True)
            alone = torch.cat([run(model, [row], layout([len(row)])) for row in rows])
            found += [alone - wanted, run(model, rows, layout(lengths, shared)) - alone]
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        module.reshard()
    agreed = torch.stack([difference.abs().mean() for difference in found]).nan_to_num(nan=math.inf)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    head_off, noise, *packed_off = agreed.tolist()
    same, other = (max(most[engine.compute_dtype], NOISE * noise) for most in (PROBE_TOLERANCE, OTHER_WAY))
    if math.isinf(head_off):
        raise ValueError(f"{at}its log-probs are not finite, so its weights are damaged")
    if head_off > other:
        raise ValueError(
            f"{at}log-probs of {kind} from its hidden states differ by {head_off:.2g} nats from its own logits; its "
            "output head is not supported"
        )
    why = obstacle
    if packed_off and (packed_off[0] > other or packed_off[1] > same):
        why = f"packed log-probs differ by {max(packed_off):.2g} nats from single sequences"
    packing = mode != "off" and not why
    _say(engine, kind, why, ranks)
    model.set_packing(packing or divides)
    return packing


@contextlib.contextmanager
def _said(refused: str) -> Iterator[None]:
    """Raise an error of a model's own code as a ValueError."""
    try:
        yield
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        raise ValueError(f"{refused}its forward fails ({one_line(error)}); take a model of another family") from error


def _say(engine: Probed, kind: str, why: str, ranks: TokenRanks) -> None:
    """ValueError if the configuration needs packing; a warning if training becomes slow."""
    mode, name = engine.own.packing, engine.name
    if not why:
        return
    if ranks.all.size > 1:
        keys = f"tensor_parallel={ranks.tensor.size} context_parallel={ranks.context.size}"
        raise ValueError(f"trainer.fsdp2: {keys} needs a model that can be packed; {kind} cannot: {why}; set both to 1")
    if mode == "require":
        raise ValueError(
            f"trainer.{name}.packing=require, but {kind} cannot be packed: {why}; set trainer.{name}.packing=auto "
            "to train one sequence at a time"
        )
    if mode == "auto" and dist.get_rank() == 0:
        warnings.warn(
            f"{kind} cannot be packed ({why}): it is trained one sequence at a time, which is slow",
            stacklevel=4,
        )
