"""Causal attention by blocks of queries; which tokens of sequences are packed, and where they stand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcrl.engines import blocked_attention
from hpcrl.engines.blocked_attention import causal_attention, suffix_attention, suffix_mask
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout, Reach, _Pad, packed_attention
from hpcrl.engines.train.fsdp2.prefix_tree import Shared, share_prefixes
from tests.engines.worlds import make_batch
from tests.planner.measuring import peak_bytes

pytestmark = pytest.mark.numerics


def test_common_prefixes_by_hand() -> None:
    tokens = torch.tensor([1, 2, 7, 1, 2, 8, 9, 1, 3, 7, 1, 2])
    kept, places, skipped = share_prefixes(tokens, [3, 4, 3, 2])
    assert kept.tolist() == [0, 1, 2, 5, 6, 8, 9]  # 1 2, then 7 or 8 9; or 1 3 7
    assert places.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 5, 6, 0, 1]
    assert skipped == [0, 2, 1, 2]
    assert torch.equal(tokens[kept][places], tokens)
    kept, places, skipped = share_prefixes(tokens, [3, 4, 3, 2], [2, 2, 0, 1])
    assert kept.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 11] and skipped == [0, 2, 0, 1]
    kept, places, skipped = share_prefixes(tokens, [3, 4, 3, 2], [0, 0, 0, 0])
    assert kept.tolist() == places.tolist() == list(range(12)) and skipped == [0] * 4


def test_turns_that_repeat_earlier_turns_share_all_of_these() -> None:
    turns = [[5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9], [5, 6, 4]]
    tokens, lengths = torch.tensor([*itertools.chain(*turns)]), [len(turn) for turn in turns]
    kept, places, skipped = share_prefixes(tokens, lengths)
    assert tokens[kept].tolist() == [5, 6, 7, 8, 9, 4] and skipped == [0, 2, 4, 2]
    layout = PackedLayout(lengths, torch.device("cpu"), Shared(kept, places, skipped))
    blocks = layout.own_queries.blocks  # the first turn, and what follows it in the others
    assert [(block.indices, block.queries, block.length) for block in blocks] == [([0], 2, 2), ([1, 2, 3], 2, 5)]
    assert tokens[kept][layout.own_queries.queries.tokens].tolist() == [5, 6, 7, 8, 9, 9, 4, 4]


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_of_random_sequences_are_all_found(seed: int) -> None:
    generator = random.Random(seed)
    rows = [[generator.randrange(2) for _ in range(generator.randrange(1, 9))] for _ in range(30)]
    tokens = torch.tensor([*itertools.chain(*rows)])
    kept, places, skipped = share_prefixes(tokens, [len(row) for row in rows])
    assert torch.equal(tokens[kept][places], tokens)
    prefixes = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    assert len(kept) == len(set(prefixes))
    first = {}  # prefix -> its token's place
    assert all(
        first.setdefault(prefix, place) == place for prefix, place in zip(prefixes, places.tolist(), strict=True)
    )
    assert sum(skipped) == len(tokens) - len(kept)


def test_prefix_lengths_end_at_the_first_trained_token() -> None:
    batch = make_batch([6, 4, 5], num_prompt_tokens=3)
    batch.loss_mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = False
    assert batch.prefix_lengths().tolist() == [3, 4, 3]  # nothing of the second is trained on
    assert batch.select([]).prefix_lengths().tolist() == []


def padded(layout: PackedLayout, packed: Tensor) -> list[Tensor]:
    blocks, shown = layout.padded.blocks, layout.padded.keys
    shapes = [(block.rows, block.length) for block in blocks]
    parts = _Pad.apply(packed, shown).split([rows * length for rows, length in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def test_shared_tokens_appear_in_every_block_and_sum_its_gradients() -> None:
    tokens = torch.tensor([1, 2, 7, 1, 2, 8, 9, 4])
    layout = PackedLayout([3, 4, 1], torch.device("cpu"), share_prefixes(tokens, [3, 4, 1]))
    packed = tokens[layout.kept].double()[:, None, None].requires_grad_()
    (block,) = padded(layout, packed)  # rows by falling length, padded with their last token
    assert block[..., 0, 0].tolist() == [[1, 2, 8, 9], [1, 2, 7, 7], [4, 4, 4, 4]]
    # The gradient of padding is zero in attention; here it is set to zero, and the rest is 1, 2, 3, ...
    gradient = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 0], [8, 0, 0, 0]]).double()
    block.backward(gradient[..., None, None])
    assert packed.grad is not None
    assert packed.grad.flatten().tolist() == [1 + 5, 2 + 6, 7, 3, 4, 8]
    assert packed.detach().flatten().tolist() == [1, 2, 7, 8, 9, 4]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The formula, with all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    hidden = (back < 0) | (back >= (window or q.shape[2]))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    top = scores.exp()
    return top / (top.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v


def heads(length: int, num_heads: int = 4, num_kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(3, n, length, 8, generator=generator).requires_grad_() for n in sizes]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 21, 40])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_blockwise_attention_matches_the_formula(
    num_kv_heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_attention, "QUERY_BLOCK", 8)
    results = []
    for way in (causal_attention, dense):
        tensors = heads(21, num_kv_heads=num_kv_heads)
        out = way(*tensors, scale=0.6, window=window, softcap=softcap)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(tensor.grad for tensor in tensors)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5, 14])
def test_last_queries_of_rows_match_the_formula(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 21, 13 and 20 tokens, whose queries start at different positions; the rest of a row is padding."""
    monkeypatch.setattr(blocked_attention, "QUERY_BLOCK", 4)
    first, lengths = torch.tensor([12, 7, 19]), (21, 13, 20)
    q, k, v = heads(21)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 0.5]) if softcap is None else None
    every = dense(q, k, v, 0.6, window, softcap, sinks)
    wanted = torch.cat([every[row, :, first[row] : n] for row, n in enumerate(lengths)], 1)
    queries = torch.stack(
        [q[row, :, [min(int(first[row]) + i, n - 1) for i in range(9)]] for row, n in enumerate(lengths)]
    )
    mask = suffix_mask(first, 9, 21, window, sinks is not None, q.dtype)
    out = suffix_attention(queries, k, v, mask, scale=0.6, softcap=softcap, sinks=sinks)
    found = torch.cat([out[row, :, : n - first[row]] for row, n in enumerate(lengths)], 1)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    for got, want in zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 8, 40])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_attention_with_sinks_matches_the_formula(
    num_kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sinks' gradient too."""
    monkeypatch.setattr(blocked_attention, "QUERY_BLOCK", 8)
    results = []
    for way in (causal_attention, dense):
        tensors = heads(21, num_kv_heads=num_kv_heads)
        sinks = torch.tensor([-1.0, 0.0, 2.0, 0.5], requires_grad=True)
        out = way(*tensors, scale=0.6, window=window, softcap=None, sinks=sinks)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, sinks.grad, *(tensor.grad for tensor in tensors)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_chunks_are_rows_of_their_own() -> None:
    """Chunks of three of rows of 7 and 4 tokens, which share two: rows of 3, 3, 1, 3 and 1."""
    tokens = torch.arange(11)
    tokens[7:9] = tokens[:2]
    shared, chunks = share_prefixes(tokens, [7, 4]), share_prefixes(tokens, [3, 3, 1, 3, 1], [2, 0, 0, 2, 0])
    whole = PackedLayout([7, 4], torch.device("cpu"), shared)
    pieces = PackedLayout([3, 3, 1, 3, 1], torch.device("cpu"), chunks)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(3))
    module = torch.nn.Module()
    found = packed_attention(module, q, k, v, Reach(chunk=3), packed_layout=whole)[0]
    assert torch.equal(found, packed_attention(module, q, k, v, None, packed_layout=pieces)[0])
    assert not torch.allclose(found, packed_attention(module, q, k, v, None, packed_layout=whole)[0])


