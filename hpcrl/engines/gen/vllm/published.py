"""Weights and values of config.json as in published folders, which vLLM's models expect.

transformers 5 stacks experts and renames some parameters when it reads files; a trainer sends what is in its memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

ROUTER: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
FIXED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), ROUTER),
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
}
"""What transformers' class of a model_type always does, and vLLM's only with these values of config.json."""
COPIED: dict[str, dict[str, str]] = {
    "lfm2": {"block_dim": "hidden_size", "conv_dim": "hidden_size"},
    "minimax_m2": {"rotary_dim": "head_dim"},  # without effect if rope_parameters has partial_rotary_factor
}
"""Keys that vLLM's class of a model_type requires, and the keys with their values in transformers'."""


def config_overrides(folder: Path) -> dict[str, Any]:
    """Values of config.json that published folders have, and that transformers does not write by itself."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # vLLM reports it
        return {}
    kind = config.get("model_type")
    wanted = FIXED.get(kind, {}) | {name: config.get(other) for name, other in COPIED.get(kind, {}).items()}
    return {name: value for name, value in wanted.items() if value is not None and config.get(name) is None}


class Published:
    """Reverses transformers' table of conversions for the model_type of a text model. Without an entry, nothing
    changes: vLLM's classes of vision-language models take the names in memory, but for those of as_published()."""

    def __init__(self, model_type: str):
        from transformers.conversion_mapping import PrefixChange, get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules = [rule for rule in get_checkpoint_conversion_mapping(model_type) or () if type(rule) is not PrefixChange]
        reverse = [rule.reverse_transform() for rule in reversed(rules)]
        self._converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]
        self._renamings = [rule for rule in reverse if not isinstance(rule, WeightConverter)]
        self._waiting: dict[str, Any] = {}  # conversions of several tensors, some of which have not come

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The weights in files for a weight in memory: views of it, or none until all come that are made into one."""
        from transformers.core_model_loading import rename_source_key

        published, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
        if pattern is None:
            yield published, tensor
            return
        rule = next(rule for rule in self._converters if pattern in rule.source_patterns)
        several = len(rule.source_patterns) > 1
        waiting = self._waiting.setdefault(published, deepcopy(rule))
        waiting.add_tensor(published, name, pattern, tensor.clone() if several else tensor)
        if len(waiting.collected_tensors) < len(rule.source_patterns):
            return
        for made, values in self._waiting.pop(published).convert(published).items():
            yield made, values[0] if isinstance(values, list) else values
