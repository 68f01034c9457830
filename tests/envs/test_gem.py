"""Environments of GEM, which nobody here wrote, by the name of its `make`."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import EnvConfig
from hpcrl.envs.making import check_env, make_env
from tests.contracts.test_env import ROW

pytestmark = pytest.mark.outside


def test_a_number_is_found_by_what_the_game_says() -> None:
    pytest.importorskip("gem", reason="GEM is not installed; make test-outside")
    config = EnvConfig(name="class", class_path="gem:make", options={"env_id": "game:GuessTheNumber-v0-easy"})
    check_env(config, "default")

    def played(seed: int) -> list[Any]:
        env, low, high = make_env(config, ROW), 1, 10
        shown = [env.reset(seed)[0]]
        while low <= high:
            guess = (low + high) // 2
            text, reward, ended, truncated, _ = env.step(f"I say \\boxed{{{guess}}}.")
            shown.append(text)
            if ended:
                assert reward == 1.0 and not truncated and f"the correct number {guess}" in str(text)
                return shown
            assert reward == 0.0
            low, high = (low, guess - 1) if "lower" in str(text) else (guess + 1, high)
        pytest.fail("it is none of the numbers")

    games = [played(seed) for seed in range(12)]
    assert "between 1 and 10" in games[0][0] and [played(seed) for seed in range(12)] == games
    assert len({game[-1] for game in games}) > 3
