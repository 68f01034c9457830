"""The typed schema of a run, including the sections of the modules in this folder. Defaults are defined there and here;
files under conf/ contain values that differ from them.

The docstring of every key gives its meaning and unit; `python -m hpcrl.launch --help SECTION` prints them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from hpcrl.config.benchmark_sampling import sampled_benchmarks
from hpcrl.config.cluster import ClusterConfig, LayoutConfig
from hpcrl.config.data import DataConfig
from hpcrl.config.domains import EnvConfig, RewardConfig
from hpcrl.config.engines import GeneratorConfig, JudgeConfig, LoRAConfig, TrainerConfig
from hpcrl.config.fake import FakeConfig
from hpcrl.config.head_training import HeadTrainingConfig
from hpcrl.config.imitation import ImitationConfig
from hpcrl.config.loss_weights import LossWeights
from hpcrl.config.model import ModelConfig, ReferenceConfig
from hpcrl.config.own_objective import without_algorithm
from hpcrl.config.part_names import listed, once, own_section
from hpcrl.config.profiling import ProfileConfig
from hpcrl.config.rollout import EvalConfig, RolloutConfig
from hpcrl.config.scalar_heads import CriticConfig, RewardModelConfig
from hpcrl.config.teacher import TeacherConfig
from hpcrl.config.teacher_endpoint import TeacherEndpoint
from hpcrl.config.teacher_paths import teachers
from hpcrl.config.untrained import as_untrained
from hpcrl.spec.divergence import Divergence
from hpcrl.spec.fields import NUMBER, Natural, Positive, Seconds, Section, Seed
from hpcrl.spec.kinds import AlgorithmSpec, PipelineSpec, RowKind
from hpcrl.spec.policy_loss import SURROGATE_KEYS, PolicyLoss
from hpcrl.spec.table import SpecError
from hpcrl.spec.tables import ALGORITHMS, PIPELINES, REWARDS, TRACKERS, TRAIN_ENGINES

S = TypeVar("S", bound=Section)


def _step_or_word(value: Any) -> str:
    return "<word>" if isinstance(value, str) and not value.strip().lstrip("+-").isdigit() else "<step>"


# Tags keep an error in one branch of the union, as in hpcrl.config.data.
ResumeFrom = Annotated[
    Annotated[int, Field(ge=1), NUMBER, Tag("<step>")] | Annotated[Literal["latest"], Tag("<word>")],
    Discriminator(_step_or_word),
]


class TrackingConfig(Section):
    """Settings of all trackers."""

    project: Annotated[str, Field(min_length=1, max_length=64)] = "hpcrl"
    """Project or experiment under which the tracker lists the run."""
    online: bool = False
    """Use the network during the run; false: keep everything in the run folder, and print at the end the command that
    uploads it."""
    timeout_s: Seconds = 60.0
    """Time after which a tracker that does not answer is stopped with a warning, seconds."""


class TimelineConfig(Section):
    """The timeline of each step in the run folder."""

    enabled: bool = True
    """Record what every rank does, and when every sample is generated, scored and trained."""
    keep_steps: Positive = 50
    """Newest steps that are kept; of earlier ones, every step that this number divides."""


DeadlineSeconds = Annotated[float, Field(ge=1, le=1e7), NUMBER]


class Timeouts(Section):
    """Timeouts in seconds. Every wait of the program has one of them."""

    start_s: DeadlineSeconds = 300.0
    """From process start until all ranks are ready, seconds."""
    command_s: DeadlineSeconds = 900.0
    """One command, from sending to the last answer; checkpoint files without progress; seconds."""
    grace_s: DeadlineSeconds = 10.0
    """From the end of the run to SIGKILL of remaining processes, seconds."""
    store_s: DeadlineSeconds = 30.0
    """One store call; also the time within which a lost store, a host that is off, or a stopped rank is detected;
    seconds."""


class KeepBestConfig(Section):
    """The best checkpoint, which is kept in addition to the newest ones."""

    metric: str | None = None
    """Validation metric of metrics.jsonl, such as val/score/mean. A step whose evaluation is better than all before
    also saves a checkpoint, which is kept until a better one; null: off."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""


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
    """Steps between evaluations; 0: never."""
    keep_checkpoints: Annotated[int, Field(ge=2), NUMBER] = 2
    """Newest checkpoints kept."""
    prune_when_full: bool = True
    """Before a save that would not fit (free space, inodes, quota), delete the oldest checkpoints, but never the newest
    valid and the best one; false: keep them."""
    max_failed_saves: Natural = 10
    """Saves in a row that a full or failing file system may refuse before the run ends; each is tried again after the
    next step. The save before a stop and at the end must succeed; 0: the first failure ends the run."""
    keep_best: KeepBestConfig = KeepBestConfig()
    """The best checkpoint."""
    resume: Literal["auto", "fresh"] = "auto"
    """auto: resume from the run folder; fresh: use a new name."""
    resume_from: ResumeFrom | None = None
    """Begin a branch: continue from the checkpoint of this step, or the latest; further keys may change, and later work
    is set aside. Repeating the command goes on with the branch; null: resume from the newest checkpoint."""
    resume_reason: Annotated[str, Field(max_length=200)] = ""
    """Why a branch is begun, for the run's records; with another reason, an equal command begins another branch."""
    deterministic: bool = False
    """Bit-exact resume on the same layout, at reduced speed."""
    dry_run: bool = False
    """Check everything, print the plan, start nothing."""
    debug: Literal["none", "rollout_only", "train_only", "fake"] = "none"
    """Partial run: generate only, train only on another run's rollouts, or both with engines without a model (fake)."""
    check_weights: bool = False
    """Compare checksums of the trainer's and the generators' weights after every update; slow."""
    load_rollouts: str | None = None
    """Run folder whose rollouts are used by debug=train_only."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    data: DataConfig = DataConfig()
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout batches and sampling."""
    algorithm: PolicyLoss = PolicyLoss()
    """Advantages and policy loss."""
    loss: dict[str, LossWeights] = {}
    """Domain -> weights of what its tokens learn from; the key default is for all other domains; empty: every domain
    learns from its rewards only."""
    imitation: ImitationConfig = ImitationConfig()
    """Rows of answers beside the rollouts."""
    reward: dict[str, RewardConfig] = {}
    """Domain -> reward; the key default is for all other domains; empty: the reward of the data source."""
    env: dict[str, EnvConfig | None] = {}
    """Domain -> environment of its prompts; empty: every rollout is a single response."""
    trainer: TrainerConfig = TrainerConfig()
    """Training engine."""
    reference: ReferenceConfig = ReferenceConfig()
    """The reference."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher."""
    critic: CriticConfig = CriticConfig()
    """The critic."""
    generator: GeneratorConfig = GeneratorConfig()
    """Generation engine."""
    judge: JudgeConfig = JudgeConfig()
    """The model that judges on the run's ranks."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """The model with a scalar head that scores on the run's ranks."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on the validation prompts."""
    layout: LayoutConfig = LayoutConfig()
    """Ranks of each role."""
    fake: FakeConfig = FakeConfig()
    """Engines of debug=fake."""
    trackers: Annotated[
        list[Annotated[str, AfterValidator(functools.partial(listed, TRACKERS))]], AfterValidator(once)
    ] = ["tensorboard"]
    """Trackers in addition to metrics.jsonl (tracking)."""
    tracking: TrackingConfig = TrackingConfig()
    """Trackers."""
    timeline: TimelineConfig = TimelineConfig()
    """What ranks and samples did."""
    profile: ProfileConfig = ProfileConfig()
    """Profiles of single steps."""
    timeouts: Timeouts = Timeouts()
    """Deadlines."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the run executes."""

    @model_validator(mode="before")
    @classmethod
    def _environments_by_domain(cls, data: Any) -> Any:
        """Read null, the result of ~env, as no environments."""
        return data | {"env": {}} if isinstance(data, dict) and data.get("env", {}) is None else data

    @model_validator(mode="before")
    @classmethod
    def _without_training(cls, data: Any) -> Any:
        """Leave out what a run without trainer ranks does not have."""
        return as_untrained(data) if isinstance(data, dict) else data

    @model_validator(mode="before")
    @classmethod
    def _without_algorithm(cls, data: Any) -> Any:
        """Leave out the algorithm of a run whose pipeline has an objective of its own."""
        return without_algorithm(data) if isinstance(data, dict) else data

    @model_validator(mode="before")
    @classmethod
    def _types_on_gpus(cls, data: Any) -> Any:
        """Set bfloat16 for GPUs: float32 would not use most of their speed, nor their attention kernels."""
        if not isinstance(data, dict) or not _asks_for_gpus(data.get("cluster")):
            return data
        of_models = [(section, "dtype") for section in ("generator", "judge", "reward_model")]
        for section, key in (("trainer", "param_dtype"), *of_models):
            given = data.get(section, {})
            if isinstance(given, dict):
                data = data | {section: {key: "bfloat16"} | given}
        return data

    @model_validator(mode="before")
    @classmethod
    def _corrected_when_ahead(cls, data: Any) -> Any:
        """Set a correction for asynchronous runs: without one, training on stale responses learns far less
        (docs/measured.md)."""
        if not isinstance(data, dict) or not _generates_ahead(data.get("rollout")):
            return data
        default = cls.model_fields["algorithm"].get_default(call_default_factory=True)
        estimator = getattr(default, "advantage_estimator", None)
        given = data.get("algorithm", {"advantage_estimator": estimator} if estimator else {})
        if not isinstance(given, dict):
            return data
        surrogate = str(given.get("surrogate", "ppo"))
        if given.get("ratio_to") == "generator" and "ratio_to" in SURROGATE_KEYS.get(surrogate, ()):
            return data  # the loss's ratio corrects
        return data | {"algorithm": {"correction": "truncate"} | given}

    @model_validator(mode="before")
    @classmethod
    def _losses_of_pipeline(cls, data: Any) -> Any:
        """Set the weights of the pipeline where none are given."""
        if not isinstance(data, dict) or not (own := _pipeline_weights(data)):
            return data
        given = data.get("loss", {})
        if not isinstance(given, dict):
            return data
        loss: dict[str, Any] = {"default": {}} | given
        return data | {"loss": {name: own | keys if isinstance(keys, dict) else keys for name, keys in loss.items()}}

    @model_validator(mode="before")
    @classmethod
    def _benchmarks_sampled(cls, data: Any) -> Any:
        """Set samples and temperature of benchmarks that are usually answered several times."""
        if not isinstance(data, dict) or (sampled := sampled_benchmarks(data)) == data.get("eval", {}):
            return data
        return data | {"eval": sampled}

    @property
    def pipeline_spec(self) -> PipelineSpec:
        """The specification of the pipeline."""
        return PIPELINES[self.pipeline]

    @property
    def row_kind(self) -> RowKind:
        """What the rows of data.train have, in a pipeline that does not learn from rewards."""
        return self.pipeline_spec.row_kind(self)

    @property
    def algorithm_spec(self) -> AlgorithmSpec:
        """The specification of the algorithm; without an advantage estimator if no domain learns from its rewards."""
        spec = ALGORITHMS[str(getattr(self.algorithm, "advantage_estimator", ""))]
        return spec if self.has_policy_loss and not self.pipeline_spec.objective else spec.without_rewards()

    @property
    def train_engine(self) -> str:
        """Name of the training engine that the ranks use."""
        return "fake" if self.debug == "fake" else self.trainer.engine

    @property
    def gen_engine(self) -> str:
        """Name of the generation engine that the ranks use."""
        return "fake" if self.debug == "fake" else self.generator.engine

    def section(self, kind: type[S]) -> S:
        """The section of the pipeline, which has this type."""
        return own_section(self, self.pipeline, self.pipeline_spec, kind)

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the run trains on rewards."""
        return self.pipeline_spec.learns_from_rewards

    @property
    def has_algorithm(self) -> bool:
        """Whether the run learns from rewards by its section `algorithm`, not by an objective of its pipeline."""
        return self.learns_from_rewards and not self.pipeline_spec.objective

    @property
    def pairs_per_group(self) -> int:
        """Maximum pairs of responses to a prompt on which the run trains; 0: it trains on all responses."""
        return self.pipeline_spec.pairs_per_group(self)

    def loss_of(self, domain: str) -> LossWeights:
        """The weights of a domain's tokens."""
        return self.loss.get(domain, self.loss.get("default", LossWeights()))

    @property
    def weighs_losses(self) -> bool:
        """Whether some domain learns from other than its rewards."""
        return not all(weights.are_default for weights in self.loss.values())

    @property
    def imitates(self) -> bool:
        """Whether rows of answers are trained on beside the rollouts."""
        return self.imitation.data is not None and self.learns_from_rewards and self.learns

    @property
    def expert_plays(self) -> bool:
        """Whether experts of environments play some turns of the training episodes."""
        return self.imitation.expert_turns > 0 and self.learns_from_rewards and self.learns

    def of_imitation(self) -> Config:
        """The configuration of supervised training on the rows of imitation.data."""
        sft = own_section(self, "sft", PIPELINES["sft"], Section)
        data: dict[str, Any] = {"train": self.imitation.data, "val": None, "domain_interleave_probs": {}}
        changes: dict[str, Any] = {
            "pipeline": "sft",
            "sft": sft.model_copy(update={"batch_size": self.imitation.num_rows}),
            "data": self.data.model_copy(update=data),
        }
        return self.model_copy(update=changes)

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from the teacher; None without a teacher."""
        if not self.uses_teacher:
            return None
        teacher = self.teacher
        return Divergence(teacher.form, teacher.beta, teacher.top_k, self.rollout.temperature or 1.0)

    @property
    def has_policy_loss(self) -> bool:
        """Whether some domain may learn from its rewards."""
        return any(weights.policy for weights in (*self.loss.values(), self.loss_of("default")))

    @property
    def trains_head(self) -> bool:
        """Whether the trainer's model has a head with one output per token (PipelineSpec.trains_head)."""
        return self.pipeline_spec.trains_head

    @property
    def head_training(self) -> HeadTrainingConfig:
        """The section of a pipeline that trains such a head."""
        return self.section(HeadTrainingConfig)

    @property
    def generates(self) -> bool:
        """Whether the run generates the responses that it trains on."""
        return self.learns_from_rewards and self.debug != "train_only"

    @property
    def learns(self) -> bool:
        """Whether the run changes the weights."""
        return self.pipeline_spec.learns and self.debug != "rollout_only"

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters that are trained; None if all weights are trained."""
        return self.trainer.lora if self.trainer.lora.rank and self.debug != "fake" else None

    @property
    def published_lora(self) -> LoRAConfig | None:
        """The adapters that generators get and apply to frozen weights; None if they get whole weights."""
        return None if self.merges_adapters else self.lora

    @property
    def merges_adapters(self) -> bool:
        """Whether weights with adapters are merged for generators."""
        return self.lora is not None and self.lora.are_merged

    @property
    def base_dtype(self) -> str:
        """The trainer's type of frozen weights with adapters, or of all weights without."""
        return self.model.dtype if self.lora is None else self.trainer.param_dtype

    @property
    def uses_reference(self) -> bool:
        """Whether the algorithm or the pipeline reads the reference's log-probs."""
        if not self.learns:
            return False
        pipeline = self.pipeline_spec
        if "reference" in pipeline.roles or not self.has_algorithm:
            return "reference" in pipeline.roles or pipeline.uses_reference(self)
        algorithm = self.algorithm_spec
        return "reference" in algorithm.roles or algorithm.uses_reference(self.algorithm)

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the frozen weights to which the trainer adds adapters."""
        return self.lora is not None and self.reference.path is None

    def of_reference(self) -> Config:
        """The configuration that the reference's engine and its plan read: with the reference's model and without
        adapters."""
        model = self.model.model_copy(update={"path": self.reference.path or self.model.path})
        trainer = self.trainer.model_copy(update={"lora": LoRAConfig()}).of_another_model()
        return self.model_copy(update={"model": model, "trainer": trainer})

    @property
    def uses_teacher(self) -> bool:
        """Whether the pipeline needs a teacher, or some domain's tokens learn from one (loss.NAME.divergence)."""
        if not (self.learns and self.learns_from_rewards):
            return False
        asked = "teacher" in (*self.pipeline_spec.roles, *self.algorithm_spec.roles)
        return asked or any(weights.divergence for weights in self.loss.values())

    @property
    def teacher_endpoint(self) -> TeacherEndpoint | None:
        """The endpoint whose model is the teacher; None if ranks hold the teacher's model, or there is no teacher."""
        given = self.teacher.endpoint if self.uses_teacher and self.debug != "fake" else None
        return None if given is None or given.url is None else given

    @property
    def teacher_engine(self) -> str:
        """Name of the training engine that the teacher's ranks use."""
        return "fake" if self.debug == "fake" else self.teacher.engine or self.trainer.engine

    @property
    def teacher_is_trainer(self) -> bool:
        """Whether the run has a teacher, and the trainer's engine computes its values (teacher.source)."""
        return self.uses_teacher and self.teacher.is_trainer

    @property
    def teacher_prompt_tokens(self) -> int:
        """Maximum prompt length that the teacher reads, tokens."""
        longest = self.teacher.max_prompt_tokens if self.teacher.context is not None else None
        return longest or self.data.max_prompt_tokens

    def of_teacher(self, folder: str | None = None) -> Config:
        """The configuration that a teacher's engine and its plan read: with the teacher's model, engine, dtype and
        prompts, and without what only the policy's training needs. folder: None: that of the first teacher, or the
        policy's."""
        engine = self.teacher.engine or self.trainer.engine
        head = self.trainer.head_dtype if TRAIN_ENGINES[engine].float32_head else None
        changes = {"engine": engine, "lora": LoRAConfig(), "router_replay": False, "freeze": [], "head_dtype": head}
        trainer = self.trainer.model_copy(update=changes).of_another_model()
        folder = folder or next(iter(teachers(self.teacher)), self.model.path)
        own = {"path": folder, "dtype": self.trainer.param_dtype, "mtp": "drop"}
        data = self.data.model_copy(update={"max_prompt_tokens": self.teacher_prompt_tokens})
        changed = {"model": self.model.model_copy(update=own), "trainer": trainer, "data": data}
        return self.model_copy(update=changed)

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm reads a critic's values."""
        return self.learns_from_rewards and self.learns and self.algorithm_spec.uses_critic(self.algorithm)

    @property
    def critic_engine(self) -> str:
        """Name of the training engine that the critic's ranks use."""
        return "fake" if self.debug == "fake" else self.critic.engine or self.trainer.engine

    @property
    def policy_waits(self) -> int:
        """Initial steps that do not train the policy."""
        return self.critic.warmup_steps if self.uses_critic else 0

    def of_critic(self) -> Config:
        """The configuration for the critic's engine and its plan: with the critic's model, engine and optimizer instead
        of the policy's."""
        critic, own = self.critic, ("lr", "min_lr", "lr_schedule", "lr_decay_steps", "weight_decay", "max_grad_norm")
        changes: dict[str, Any] = {name: getattr(critic, name) for name in own}
        changes |= {"engine": critic.engine or self.trainer.engine, "lr_warmup_steps": critic.lr_warmup_steps}
        changes |= {"lora": LoRAConfig(), "router_replay": False, "head_dtype": None, "freeze": []}
        model = self.model.model_copy(update={"path": critic.path or self.model.path, "mtp": "drop"})
        trainer = self.trainer.model_copy(update=changes).of_another_model()
        return self.model_copy(update={"trainer": trainer, "model": model})

    def of_judge(self) -> Config:
        """The configuration for the judge's engine and its plan: with the judge's model, engine, lengths and ranks
        instead of the policy's and its generator's."""
        judge = self.judge
        trainer = self.trainer.model_copy(update={"lora": LoRAConfig(), "router_replay": False})
        sampling = RolloutConfig(num_prompts=1, group_size=1, max_new_tokens=judge.max_new_tokens)
        data = {"max_prompt_tokens": judge.max_prompt_tokens, "max_pixels": None, "val": None}
        changes: dict[str, Any] = {
            "model": self.model.model_copy(update={"path": judge.path}),
            "generator": judge,
            "trainer": trainer,
            "rollout": sampling,
            "data": self.data.model_copy(update=data),
            "env": {},
            "layout": self.layout.model_copy(update={"generator": self.layout.of("judge"), "offload": "never"}),
        }
        return self.model_copy(update=changes)

    def asks(self, role: str) -> list[str]:
        """The domains whose reward sends requests to this role's ranks."""
        if self.debug == "fake" or not self.responds:  # rewards are random, or there are none
            return []
        return [domain for domain, reward in self.reward.items() if role in REWARDS[reward.name].asks(reward.options)]

    @property
    def decoupling_eps(self) -> float | None:
        """The number added to standard deviations of decoupled rewards; None: the algorithm does not read them."""
        return self.algorithm_spec.decoupling_eps(self.algorithm) if self.learns_from_rewards else None

    def part_weights(self, domain: str) -> Mapping[str, float]:
        """The part weights of a domain's reward (RewardSpec)."""
        reward = self.reward.get(domain, self.reward.get("default"))
        return {} if reward is None else REWARDS[reward.name].part_weights(reward.options)

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates on validation prompts."""
        return self._has_validation and not self.pipeline_spec.validates_rows(self)

    @property
    def validates_rows(self) -> bool:
        """Whether the run computes its loss on rows of data.val."""
        return self._has_validation and self.pipeline_spec.validates_rows(self)

    @property
    def _has_validation(self) -> bool:
        return self.data.val is not None and (self.eval_every > 0 or not self.pipeline_spec.trains)

    @property
    def writes_responses(self) -> bool:
        """Whether the run responds to the prompts of data.train without training on the responses."""
        return self.pipeline_spec.writes_responses

    @property
    def responds(self) -> bool:
        """Whether the run generates responses, for whatever purpose."""
        return self.generates or self.evaluates or self.writes_responses

    def env_of(self, domain: str) -> EnvConfig | None:
        """The environment of a domain's prompts; None: a single response."""
        return self.env[domain] if domain in self.env else self.env.get("default")

    @property
    def envs(self) -> dict[str, EnvConfig]:
        """Every environment by its section's name."""
        return {name: env for name, env in self.env.items() if env is not None}

    def turn_timeout_s(self, env: EnvConfig) -> float:
        """Maximum duration of an environment's turn, seconds."""
        return env.timeout_s or self.timeouts.command_s / 2

    @property
    def max_turns(self) -> int:
        """Maximum model turns of a rollout."""
        return max((env.max_turns for env in self.envs.values()), default=1)

    @property
    def by_steps(self) -> bool:
        """Whether an environment has turns that are separate sequences."""
        return any(env.by_steps for env in self.envs.values())

    @property
    def max_sequence_turns(self) -> int:
        """Maximum model turns of a sequence."""
        return max((1 if env.by_steps else env.max_turns for env in self.envs.values()), default=1)

    @property
    def max_turn_tokens(self) -> int:
        """Maximum tokens of a full prompt and a full response."""
        if self.trains_head:
            return self.head_training.max_tokens + 1  # a token after the last, whose value is read
        return self.data.max_prompt_tokens + self.max_response_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum sequence length in tokens."""
        return max((self.sequence_tokens(env) for env in self.envs.values()), default=self.max_turn_tokens)

    @property
    def max_image_tokens(self) -> int:
        """Maximum tokens of an image: longer prompts are not used. Observations only end with their sequence."""
        return self.max_sequence_tokens if self.envs else self.data.max_prompt_tokens

    def sequence_tokens(self, env: EnvConfig) -> int:
        """Maximum sequence length in an environment, tokens: every turn may have a full prompt and a full response, up
        to the environment's own limit for the whole sequence."""
        full = (1 if env.by_steps else env.max_turns) * self.max_turn_tokens
        return min(full, env.max_sequence_tokens or full)

    @property
    def max_row_tokens(self) -> int:
        """Maximum tokens of a trained row: of a rollout, which may have several sequences, or of a row of a file."""
        rows = (
            env.max_turns * self.max_turn_tokens if env.by_steps else self.sequence_tokens(env)
            for env in self.envs.values()
        )
        return self._with_rows_of_files(max(rows, default=self.max_turn_tokens))

    @property
    def max_trained_tokens(self) -> int:
        """Maximum length of a trained sequence in tokens."""
        return self._with_rows_of_files(self.max_sequence_tokens)

    def _with_rows_of_files(self, generated: int) -> int:
        """The length of what is generated, in tokens, or the limit for rows of a file, if these are trained on."""
        limit = self.data.max_sequence_tokens
        if limit is None or self.trains_head:
            return generated
        if self.learns_from_rewards:
            return max(generated, limit) if self.imitates else generated
        return limit

    @property
    def max_response_tokens(self) -> int:
        """Maximum response length of training and evaluation, tokens."""
        lengths = [self.rollout.max_new_tokens] if self.learns_from_rewards or self.responds else [0]
        if self.evaluates and (longest := self.eval.longest_response) is not None:
            lengths.append(longest)
        return max(lengths)


def _pipeline_weights(data: dict[str, Any]) -> dict[str, float]:
    """PipelineSpec.loss_weights of the pipeline in unchecked values."""
    with contextlib.suppress(SpecError, TypeError):  # reported as an unknown pipeline
        return dict(PIPELINES[data.get("pipeline", "rlvr")].loss_weights)
    return {}


def _generates_ahead(rollout: Any) -> bool:
    """Whether a section `rollout`, not yet checked, has a max_staleness above 0."""
    try:
        return isinstance(rollout, dict) and float(rollout.get("max_staleness", 0)) > 0
    except (TypeError, ValueError):  # the key's type refuses it
        return False


def _asks_for_gpus(cluster: Any) -> bool:
    """Whether a section `cluster`, not yet checked, requests GPUs."""
    if not isinstance(cluster, dict):
        return False
    components = cluster.get("components") or {}
    parts = components.values() if isinstance(components, dict) else ()
    counts = [part.get("gpus_per_node", 0) for part in parts if isinstance(part, dict)]
    device = cluster.get("device", "auto")
    return device == "cuda" or (device == "auto" and any(count not in (0, "0") for count in counts))