IMAGE_ROWS = (
    (1, 2, 101, 101, 101, 3, 4, 102, 102, 5, 5, 5),
    (1, 2, 101, 101, 101, 3, 4, 102, 102, 6),  # up to 6 the first row's tokens
    (1, 2, 103, 103, 103, 103, 103, 104, 104, 104, 7),  # images with nothing between them
    (105, 105),
    (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 106, 106, 106, 2),
    (8, 9, 8),
)
"""Rows of token ids, those of images above 100."""


def with_images(rows: Sequence[Sequence[int]], only_in_windows: bool = False) -> tuple[PackedLayout, Tensor, Tensor]:
    """A layout that shares prefixes, int64 [T] the packed token of each token, and the number of its image."""
    tokens, lengths = torch.tensor([*itertools.chain(*rows)]), [len(row) for row in rows]
    number_of_row = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    numbers = torch.where(tokens > 100, tokens + 1000 * number_of_row, -1)  # a row's images are its own
    shared = share_prefixes(tokens, lengths)
    layout = PackedLayout(lengths, torch.device("cpu"), shared, images=numbers, only_in_windows=only_in_windows)
    return layout, shared.places, numbers


def row_by_row(
    qkv: Sequence[Tensor], rows: Sequence[Tensor], numbers: Sequence[Tensor], window: int | None
) -> list[Tensor]:
    """The formula for each row, [n, heads, D], from packed q, k and v and a mask that is made token by token."""
    found = []
    for tokens, images in zip(rows, numbers, strict=True):
        q, k, v = (x[tokens].transpose(0, 1) for x in qkv)
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        hidden = torch.tensor(
            [
                [
                    (key > query and not (a >= 0 and a == b)) or (window is not None and key <= query - window)
                    for key, b in enumerate(images.tolist())
                ]
                for query, a in enumerate(images.tolist())
            ]
        )
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return found


