"""A cache's total size is limited."""

from __future__ import annotations

import pytest

from hpcrl.system.sized_cache import SizedCache


def test_the_least_recently_used_values_are_dropped() -> None:
    made: list[bytes] = []

    def get(key: bytes) -> str:
        def make() -> str:
            made.append(key)
            return key.decode() * 4

        return cache.get(key, make)

    cache = SizedCache[str](10, len)
    assert [get(key) for key in (b"a", b"b", b"a")] == ["aaaa", "bbbb", "aaaa"] and made == [b"a", b"b"]
    get(b"c")  # 12 of 10 bytes: b is dropped
    assert [get(key) for key in (b"a", b"c")] == ["aaaa", "cccc"] and made == [b"a", b"b", b"c"]
    get(b"b")
    assert made[3:] == [b"b"]
    get(b"large key")  # 36 bytes: kept without the others
    get(b"large key")
    get(b"b")
    assert made[4:] == [b"large key", b"b"]


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    cache = SizedCache[str](10, len)
    with pytest.raises(KeyError):
        cache.get(b"a", lambda: {}["a"])
    assert cache.get(b"a", lambda: "value") == "value"
