"""The tables of all parts: add a part by its name and the path of its specification."""

from __future__ import annotations

from hpcrl.spec.kinds import (
    AlgorithmSpec,
    EnvSpec,
    GenEngineSpec,
    PairLossSpec,
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
        "reward_model": "hpcrl.pipelines.train_reward_model:SPEC",
        "online_dpo": "hpcrl.pipelines.online_dpo:SPEC",
        "dpo": "hpcrl.pipelines.dpo:SPEC",
        "agentic": "hpcrl.pipelines.agentic:SPEC",
        "distill": "hpcrl.pipelines.distill:SPEC",
        "evaluate": "hpcrl.pipelines.evaluate:SPEC",
        "generate": "hpcrl.pipelines.generate:SPEC",
        "convert": "hpcrl.pipelines.convert:SPEC",
    },
)

ROLES = SpecTable(
    "role",
    RoleSpec,
    {
        "trainer": "hpcrl.workers.spec:TRAINER",
        "generator": "hpcrl.workers.spec:GENERATOR",
        "reference": "hpcrl.workers.spec:REFERENCE",
        "teacher": "hpcrl.workers.spec:TEACHER",
        "critic": "hpcrl.workers.spec:CRITIC",
        "judge": "hpcrl.workers.spec:JUDGE",
        "reward_model": "hpcrl.workers.spec:REWARD_MODEL",
        "reward": "hpcrl.workers.spec:REWARD",
        "env": "hpcrl.workers.spec:ENV",
    },
)

TRAIN_ENGINES = SpecTable(
    "training engine",
    TrainEngineSpec,
    {
        "fsdp2": "hpcrl.engines.train.fsdp2.spec:SPEC",
        "megatron": "hpcrl.engines.train.megatron.spec:SPEC",
        "deepspeed": "hpcrl.engines.train.deepspeed.spec:SPEC",
        "fake": "hpcrl.engines.train.fake_trainer.spec:SPEC",
    },
)

GEN_ENGINES = SpecTable(
    "generation engine",
    GenEngineSpec,
    {
        "native": "hpcrl.engines.gen.native.spec:SPEC",
        "vllm": "hpcrl.engines.gen.vllm.spec:SPEC",
        "sglang": "hpcrl.engines.gen.sglang.spec:SPEC",
        "fake": "hpcrl.engines.gen.fake_generator.spec:SPEC",
    },
)

ALGORITHMS = SpecTable(
    "algorithm",
    AlgorithmSpec,
    {
        "grpo": "hpcrl.algorithms.spec:GRPO_SPEC",
        "gdpo": "hpcrl.algorithms.spec:GDPO_SPEC",
        "reinforce_plus_plus": "hpcrl.algorithms.spec:REINFORCE_PLUS_PLUS_SPEC",
        "reinforce": "hpcrl.algorithms.spec:REINFORCE_SPEC",
        "rloo": "hpcrl.algorithms.spec:RLOO_SPEC",
        "remax": "hpcrl.algorithms.spec:REMAX_SPEC",
        "raft_plus_plus": "hpcrl.algorithms.spec:RAFT_PLUS_PLUS_SPEC",
        "gae": "hpcrl.algorithms.spec:GAE_SPEC",
        "turn_reinforce": "hpcrl.algorithms.spec:TURN_REINFORCE_SPEC",
        "turn_gae": "hpcrl.algorithms.spec:TURN_GAE_SPEC",
        "gigpo": "hpcrl.algorithms.spec:GIGPO_SPEC",
    },
)

DPO_LOSSES = SpecTable(
    "loss on pairs",
    PairLossSpec,
    {
        "sigmoid": "hpcrl.algorithms.pairs.spec:SIGMOID",
        "ipo": "hpcrl.algorithms.pairs.spec:IPO",
        "robust": "hpcrl.algorithms.pairs.spec:ROBUST",
        "simpo": "hpcrl.algorithms.pairs.spec:SIMPO",
        "orpo": "hpcrl.algorithms.pairs.spec:ORPO",
        "cpo": "hpcrl.algorithms.pairs.spec:CPO",
        "kto": "hpcrl.algorithms.pairs.spec:KTO",
    },
)

REWARDS = SpecTable(
    "reward",
    RewardSpec,
    {
        "exact_match": "hpcrl.rewards.spec:EXACT_MATCH",
        "math": "hpcrl.rewards.spec:MATH",
        "numeric": "hpcrl.rewards.spec:NUMERIC",
        "choice": "hpcrl.rewards.spec:CHOICE",
        "grounding": "hpcrl.rewards.spec:GROUNDING",
        "f1": "hpcrl.rewards.spec:F1",
        "regex": "hpcrl.rewards.spec:REGEX",
        "json_schema": "hpcrl.rewards.spec:JSON_SCHEMA",
        "ifeval": "hpcrl.rewards.spec:IFEVAL",
        "code": "hpcrl.rewards.spec:CODE",
        "length": "hpcrl.rewards.spec:LENGTH",
        "repetition": "hpcrl.rewards.spec:REPETITION",
        "tags": "hpcrl.rewards.spec:TAGS",
        "language": "hpcrl.rewards.spec:LANGUAGE",
        "composed": "hpcrl.rewards.spec:COMPOSED",
        "reasoning_gym": "hpcrl.rewards.spec:REASONING_GYM",
        "judge": "hpcrl.rewards.spec:JUDGE",
        "reward_model": "hpcrl.rewards.spec:REWARD_MODEL",
        "sort_digits": "hpcrl.rewards.spec:SORT_DIGITS",
        "none": "hpcrl.rewards.spec:NONE",
        "fake": "hpcrl.rewards.spec:FAKE",
        "function": "hpcrl.rewards.spec:FUNCTION",
    },
)

ENVS = SpecTable(
    "environment",
    EnvSpec,
    {
        "scripted": "hpcrl.envs.spec:SCRIPTED",
        "frozen_lake": "hpcrl.envs.spec:FROZEN_LAKE",
        "sokoban": "hpcrl.envs.spec:SOKOBAN",
        "guess": "hpcrl.envs.spec:GUESS",
        "tic_tac_toe": "hpcrl.envs.spec:TIC_TAC_TOE",
        "gymnasium": "hpcrl.envs.spec:GYMNASIUM",
        "verifiers": "hpcrl.envs.spec:VERIFIERS",
        "openenv": "hpcrl.envs.spec:OPENENV",
        "tools": "hpcrl.envs.tools.spec:TOOLS",
        "remote": "hpcrl.envs.spec:REMOTE",
        "webshop": "hpcrl.envs.spec:WEBSHOP",
        "textworld": "hpcrl.envs.spec:TEXTWORLD",
        "swe": "hpcrl.envs.spec:SWE",
        "class": "hpcrl.envs.spec:CLASS",
    },
)

TRACKERS = SpecTable(
    "tracker",
    TrackerSpec,
    {
        "tensorboard": "hpcrl.metrics.trackers.spec:TENSORBOARD",
        "wandb": "hpcrl.metrics.trackers.spec:WANDB",
        "swanlab": "hpcrl.metrics.trackers.spec:SWANLAB",
        "mlflow": "hpcrl.metrics.trackers.spec:MLFLOW",
        "prometheus": "hpcrl.metrics.trackers.spec:PROMETHEUS",
        "otlp": "hpcrl.metrics.trackers.spec:OTLP",
    },
)
