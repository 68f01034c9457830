"""The configuration: a typed schema and its cross-field checks. Imports no torch.

`parse` turns composed plain data into a `Config` or raises `ConfigError` with every problem at once, one line each.
The defaults live here; the files under conf/ hold values that differ from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """Everything that is wrong with a configuration; `problems` holds one line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, numbers given as text are not."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)


class TinyModel(Section):
    """A model made from these numbers with seeded random weights, for demos and tests, where model.path is not given."""

    architecture: Literal["qwen2", "qwen3", "qwen3_moe", "llama", "gemma2"] = "qwen2"
    vocab_size: Positive = 320
    hidden_size: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    intermediate_size: Positive = 192
    num_experts: Positive = 4
    max_position_embeddings: Positive = 4096
    tie_word_embeddings: bool = True
    seed: Natural = 0


class ModelConfig(Section):
    """The policy. `path` is a folder in HF layout; without one the tiny model is made inside the run folder."""

    path: str | None = None
    tiny: TinyModel = TinyModel()
    dtype: Literal["float32", "bfloat16"] = "float32"


class DataSource(Section):
    """One source of prompts: a jsonl or parquet file, `task:NAME` (built in) or `reasoning_gym:NAME`."""

    path: str
    tag: str | None = None
    size: Positive | None = None  # generated sources: rows of an epoch
    options: dict[str, Any] = {}  # generated sources: arguments of the task


class DataConfig(Section):
    """Where prompts come from and how a row is read."""

    train: str | list[str | DataSource] = "task:sort_digits"
    val: str | list[str | DataSource] | None = None
    prompt_key: str | None = None  # null: prompt, messages, question or problem, whichever the file has
    answer_key: str | None = None  # null: answer, ground_truth, label, solution; reward_model.ground_truth (verl)
    tag_key: str = "tag"
    system_prompt: str | None = None
    max_prompt_tokens: Positive = 1024
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    shuffle: bool = True
    domain_interleave_probs: dict[str, Share] = {}


class RolloutConfig(Section):
    """What a rollout batch is: num_prompts groups of group_size responses."""

    num_prompts: Positive = 64
    group_size: Positive = 8
    max_new_tokens: Positive = 256
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Natural = 0
    min_p: Share = 0.0
    stop: list[str] = []
    max_lag: NonNegative = 0
    over_sampling: Natural = 0  # groups generated beyond num_prompts; aborted once enough valid groups exist
    max_attempts: Positive = 3
    filter_mean_low: float | None = None  # keep groups with low < mean score < high
    filter_mean_high: float | None = None
    filter_std: bool = False  # drop groups whose rewards are all equal
    max_generated_groups: Positive | None = None  # give up a step after so many; null: 20 x num_prompts
    save_rollouts: bool = True


class PolicyLoss(Section):
    """Keys that every clipped policy-gradient algorithm reads (roll.md 2 and 3)."""

    pg_clip_low: NonNegative = 0.2
    pg_clip_high: NonNegative = 0.2
    dual_clip: PositiveFloat | None = None  # c of dual clip, > 1; null: off
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    kl_loss_coef: NonNegative = 0.0
    kl_reward_coef: NonNegative = 0.0
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    entropy_loss_coef: float = 0.0
    reward_clip: PositiveFloat | None = None
    advantage_clip: PositiveFloat | None = None
    whiten_advantages: bool = False
    ppo_epochs: Positive = 1
    num_mini_batches: Positive = 1


