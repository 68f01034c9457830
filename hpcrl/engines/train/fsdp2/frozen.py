"""Keep parts of a vision-language model as they are (trainer.freeze)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedModel

MERGER = re.compile(r"merger|projector|connector|embed_vision")
"""In a parameter's name if it belongs to the layers between the vision tower and the decoder."""


def freeze(hf: PreTrainedModel, parts: Sequence[str]) -> None:
    """Unset requires_grad for these parts: vision, the tower without its merger, and merger, the layers that turn the
    tower's features into embeddings of tokens. ValueError if the model has no parameters of a part."""
    others = {id(p) for module in (hf.get_decoder(), hf.get_output_embeddings()) if module for p in module.parameters()}
    found: dict[str, list[str]] = {"vision": [], "merger": []}
    for name, parameter in hf.named_parameters():
        if id(parameter) not in others:
            found["merger" if MERGER.search(name) else "vision"].append(name)
    for part in parts:
        if not found[part]:
            raise ValueError(f"trainer.freeze: {hf.config.model_type} has no part {part}; leave it out")
        for name in found[part]:
            hf.get_parameter(name).requires_grad_(False)
