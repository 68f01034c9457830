"""A shop's catalogue, read or generated once per process and shared by all environments."""

from __future__ import annotations

import json
import random
import threading
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from typing import Any

from hpcrl.data.env_sources import HALF
from hpcrl.envs.spec import WebShopOptions
from hpcrl.envs.webshop.generated import generated
from hpcrl.envs.webshop.products import Goal, human_goals, products_of, synthetic_goals
from hpcrl.envs.webshop.search import Search

NUM_GENERATED = 1000
ORDER = 233
"""Seed of the original's order of goals."""
FILES = ("items", "attributes", "human")


class Catalogue:
    """Products, their search, and goals shuffled as in the original; the first `held_out` are for validation."""

    def __init__(self, options: WebShopOptions):
        """ValueError begins with the wrong option."""
        count = options.num_products
        if options.items:
            items, attributes = _read(options, "items", list), _read(options, "attributes", dict)
        else:
            items, attributes = generated(count or NUM_GENERATED, options.seed)
        human = _read(options, "human", dict) if options.human else None
        try:
            self.products = products_of(items[:count], attributes)
        except ValueError as error:
            raise ValueError(f"items: {options.items}: {error}") from error
        try:
            made = (
                human_goals(self.products, human) if human is not None else synthetic_goals(self.products, attributes)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            at = "human" if options.human else "attributes"
            raise ValueError(f"{at}: {getattr(options, at)}: {error}") from error
        random.Random(ORDER).shuffle(made)
        self.goals = made
        if len(made) <= options.held_out:
            raise ValueError(f"held_out: {options.held_out} of {len(made)} goals leave none for training")
        self._held_out = options.held_out
        self._weights = [*accumulate(goal.weight for goal in made)]
        self.number = {product.asin.lower(): place for place, product in enumerate(self.products)}
        self.search = Search(self.products)

    def goal(self, seed: int) -> Goal:
        """A goal drawn by weight: from the validation goals for a seed of data.val, else from the other goals."""
        first, end = (0, self._held_out) if seed >= HALF and self._held_out else (self._held_out, len(self.goals))
        low, high = (self._weights[place - 1] if place else 0.0 for place in (first, end))
        drawn = low + random.Random(seed).random() * (high - low)
        return self.goals[min(bisect(self._weights, drawn, first, end), end - 1)]


_LOCK = threading.Lock()
_KNOWN: dict[tuple[Any, ...], Catalogue] = {}


def catalogue_of(options: WebShopOptions) -> Catalogue:
    """The catalogue of these options. ValueError begins with the wrong option."""
    key = tuple(getattr(options, name) for name in (*FILES, "num_products", "seed", "held_out"))
    with _LOCK:
        if key not in _KNOWN:
            _KNOWN[key] = Catalogue(options)
        return _KNOWN[key]


def probe(options: WebShopOptions, own_code: bool) -> None:
    """ValueError if a file is missing, or, in env ranks (own_code), which load the catalogue now, has wrong content."""
    for name in FILES:
        path = getattr(options, name)
        if path and not Path(path).is_file():
            raise ValueError(f"{name}: there is no file {path!r}")
    if own_code:
        catalogue_of(options)


def _read(options: WebShopOptions, name: str, kind: type) -> Any:
    path = getattr(options, name)
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {path!r} cannot be read: {error}") from error
    if not isinstance(found, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{name}: {path!r} has {type(found).__name__}, not {wanted}")
    return found
