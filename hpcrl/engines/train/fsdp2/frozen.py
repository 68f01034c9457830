"""Keep parts of a vision-language model as they are (trainer.freeze)."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from hpcrl.models.tower import part_of


def freeze(hf: PreTrainedModel, parts: Sequence[str]) -> None:
    """Unset requires_grad for these parts, as in part_of(). ValueError if the model has no parameters of a part."""
    others = {id(p) for module in (hf.get_decoder(), hf.get_output_embeddings()) if module for p in module.parameters()}
    found: dict[str, list[str]] = {"vision": [], "merger": []}
    for name, parameter in hf.named_parameters():
        if id(parameter) not in others:
            found[part_of(name)].append(name)
    for part in parts:
        if not found[part]:
            raise ValueError(f"trainer.freeze: {hf.config.model_type} has no part {part}; leave it out")
        for name in found[part]:
            hf.get_parameter(name).requires_grad_(False)
