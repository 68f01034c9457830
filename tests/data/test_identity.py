"""Prompts are identified by content alone."""

from __future__ import annotations

import hashlib
import json

from hpcrl.data.identity import prompt_id
from hpcrl.spec.media import IMAGE_MARK

MESSAGES = [{"role": "system", "content": "kurz"}, {"role": "user", "content": "2+2? \u00e4"}]


def test_the_id_is_that_of_the_canonical_json() -> None:
    """Worked out here without hpcrl: `printf TEXT | sha256sum`."""
    text = '[{"content":"kurz","role":"system"},{"content":"2+2? \u00e4","role":"user"}]'
    assert json.loads(text) == MESSAGES
    assert prompt_id(MESSAGES) == hashlib.sha256(text.encode()).hexdigest()[:16] == "23cef9949e3c1edc"


def test_order_of_keys_is_no_difference_and_everything_else_is_one() -> None:
    turned = [dict(reversed(message.items())) for message in MESSAGES]
    assert prompt_id(turned) == prompt_id(MESSAGES)
    others = [
        prompt_id(MESSAGES[::-1]),
        prompt_id(MESSAGES[1:]),
        prompt_id([*MESSAGES[:1], {"role": "user", "content": "2+2?"}]),
        prompt_id(MESSAGES, [b"\1" * 32]),
        prompt_id(MESSAGES, [b"\2" * 32]),
        prompt_id(MESSAGES, [b"\1" * 32, b"\2" * 32]),
    ]
    assert len({prompt_id(MESSAGES), *others}) == 7


def test_an_image_mark_is_as_in_files() -> None:
    """So the id can be found again from a file, which has `<image>`; text that UTF-8 cannot hold has an id too."""
    marked = [{"role": "user", "content": f"{IMAGE_MARK}what? \ud800"}]
    assert prompt_id(marked) == prompt_id([{"role": "user", "content": "<image>what? ?"}])
