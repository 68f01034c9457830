"""A rank that cannot use the GPU it was given says so instead of computing on the CPU."""

from __future__ import annotations

import pytest
import torch

from hpcrl.control.messages import BuildRole
from hpcrl.node.devices import VISIBLE
from tests.roles.conftest import Stage


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")
@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_gpu_that_torch_does_not_find_stops_the_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    worker = stage.worker(2, {})
    with pytest.raises(ValueError, match=r"GPU 0 is assigned to this rank, but torch .* finds none"):
        worker._build_role(BuildRole(role, [2]), 1)
