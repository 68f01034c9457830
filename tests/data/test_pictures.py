"""Images as models see them: decoded once, upright, opaque, with 8 bits, and in the size of transformers' processor."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcrl.data.pictures import MAX_FILE_PIXELS, decode, read_picture, size_of
from hpcrl.models.vision import Vision, read_vision
from hpcrl.spec.media import Medium

SMALL = Vision(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 64)
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def test_lossless_files_have_their_pixels() -> None:
    image = noise(5, 7)
    for kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(pixels(decode(saved(image, kind))), np.asarray(image))
    assert np.array_equal(pixels(decode(saved(image, "WEBP", lossless=True))), np.asarray(image))


def test_exif_orientation_turns_the_image() -> None:
    image = Image.fromarray(np.array([[RED, GREEN, BLUE]], np.uint8))  # one row
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    assert pixels(decode(saved(image, exif=exif))).tolist() == [[list(RED)], [list(GREEN)], [list(BLUE)]]


def test_transparent_parts_are_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, 1], rgba[0, 2] = (*RED, 255), (0, 0, 0, 128)
    assert pixels(decode(saved(Image.fromarray(rgba)))).tolist() == [[[255] * 3, list(RED), [127] * 3]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([*GREEN, *BLUE])
    palette.putpixel((1, 0), 1)
    assert pixels(decode(saved(palette, transparency=0))).tolist() == [[[255] * 3, list(BLUE)]]
    assert pixels(decode(saved(palette))).tolist() == [[list(GREEN), list(BLUE)]]
    grey = Image.merge("LA", [Image.new("L", (1, 1), 9), Image.new("L", (1, 1), 0)])
    assert pixels(decode(saved(grey))).tolist() == [[[255] * 3]]


def test_sixteen_bits_are_scaled_not_cut() -> None:
    values = np.array([[0, 257, 256 * 128, 65535]], np.uint16)
    assert pixels(decode(saved(Image.fromarray(values))))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert pixels(decode(saved(Image.fromarray(values), "TIFF")))[0, :, 2].tolist() == [0, 1, 128, 255]


def test_other_modes_become_rgb() -> None:
    assert pixels(decode(saved(Image.new("1", (1, 1), 1)))).tolist() == [[[255] * 3]]
    assert pixels(decode(saved(Image.new("L", (1, 1), 7)))).tolist() == [[[7] * 3]]
    cyan = pixels(decode(saved(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG", quality=100)))
    assert np.abs(cyan.astype(int) - [0, 255, 255]).max() <= 2


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)]
    content = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (pixels(decode(content)) == RED).all()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def bomb() -> bytes:
    """A PNG of a few kilobytes whose header promises, and whose data hold, more pixels than the limit."""
    side = int(MAX_FILE_PIXELS**0.5) + 1

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])  # 1 bit, grey
    rows = zlib.compress(bytes((side // 8 + 2) * side))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"hello", "it is damaged, or not an image of a known format"),
        (b"", "it is damaged, or not an image of a known format"),
        (saved(noise(300, 200), "JPEG")[:4000], "it cannot be decoded: image file is truncated"),
        (saved(noise(30, 20))[:-30], "it cannot be decoded"),
        (bomb(), "8193 x 8193 pixels, and at most 67108864 are decoded"),
        (saved(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), "its channels are floating-point numbers"),
        (saved(Image.fromarray(np.full((2, 2), 1 << 20, np.int32)), "TIFF"), "more than 16 bits"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is damaged, or not an image of a known format"),
    ],
)
def test_what_is_no_image_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode(content)


def test_the_head_of_a_file_shows_what_the_start_refuses() -> None:
    """What only its data show is found when the row is drawn."""

    def header(width: int, height: int) -> bytes:
        sides = width.to_bytes(4, "big") + height.to_bytes(4, "big")
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sides + bytes([8, 2, 0, 0, 0])) + chunk(b"IDAT", b"")

    for content, problem in (
        (header(0, 5), "it is damaged, or not an image of a known format"),
        (header(1 << 30, 1 << 30), "it has more pixels than the 67108864 that are decoded"),
        (bomb(), "8193 x 8193 pixels, and at most 67108864 are decoded"),
        (saved(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), "its channels are floating-point numbers"),
    ):
        with pytest.raises(ValueError, match=problem):
            size_of(content)
    assert size_of(header(3, 5)) == (3, 5)
    with pytest.raises(ValueError, match="it cannot be decoded"):
        decode(header(3, 5))


def test_damage_gives_one_kind_of_error() -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        content = np.frombuffer(saved(noise(24, 31), kind), np.uint8)
        for _ in range(60):
            damaged = content.copy()
            at = rng.integers(0, len(damaged), size=rng.integers(1, 8))
            damaged[at] = rng.integers(0, 256, size=len(at))
            try:
                assert decode(damaged[: rng.integers(20, len(damaged) + 1)].tobytes()).mode == "RGB"
            except ValueError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("vision", [SMALL, Vision(16, 2, 65536, 16777216), Vision(14, 2, 3136, 12845056)])
def test_sizes_and_tokens_are_those_of_transformers(vision: Vision) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(1)
    for width, height in [(1, 1), (1, 200), (4000, 3000), (42, 70), *rng.integers(1, 900, size=(300, 2)).tolist()]:
        try:
            wanted = smart_resize(height, width, vision.patch * vision.merge, vision.min_pixels, vision.max_pixels)
        except ValueError:
            with pytest.raises(ValueError, match="the longer side may be 200 times the shorter"):
                vision.fit(width, height)
            continue
        assert vision.fit(width, height) == wanted[::-1]
        assert (
            vision.num_tokens(*vision.fit(width, height)) * (vision.patch * vision.merge) ** 2 == wanted[0] * wanted[1]
        )


def test_the_pixels_are_those_of_transformers_processor() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=SMALL.min_pixels, max_pixels=SMALL.max_pixels
    )
    for image in (noise(70, 90), noise(400, 333), noise(9, 20)):
        (picture,) = read_picture(saved(image), SMALL)
        mine = processor(images=[Image.fromarray(picture.pixels)], return_tensors="np")
        theirs = processor(images=[image], return_tensors="np")
        assert np.array_equal(mine["image_grid_thw"], theirs["image_grid_thw"])
        assert np.array_equal(mine["pixel_values"], theirs["pixel_values"]), "our size is resized to itself"


def test_equal_pixels_have_equal_digests() -> None:
    image = noise(28, 56)
    png, bmp = (read_picture(saved(image, kind), SMALL)[0] for kind in ("PNG", "BMP"))
    assert png == bmp and png.digest == bmp.digest and png.width == 56
    assert read_picture(saved(noise(28, 56, seed=1)), SMALL)[0].digest != png.digest
    assert Medium("image", bytes(56 * 28 * 3), 56, 28).digest != Medium("image", bytes(56 * 28 * 3), 28, 56).digest


def test_sizes_are_read_from_a_models_files() -> None:
    config = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    published = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    assert read_vision(config, published) == Vision(16, 2, 65536, 16777216, 151655)
    assert read_vision({}, {"min_pixels": 3136, "max_pixels": 12845056}) == Vision(14, 2, 3136, 12845056, 151655)
    assert read_vision(config, {}).patch == 16
    with pytest.raises(ValueError, match="max_pixels is '1M', not a positive number"):
        read_vision(config, {"max_pixels": "1M"})
    for key, value, problem in (
        ("patch_size", 14, "patch_size=14 of the image processor, but 16 in vision_config of config.json"),
        ("merge_size", 4, "merge_size=4 of the image processor, but 2 in vision_config"),
        ("size", {"height": 224, "width": 224}, "size of the image processor has height, width, of another family"),
        ("size", 448, "size of the image processor is 448, without the names of its sides"),
        ("do_rescale", False, "do_rescale=false of the image processor is not supported"),
        ("image_mean", [0.5], r"image_mean of the image processor is \[0.5\], not three numbers$"),
        ("image_std", [0.5, 0, 0.5], r"image_std .* is \[0.5, 0, 0.5\], not three numbers above 0"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_vision(config, published | {key: value})
    older = {"size": {"min_pixels": 3136, "max_pixels": 12845056}, "min_pixels": 3136, "max_pixels": 12845056}
    assert read_vision({}, older).max_pixels == 12845056, "as transformers 4.45 wrote them"
    with pytest.raises(ValueError, match="min_pixels=9000 and max_pixels=8000 of the image processor allow no image"):
        read_vision(config, {"min_pixels": 9000, "max_pixels": 8000})
