"""GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv 2507.01006)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.vision import Vision, read_vision

LIMITS = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
IMAGE_TOKEN_IDS = {"glm4v": 151343, "glm46v": 151343, "glm4v_moe": 151363}


@dataclass(frozen=True)
class GlmVision(Vision):
    """As in Qwen-VL, but the limits are of the pixels of all frames, and a side shorter than a token is enlarged
    first."""

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Equal to `smart_resize` of GLM-4V's processor in transformers."""
        unit = self.patch * self.merge
        if min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        return super().fit(width, height)


def read_glm(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Image properties of a GLM-4V model."""
    size = {"size": LIMITS} if processor.get("size") is None else {}
    token = {"image_token_id": IMAGE_TOKEN_IDS.get(str(config.get("model_type")), Vision.image_token_id)}
    found = read_vision({**token, **config}, {**processor, **size})
    limits = {key: getattr(found, key) // found.frames for key in ("min_pixels", "max_pixels")}
    return GlmVision(**asdict(found) | limits)


FAMILY = Family(model_types=("glm4v", "glm4v_moe", "glm46v"), vision=read_glm, vllm_images=("glm4v",))
