"""What a rank does in each role; built by a BuildRole command (hpcrl.roles.worker)."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from hpcrl.roles.env import EnvRole
from hpcrl.roles.generator import GeneratorRole
from hpcrl.roles.reward import RewardRole
from hpcrl.roles.trainer import ReferenceRole, TrainerRole

ROLES = {
    "trainer": TrainerRole,
    "generator": GeneratorRole,
    "reference": ReferenceRole,
    "reward": RewardRole,
    "env": EnvRole,
}

IMPORTS = {
    "trainer": "hpcrl.engines.train.fsdp2.engine",
    "reference": "hpcrl.engines.train.fsdp2.engine",
    "generator": "transformers.models.auto.tokenization_auto",
    "env": "transformers.models.auto.tokenization_auto",
}
"""The slowest import of a role, taking seconds; reward ranks go without."""


def import_engines(roles: Collection[str]) -> None:
    """Import what these roles will need, so that ranks do it side by side before they meet and wait for each other."""
    for role in roles:
        if role in IMPORTS:
            importlib.import_module(IMPORTS[role])
