"""The typed schema of a run. Defaults live here; the files under conf/ hold values that differ from them.

The docstring of every key gives its meaning and unit; `python -m hpcrl.launch --help SECTION` prints them.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from hpcrl.config.cluster import ClusterConfig, LayoutConfig
from hpcrl.config.critic import CriticConfig
from hpcrl.config.data import DataConfig
from hpcrl.config.fake import FakeConfig
from hpcrl.config.reward_model import RewardModelConfig
from hpcrl.spec.fields import (
    NUMBER,
    Count,
    Float,
    Natural,
    NonNegative,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    Seed,
    Share,
)
from hpcrl.spec.kinds import AlgorithmSpec, PipelineSpec, Spec
from hpcrl.spec.policy_loss import PolicyLoss
from hpcrl.spec.table import SpecError, SpecTable
from hpcrl.spec.tables import ALGORITHMS, ENVS, GEN_ENGINES, PIPELINES, REWARDS, TRACKERS, TRAIN_ENGINES

S = TypeVar("S", bound=Section)
MOST_MEMBERS = (1 << 14) - 1
MOST_HELD_OUT = 1 << 20
"""Limits of a sample id (hpcrl.rollout.types)."""
LEAST_VOCABULARY = 259
"""Tokens of the tokenizer created for model.tiny: every byte and three special tokens."""


class TinyModel(Section):
    """A model created from these sizes with seeded random weights, used if model.path is not given (demos, tests)."""

    architecture: Literal["qwen2", "qwen3", "qwen3_moe", "llama", "gemma2"] = "qwen2"
    """Model family."""
    vocab_size: Annotated[int, Field(ge=LEAST_VOCABULARY, le=1 << 20), NUMBER] = 320
    """Rows of the embedding; the tokenizer is trained to at most this many tokens."""
    hidden_size: Annotated[int, Field(ge=1, le=1 << 16), NUMBER] = 64
    """Width of the hidden states."""
    num_layers: Annotated[int, Field(ge=1, le=1000), NUMBER] = 2
    """Decoder layers."""
    num_heads: Positive = 4
    """Query heads."""
    num_kv_heads: Positive = 2
    """Key and value heads; must divide num_heads."""
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20), NUMBER] = 192
    """Width of the feed-forward layer."""
    num_experts: Annotated[int, Field(ge=1, le=1 << 12), NUMBER] = 4
    """Experts per layer (qwen3_moe)."""
    max_position_embeddings: Positive = 4096
    """Maximum sequence length, tokens."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output projection."""
    seed: Seed = 0
    """Seed of the weights."""


class ModelConfig(Section):
    """The policy. `path` is a folder in HF layout; without a path, model.tiny is created inside the run folder."""

    path: str | None = None
    """Folder in HF layout (config.json, *.safetensors, tokenizer.json); null: create model.tiny."""
    tiny: TinyModel = TinyModel()
    """The model to create if no path is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's master weights."""


class DomainRolloutConfig(Section):
    """What differs for the prompts of one domain; null: as for all."""

    max_new_tokens: Positive | None = None
    """Maximum response length, tokens, also of held-out prompts; at most rollout.max_new_tokens."""
    filter_mean_low: Float | None = None
    """Keep only groups with a mean score above this value."""
    filter_mean_high: Float | None = None
    """Keep only groups with a mean score below this value."""
    filter_std: bool | None = None
    """Drop groups whose rewards are all equal."""


