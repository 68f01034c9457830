"""The choice of the largest numbers over ranks, against a sort."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.selection import largest, token_numbers
from tests.algorithms.test_invariance import together


@pytest.mark.parametrize("count", [0, 1, 7, 50, 120, 500])
def test_largest_values_over_all_ranks_match_a_sort(count: int) -> None:
    values = torch.cat([torch.randn(90, generator=torch.Generator().manual_seed(1)), torch.zeros(20), -torch.zeros(10)])
    values[:4] = torch.tensor([3e38, -3e38, 1e-30, -1e-30])
    coefficients = torch.randperm(120, generator=torch.Generator().manual_seed(2)) * 1000
    order = sorted(range(120), key=lambda i: (values[i].item(), coefficients[i].item()), reverse=True)
    parts = [torch.arange(0, 50), torch.arange(0), torch.arange(50, 120)]
    chosen = together(
        parts, lambda part, all_sum: largest(values[part], coefficients[part], count, all_sum).nonzero()[:, 0]
    )
    found = [int(part[place]) for part, places in zip(parts, chosen, strict=True) for place in places]
    assert sorted(found) == sorted(order[:count])


def test_token_numbers_depend_only_on_sample_and_position() -> None:
    samples = torch.arange(500) * (1 << 24)
    rows = torch.arange(500).repeat_interleave(40)
    coefficients = token_numbers(rows, samples)
    assert len(coefficients.unique()) > 19_980 and int(coefficients.min()) >= 0 and int(coefficients.max()) < 2**31
    shares = (coefficients.view(500, 40) < 2**30).float()
    assert abs(shares.mean() - 0.5) < 0.02 and shares.mean(0).std() < 0.05 and shares.mean(1).std() < 0.11
    alone = token_numbers(torch.zeros(40, dtype=torch.int64), samples[7:8])
    assert alone.tolist() == coefficients.view(500, 40)[7].tolist()
