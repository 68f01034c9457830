"""Layers with a gated delta rule (arXiv 2412.06464): states in memory, prefill, and decoding of one token per slot.

A layer's state of a sequence is the recurrent state and the last inputs of the convolution before it. Its size does not
depend on the sequence's length, and it belongs to one position: unlike keys and values, it cannot be cut. So the prefix
cache keeps copies, at the ends of prompts and turns (blocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.models.delta import DeltaSizes
from hpcrl.rollout.device_copies import to_device

CHUNK = 64  # tokens whose products a prefill computes at once
EPSILON = 1e-6  # added to squared norms of queries and keys


@dataclass(slots=True)
class Delta:
    """The weights of a mixer, apart from its projections."""

    convolution: Tensor  # [C, K], without biases
    log_decay: Tensor  # [heads]
    decay_bias: Tensor  # [heads]
    norm: Tensor  # [value_dim], of the output


class RecurrentStates:
    """States in all recurrent layers: one for each slot, then one for each of as many kept positions.

    Args:
        num_layers: Number of recurrent layers.
    """

    def __init__(self, sizes: DeltaSizes, num_layers: int, num_slots: int, dtype: torch.dtype, device: torch.device):
        self._sizes, self._num_slots, self._device = sizes, num_slots, device
        self._recurrent = torch.empty(num_layers, 0, sizes.keys, sizes.group * sizes.value_dim, device=device)
        self._convolved = torch.empty(num_layers, 0, sizes.convolved, sizes.kernel - 1, dtype=dtype, device=device)

    def allocate(self) -> None:
        """Allocate the memory if that has not been done."""
        if not self._recurrent.shape[1]:
            self._recurrent, self._convolved = (
                old.new_zeros(old.shape[0], 2 * self._num_slots, *old.shape[2:])
                for old in (self._recurrent, self._convolved)
            )

    def clear(self) -> None:
        """Free the memory."""
        self._recurrent, self._convolved = self._recurrent[:, :0].clone(), self._convolved[:, :0].clone()

    def start(self, slots: Sequence[int]) -> None:
        """Set the states of these slots to those of empty sequences."""
        if slots:
            at = self._index(slots)
            self._recurrent[:, at] = 0
            self._convolved[:, at] = 0

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy states between slots (from, to)."""
        self._copy([source for source, _ in moves], [target for _, target in moves])

    def keep(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states of slots to kept positions (slot, kept)."""
        self._copy([slot for slot, _ in copies], [self._num_slots + kept for _, kept in copies])

    def restore(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy kept states to slots (kept, slot)."""
        self._copy([self._num_slots + kept for kept, _ in copies], [slot for _, slot in copies])

    def prefill(self, layer: int, delta: Delta, projected: Tensor, adding: PrefillRows, epsilon: float) -> Tensor:
        """The output [T, values] for `projected` [T, projected], several rows' next tokens; updates the states."""
        sizes, (rows, length) = self._sizes, adding.shape
        mixed, gates, beta, decay = _parts(sizes, delta, projected)
        mixed, beta, decay = (adding.pad(part) for part in (mixed, beta, decay))  # zeros change no state
        window = torch.cat((self._convolved[layer, adding.slots], mixed.transpose(1, 2)), dim=2)
        last = adding.lengths[:, None, None] + torch.arange(sizes.kernel - 1, device=window.device)
        self._convolved[layer, adding.slots] = window.gather(2, last.expand(-1, sizes.convolved, -1))
        convolved = F.silu(F.conv1d(window, delta.convolution[:, None], groups=sizes.convolved)).transpose(1, 2)
        q, k, v = _heads(sizes, convolved.reshape(rows * length, -1))
        state = self._recurrent[layer, adding.slots].unflatten(1, (sizes.key_heads, sizes.key_dim))
        state = state.unflatten(3, (sizes.group, sizes.value_dim)).transpose(2, 3).contiguous()
        outputs = []
        inputs = [part.unflatten(0, (rows, length)) for part in (q, k, v)] + [
            part.unflatten(2, (sizes.key_heads, sizes.group)) for part in (beta, decay)
        ]
        for chunk in zip(*(part.split(CHUNK, dim=1) for part in inputs), strict=True):
            output, state = _chunk(state, *chunk)
            outputs.append(output)
        self._recurrent[layer, adding.slots] = state.transpose(2, 3).flatten(1, 2).flatten(2)
        attended = adding.unpad(torch.cat(outputs, dim=1))
        return _gated(sizes, delta, attended.to(projected.dtype), gates, epsilon)

    def decode(self, layer: int, delta: Delta, projected: Tensor, epsilon: float) -> Tensor:
        """The output [R, values] for `projected` [R, projected], the next token of each of the first R slots; updates
        their states."""
        sizes, rows = self._sizes, len(projected)
        mixed, gates, beta, decay = _parts(sizes, delta, projected)
        last = self._convolved[layer, :rows]
        window = torch.cat((last, mixed[..., None]), dim=2)
        last.copy_(window[..., 1:])
        convolved = F.silu((window.float() * delta.convolution).sum(-1).to(projected.dtype))
        q, k, v = _heads(sizes, convolved)
        flat = (rows * sizes.key_heads, sizes.key_dim, sizes.group * sizes.value_dim)
        state = self._recurrent[layer, :rows].view(flat)
        factors = decay.exp_().view(flat[0], 1, sizes.group, 1)
        state.unflatten(2, (sizes.group, sizes.value_dim)).mul_(factors)
        known = torch.bmm(k.view(flat[0], 1, -1), state)
        change = (v.reshape(known.shape) - known).unflatten(2, (sizes.group, -1)).mul_(beta.view(factors.shape))
        state.baddbmm_(k.view(flat[0], -1, 1), change.flatten(2))
        attended = torch.bmm(q.view(flat[0], 1, -1), state).view(rows, sizes.num_heads, sizes.value_dim)
        return _gated(sizes, delta, attended.to(projected.dtype), gates, epsilon)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            source, target = self._index(sources), self._index(targets)
            for states in (self._recurrent, self._convolved):
                states[:, target] = states[:, source]

    def _index(self, places: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(places, dtype=torch.int64), self._device)


@dataclass(frozen=True)
class PrefillRows:
    """How T new tokens are N rows of several slots.

    Args:
        slots: int64 [N].
        lengths: int64 [N], the number of each row's new tokens.
        padded: int64 [T], the tokens' indices in rows of equal length; None if all rows already have this length.
        shape: N and the length of these rows.
    """

    slots: Tensor
    lengths: Tensor
    padded: Tensor | None
    shape: tuple[int, int]

    def pad(self, values: Tensor) -> Tensor:
        """[N, length, *] of values [T, *], with zeros behind each row's."""
        if self.padded is not None:
            count = self.shape[0] * self.shape[1]
            values = values.new_zeros(count, *values.shape[1:]).index_copy_(0, self.padded, values)
        return values.unflatten(0, self.shape)

    def unpad(self, values: Tensor) -> Tensor:
        """The inverse of pad()."""
        return values.flatten(0, 1) if self.padded is None else values.flatten(0, 1)[self.padded]


def _parts(sizes: DeltaSizes, delta: Delta, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the projection: the convolution's inputs [T, C], the output's gates [T, heads, value_dim], and float32 [T,
    heads] each the strength of a change and the logarithm of the decay."""
    mixed, gates, beta, decay = projected.split((sizes.convolved, sizes.values, sizes.num_heads, sizes.num_heads), 1)
    log_decay = F.softplus(decay.float() + delta.decay_bias) * -delta.log_decay.float().exp()
    return mixed, gates.unflatten(1, (sizes.num_heads, -1)), beta.sigmoid().float(), log_decay


def _heads(sizes: DeltaSizes, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys float32 [T, key_heads, key_dim], normalised, and values [T, key_heads, group, value_dim]."""
    both, values = convolved.float().split((2 * sizes.keys, sizes.values), 1)
    both = both.unflatten(1, (2, sizes.key_heads, sizes.key_dim))
    both = both * both.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    q, k = both.unbind(1)
    return q * sizes.key_dim**-0.5, k.contiguous(), values.unflatten(1, (sizes.key_heads, sizes.group, -1))


def _gated(sizes: DeltaSizes, delta: Delta, attended: Tensor, gates: Tensor, epsilon: float) -> Tensor:
    """[T, values] of outputs [T, heads or key_heads, ...] and gates [T, heads, value_dim]."""
    normed = F.rms_norm(attended.view(gates.shape), (sizes.value_dim,), delta.norm, epsilon)
    return (normed * F.silu(gates.float())).to(normed.dtype).flatten(1)


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [N, c, H, group, value_dim] of c tokens, and the state [N, H, group, key_dim, value_dim] after them,
    if it is `state` before. q and k are [N, c, H, key_dim], v as the outputs, beta and decay [N, c, H, group].

    The changes of the state by all tokens solve a triangular system (arXiv 2406.06484)."""
    q, k = (x.transpose(1, 2)[:, :, None] for x in (q, k))  # [N, H, 1, c, key_dim]
    v = v.permute(0, 2, 3, 1, 4)
    beta, total = (x.permute(0, 2, 3, 1)[..., None] for x in (beta, decay.cumsum(1)))  # [N, H, group, c, 1]
    between = (total - total.transpose(-1, -2)).tril().exp().tril()  # decay from each earlier token to each token
    system = (k @ k.transpose(-1, -2)) * between * beta
    since = total.exp()  # decay from the state before to each token
    right = beta * (v - since * (k @ state))
    change = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    output = since * (q @ state) + ((q @ k.transpose(-1, -2)) * between) @ change
    last = total[..., -1:, :]
    state = state * last.exp() + ((last - total).exp() * k).transpose(-1, -2) @ change
    return output.permute(0, 3, 1, 2, 4), state