class RolloutConfig(Section):
    """A rollout batch: num_prompts groups of group_size responses."""

    num_prompts: Positive = 64
    """Prompts (groups) per step."""
    group_size: Annotated[int, Field(ge=1, le=MOST_MEMBERS), NUMBER] = 8
    """Responses per prompt."""
    max_new_tokens: Positive = 256
    """Maximum response length, tokens."""
    temperature: NonNegative = 1.0
    """Sampling temperature; must be above 0, since greedy responses to a prompt are all equal."""
    top_p: Annotated[float, Field(ge=1e-3, le=1), NUMBER] = 1.0
    """Nucleus sampling; 1: off."""
    top_k: Natural = 0
    """Most likely tokens kept; 0: off."""
    min_p: Share = 0.0
    """Minimum probability of a kept token, relative to the most likely token; 0: off."""
    stop: list[str] = []
    """Strings that end a response."""
    max_lag: NonNegative = 0
    """Maximum lag of a token's weights behind the weights being trained, steps; 0: synchronous; 0.5: lag 1 for half of
    a batch."""
    on_stale: Literal["wait", "cancel"] = "wait"
    """Groups that would become too old for max_lag: the batch waits for them, or they are cancelled and restarted,
    which is faster and favours short responses."""
    on_new_weights: Literal["continue", "recompute", "restart"] = "continue"
    """Responses in progress when weights arrive: continue with the KV cache of the old weights (log-probs of no single
    policy, token/mixed_weights_ratio), recompute the cache, or restart (at most max_attempts times)."""
    extra_prompts: Natural = 0
    """Redundant groups, generated beyond num_prompts and aborted once there are enough valid groups."""
    extra_members: Natural = 0
    """Redundant responses per prompt, beyond group_size; the first group_size responses count, which favours short
    responses (scheduler/kept_length, scheduler/aborted_length)."""
    siblings_together: bool = True
    """Send all responses to a prompt to one replica while it has room; false: each to the least loaded replica."""
    prompt_affinity: bool = False
    """Send a restarted prompt to the replica that has its prefix, if there is room."""
    routing: Literal["count", "expected_length"] = "count"
    """Unit of a replica's load: responses, or tokens expected from recent lengths in each response's domain."""
    spare_slow_replicas: bool = True
    """Give fewer responses to a replica that decodes more slowly than others under equal load
    (scheduler/replica_speed)."""
    min_replicas: Positive = 1
    """Generator replicas that must remain for the run to continue after losses."""
    max_attempts: Annotated[int, Field(ge=1, le=200), NUMBER] = 3
    """Attempts after which a prompt counts as failed."""
    filter_mean_low: Float | None = None
    """Keep only groups with a mean score above this value."""
    filter_mean_high: Float | None = None
    """Keep only groups with a mean score below this value."""
    filter_std: bool = False
    """Drop groups whose rewards are all equal."""
    domains: dict[str, DomainRolloutConfig] = {}
    """Domain -> max_new_tokens, filter_mean_low, filter_mean_high and filter_std of its prompts, where they differ."""
    max_generated_groups: Positive | None = None
    """Groups generated for a step before the run ends; null: 20 x num_prompts."""
    save_rollouts: bool = True
    """Write every step's rollouts to rollouts/step_NNNNNN (HDF5)."""

    def of_domain(self, domain: str) -> RolloutConfig:
        """The section as it is for the prompts of a domain."""
        own = self.domains.get(domain, DomainRolloutConfig()).model_dump(exclude_none=True)
        return self.model_copy(update=own) if own else self

    @property
    def most_generated_groups(self) -> int:
        """max_generated_groups, or its default."""
        return self.max_generated_groups or 20 * self.num_prompts


def _listed(table: SpecTable[Any], name: str) -> str:
    if name not in list(table) and ":" not in name:
        *others, last = map(repr, table)
        raise PydanticCustomError("literal_error", "{expected}", {"expected": f"{', '.join(others)} or {last}"})
    try:
        table[name]
    except SpecError as error:
        raise ValueError(str(error)) from error
    return name


def _once(names: list[str]) -> list[str]:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"every name once, {name} is there twice")
    return names


class RewardConfig(Section):
    """The reward of one domain's rows: built-in, or `function`, an import path or file."""

    name: Annotated[str, AfterValidator(functools.partial(_listed, REWARDS))] = "exact_match"
    """Built-in reward, function, or module:SPEC."""
    function: str | None = None
    """package.module:callable or file.py:callable, used with name=function."""
    signature: Literal["auto", "verl", "trl", "openrlhf", "hpcrl"] = "auto"
    """How the function is called; auto: determined by its parameter names."""
    timeout_s: Seconds = 10.0
    """Timeout for one response, or one group if the reward scores groups, seconds; then its samples have an error."""
    num_processes: Count = 1
    """Worker processes per reward rank."""
    concurrency: Count = 64
    """Concurrent calls per worker process of an asynchronous reward."""
    options: dict[str, Any] = {}
    """Arguments of the reward."""


