"""Estimator and objective of an algorithm's section, for tests that make sections themselves."""

from __future__ import annotations

from typing import Any

from hpcrl.algorithms import factory
from hpcrl.algorithms.interface import Algorithm
from hpcrl.spec.divergence import Divergence
from hpcrl.spec.tables import ALGORITHMS


def make_pair(section: Any, divergence: Divergence | None = None) -> Algorithm:
    return factory.make_pair(ALGORITHMS[section.advantage_estimator], section, divergence=divergence)