class GRPO(PolicyLoss):
    """Group-relative policy optimisation (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"
    std_normalize: bool = True  # false: Dr. GRPO's advantage (arXiv 2503.20783)
    std_eps: NonNegative = 1e-6


class ReinforcePlusPlus(PolicyLoss):
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over the batch, PPO clip."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Share = 1.0
    std_eps: NonNegative = 1e-6


class Reinforce(PolicyLoss):
    """REINFORCE returns with PPO clip; rewards optionally normalised."""

    name: Literal["reinforce"] = "reinforce"
    gamma: Share = 1.0
    norm_mean_type: Literal["batch", "group"] | None = None
    norm_std_type: Literal["batch", "group"] | None = None
    std_eps: NonNegative = 1e-6


AlgorithmConfig = Annotated[Union[GRPO, ReinforcePlusPlus, Reinforce], Field(discriminator="name")]


class RewardConfig(Section):
    """How the rows of one domain are scored. `name` is built in, or `function` an import path `package.module:callable`."""

    name: Literal["exact_match", "math", "reasoning_gym", "sort_digits", "function"] = "exact_match"
    function: str | None = None
    signature: Literal["auto", "verl", "trl", "hpcrl"] = "auto"
    timeout_s: PositiveFloat = 10.0
    num_processes: Positive = 1
    options: dict[str, Any] = {}


class EnvConfig(Section):
    """The environment of multi-turn rollouts: built in by name, or `class_path` an import path `package.module:Class`."""

    name: Literal["scripted", "class"] = "scripted"
    class_path: str | None = None
    max_turns: Positive = 2
    options: dict[str, Any] = {}


class TrainerConfig(Section):
    """The training engine and its optimizer."""

    engine: Literal["fsdp2"] = "fsdp2"
    lr: PositiveFloat = 1e-6
    min_lr: NonNegative = 0.0
    warmup_steps: Natural = 0
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    weight_decay: NonNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    max_tokens_per_micro_batch: Positive = 16384
    packing: Literal["auto", "require", "off"] = "auto"
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # compute; the master copy is model.dtype
    logits_chunk_tokens: Positive = 4096


class GeneratorConfig(Section):
    """The generation engine of each replica."""

    engine: Literal["native"] = "native"
    max_slots: Positive = 256
    burst_tokens: Positive = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_bucket: Positive = 32


class EvalConfig(Section):
    """Held-out evaluation on data.val."""

    num_prompts: Positive = 256
    temperature: NonNegative = 0.0
    max_new_tokens: Positive | None = None  # null: rollout.max_new_tokens
    num_examples: Natural = 5


class SFTConfig(Section):
    """The supervised pipeline: token-mean cross entropy on the answers."""

    batch_size: Positive = 64
    stop_score: Share | None = None  # end early once a sampled held-out score reaches this


class RoleConfig(Section):
    """How many ranks a role has, or with which role it shares ranks."""

    num_ranks: Positive | None = None
    colocate_with: Literal["controller", "trainer", "generator", "reference", "reward", "env"] | None = None
    tensor_parallel: Positive = 1
    min_ranks: Positive = 1  # reward, env: go on while so many remain


class LayoutConfig(Section):
    """Which ranks play which role. rank 0 is the controller."""

    name: str = "colocated"
    trainer: RoleConfig = RoleConfig(num_ranks=2)
    generator: RoleConfig = RoleConfig(colocate_with="trainer")
    reference: RoleConfig = RoleConfig(colocate_with="trainer")
    reward: RoleConfig = RoleConfig(colocate_with="trainer")
    env: RoleConfig = RoleConfig(colocate_with="trainer")


class Timeouts(Section):
    """Deadlines in seconds. Every wait of the program is under one of them."""

    start_s: PositiveFloat = 300.0  # process start to ready
    command_s: PositiveFloat = 900.0  # one command, from its sending to the last answer
    grace_s: PositiveFloat = 10.0  # from the end of the world to SIGKILL
    store_s: PositiveFloat = 30.0  # one store call; time until a lost store is noticed


class ClusterConfig(Section):
    """Where the program runs."""

    name: Literal["local", "slurm"] = "local"
    threads_per_rank: Positive = 1


class Config(Section):
    """Everything about a run."""

    pipeline: Literal["rlvr", "sft"] = "rlvr"
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "rlvr"
    run_dir: str = ""  # empty: runs/<run_name>
    seed: Natural = 0
    max_steps: Positive = 100
    save_every: Natural = 20  # 0: only at the end
    eval_every: Natural = 10  # 0: never
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    resume: Literal["auto", "fresh"] = "auto"
    deterministic: bool = False
    dry_run: bool = False
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = GRPO()
    reward: dict[str, RewardConfig] = {}
    env: EnvConfig | None = None
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    eval: EvalConfig = EvalConfig()
    sft: SFTConfig = SFTConfig()
    layout: LayoutConfig = LayoutConfig()
    timeouts: Timeouts = Timeouts()
    cluster: ClusterConfig = ClusterConfig()