class EnvConfig(Section):
    """The environment of one domain's prompts: built-in, or `class_path`, an import path. Key default: all other
    domains; null: no environment, a single response."""

    name: Annotated[str, AfterValidator(functools.partial(_listed, ENVS))] = "scripted"
    """Built-in environment, class, or module:SPEC."""
    class_path: str | None = None
    """package.module:Class, used with name=class."""
    max_turns: Positive = 2
    """Maximum model turns per episode."""
    add_reward: bool = False
    """Also score each episode with the domain's reward and add this to the environment's rewards."""
    num_threads: Count = 1
    """Environments that step concurrently on an env rank; more than 1 helps environments that wait (for a network or a
    process), whose code must be thread-safe."""
    timeout_s: Seconds | None = None
    """Timeout for one turn, seconds; then its sample ends with reward 0 and its thread is abandoned; null: half of
    timeouts.command_s."""
    options: dict[str, Any] = {}
    """Arguments of the environment."""


class LoRAConfig(Section):
    """Training low-rank adapters beside frozen linear layers (LoRA, arXiv 2106.09685) in place of all weights."""

    rank: Annotated[int, Field(ge=0, le=512), NUMBER] = 0
    """Rank of the adapters; 0: train all weights."""
    alpha: PositiveFloat = 32.0
    """The product of an adapter's two matrices is multiplied by alpha / rank."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Last parts of the names of the linear layers that get an adapter ([q_proj, v_proj]); null: all of the decoder.
    The embedding, the vocabulary projection, and routers and experts of a mixture never do."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


class TrainerConfig(Section):
    """The training engine and its optimizer."""

    engine: str = "fsdp2"
    """Training engine."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """For the matrices of layers; embedding, vocabulary projection, norms and biases have AdamW. muon: Muon, scaled to
    AdamW's learning rates (arXiv 2502.16982). adamw8bit: AdamW with moments in 8 bits (arXiv 2110.02861)."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Final learning rate of a schedule."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps of linear learning-rate warm-up."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning-rate schedule after the warm-up."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's beta_1 and beta_2."""
    eps: Annotated[float, Field(gt=0, le=1), NUMBER] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER] = 1.0
    """Maximum gradient norm, to which gradients are clipped; inf: off."""
    max_tokens_per_micro_batch: Positive = 16384
    """Maximum tokens of one forward and backward pass on one rank."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of computation, by default bfloat16 if the configuration asks for GPUs; the master weights have
    model.dtype. With lora, also the type of the frozen weights."""
    head_dtype: Literal["float32"] | None = None
    """Type in which the vocabulary projection is computed, also by the reference; null: param_dtype. float32 with
    param_dtype=bfloat16 brings log-probs closer to the generator's (set generator.head_dtype alike)."""
    router_replay: bool = False
    """Mixture of experts: choose for each response token the experts that the generator chose for it (arXiv
    2510.11370)."""
    max_mismatch: Share | None = None
    """Largest mean difference between the trainer's and the generator's probabilities of the tokens of a step that were
    written by the weights being trained (mismatch/diff/mean); a step above it ends the run unsaved; null: no bound."""
    logits_chunk_tokens: Positive = 4096
    """Tokens per chunk of the vocabulary projection."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters."""

    def section(self, kind: type[S]) -> S:
        """The section of the engine, which is of this type."""
        return _own_section(self, self.engine, TRAIN_ENGINES[self.engine], kind)


class GeneratorConfig(Section):
    """The generation engine of each replica."""

    engine: str = "native"
    """Generation engine."""
    max_slots: Positive = 256
    """Maximum responses that a replica decodes at once."""
    max_requests: Positive | None = None
    """Maximum responses assigned to a replica, including those that wait for a slot; null: twice max_slots."""
    burst_tokens: Positive = 16
    """Decode steps per burst, between two reads of the inbox."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and KV cache, by default bfloat16 if the configuration asks for GPUs."""
    head_dtype: Literal["float32"] | None = None
    """Type in which the vocabulary projection is computed; null: dtype. float32 with dtype=bfloat16 brings log-probs
    closer to the trainer's (set trainer.head_dtype alike)."""

    def section(self, kind: type[S]) -> S:
        """The section of the engine, which is of this type."""
        return _own_section(self, self.engine, GEN_ENGINES[self.engine], kind)

    @property
    def most_requests(self) -> int:
        """max_requests, or its default."""
        return self.max_requests or 2 * self.max_slots


