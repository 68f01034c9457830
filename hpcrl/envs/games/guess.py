"""Guess: find a number; the observation after each guess shows whether the number is higher or lower."""

from __future__ import annotations

import random

from hpcrl.envs.games.game import Outcome, TextGame
from hpcrl.envs.spec import GuessOptions


class Guess(TextGame[GuessOptions]):
    """Reward 1 for the number, 0 for another guess. A guess is effective if the answers so far allow it."""

    def __init__(self, options: GuessOptions):
        self.actions = [str(number) for number in range(options.low, options.high + 1)]
        super().__init__(options)

    @property
    def described_actions(self) -> str:
        return f"a number from {self.options.low} to {self.options.high}"

    def begin(self, rng: random.Random) -> None:
        self.number = rng.randint(self.options.low, self.options.high)
        self.low, self.high = self.options.low, self.options.high  # the range that the answers so far allow
        self._said = f"between {self.low} and {self.high}"

    def show(self) -> str:
        return self._said

    def act(self, action: str) -> Outcome:
        guess = int(action)
        effective, found = self.low <= guess <= self.high, guess == self.number
        if guess < self.number:
            self.low, self._said = max(self.low, guess + 1), "higher"
        elif guess > self.number:
            self.high, self._said = min(self.high, guess - 1), "lower"
        else:
            self._said = "found"
        return Outcome(float(found), effective, found, found)

    def best_action(self) -> str:
        return str((self.low + self.high) // 2)
