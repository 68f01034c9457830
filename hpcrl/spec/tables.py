"""The tables of all parts: add a part by its name and the path of its specification."""

from __future__ import annotations

from hpcrl.spec.kinds import (
    AlgorithmSpec,
    EnvSpec,
    GenEngineSpec,
    PipelineSpec,
    RewardSpec,
    RoleSpec,
    TrackerSpec,
    TrainEngineSpec,
)
from hpcrl.spec.table import SpecTable

PIPELINES = SpecTable(
    "pipeline",
    PipelineSpec,
    {
        "rlvr": "hpcrl.pipelines.rlvr:SPEC",
        "sft": "hpcrl.pipelines.sft:SPEC",
        "rlvr_vl": "hpcrl.pipelines.planned:RLVR_VL",
        "agentic": "hpcrl.pipelines.agentic:SPEC",
        "convert": "hpcrl.pipelines.convert:SPEC",
    },
)

ROLES = SpecTable(
    "role",
    RoleSpec,
    {
        "trainer": "hpcrl.roles.specs:TRAINER",
        "generator": "hpcrl.roles.specs:GENERATOR",
        "reference": "hpcrl.roles.specs:REFERENCE",
        "critic": "hpcrl.roles.specs:CRITIC",
        "judge": "hpcrl.roles.specs:JUDGE",
        "reward_model": "hpcrl.roles.specs:REWARD_MODEL",
        "reward": "hpcrl.roles.specs:REWARD",
        "env": "hpcrl.roles.specs:ENV",
    },
)

TRAIN_ENGINES = SpecTable(
    "training engine",
    TrainEngineSpec,
    {
        "fsdp2": "hpcrl.engines.train.fsdp2.spec:SPEC",
        "megatron": "hpcrl.engines.train.megatron.spec:SPEC",
        "deepspeed": "hpcrl.engines.train.deepspeed.spec:SPEC",
        "fake": "hpcrl.engines.train.fake.spec:SPEC",
    },
)

GEN_ENGINES = SpecTable(
    "generation engine",
    GenEngineSpec,
    {
        "native": "hpcrl.engines.gen.native.spec:SPEC",
        "vllm": "hpcrl.engines.gen.vllm.spec:SPEC",
        "sglang": "hpcrl.engines.gen.sglang.spec:SPEC",
        "fake": "hpcrl.engines.gen.fake.spec:SPEC",
    },
)

ALGORITHMS = SpecTable(
    "algorithm",
    AlgorithmSpec,
    {
        "grpo": "hpcrl.algorithms.specs:GRPO_SPEC",
        "gdpo": "hpcrl.algorithms.specs:GDPO_SPEC",
        "reinforce_plus_plus": "hpcrl.algorithms.specs:REINFORCE_PLUS_PLUS_SPEC",
        "reinforce": "hpcrl.algorithms.specs:REINFORCE_SPEC",
        "rloo": "hpcrl.algorithms.specs:RLOO_SPEC",
        "remax": "hpcrl.algorithms.specs:REMAX_SPEC",
        "raft_plus_plus": "hpcrl.algorithms.specs:RAFT_PLUS_PLUS_SPEC",
        "gae": "hpcrl.algorithms.specs:GAE_SPEC",
        "turn_reinforce": "hpcrl.algorithms.specs:TURN_REINFORCE_SPEC",
        "turn_gae": "hpcrl.algorithms.specs:TURN_GAE_SPEC",
        "gigpo": "hpcrl.algorithms.specs:GIGPO_SPEC",
    },
)

REWARDS = SpecTable(
    "reward",
    RewardSpec,
    {
        "exact_match": "hpcrl.rewards.specs:EXACT_MATCH",
        "math": "hpcrl.rewards.specs:MATH",
        "numeric": "hpcrl.rewards.specs:NUMERIC",
        "choice": "hpcrl.rewards.specs:CHOICE",
        "f1": "hpcrl.rewards.specs:F1",
        "regex": "hpcrl.rewards.specs:REGEX",
        "json_schema": "hpcrl.rewards.specs:JSON_SCHEMA",
        "ifeval": "hpcrl.rewards.specs:IFEVAL",
        "code": "hpcrl.rewards.specs:CODE",
        "length": "hpcrl.rewards.specs:LENGTH",
        "repetition": "hpcrl.rewards.specs:REPETITION",
        "tags": "hpcrl.rewards.specs:TAGS",
        "language": "hpcrl.rewards.specs:LANGUAGE",
        "composed": "hpcrl.rewards.specs:COMPOSED",
        "reasoning_gym": "hpcrl.rewards.specs:REASONING_GYM",
        "judge": "hpcrl.rewards.specs:JUDGE",
        "reward_model": "hpcrl.rewards.specs:REWARD_MODEL",
        "sort_digits": "hpcrl.rewards.specs:SORT_DIGITS",
        "fake": "hpcrl.rewards.specs:FAKE",
        "function": "hpcrl.rewards.specs:FUNCTION",
    },
)

ENVS = SpecTable(
    "environment",
    EnvSpec,
    {
        "scripted": "hpcrl.envs.specs:SCRIPTED",
        "frozen_lake": "hpcrl.envs.specs:FROZEN_LAKE",
        "sokoban": "hpcrl.envs.specs:SOKOBAN",
        "guess": "hpcrl.envs.specs:GUESS",
        "tic_tac_toe": "hpcrl.envs.specs:TIC_TAC_TOE",
        "gymnasium": "hpcrl.envs.specs:GYMNASIUM",
        "verifiers": "hpcrl.envs.specs:VERIFIERS",
        "openenv": "hpcrl.envs.specs:OPENENV",
        "tools": "hpcrl.envs.tools.specs:TOOLS",
        "remote": "hpcrl.envs.specs:REMOTE",
        "webshop": "hpcrl.envs.specs:WEBSHOP",
        "textworld": "hpcrl.envs.specs:TEXTWORLD",
        "swe": "hpcrl.envs.specs:SWE",
        "class": "hpcrl.envs.specs:CLASS",
    },
)

TRACKERS = SpecTable(
    "tracker",
    TrackerSpec,
    {
        "tensorboard": "hpcrl.metrics.trackers.specs:TENSORBOARD",
        "wandb": "hpcrl.metrics.trackers.specs:WANDB",
        "swanlab": "hpcrl.metrics.trackers.specs:SWANLAB",
        "mlflow": "hpcrl.metrics.trackers.specs:MLFLOW",
    },
)
