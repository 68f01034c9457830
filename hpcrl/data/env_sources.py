"""Rows from environments: `env:DOMAIN` gives episode starts, `expert:NAME` dialogues of a built-in environment's
expert.

A row's column env_seed determines the start of an episode, so all group members start equally. Seeds below 2**30 are
for train, all other seeds for val.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

from hpcrl.config import Positive, Section
from hpcrl.spec.fields import Share
from hpcrl.spec.options import read_options
from hpcrl.spec.tables import ENVS

STARTS = "env:"
SEED_COLUMN = "env_seed"
MAX_SEED = 1 << 31
HALF = MAX_SEED // 2


def episode_start(name: str, seed: int, split: str, index: int) -> int:
    """The 31-bit seed of a row's environment, a function of the arguments only."""
    digest = hashlib.blake2b(f"{name}/{seed}/{split}/{index}/start".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HALF + (HALF if split == "val" else 0)


def given_start(columns: Mapping[str, Any]) -> int | None:
    """The environment seed in a row's columns, None without one. ValueError if it is not a valid seed."""
    given = columns.get(SEED_COLUMN)
    if given is None or (type(given) is int and 0 <= given < MAX_SEED):
        return given
    raise ValueError(f"column {SEED_COLUMN}: {given!r} is not a whole number from 0 to {MAX_SEED - 1}")


class StartTask:
    """Starts for a domain's environment. ValueError if options are given: they belong in the environment's section."""

    def __init__(self, name: str, options: dict[str, Any], size: int, seed: int, split: str):
        if options:
            raise ValueError(f"env:{name}: give the environment's options in env.{name}.options")
        self.name, self.size = name, size
        self._seed, self._split = seed, split

    def row(self, index: int) -> dict[str, Any]:
        start = episode_start(self.name, self._seed, self._split, index)
        return {"prompt": f"{self.name} {start}", SEED_COLUMN: start}


class ExpertOptions(Section):
    """Options of expert:NAME."""

    env: dict[str, Any] = {}
    """Options of the environment."""
    noise: Share = 0.0
    """Probability that a turn is a random action instead of the expert's."""
    max_turns: Positive = 10
    """Maximum turns of an episode."""


class ExpertTask:
    """Episodes of an environment's own expert as dialogues, for supervised training. ValueError names an environment
    without an expert, or wrong options."""

    def __init__(self, name: str, options: dict[str, Any], size: int, seed: int, split: str):
        able = [known for known, spec in ENVS.items() if spec.has_expert]
        if name not in able:
            raise ValueError(f"expert:{name}: no such environment has an expert; there are {', '.join(able)}")
        self.name, self.size = name, size
        self._seed, self._split = seed, split
        spec = ENVS[name]
        assert spec.section is not None, "an expert is of an environment with typed options"
        try:
            self._options = read_options(ExpertOptions, options)
            self._env_options = read_options(spec.section, self._options.env)
            if obstacle := spec.expert_obstacle(self._env_options) or spec.row_obstacle(self._env_options):
                raise ValueError(obstacle)
        except ValueError as error:
            raise ValueError(f"expert:{name}: {error}") from error
        self._make = spec.load()

    def row(self, index: int) -> dict[str, Any]:
        start = episode_start(self.name, self._seed, self._split, index)
        env, rng = self._make(self._env_options), random.Random(f"{start}/expert")
        env.max_turns = self._options.max_turns  # as in make_env()
        observation, info = env.reset(start)
        messages: list[dict[str, Any]] = []
        for _ in range(self._options.max_turns):
            response = env.expert(rng, self._options.noise)
            said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
            messages += [*said, {"role": "assistant", "content": response}]
            observation, _, ended, truncated, _ = env.step(response)
            if ended or truncated:
                break
        tools = info.get("tools")
        return {"messages": messages, **({"tools": tools} if tools else {})}
