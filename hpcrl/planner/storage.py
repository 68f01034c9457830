"""What a run stores: the size of a checkpoint, before the first one is written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from hpcrl.config import Config
from hpcrl.models.families import read_shape
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.planner.trainer import checkpoint_bytes, critic_checkpoint_bytes, trained_shape


def whole_checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of weights and optimizer state of policy and critic in one checkpoint. CannotPlanError for an engine
    without a plan."""
    return checkpoint_bytes(config, shape) + (critic_checkpoint_bytes(config, shape) if config.uses_critic else 0)


def planned_checkpoint_bytes(config: Config) -> int:
    """The same from the model's config.json; 0 if it cannot be planned."""
    with contextlib.suppress(CannotPlanError, OSError, ValueError):
        if config.debug != "fake":
            path = config.model.path
            found = json.loads((Path(path) / "config.json").read_text()) if path else config.model.tiny.hf_config()
            return whole_checkpoint_bytes(config, trained_shape(config, read_shape(found)))
    return 0
