"""Causal attention over rows of equal length, computed in blocks of queries if it has a sliding window or soft cap.

Attention sinks (gpt-oss) add a number per head to the scores before the softmax, and nothing to the values. Here they
are one more key, whose value is zero. Its score is the product of additional columns of queries and keys, so kernels
need no mask and compute the sinks' gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 256
SINK_COLUMNS = 8  # kernels need multiples of 8 columns; one has the sinks, the others are zero


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [N, heads, P, D] to k and v [N, kv_heads, P, D], as [N, heads, P, D]; differentiable.

    Args:
        window: A token attends to the last `window` tokens, including itself. None means all tokens up to itself.
        softcap: Scores are softcap * tanh(scores / softcap) (arXiv 2408.00118), which no kernel computes. The backward
            pass recomputes them, one block of queries after another.
        sinks: [heads], the attention sinks' scores.

    A block reads only the keys to which it can attend, so masks and scores are smaller than [P, P].
    """
    length = q.shape[2]
    window = None if window is None or window >= length else window
    if window is None and softcap is None:
        return _plain(q, k, v, scale, sinks)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        part = (q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], scale, window, softcap, sinks)
        if softcap is None:
            blocks.append(_last_queries(*part))
        else:
            blocks.append(checkpoint(_last_queries, *part, use_reentrant=False, preserve_rng_state=False))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def full_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attention of all queries to all keys; shapes as in suffix_attention()."""
    return _kernel(q, k, v, scale, causal=False)


def suffix_mask(
    first: Tensor,
    queries: int,
    keys: int,
    window: int | None,
    sinks: bool,
    dtype: torch.dtype,
    ends: Tensor | None = None,
) -> Tensor:
    """[N, 1, queries, keys], one more key with `sinks`: what suffix_attention() adds to scores, 0 or -inf. A row's
    first query is at position first[row], int64 [N], of its keys; `window` is as in causal_attention(). With `ends`,
    int64 [N], a row's queries also see later keys, up to number ends[row]."""
    places = torch.arange(keys, device=first.device)
    at = first[:, None] + torch.arange(queries, device=first.device)
    at = at.clamp(max=keys - 1) if ends is None else at.minimum(ends[:, None] - 1)  # padding sees a key, too
    visible = places <= (at[:, :, None] if ends is None else ends[:, None, None] - 1)
    if window is not None:
        visible = visible & (places > at[:, :, None] - window)
    visible = visible[:, None]
    mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return (F.pad(mask, (1, 0)) if sinks else mask).expand(-1, -1, queries, -1)


def suffix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """causal_attention() for queries q [N, heads, P, D] that follow other tokens of their rows. `mask` is
    suffix_mask()'s, one for all layers, because autograd keeps it. Keys k and v [N, kv_heads, keys, D] after a row's
    own end may be anything."""
    if sinks is not None:
        width, (q, k, v) = v.shape[-1], _with_sinks(q, k, v, sinks, scale)
        return suffix_attention(q, k, v, mask, scale=scale, softcap=softcap)[..., :width]
    if softcap is None:
        return _kernel(q, k, v, scale, mask)
    blocks = []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        part = (q[:, :, rows], k, v, mask[:, :, rows], scale, softcap)
        blocks.append(checkpoint(_masked_by_sum, *part, use_reentrant=False, preserve_rng_state=False))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _masked_by_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    return masked_attention(q, k, v, mask == 0, scale, softcap)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        width, (q, k, v) = v.shape[-1], _with_sinks(q, k, v, sinks, scale)
        # With another query before the first, whose result is dropped, every token attends to the sink.
        return _plain(F.pad(q, (0, 0, 1, 0)), k, v, scale, None)[:, :, 1:, :width]
    return _kernel(q, k, v, scale, causal=True)


def _kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """torch's attention."""
    heads_per_key = q.shape[1] // k.shape[1]
    if heads_per_key > 1 and q.is_cuda and q.dtype == torch.float32:
        # Only 16-bit kernels support GQA. In fp32, torch would use a kernel that stores all scores unless keys are
        # repeated.
        k, v = k.repeat_interleave(heads_per_key, 1), v.repeat_interleave(heads_per_key, 1)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [N, heads, P, D] to k and v [N, kv_heads, keys, D], as [N, heads, P, D]. `visible`, bool [N or 1,
    1, P, keys], must have a key for each query. `softcap` and `sinks`, of which a model may have one, are as in
    causal_attention(); without `softcap`, v may have another head size than q and k."""
    if sinks is not None:
        if softcap is not None:
            raise NotImplementedError("attention sinks with soft-capped scores")
        width, (q, k, v) = v.shape[-1], _with_sinks(q, k, v, sinks, scale)
        return masked_attention(q, k, v, F.pad(visible, (1, 0), value=True), scale)[..., :width]
    # Heads that share keys become additional rows, so no kernel repeats keys.
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    visible = visible.repeat(1, 1, q.shape[1] // k.shape[1], 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=scale)
        return out.view(*q.shape[:-1], v.shape[-1])
    scores = torch.tanh(rows @ k.transpose(2, 3) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32)
    return (weights.to(v.dtype) @ v).view(q.shape)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same with more columns and another first key, whose score is the sink of the query's head."""
    score = (sinks / scale).to(q.dtype)[None, :, None, None].expand(*q.shape[:3], 1)
    of_sink = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.shape[3], SINK_COLUMNS - 1))
    q = F.pad(torch.cat([q, score], dim=-1), (0, SINK_COLUMNS - 1))
    k = torch.cat([of_sink, F.pad(k, (0, SINK_COLUMNS))], dim=2)
    return q, k, F.pad(v, (0, SINK_COLUMNS, 1, 0))


def _last_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a row's last queries to all keys up to them."""
    length, num_keys = q.shape[2], k.shape[2]
    visible = torch.ones(1, 1, length, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - length)
    if window is not None:
        visible = visible.triu(num_keys - length + 1 - window)
    return masked_attention(q, k, v, visible, scale, softcap, sinks)
