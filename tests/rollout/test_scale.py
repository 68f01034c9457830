"""The benchmark of the controller's scale at its smallest size: accounting is exact."""

from __future__ import annotations

import pytest

from tests.bench.scale import GROUP_SIZE, connected, virtual


def test_each_sample_is_trained_once_in_virtual_time() -> None:
    report = virtual(num_replicas=16, in_flight=512, steps=2)
    assert report["trained"] == 2 * 128 and report["trained"] % GROUP_SIZE == 0
    assert report["events"] > 16 and report["event_bytes"] > 32


@pytest.mark.slow  # processes that import torch
def test_each_sample_is_trained_once_over_connections() -> None:
    report = connected(num_ranks=3, in_flight=96, steps=2)
    assert report["trained"] == 2 * 24
    assert report["events"] >= report["trained"] // GROUP_SIZE
