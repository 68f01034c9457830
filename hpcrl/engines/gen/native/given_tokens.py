"""Log-probs of given tokens: forward passes over whole rows, which read and write no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.engines.gen.native.paged_attention import PrefillAttention
from hpcrl.engines.gen.native.recurrent import PrefillRows, RecurrentStates
from hpcrl.engines.gen.native.transformer import Transformer

PASS_TOKENS = 4096  # maximum tokens of a forward pass with several rows, padding included
LOGITS = 1 << 25  # maximum logits computed at once, unless one token has more


class GivenTokens(NamedTuple):
    """A response's log-softmax(logits), float32 [n], and whether greedy decoding would have given these tokens."""

    logprobs: np.ndarray
    greedy: bool


def logprobs_of(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    model: Transformer,
    architecture: Architecture,
    states: RecurrentStates | None,
    max_rows: int,
    device: torch.device,
) -> list[GivenTokens]:
    """Of rows (prompt, response), both not empty, in their order. Overwrites `states` of the first `max_rows` slots.

    Args:
        max_rows: Rows of a forward pass at most.
    """
    results: dict[int, GivenTokens] = {}
    # Sorted by length, neighbouring rows need little padding.
    queue = sorted(range(len(rows)), key=lambda i: -sum(map(len, rows[i])))
    while queue:
        longest = sum(map(len, rows[queue[0]])) - 1
        count = min(max_rows, max(1, PASS_TOKENS // longest))
        chosen, queue = queue[:count], queue[count:]
        parts = _one_pass([rows[i] for i in chosen], model, architecture, states, device)
        results.update(zip(chosen, parts, strict=True))
    return [results[i] for i in range(len(rows))]


def _one_pass(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    model: Transformer,
    architecture: Architecture,
    states: RecurrentStates | None,
    device: torch.device,
) -> list[GivenTokens]:
    inputs = [np.array([*prompt, *response][:-1], dtype=np.int64) for prompt, response in rows]
    lengths = np.array([len(ids) for ids in inputs])
    row, column = np.nonzero(np.arange(lengths.max()) < lengths[:, None])
    # A token is predicted after the one before it.
    first = np.array([len(prompt) - 1 for prompt, _ in rows])
    wanted = np.flatnonzero(column >= first[row])
    targets = np.array([token for _, response in rows for token in response], dtype=np.int64)

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    shape = (len(rows), int(lengths.max()))
    padded = None if len(row) == shape[0] * shape[1] else on_device(row * shape[1] + column)
    nowhere = on_device(np.zeros(0, dtype=np.int64))
    adding = PrefillAttention(nowhere, nowhere, padded, shape, past=None, starts=nowhere)
    recurrent = None
    if states is not None:
        states.allocate()
        states.start(range(len(rows)))
        recurrent = PrefillRows(on_device(np.arange(len(rows))), on_device(lengths), padded, shape)
    positions = column if architecture.vision is None else np.repeat(column[:, None], 3, axis=1)
    ids = on_device(np.concatenate(inputs))
    hidden = model.prefill(ids, on_device(positions), None, adding, rows=recurrent, wanted=on_device(wanted))
    assert hidden is not None
    logprobs, greedy = [], []
    size = max(1, LOGITS // architecture.vocab_size)
    for states_of_some, of_some in zip(hidden.split(size), on_device(targets).split(size), strict=True):
        logits = model.logits(states_of_some)
        logprobs.append(logits.log_softmax(-1).gather(1, of_some[:, None])[:, 0].cpu().numpy())
        greedy.append((logits.argmax(-1) == of_some).cpu().numpy())
    ends = np.cumsum([len(response) for _, response in rows])[:-1]
    of_rows = zip(np.split(np.concatenate(logprobs), ends), np.split(np.concatenate(greedy), ends), strict=True)
    return [GivenTokens(values, bool(chosen.all())) for values, chosen in of_rows]