@pytest.mark.parametrize("only_in_windows", [False, True])
@pytest.mark.parametrize("window", [None, 2, 4, 7, 40])
def test_tokens_of_an_image_see_each_other(window: int | None, only_in_windows: bool) -> None:
    """Windows shorter than an image, than a row, and longer than all rows; each token of a common prefix once."""
    layout, places, numbers = with_images(IMAGE_ROWS, only_in_windows)
    assert layout.num_packed == sum(map(len, IMAGE_ROWS)) - 9 - 2 - 1  # what the rows share
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(layout.num_packed, n, 8, generator=generator).requires_grad_() for n in (4, 2, 2)]
    given = (x.transpose(0, 1)[None] for x in qkv)
    reach = None if window is None else Reach(window=window)
    packed = packed_attention(torch.nn.Module(), *given, reach, packed_layout=layout)[0][0]
    lengths = [len(row) for row in IMAGE_ROWS]
    seen = numbers if window is not None or not only_in_windows else torch.full_like(numbers, -1)
    wanted = torch.cat(row_by_row(qkv, places.split(lengths), seen.split(lengths), window))
    found = packed[places]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    for got, want in zip(*(torch.autograd.grad((x * weights).sum(), qkv) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_an_image_of_a_common_prefix_is_computed_once() -> None:
    """Images of 3, 2, 5, 3, 2 and 3 tokens; the second row's are the first row's."""
    layout, _, _ = with_images(IMAGE_ROWS)
    for window in (None, 4):
        assert len(layout.images(window).queries.slots) == 18
    assert sum(block.rows for block in layout.images(None).blocks) == 6
    keys = [block.length for block in layout.images(4).blocks]
    assert max(keys) == 2 + 5  # those of the longest image, which two tokens precede, fewer than its window
    members = [[1] * 40 + [101] * 300 + [2] * length for length in (7, 9, 30, 11)]
    layout, _, _ = with_images(members)
    (block,) = layout.images(None).blocks
    assert (block.rows, block.queries, block.length) == (1, 300, 340)
    assert block.hides_nothing(None) and block.hides_nothing(340) and not block.hides_nothing(339)
    assert layout.own_queries is not layout.padded  # queries of the prefix are not repeated


@pytest.mark.slow
def test_images_need_no_mask_of_all_token_pairs(tmp_path: Path) -> None:
    """Peak memory beyond inputs and gradients: less than a mask in fp32, for images of 200 tokens."""
    rows = [[image + 101 if token < 200 else token % 50 for image in range(8) for token in range(256)]]
    layout, _, _ = with_images(rows)
    q, k, v = (torch.randn(1, n, 2048, 8, requires_grad=True) for n in (4, 2, 2))
    for reach in (None, Reach(window=64)):

        def work(reach: Reach | None = reach) -> None:
            packed_attention(torch.nn.Module(), q, k, v, reach, packed_layout=layout)[0].sum().backward()

        work()
        assert peak_bytes(work, tmp_path / "trace.json") < 4 * 2048**2


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(64, None), (64, 2.0), (None, 2.0)])
def test_no_tensor_holds_scores_of_all_token_pairs(window: int | None, softcap: float | None, tmp_path: Path) -> None:
    """Peak memory of forward and backward beyond inputs and gradients, in bytes per pair of tokens of one head."""
    tensors = heads(2048)

    def work() -> None:
        causal_attention(*tensors, scale=0.3, window=window, softcap=softcap).sum().backward()

    work()  # gradients are there from now on
    pairs = 3 * 4 * 2048**2
    assert peak_bytes(work, tmp_path / "trace.json") < 4 * pairs


@pytest.mark.slow
def test_the_memory_measure_detects_scores_of_all_token_pairs(tmp_path: Path) -> None:
    """Negative control."""
    tensors = heads(2048)
    peak = peak_bytes(lambda: dense(*tensors, 0.3, 64, 2.0).sum().backward(), tmp_path / "trace.json")
    assert peak > 4 * 3 * 4 * 2048**2
