"""The tool crop, on drawn images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcrl.config import EnvConfig
from hpcrl.envs.environment import checked_step, image_bytes
from hpcrl.envs.factory import make_env

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quarters(side: int = 56) -> bytes:
    """Red, green / blue, white."""
    image = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8).repeat(side // 2, 0).repeat(side // 2, 1)
    file = image_bytes(image)
    assert isinstance(file, bytes)
    return file


def env(*images: Any, **options: Any) -> Any:
    row = {"messages": [{"role": "user", "content": "?"}], "extra": {"images": list(images)} if images else {}}
    made = make_env(EnvConfig(name="tools", options={"tools": ["crop"], **options}), row)
    made.reset(0)
    return made


def call(made: Any, *boxes: list[Any], **arguments: Any) -> list[dict[str, Any]]:
    calls = [{"name": "crop", "arguments": {"bbox": box, **arguments}} for box in boxes]
    text = "\n".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)
    observation: Any = checked_step(made.step(text))[0]
    return list(observation)


def crop(made: Any, *box: Any, **arguments: Any) -> tuple[str, np.ndarray]:
    (message,) = call(made, [*box], **arguments)
    (file,) = message["images"]
    assert message["role"] == "tool" and message["name"] == "crop"
    return message["content"], np.asarray(Image.open(io.BytesIO(file)))


def error(made: Any, *box: Any, **arguments: Any) -> str:
    (message,) = call(made, [*box], **arguments)
    assert "images" not in message
    return str(message["content"])


def test_a_region_is_enlarged() -> None:
    text, seen = crop(env(quarters()), 28, 0, 56, 28, label="a leaf")
    assert text == "Image 2, 56 x 56 pixels: (28, 0) to (56, 28) of image 1, a leaf."
    assert seen.shape == (56, 56, 3) and (seen == GREEN).all()
    _, seen = crop(env(quarters(), crop_zoom=1), 0, 0, 56, 56)
    assert (seen == np.asarray(Image.open(io.BytesIO(quarters())))).all(), "the whole image, unchanged"
    _, seen = crop(env(quarters(), crop_zoom=4), 14, 28, 42, 42)
    assert seen.shape == (56, 112, 3), "twice as wide as high"
    assert (seen[:, :50] == BLUE).all() and (seen[:, -50:] == WHITE).all()


def test_coordinates_are_pixels_of_the_image_that_the_model_sees() -> None:
    """A file of 200 x 200 pixels, of which the model may see 56 x 56."""
    small = {"crop_max_pixels": 56 * 56, "crop_min_pixels": 28 * 28}
    _, seen = crop(env(quarters(200), **small), 28, 28, 56, 56)
    assert seen.shape == (56, 56, 3) and (seen == WHITE).all()
    fine = np.zeros((112, 112, 3), np.uint8)
    fine[:, ::2] = 255  # lost in a reduction to 56 x 56
    _, seen = crop(env(image_bytes(fine), **small), 0, 0, 28, 28)
    assert seen.shape == (56, 56, 3) and (seen == fine[:56, :56]).all(), "cut out of the file's own pixels"


def test_a_box_beyond_the_image_is_clipped() -> None:
    text, seen = crop(env(quarters()), 28, 28, 10**400, 5000.5)
    assert "(28, 28) to (56, 56) of image 1" in text and (seen == WHITE).all()
    _, seen = crop(env(quarters()), -50, -1, 28, 28)
    assert (seen == RED).all()


@pytest.mark.parametrize(
    ("box", "arguments", "problem"),
    [
        ([30, 0, 30, 56], {}, "the box is empty: x1 < x2 and y1 < y2 must hold, and image 1 has 56 x 56 pixels"),
        ([0, 40, 20, 30], {}, "the box is empty"),
        ([60, 0, 90, 20], {}, "the box is empty"),
        ([0, 0, 56, 0.1], {"image": 2}, "there is no image 2; there are 1, numbered from 1"),
        ([0, 0, 9, 9], {"image": 0}, "there is no image 0"),
        ([0, 0, 56], {}, "wrong arguments of crop: bbox: [0, 0, 56] is too short"),
        ([0, 0, "a", 56], {}, "wrong arguments of crop: bbox.2: 'a' is not of type 'number'"),
        ([0, 0, 9, 9], {"zoom": 3}, "wrong arguments of crop"),
    ],
)
def test_errors_are_texts_for_the_model(box: list[Any], arguments: dict[str, Any], problem: str) -> None:
    assert error(env(quarters()), *box, **arguments).startswith(f"Error: {problem}")


def test_a_region_too_narrow_for_the_model_is_an_error() -> None:
    assert error(env(quarters(1120)), 0, 0, 900, 1).startswith("Error: the box is too narrow: 1800 x 2 pixels")


def test_without_an_image_there_is_nothing_to_crop() -> None:
    assert error(env(), 0, 0, 9, 9) == "Error: there is no image 1; there are 0, numbered from 1"


def test_images_and_crops_are_numbered() -> None:
    made = env(quarters(), image_bytes(np.full((56, 56, 3), 9, np.uint8)))
    assert crop(made, 0, 0, 28, 28, image=2)[0].startswith("Image 3, ")
    first, second = call(made, [28, 0, 56, 56], [0, 0, 56, 28])
    assert first["content"].startswith("Image 4, 56 x 112 pixels") and second["content"].startswith("Image 5")
    _, seen = crop(made, 0, 56, 56, 112, image=4)
    assert (seen[4:] == WHITE).all(), "the lower half of the right half"
    made.reset(0)
    assert "there are 2," in error(made, 0, 0, 9, 9, image=3), "a new episode has no crops"


def test_images_of_a_row_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(quarters())
    url = f"data:image/png;base64,{base64.b64encode(quarters()).decode()}"
    for given in (str(path), url, quarters(), {"bytes": quarters(), "path": None}, {"bytes": None, "path": str(path)}):
        assert (crop(env(given), 0, 28, 28, 56)[1] == BLUE).all()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (b"\x89PNG\r\n\x1a\n broken", r"the row: images\[0\]: it is damaged, or not an image of a known format"),
        (b"text", r"the row: images\[0\]: the content begins like none of png"),
        ("missing.png", r"the row: images\[0\]: missing.png cannot be read"),
    ],
)
def test_an_unreadable_image_is_an_error_of_the_sample(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        env(given)


def test_a_label_cannot_mark_the_place_of_an_image() -> None:
    text, _ = crop(env(quarters()), 0, 0, 28, 28, label="<image>leaf" + 200 * "x")
    assert "<image>" not in text and ", leafxxx" in text and len(text) < 160
