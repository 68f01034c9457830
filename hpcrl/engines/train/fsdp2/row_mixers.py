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
from hpcrl.engines.train.fsdp2.model_kind import decoder_of
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout, Padded, pad, unpad
from hpcrl.engines.train.fsdp2.prefix_tree import Shared
from hpcrl.engines.train.fsdp2.row_attention import causal_mask
from hpcrl.models.families import UNKNOWN, family_of
from hpcrl.models.family import Family
from hpcrl.models.row_modules import is_row_attention, row_modules
from hpcrl.rollout.device_copies import to_device


def mixers_of(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder's modules that mix tokens without packed attention, by name: modules that have a convolution over
    tokens, attention that runs row by row, and those listed by the model's family."""
    family = family_of(hf.config.get_text_config().model_type)
    in_decoder = set(decoder_of(hf).modules())
    return dict(row_modules(((name, m) for name, m in hf.named_modules() if m in in_decoder), family))


class RowMixers:
    """Makes mixers compute row by row.

    Attributes:
        modules: The mixers by name.
        rows: Of the sequences in the current forward pass; None for one sequence.
        in_one_block: Whether a mixer calls its parts once per forward pass, for all rows. Otherwise, the number of
            calls depends on the rank's rows.
    """

    def __init__(self, modules: Mapping[str, nn.Module], family: Family = UNKNOWN):
        self.modules = modules
        self.rows: _Rows | None = None
        self.in_one_block = False
        for module in modules.values():
            forward = module.forward
            own = forward.own if isinstance(forward, _Mixer) else forward  # of a copied model
            module.forward = _Mixer(own, self, is_row_attention(module, family))  # type: ignore[method-assign]

    def set_layout(self, layout: PackedLayout | None) -> None:
        """The sequences of the next forward pass and its recomputation; None for one sequence."""
        self.rows = _Rows(layout, self.in_one_block) if layout is not None and self.modules else None


class OfBlocks:
    """Keys that a layer chose, for the next one, which has the same blocks: a tensor of each."""

    def __init__(self, parts: list[Tensor]):
        self.parts = parts


class _Mixer:
    """The forward of a mixer. An object instead of a function, because a copy of the model must call copied modules.

    Attributes:
        own: The module's forward for a batch of sequences.
    """

    def __init__(self, own: Callable[..., Any], mixers: RowMixers, has_mask: bool):
        """has_mask: whether the module takes a causal mask."""
        self.own, self._mixers, self._has_mask = own, mixers, has_mask
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
            for block, part in zip(blocks, rows.spread_all(value, num_tokens), strict=True):
                block[name] = part
        if self._has_mask:
            states = next(iter(given.values()))
            for block, shape in zip(blocks, rows.blocks, strict=True):
                block["attention_mask"] = causal_mask(shape, given.get("attention_mask"), states)
        return rows.collect([self.own(**block) for block in blocks])


class _Rows:
    """The rows of a layout that this rank computes, in blocks (rows, length)."""

    def __init__(self, layout: PackedLayout, in_one_block: bool):
        self._ranks, self._num_packed = layout.ranks, layout.num_packed
        if self._ranks.all.size == 1:
            self._use(layout.in_one_block() if in_one_block else layout.padded)
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
        lengths = [len(row) for row in mine]
        self._use(PackedLayout(lengths, device, Shared(tokens, places, [0] * len(lengths))).padded)
        self._tokens, self._sent, self._to = (to_device(x, device) for x in (tokens, sent, tokens[sent]))

    def _use(self, padded: Padded) -> None:
        self.blocks, self._shown = [(block.rows, block.length) for block in padded.blocks], padded.keys

    def spread_all(self, value: Any, num_tokens: int) -> list[Any]:
        """An argument of each block: tensors of tokens, also in tuples and dictionaries, are spread; with the rotation
        of all tensor-parallel ranks' tokens. Others are equal for all blocks."""
        if isinstance(value, OfBlocks):
            return value.parts
        if isinstance(value, tuple):
            return list(zip(*(self.spread_all(each, num_tokens) for each in value), strict=True))
        if isinstance(value, dict):
            parts = {name: self.spread_all(each, num_tokens) for name, each in value.items()}
            return [{name: part[i] for name, part in parts.items()} for i in range(len(self.blocks))]
        tensor = self._ranks.tensor
        if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens):
            return list(self.spread(value))
        if tensor.size > 1 and isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens * tensor.size):
            return list(self.spread(value[:, tensor.rank :: tensor.size]))
        return [value] * len(self.blocks)

    def spread(self, own: Tensor) -> list[Tensor]:
        """[rows, length, ...] of each block, from packed tokens [1, n, ...]."""
        tokens = own[0]
        if self._ranks.all.size > 1:
            tokens = gather_tokens(gather_tokens(tokens, self._ranks.tensor), self._ranks.context)
            tokens = tokens.index_select(0, self._tokens)
        parts = pad(tokens, self._shown).split([rows * length for rows, length in self.blocks])
        return [part.unflatten(0, block) for part, block in zip(parts, self.blocks, strict=True)]

    def collect(self, outputs: Sequence[Any]) -> Any:
        """Packed tokens [1, n, ...] from tensors [rows, length, ...] of each block, or a tuple of such tensors. A
        parameter is returned as it is. What else a mixer returns is a state, and None here."""
        if isinstance(outputs[0], tuple):
            return tuple(self.collect(each) for each in zip(*outputs, strict=True))
        if isinstance(outputs[0], nn.Parameter):
            return outputs[0]
        of_tokens = zip(outputs, self.blocks, strict=True)
        if not all(isinstance(output, Tensor) and output.shape[:2] == block for output, block in of_tokens):
            return None
        if not outputs[0].is_floating_point():
            return OfBlocks(list(outputs))
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
