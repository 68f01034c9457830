"""Which layers of a model have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.models.families import family_of

FULL, SLIDING = "full_attention", "sliding_attention"


def attention_kinds(model: Mapping[str, Any]) -> set[str]:
    """The kinds of layers (full_attention, sliding_attention or both), as transformers reads them from the config.json
    of a family whose decoder is known."""
    decoder, window = family_of(model.get("model_type")).decoder, model.get("sliding_window", 4096)
    if decoder is None or decoder.windows == "none":
        return {FULL}
    if isinstance(named := model.get("layer_types"), list):
        return set(map(str, named))
    if window is None or (decoder.window_switch and not model.get("use_sliding_window")):
        return {FULL}
    first, layers = model.get("max_window_layers", 28), model.get("num_hidden_layers", 0)
    if decoder.windows == "all" or not isinstance(first, int) or first <= 0:
        return {SLIDING}
    return {FULL, *((SLIDING,) if isinstance(layers, int) and first < layers else ())}
