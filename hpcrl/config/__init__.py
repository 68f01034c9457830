"""The configuration: a typed schema, its cross-field checks and its composition by Hydra. Imports no torch.

`load(argv)` composes and checks a command line's arguments; `parse(data)` checks plain data. Both raise `ConfigError`
with every problem at once, one line each.
"""

from typing import TYPE_CHECKING, Any

from hpcrl.config.assembling import config_class
from hpcrl.config.cluster import ClusterConfig, ComponentConfig, LayoutConfig, RoleConfig, RoleName
from hpcrl.config.data import DataConfig, DataSource
from hpcrl.config.domains import EnvConfig, RewardConfig
from hpcrl.config.engines import GeneratorConfig, JudgeConfig, LoRAConfig, TrainerConfig
from hpcrl.config.fake import FakeConfig
from hpcrl.config.model import ModelConfig, TinyModel
from hpcrl.config.reading import LoadedConfig, load, parse, read, read_data
from hpcrl.config.rollout import DomainRolloutConfig, EvalConfig, EvalSampling, RolloutConfig
from hpcrl.config.schema import Timeouts
from hpcrl.spec.fields import Natural, NonNegative, Positive, PositiveFloat, Section, Share
from hpcrl.spec.policy_loss import PolicyLoss
from hpcrl.spec.problems import ConfigError, Problem

if TYPE_CHECKING:
    from hpcrl.config.schema import Config

__all__ = [
    "ClusterConfig",
    "ComponentConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataSource",
    "DomainRolloutConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalSampling",
    "FakeConfig",
    "GeneratorConfig",
    "JudgeConfig",
    "LayoutConfig",
    "LoRAConfig",
    "LoadedConfig",
    "ModelConfig",
    "Natural",
    "NonNegative",
    "PolicyLoss",
    "Positive",
    "PositiveFloat",
    "Problem",
    "RewardConfig",
    "RoleConfig",
    "RoleName",
    "RolloutConfig",
    "Section",
    "Share",
    "Timeouts",
    "TinyModel",
    "TrainerConfig",
    "load",
    "parse",
    "read",
    "read_data",
]


def __getattr__(name: str) -> Any:
    """Config, built from the tables on first access: a reward's worker process does not need it."""
    if name == "Config":
        return config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
