"""Placeholders of images become as many tokens as the images have."""

from __future__ import annotations

import pytest

from hpcrl.data.image_tokens import Span, expand

PAD = 9


def test_each_placeholder_becomes_its_images_tokens() -> None:
    ids, spans = expand([1, PAD, 2, PAD, PAD, 3], PAD, [2, 1, 3])
    assert ids == [1, PAD, PAD, 2, PAD, PAD, PAD, PAD, 3]
    assert spans == [Span(1, 2), Span(4, 1), Span(5, 3)]
    assert all(ids[span.start : span.start + span.length] == [PAD] * span.length for span in spans)


def test_a_text_without_images_is_unchanged() -> None:
    assert expand([1, 2], PAD, []) == ([1, 2], [])


@pytest.mark.parametrize(("ids", "lengths"), [([1, 2], [4]), ([PAD], []), ([PAD, PAD], [1])])
def test_other_numbers_of_placeholders_and_images_are_refused(ids: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"writes {ids.count(PAD)} image placeholders for {len(lengths)} images"):
        expand(ids, PAD, lengths)
