"""A rank that cannot use its GPU reports it instead of computing on the CPU."""

from __future__ import annotations

import pytest
import torch

from hpcrl.messaging.messages import BuildRole
from hpcrl.node.devices import VISIBLE
from hpcrl.workers.allocator import grow_segments
from tests.workers.conftest import Stage


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")
@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_gpu_missing_in_torch_stops_the_start(stage: Stage, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    worker = stage.worker(2, {})
    with pytest.raises(ValueError, match=r"GPU 0 is assigned to this rank, but torch .* finds none"):
        worker._build_role(BuildRole(role, [2]), 1)


@pytest.mark.parametrize(
    ("environ", "with_gpu", "grows"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, True, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, True, False),
    ],
)
def test_allocator_segments_are_expandable_unless_the_user_says_otherwise(
    environ: dict[str, str], with_gpu: bool, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own settings, which a CPU build has too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: with_gpu)
    torch._C._accelerator_setAllocatorSettings("")
    try:
        assert grow_segments(environ) == grows
        assert ("expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()) == grows
    finally:
        torch._C._accelerator_setAllocatorSettings("")
