"""Sizes and grids of pictures, for sizes up to 3000 pixels, are equal to those of transformers' processors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hpcrl.models.gemma4 import read_gemma4
from hpcrl.models.glm4v import read_glm
from hpcrl.models.idefics3 import read_idefics
from hpcrl.models.internvl import read_intern
from hpcrl.models.llava_onevision import GRID, read_llava
from hpcrl.models.vision import Vision


def sizes() -> Iterator[tuple[int, int]]:
    """Widths and heights with ratios below 200."""
    drawn = np.random.default_rng(0).integers(20, 3000, (300, 2)).tolist()
    yield from ((width, height) for width, height in drawn)
    yield from ((448, 448), (896, 448), (1000, 10), (7, 1000), (1, 1), (3000, 2999))


def test_glm() -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    vision = read_glm({"model_type": "glm4v"}, {})
    for width, height in sizes():
        want = smart_resize(2, height, width, 2, 28, 112 * 112, 28 * 28 * 15000)
        assert vision.fit(width, height) == want[::-1], (width, height)


def test_internvl() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    vision = read_intern({}, {})
    for width, height in sizes():
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        tiles = vision.tiles(width, height)
        assert len(tiles) == (columns * rows + 1 if columns * rows > 1 else 1)
        assert tiles[0].sizes == ((columns * 448, rows * 448),) and tiles[-1].sizes == ((448, 448),)
    assert len(read_intern({}, {"max_patches": 1}).tiles(2000, 1000)) == 1


def test_idefics() -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    for longest in (2048, 5000):
        given = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 512}}
        vision, processor = (
            read_idefics({"vision_config": {"patch_size": 16}}, given),
            SmolVLMImageProcessorPil(**given),
        )
        for width, height in list(sizes())[::10]:
            if min(width, height) < 20:
                continue
            patches, rows, columns = processor.get_number_of_image_patches(height, width, given)
            tiles = vision.tiles(width, height)
            assert (len(tiles), tiles[-2].row, tiles[-2].column) == (patches, rows, columns), (width, height)


def test_gemma4() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    vision = read_gemma4({"vision_config": {}}, {})
    assert vision is not None
    for width, height in sizes():
        want = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
        assert vision.fit(width, height) == want[::-1], (width, height)
        assert vision.num_tokens(*vision.fit(width, height)) <= 280


def test_llava() -> None:
    from transformers.image_processing_utils import get_patch_output_size, select_best_resolution

    vision = read_llava({}, {})
    for width, height in sizes():
        best = select_best_resolution((height, width), GRID)
        want = get_patch_output_size(np.zeros((1, height, width)), best, "channels_first")
        assert vision.fit(width, height) == want[::-1], (width, height)
        assert vision.fit(*want[::-1]) == want[::-1], "the model's picture is not resized again"
    assert vision.num_tokens(384, 384) == 27 * 27 + 27 * 28  # the tower drops 6 pixels at two sides


@pytest.mark.parametrize("read", [read_glm, read_intern, read_idefics, read_llava])
def test_a_ratio_above_the_limit_is_refused(read: type[Vision]) -> None:
    vision = read({"model_type": "glm4v"}, {})  # type: ignore[call-arg, arg-type]
    with pytest.raises(ValueError, match="times the shorter"):
        vision.tiles(30, 9000)