class JudgeConfig(GeneratorConfig):
    """The model of the role judge and its engine, for rewards with a judge of `role: judge`. Its weights stay as they
    are."""

    path: str | None = None
    """Folder in HF layout, with a tokenizer that has a chat template."""
    max_slots: Positive = 32
    """Requests that a rank decodes at once."""
    max_requests: Positive | None = None
    """Requests that a rank accepts at once, including those that wait for a slot; others are told to come back; null:
    four times max_slots."""
    burst_tokens: Positive = 4
    """Decode steps between two looks for new requests."""
    max_prompt_tokens: Positive = 8192
    """Longest question, tokens; a longer one is refused, and costs the vote."""
    max_new_tokens: Positive = 1024
    """Longest answer, tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and KV cache, by default bfloat16 if the configuration asks for GPUs."""
    head_dtype: Literal["float32"] | None = None
    """Type in which the vocabulary projection is computed; null: dtype."""

    @property
    def most_requests(self) -> int:
        """max_requests, or its default."""
        return self.max_requests or 4 * self.max_slots


class EvalConfig(Section):
    """Held-out evaluation on data.val."""

    num_prompts: Annotated[int, Field(ge=1, le=MOST_HELD_OUT), NUMBER] = 256
    """Held-out prompts per evaluation."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0: greedy."""
    max_new_tokens: Positive | None = None
    """Maximum response length, tokens; null: rollout.max_new_tokens."""
    num_examples: Natural = 5
    """Sample completions shown before and after training."""


class TrackingConfig(Section):
    """Settings that all trackers share."""

    project: Annotated[str, Field(min_length=1, max_length=64)] = "hpcrl"
    """Project or experiment under which the tracker lists the run."""
    online: bool = False
    """Use the network during the run; false: keep everything in the run folder, and print at the end the command that
    uploads it."""
    timeout_s: Seconds = 60.0
    """Time after which a tracker that does not answer is given up with a warning, seconds."""


DeadlineSeconds = Annotated[float, Field(ge=1, le=1e7), NUMBER]


class Timeouts(Section):
    """Deadlines in seconds. Every wait of the program has one of them."""

    start_s: DeadlineSeconds = 300.0
    """From process start until all ranks are ready, seconds."""
    command_s: DeadlineSeconds = 900.0
    """One command, from sending to the last answer; checkpoint files without progress; seconds."""
    grace_s: DeadlineSeconds = 10.0
    """From the end of the run to SIGKILL of remaining processes, seconds."""
    store_s: DeadlineSeconds = 30.0
    """One store call, and the time until a lost store is detected, seconds."""


