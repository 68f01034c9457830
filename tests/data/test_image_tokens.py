"""Placeholders of images become as many tokens as the images have."""

from __future__ import annotations

import pytest

from hpcrl.data.image_tokens import expand
from hpcrl.spec.media import IMAGE, Medium

PAD = 9


def images(*lengths: int) -> list[Medium]:
    return [Medium(IMAGE, bytes([length]), length=length) for length in lengths]


def test_each_placeholder_becomes_its_images_tokens() -> None:
    ids, media = expand([1, PAD, 2, PAD, PAD, 3], PAD, images(2, 1, 3))
    assert ids == [1, PAD, PAD, 2, PAD, PAD, PAD, PAD, 3]
    assert [(medium.start, medium.length) for medium in media] == [(1, 2), (4, 1), (5, 3)]
    assert [medium.content for medium in media] == [b"\2", b"\1", b"\3"]


def test_a_text_without_images_is_unchanged() -> None:
    assert expand([1, 2], PAD, []) == ([1, 2], ())


@pytest.mark.parametrize(("ids", "lengths"), [([1, 2], [4]), ([PAD], []), ([PAD, PAD], [1])])
def test_other_numbers_of_placeholders_and_images_are_refused(ids: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"writes {ids.count(PAD)} image placeholders for {len(lengths)} images"):
        expand(ids, PAD, images(*lengths))
