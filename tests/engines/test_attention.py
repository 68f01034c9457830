"""Which tokens of sequences are packed, and where they stand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.engines.train.fsdp2.attention import PackedLayout, _Pad, shared_prefixes
from tests.engines.worlds import make_batch

pytestmark = pytest.mark.numerics


def test_shared_prefixes_by_hand() -> None:
    tokens = torch.tensor([1, 2, 7, 1, 2, 8, 9, 1, 3, 7, 1, 2])
    kept, places = shared_prefixes(tokens, [3, 4, 3, 2], [2, 2, 2, 2])
    assert kept.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]  # the second and the last sequence begin like the first
    assert places.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 0, 1]
    assert torch.equal(tokens[kept][places], tokens)
    kept, places = shared_prefixes(tokens, [3, 4, 3, 2], [0, 0, 0, 0])
    assert kept.tolist() == places.tolist() == list(range(12))


def test_prefix_lengths_end_at_the_first_trained_token() -> None:
    batch = make_batch([6, 4, 5], num_prompt_tokens=3)
    batch.loss_mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = False
    assert batch.prefix_lengths().tolist() == [3, 4, 3]  # nothing of the second is trained on
    assert batch.select([]).prefix_lengths().tolist() == []


def padded(layout: PackedLayout, packed: Tensor) -> list[Tensor]:
    blocks = _Pad.apply(packed, layout).split([rows * length for rows, length in layout.blocks])
    return [b.unflatten(0, shape) for b, shape in zip(blocks, layout.blocks, strict=True)]


def test_shared_tokens_are_shown_in_every_block_and_gather_its_gradient() -> None:
    tokens = torch.tensor([1, 2, 7, 1, 2, 8, 9, 4])
    shared = shared_prefixes(tokens, [3, 4, 1], [2, 2, 0])
    layout = PackedLayout([3, 4, 1], torch.device("cpu"), shared)
    packed = tokens[layout.kept].double()[:, None, None].requires_grad_()
    (block,) = padded(layout, packed)  # rows by falling length, padded with their last token
    assert block[..., 0, 0].tolist() == [[1, 2, 8, 9], [1, 2, 7, 7], [4, 4, 4, 4]]
    # What padding passes on is zero in attention; here it is set so, and the rest is 1, 2, 3, ...
    gradient = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 0], [8, 0, 0, 0]]).double()
    block.backward(gradient[..., None, None])
    assert packed.grad is not None
    assert packed.grad.flatten().tolist() == [1 + 5, 2 + 6, 7, 3, 4, 8]
    assert packed.detach().flatten().tolist() == [1, 2, 7, 8, 9, 4]