class Config(Section):
    """The configuration of a run."""

    pipeline: str = "rlvr"
    """The pipeline, which defines a step."""
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "rlvr"
    """Name of the run; default on the command line: the name of the experiment or pipeline, plus the debug mode."""
    run_dir: str = ""
    """Run folder; empty: runs/<run_name>."""
    seed: Seed = 0
    """Seed of data order and sampling."""
    max_steps: Positive = 100
    """Steps of the run."""
    save_every: Natural = 20
    """Steps between checkpoints; 0: only at the end."""
    eval_every: Natural = 10
    """Steps between held-out evaluations; 0: never."""
    keep_checkpoints: Annotated[int, Field(ge=2), NUMBER] = 2
    """Newest checkpoints kept."""
    resume: Literal["auto", "fresh"] = "auto"
    """auto: resume from the run folder; fresh: use a new name."""
    deterministic: bool = False
    """Bit-exact resume on the same layout, at reduced speed."""
    dry_run: bool = False
    """Check everything, print the plan, start nothing."""
    debug: Literal["none", "rollout_only", "train_only", "fake"] = "none"
    """Partial run: generate only, train only on another run's rollouts, or both with engines without a model (fake)."""
    check_weights: bool = False
    """Compare checksums of the weights of trainer and generators after every update; slow."""
    rollouts: str | None = None
    """Run folder whose rollouts are used by debug=train_only."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    data: DataConfig = DataConfig()
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout batches and sampling."""
    algorithm: PolicyLoss = PolicyLoss()
    """Advantages and policy loss."""
    reward: dict[str, RewardConfig] = {}
    """Domain -> reward; empty: the reward of the data source; key default: all other domains."""
    env: dict[str, EnvConfig | None] = {}
    """Domain -> environment of its prompts; empty: every rollout is a single response."""
    trainer: TrainerConfig = TrainerConfig()
    """Training engine."""
    critic: CriticConfig = CriticConfig()
    """The critic."""
    generator: GeneratorConfig = GeneratorConfig()
    """Generation engine."""
    judge: JudgeConfig = JudgeConfig()
    """The model that judges on ranks of the run."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """The model with a scalar head that scores on ranks of the run."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    layout: LayoutConfig = LayoutConfig()
    """Ranks of each role."""
    fake: FakeConfig = FakeConfig()
    """Engines of debug=fake."""
    trackers: Annotated[
        list[Annotated[str, AfterValidator(functools.partial(_listed, TRACKERS))]], AfterValidator(_once)
    ] = ["tensorboard"]
    """Trackers beside metrics.jsonl (tracking)."""
    tracking: TrackingConfig = TrackingConfig()
    """Trackers."""
    timeouts: Timeouts = Timeouts()
    """Deadlines."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the run executes."""

    @model_validator(mode="before")
    @classmethod
    def _environments_by_domain(cls, data: Any) -> Any:
        """Treat null, as ~env leaves it, as no environments."""
        return data | {"env": {}} if isinstance(data, dict) and data.get("env", {}) is None else data

    @model_validator(mode="before")
    @classmethod
    def _types_on_gpus(cls, data: Any) -> Any:
        """In float32, most of a GPU's speed and its attention kernels are not used."""
        if not isinstance(data, dict) or not _asks_for_gpus(data.get("cluster")):
            return data
        of_models = [(section, "dtype") for section in ("generator", "judge", "reward_model")]
        for section, key in (("trainer", "param_dtype"), *of_models):
            given = data.get(section, {})
            if isinstance(given, dict):
                data = data | {section: {key: "bfloat16"} | given}
        return data

    @property
    def pipeline_spec(self) -> PipelineSpec:
        """The specification of the pipeline."""
        return PIPELINES[self.pipeline]

    @property
    def algorithm_spec(self) -> AlgorithmSpec:
        """The specification of the algorithm."""
        return ALGORITHMS[str(getattr(self.algorithm, "name", ""))]

    @property
    def train_engine(self) -> str:
        """Name of the training engine that the ranks use."""
        return "fake" if self.debug == "fake" else self.trainer.engine

    @property
    def gen_engine(self) -> str:
        """Name of the generation engine that the ranks use."""
        return "fake" if self.debug == "fake" else self.generator.engine

    def section(self, kind: type[S]) -> S:
        """The section of the pipeline, which is of this type."""
        return _own_section(self, self.pipeline, self.pipeline_spec, kind)

    @property
    def reinforces(self) -> bool:
        """Whether the run learns from rewards."""
        return self.pipeline_spec.generates

    @property
    def generates(self) -> bool:
        """Whether the run generates the responses it learns from."""
        return self.reinforces and self.debug != "train_only"

    @property
    def learns(self) -> bool:
        """Whether the run changes the weights."""
        return self.pipeline_spec.learns and self.debug != "rollout_only"

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters that are trained; None if all weights are."""
        return self.trainer.lora if self.trainer.lora.rank and self.debug != "fake" else None

    @property
    def base_dtype(self) -> str:
        """The type in which the trainer keeps the weights beside which adapters stand, or all without adapters."""
        return self.model.dtype if self.lora is None else self.trainer.param_dtype

    @property
    def uses_reference(self) -> bool:
        """Whether the algorithm reads log-probs of the frozen initial policy."""
        return self.reinforces and self.learns and self.algorithm_spec.uses_reference(self.algorithm)

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm reads a critic's values."""
        return self.reinforces and self.learns and self.algorithm_spec.uses_critic(self.algorithm)

    @property
    def critic_engine(self) -> str:
        """Name of the training engine that the critic's ranks use."""
        return "fake" if self.debug == "fake" else self.critic.engine or self.trainer.engine

    @property
    def policy_waits(self) -> int:
        """Steps at the beginning in which the policy does not learn."""
        return self.critic.warmup_steps if self.uses_critic else 0

    def of_critic(self) -> Config:
        """The configuration that the critic's engine and its plan read: with the critic's model, engine and optimizer
        in place of the policy's."""
        critic, own = self.critic, ("lr", "min_lr", "lr_schedule", "weight_decay", "max_grad_norm")
        changes: dict[str, Any] = {name: getattr(critic, name) for name in own}
        changes |= {"engine": critic.engine or self.trainer.engine, "lr_warmup_steps": critic.lr_warmup_steps}
        changes |= {"lora": LoRAConfig(), "router_replay": False, "head_dtype": None}
        model = self.model.model_copy(update={"path": critic.path or self.model.path})
        return self.model_copy(update={"trainer": self.trainer.model_copy(update=changes), "model": model})

    def of_judge(self) -> Config:
        """The configuration that the judge's engine and its plan read: with the judge's model, engine, lengths and
        ranks in place of the policy's and its generator's."""
        judge = self.judge
        trainer = self.trainer.model_copy(update={"lora": LoRAConfig(), "router_replay": False})
        sampling = RolloutConfig(num_prompts=1, group_size=1, max_new_tokens=judge.max_new_tokens)
        changes: dict[str, Any] = {
            "model": self.model.model_copy(update={"path": judge.path}),
            "generator": judge,
            "trainer": trainer,
            "rollout": sampling,
            "data": self.data.model_copy(update={"max_prompt_tokens": judge.max_prompt_tokens, "val": None}),
            "env": {},
            "layout": self.layout.model_copy(update={"generator": self.layout.of("judge"), "offload": "never"}),
        }
        return self.model_copy(update=changes)

    def asks(self, role: str) -> list[str]:
        """The domains whose reward asks ranks of this role."""
        if self.debug == "fake" or not (self.generates or self.evaluates):  # then rewards are random, or none is given
            return []
        return [domain for domain, reward in self.reward.items() if role in REWARDS[reward.name].asks(reward.options)]

    @property
    def has_judge(self) -> bool:
        """Whether ranks of the run judge."""
        return bool(self.asks("judge"))

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates on held-out prompts."""
        return self.data.val is not None and self.eval_every > 0

    def env_of(self, domain: str) -> EnvConfig | None:
        """The environment of the prompts of a domain; None: a single response."""
        return self.env[domain] if domain in self.env else self.env.get("default")

    @property
    def envs(self) -> dict[str, EnvConfig]:
        """Every environment by the name of its section."""
        return {name: env for name, env in self.env.items() if env is not None}

    def turn_timeout_s(self, env: EnvConfig) -> float:
        """Maximum duration of an environment's turn, seconds."""
        return env.timeout_s or self.timeouts.command_s / 2

    @property
    def max_turns(self) -> int:
        """Maximum model turns of a rollout."""
        return max((env.max_turns for env in self.envs.values()), default=1)

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum sequence length in tokens: every turn may have a full prompt and a full response."""
        return self.max_turns * (self.data.max_prompt_tokens + self.max_response_tokens)

    @property
    def max_response_tokens(self) -> int:
        """Maximum response length of training and evaluation, tokens."""
        lengths = [self.rollout.max_new_tokens] if self.reinforces or self.evaluates else [0]
        if self.evaluates and self.eval.max_new_tokens is not None:
            lengths.append(self.eval.max_new_tokens)
        return max(lengths)


def _asks_for_gpus(cluster: Any) -> bool:
    """Whether a section `cluster`, not yet checked, names GPUs."""
    if not isinstance(cluster, dict):
        return False
    components = cluster.get("components") or {}
    parts = components.values() if isinstance(components, dict) else ()
    counts = [part.get("gpus_per_node", 0) for part in parts if isinstance(part, dict)]
    device = cluster.get("device", "auto")
    return device == "cuda" or (device == "auto" and any(count not in (0, "0") for count in counts))


def _own_section(at: Section, name: str, spec: Spec, kind: type[S]) -> S:
    section = getattr(at, section_name(name, spec))
    assert isinstance(section, kind), f"the section of {name} is not a {kind.__name__}"
    return section


def section_name(name: str, spec: Spec) -> str:
    """The key of a part's section: of one that is named by path the name in its specification."""
    return spec.name if ":" in name else name
