"""Recurrent token mixers (gated delta rule, state spaces, linear attention, short convolutions) over packed sequences.

Such a module carries a state from token to token, and over packed sequences its own forward would carry it from one
sequence into the next. So the sequences are gathered into padded blocks [rows, length], and the module's own forward
runs on each block as on a batch, in which every row starts without a state. Padding is on the right, where no real
token depends on it.

Where sequences share a prefix, which is packed once, the mixer computes it in each row, and the rest of the layer once.
As in attention, the gradient of a shared token is the sum over the rows that show it.

Ranks that split the tokens divide the rows: each gathers all tokens, computes its rows, and gets its tokens back. So
mixers are whole on tensor-parallel ranks, and the gradient of their parameters is a sum over ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.engines.train.fsdp2.exchange import gather_tokens, sum_tokens
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout, pad, unpad
from hpcrl.models.families import family_of
from hpcrl.rollout.device_copies import to_device


def mixers_of(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder's modules that mix tokens without attention, by name: modules that have a convolution over tokens,
    and those listed by the model's family."""
    listed = family_of(hf.config.get_text_config().model_type).mixers
    in_decoder = set(hf.get_decoder().modules())
    found: dict[str, nn.Module] = {}
    for name, module in hf.named_modules():
        inner = module not in in_decoder or any(name.startswith(f"{outer}.") for outer in found)
        if not inner and (type(module).__name__ in listed or any(isinstance(m, nn.Conv1d) for m in module.children())):
            found[name] = module
    return found


class RowMixers:
    """Makes mixers compute row by row.

    Attributes:
        modules: The mixers by name.
        rows: Of the sequences in the current forward pass; None for one sequence.
        in_one_block: Whether a mixer calls its parts once per forward pass, for all rows. Otherwise, the number of
            calls depends on the rank's rows.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.modules = modules
        self.rows: _Rows | None = None
        self.in_one_block = False
        for module in modules.values():
            forward = module.forward
            own = forward.own if isinstance(forward, _Mixer) else forward  # of a copied model
            module.forward = _Mixer(own, self)  # type: ignore[method-assign]

    def set_layout(self, layout: PackedLayout | None) -> None:
        """The sequences of the next forward pass and its recomputation; None for one sequence."""
        self.rows = _Rows(layout, self.in_one_block) if layout is not None and self.modules else None


class _Mixer:
    """The forward of a mixer. An object instead of a function, because a copy of the model must call copied modules.

    Attributes:
        own: The module's forward for a batch of sequences.
    """

    def __init__(self, own: Callable[..., Any], mixers: RowMixers):
        self.own, self._mixers = own, mixers
        self._signature = inspect.signature(own)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The module's output for packed tokens [1, n, ...]. Its first argument holds the tokens. Only arguments that
        it names are passed on, because kernels know neither a layout nor positions in packed sequences."""
        rows = self._mixers.rows
        if rows is None:
            return self.own(*inputs, **named)
        given = self._signature.bind(*inputs, **named).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.pop(name, None)
        num_tokens = next(iter(given.values())).shape[1]
        blocks: list[dict[str, Any]] = [{} for _ in rows.blocks]
        for name, value in given.items():
            is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens)
            parts = rows.spread(value) if is_of_tokens else [value] * len(blocks)
            for block, part in zip(blocks, parts, strict=True):
                block[name] = part
        return rows.collect([self.own(**block) for block in blocks])


class _Rows:
    """The rows of a layout that this rank computes, in blocks (rows, length)."""

    def __init__(self, layout: PackedLayout, in_one_block: bool):
        self._ranks, self._num_packed = layout.ranks, layout.num_packed
        if self._ranks.all.size == 1:
            self.blocks, self._shown = layout.in_one_block() if in_one_block else layout.padded
            return
        sequences, place = layout.sequences, self._ranks.place
        owners = divide([len(tokens) for tokens in sequences], self._ranks.all.size)
        mine = [tokens for tokens, owner in zip(sequences, owners, strict=True) if owner == place]
        # A rank without rows computes one token, so its exchanges and parameters are in the graph.
        mine = mine or [torch.zeros(1, dtype=torch.int64)]
        tokens, places = torch.cat(mine).unique(return_inverse=True)
        first = torch.empty(self._num_packed, dtype=torch.int64)  # the rank that sends a token's result
        for sequence, owner in reversed(list(zip(sequences, owners, strict=True))):
            first[sequence] = owner
        sent = (first[tokens] == place).nonzero()[:, 0]
        device = layout.kept.device
        self.blocks, self._shown = PackedLayout([len(row) for row in mine], device, (tokens, places)).padded
        self._tokens, self._sent, self._to = (to_device(x, device) for x in (tokens, sent, tokens[sent]))

    def spread(self, own: Tensor) -> list[Tensor]:
        """[rows, length, ...] of each block, from packed tokens [1, n, ...]."""
        tokens = own[0]
        if self._ranks.all.size > 1:
            tokens = gather_tokens(gather_tokens(tokens, self._ranks.tensor), self._ranks.context)
            tokens = tokens.index_select(0, self._tokens)
        parts = pad(tokens, self._shown).split([rows * length for rows, length in self.blocks])
        return [part.unflatten(0, block) for part, block in zip(parts, self.blocks, strict=True)]

    def collect(self, outputs: Sequence[Any]) -> Any:
        """Packed tokens [1, n, ...] from tensors [rows, length, ...] of each block, or a tuple of such tensors. What
        else a mixer returns is a state, and None here."""
        if isinstance(outputs[0], tuple):
            return tuple(self.collect(each) for each in zip(*outputs, strict=True))
        of_tokens = zip(outputs, self.blocks, strict=True)
        if not all(isinstance(output, Tensor) and output.shape[:2] == block for output, block in of_tokens):
            return None
        slots = [output.flatten(0, 1) for output in outputs]
        packed = unpad(slots[0] if len(slots) == 1 else torch.cat(slots), self._shown)
        if self._ranks.all.size > 1:
            size = self._ranks.all.size
            whole = packed.new_zeros(-(-self._num_packed // size) * size, *packed.shape[1:])
            whole = whole.index_add(0, self._to, packed.index_select(0, self._sent))
            packed = sum_tokens(sum_tokens(whole, self._ranks.context), self._ranks.tensor)
        return packed[None]


def divide(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that computes each row: from the longest row on, the rank with the fewest tokens."""
    owners, loads = [0] * len(lengths), [0] * num_ranks
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        owners[row] = loads.index(min(loads))
        loads[owners[row]] += lengths[row]
    return owners
