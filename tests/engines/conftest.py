"""One-rank process group in the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.worlds import process_group


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("world") / "store")):
        yield
