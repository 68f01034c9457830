"""How the state of an engine goes to host memory and back (TrainEngine.offload), tensor by tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; the tensor itself if it is there."""
    return tensor.to(device)
