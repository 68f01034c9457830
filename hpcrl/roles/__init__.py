"""What a rank does in each role; built by a BuildRole command (hpcrl.roles.worker)."""

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
