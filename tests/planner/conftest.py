"""The one-rank process group of the engine tests."""

from tests.engines.conftest import world_of_one  # noqa: F401 - a fixture
