"""The typed schema of a run. Defaults live here; the files under conf/ hold values that differ from them.

Every key has a line that says what it means and in which unit: `python -m hpcrl.launch --help SECTION` prints them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from hpcrl.config.cluster import ClusterConfig, LayoutConfig, layout_class
from hpcrl.config.data import DataConfig
from hpcrl.config.fake import FakeConfig
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
from hpcrl.spec.problems import Path
from hpcrl.spec.table import SpecError, Table
from hpcrl.spec.tables import ALGORITHMS, ENVS, GEN_ENGINES, PIPELINES, REWARDS, TRAIN_ENGINES

S = TypeVar("S", bound=Section)
MOST_MEMBERS = 1 << 14
MOST_HELD_OUT = 1 << 20
"""What a sample id has room for (hpcrl.rollout.types)."""
LEAST_VOCABULARY = 259
"""Tokens of the tokenizer that is made for model.tiny: every byte and three special tokens."""


class TinyModel(Section):
    """A model made from these numbers with seeded random weights where model.path is not given (demos, tests)."""

    architecture: Literal["qwen2", "qwen3", "qwen3_moe", "llama", "gemma2"] = "qwen2"
    """The family."""
    vocab_size: Annotated[int, Field(ge=LEAST_VOCABULARY, le=1 << 20), NUMBER] = 320
    """Rows of the embedding; the tokenizer is trained to at most this many tokens."""
    hidden_size: Annotated[int, Field(ge=1, le=1 << 16), NUMBER] = 64
    """Width."""
    num_layers: Annotated[int, Field(ge=1, le=1000), NUMBER] = 2
    """Decoder layers."""
    num_heads: Positive = 4
    """Query heads."""
    num_kv_heads: Positive = 2
    """Key and value heads; divides num_heads."""
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20), NUMBER] = 192
    """Width of the feed-forward part."""
    num_experts: Annotated[int, Field(ge=1, le=1 << 12), NUMBER] = 4
    """Experts of a layer (qwen3_moe)."""
    max_position_embeddings: Positive = 4096
    """Longest sequence, tokens."""
    tie_word_embeddings: bool = True
    """Whether the output projection is the embedding."""
    seed: Seed = 0
    """Seed of the weights."""


class ModelConfig(Section):
    """The policy. `path` is a folder in HF layout; without one the tiny model is made inside the run folder."""

    path: str | None = None
    """Folder in HF layout (config.json, *.safetensors, tokenizer.json); null: make model.tiny."""
    tiny: TinyModel = TinyModel()
    """The model to make where no path is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The trainer's master copy of the weights."""


class RolloutConfig(Section):
    """What a rollout batch is: num_prompts groups of group_size responses."""

    num_prompts: Positive = 64
    """Prompts (groups) of a step."""
    group_size: Annotated[int, Field(ge=1, le=MOST_MEMBERS), NUMBER] = 8
    """Responses of a prompt."""
    max_new_tokens: Positive = 256
    """Longest response, tokens."""
    temperature: NonNegative = 1.0
    """Sampling temperature; above 0, since greedy responses to a prompt are all the same."""
    top_p: Annotated[float, Field(ge=1e-3, le=1), NUMBER] = 1.0
    """Nucleus; 1: off."""
    top_k: Natural = 0
    """Most likely tokens kept; 0: off."""
    min_p: Share = 0.0
    """Tokens kept by probability relative to the most likely one; 0: off."""
    stop: list[str] = []
    """Strings that end a response."""
    max_lag: NonNegative = 0
    """Steps a token may be behind the weights it trains; 0: synchronous; 0.5: half of a batch by one step."""
    on_stale: Literal["wait", "cancel"] = "wait"
    """Groups that get too old for max_lag on their way: the batch waits for them, or they are cancelled and start
    anew, which is faster and favours short responses."""
    on_new_weights: Literal["continue", "recompute", "restart"] = "continue"
    """Responses on their way when weights arrive: go on with the keys and values of the old ones, so that their
    log-probs are of no single policy (token/mixed_weights_ratio), compute these anew, or start anew (each max_attempts
    times at most)."""
    extra_prompts: Natural = 0
    """Redundant groups: generated beyond num_prompts, aborted once enough valid groups exist."""
    extra_members: Natural = 0
    """Redundant responses: generated to each prompt beyond group_size; the first group_size count, which favours short
    ones (scheduler/kept_length, scheduler/aborted_length)."""
    siblings_together: bool = True
    """Responses to a prompt go to one replica as long as it has room; false: each to the replica with the least."""
    prompt_affinity: bool = False
    """A prompt that starts anew goes to the replica that has its prefix, if there is room."""
    routing: Literal["count", "expected_length"] = "count"
    """What a replica's load is measured in: responses, or tokens expected from the recent lengths of their domains."""
    spare_slow_replicas: bool = True
    """A replica that decodes slower than the others, for what it carries, is given less (scheduler/replica_speed)."""
    min_replicas: Positive = 1
    """Generator replicas without which the run stops; lost ones above it are done without."""
    max_attempts: Annotated[int, Field(ge=1, le=200), NUMBER] = 3
    """Attempts at a prompt before it counts as failed."""
    filter_mean_low: Float | None = None
    """Keep only groups with a mean score above this."""
    filter_mean_high: Float | None = None
    """Keep only groups with a mean score below this."""
    filter_std: bool = False
    """Drop groups whose rewards are all equal."""
    max_generated_groups: Positive | None = None
    """Groups after which a step gives up; null: 20 x num_prompts."""
    save_rollouts: bool = True
    """Write every step's rollouts to rollouts/step_NNNNNN (HDF5)."""

    @property
    def most_generated_groups(self) -> int:
        """max_generated_groups, or what it is when it is not given."""
        return self.max_generated_groups or 20 * self.num_prompts


def _listed(table: Table[Any], name: str) -> str:
    if name not in list(table) and ":" not in name:
        *others, last = map(repr, table)
        raise PydanticCustomError("literal_error", "{expected}", {"expected": f"{', '.join(others)} or {last}"})
    try:
        table[name]
    except SpecError as error:
        raise ValueError(str(error)) from error
    return name


class RewardConfig(Section):
    """How the rows of one domain are scored: built in by name, or `function`, an import path or a file."""

    name: Annotated[str, AfterValidator(functools.partial(_listed, REWARDS))] = "exact_match"
    """Built-in reward, function, or module:SPEC."""
    function: str | None = None
    """package.module:callable or file.py:callable, with name=function."""
    signature: Literal["auto", "verl", "trl", "openrlhf", "hpcrl"] = "auto"
    """How the function is called; auto: by its parameter names."""
    timeout_s: Seconds = 10.0
    """Seconds for one response, or one group where the reward scores groups; after that its samples have an error."""
    num_processes: Count = 1
    """Worker processes of each reward rank."""
    concurrency: Count = 64
    """Calls that each worker process of an asynchronous reward waits for at once."""
    options: dict[str, Any] = {}
    """Arguments of the reward."""


class EnvConfig(Section):
    """The environment of one domain's prompts: built in by name, or `class_path`, an import path. Key default: of every
    domain that is not named; null: none, so that one response is all."""

    name: Annotated[str, AfterValidator(functools.partial(_listed, ENVS))] = "scripted"
    """Built-in environment, class, or module:SPEC."""
    class_path: str | None = None
    """package.module:Class, with name=class."""
    max_turns: Positive = 2
    """Model turns of an episode."""
    add_reward: bool = False
    """Score each episode with the domain's reward too and add that to the environment's own rewards."""
    num_threads: Count = 1
    """Environments of an env rank that step at once; more than 1 for those that wait (a network, a process), whose
    code must be fit for threads."""
    timeout_s: Seconds | None = None
    """Seconds for one turn; after that its sample ends with reward 0 and its thread is given up; null: half of
    timeouts.command_s."""
    options: dict[str, Any] = {}
    """Arguments of the environment."""


class TrainerConfig(Section):
    """The training engine and its optimizer."""

    engine: str = "fsdp2"
    """Training engine."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate (AdamW)."""
    min_lr: NonNegative = 0.0
    """Where a schedule ends."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's moments."""
    eps: Annotated[float, Field(gt=0, le=1), NUMBER] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER] = 1.0
    """Gradients are clipped to this norm; inf: off."""
    max_tokens_per_micro_batch: Positive = 16384
    """Tokens of one forward and backward on one rank."""
    packing: Literal["auto", "require", "off"] = "auto"
    """Several sequences in one row: auto where a probe at load agrees, require, off."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute; the master copy is model.dtype."""
    logits_chunk_tokens: Positive = 4096
    """Tokens of one chunk of the vocabulary projection."""

    def section(self, kind: type[S]) -> S:
        """The section of the engine, which is of this type."""
        return _own_section(self, self.engine, TRAIN_ENGINES[self.engine], kind)


class GeneratorConfig(Section):
    """The generation engine of each replica."""

    engine: str = "native"
    """Generation engine."""
    max_slots: Positive = 256
    """Responses a replica decodes at once."""
    max_requests: Positive | None = None
    """Responses a replica is given at once, those that wait there for a slot included; null: twice max_slots."""
    burst_tokens: Positive = 16
    """Decode steps between two looks at the inbox."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and KV cache."""
    kv_bucket: Positive = 32
    """KV cache lengths are rounded up to this many tokens."""

    def section(self, kind: type[S]) -> S:
        """The section of the engine, which is of this type."""
        return _own_section(self, self.engine, GEN_ENGINES[self.engine], kind)

    @property
    def most_requests(self) -> int:
        """max_requests, or what it is when it is not given."""
        return self.max_requests or 2 * self.max_slots


class EvalConfig(Section):
    """Held-out evaluation on data.val."""

    num_prompts: Annotated[int, Field(ge=1, le=MOST_HELD_OUT), NUMBER] = 256
    """Held-out prompts of one evaluation."""
    temperature: NonNegative = 0.0
    """0: greedy."""
    max_new_tokens: Positive | None = None
    """Longest response, tokens; null: rollout.max_new_tokens."""
    num_examples: Natural = 5
    """Sample completions shown before and after."""


Deadline = Annotated[float, Field(ge=1, le=1e7), NUMBER]


class Timeouts(Section):
    """Deadlines in seconds. Every wait of the program is under one of them."""

    start_s: Deadline = 300.0
    """Process start to ready, seconds."""
    command_s: Deadline = 900.0
    """One command, from its sending to the last answer; files of a checkpoint without progress; seconds."""
    grace_s: Deadline = 10.0
    """From the end of the world to SIGKILL, seconds."""
    store_s: Deadline = 30.0
    """One store call, and the time until a lost store is noticed, seconds."""


class Config(Section):
    """Everything about a run."""

    pipeline: str = "rlvr"
    """What a step does."""
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "rlvr"
    """Name of the run; from the command line its default is the experiment's or pipeline's name, and debug's mode."""
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
    """auto: go on where the run folder ends; fresh: take a new name."""
    deterministic: bool = False
    """Bit-exact resume on the same layout, at a cost in speed."""
    dry_run: bool = False
    """Check everything, print the plan, start nothing."""
    debug: Literal["none", "rollout_only", "train_only", "fake"] = "none"
    """Half a run: generate only, train only on another run's rollouts, or both with engines without a model (fake)."""
    rollouts: str | None = None
    """Run folder whose rollouts debug=train_only trains on."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    data: DataConfig = DataConfig()
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout batches and sampling."""
    algorithm: PolicyLoss = PolicyLoss()
    """Advantages and policy loss."""
    reward: dict[str, RewardConfig] = {}
    """Domain -> reward; empty: the source's own, key default: every other domain."""
    env: dict[str, EnvConfig | None] = {}
    """Domain -> environment of its prompts; empty: every rollout is one response."""
    trainer: TrainerConfig = TrainerConfig()
    """Training engine."""
    generator: GeneratorConfig = GeneratorConfig()
    """Generation engine."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    layout: LayoutConfig = LayoutConfig()
    """Ranks of each role."""
    fake: FakeConfig = FakeConfig()
    """Engines of debug=fake."""
    timeouts: Timeouts = Timeouts()
    """Deadlines."""
    cluster: ClusterConfig = ClusterConfig()
    """Where it runs."""

    @model_validator(mode="before")
    @classmethod
    def _environments_by_domain(cls, data: Any) -> Any:
        """null, as ~env leaves it, is none."""
        return data | {"env": {}} if isinstance(data, dict) and data.get("env", {}) is None else data

    @property
    def pipeline_spec(self) -> PipelineSpec:
        """What the pipeline says of itself."""
        return PIPELINES[self.pipeline]

    @property
    def algorithm_spec(self) -> AlgorithmSpec:
        """What the algorithm says of itself."""
        return ALGORITHMS[str(getattr(self.algorithm, "name", ""))]

    @property
    def train_engine(self) -> str:
        """The training engine that the ranks make."""
        return "fake" if self.debug == "fake" else self.trainer.engine

    @property
    def gen_engine(self) -> str:
        """The generation engine that the ranks make."""
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
    def evaluates(self) -> bool:
        """Whether the run evaluates on held-out prompts."""
        return self.data.val is not None and self.eval_every > 0

    def env_of(self, domain: str) -> EnvConfig | None:
        """The environment that the prompts of a domain have; None: one response is all."""
        return self.env[domain] if domain in self.env else self.env.get("default")

    @property
    def envs(self) -> dict[str, EnvConfig]:
        """Every environment by the name of its section."""
        return {name: env for name, env in self.env.items() if env is not None}

    def turn_timeout_s(self, env: EnvConfig) -> float:
        """Longest turn of an environment."""
        return env.timeout_s or self.timeouts.command_s / 2

    @property
    def max_turns(self) -> int:
        """Most model turns of a rollout."""
        return max((env.max_turns for env in self.envs.values()), default=1)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence in training or evaluation: every turn may have a full prompt and a full response."""
        return self.max_turns * (self.data.max_prompt_tokens + self.max_response_tokens)

    @property
    def max_response_tokens(self) -> int:
        """Longest response of training and evaluation, tokens."""
        lengths = [self.rollout.max_new_tokens] if self.reinforces or self.evaluates else [0]
        if self.evaluates and self.eval.max_new_tokens is not None:
            lengths.append(self.eval.max_new_tokens)
        return max(lengths)


def _own_section(at: Section, name: str, spec: Spec, kind: type[S]) -> S:
    section = getattr(at, _section_name(name, spec))
    assert isinstance(section, kind), f"the section of {name} is no {kind.__name__}"
    return section


def _section_name(name: str, spec: Spec) -> str:
    return spec.name if ":" in name else name


@dataclass(frozen=True)
class Named:
    """The parts that a run names by the path of their specification, `module:NAME`; empty: one of the table's."""

    pipeline: str = ""
    train_engine: str = ""
    gen_engine: str = ""
    algorithm: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Named:
        """What plain data names."""
        return cls(*(_path(data, *keys) for keys, _ in NAMED))


NAMED: tuple[tuple[tuple[str, ...], Table[Any]], ...] = (
    (("pipeline",), PIPELINES),
    (("trainer", "engine"), TRAIN_ENGINES),
    (("generator", "engine"), GEN_ENGINES),
    (("algorithm", "name"), ALGORITHMS),
)
"""Keys that choose a part with a section of its own, in the order of Named's fields."""


def unloadable(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """(key, what is wrong) of every part that is named by a path where no specification is."""
    for keys, table in NAMED:
        if path := _path(data, *keys):
            try:
                table[path]
            except SpecError as error:
                yield keys, str(error)


def _path(data: Any, *keys: str) -> str:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, str) and ":" in data else ""


@lru_cache
def config_class(named: Named = Named()) -> type[Config]:
    """Config with the choices and sections of everything that the tables list, and of what is named by its path.

    SpecError where a specification cannot be loaded."""
    pipelines = _choices(PIPELINES, named.pipeline)
    trainer = _engine(TrainerConfig, _choices(TRAIN_ENGINES, named.train_engine))
    generator = _engine(GeneratorConfig, _choices(GEN_ENGINES, named.gen_engine))
    layout = layout_class()
    algorithms = [_named(name, spec) for name, spec in _choices(ALGORITHMS, named.algorithm).items()]
    union = functools.reduce(operator.or_, algorithms)  # a union of one is that one, which needs no discriminator
    algorithm: Any = Annotated[union, Field(discriminator="name")] if len(algorithms) > 1 else union
    fields: dict[str, Any] = {
        "pipeline": (_literal(pipelines), _described(Config, "pipeline")),
        "algorithm": (algorithm, Field(algorithms[0](), description=Config.model_fields["algorithm"].description)),
        "layout": (layout, Field(layout(), description=Config.model_fields["layout"].description)),
        "trainer": (trainer, Field(trainer(), description=Config.model_fields["trainer"].description)),
        "generator": (generator, Field(generator(), description=Config.model_fields["generator"].description)),
        **_sections(Config, pipelines),
    }
    return create_model("Config", __base__=Config, __doc__=Config.__doc__, **fields)


def _choices(table: Table[Any], path: str) -> dict[str, Spec]:
    """The entries that a key may name."""
    found = {name: spec for name, spec in table.items() if getattr(spec, "offered", True)}
    return found | ({path: table[path]} if path else {})


def _named(name: str, spec: Spec) -> type[Section]:
    """The section of an algorithm, with the name by which it is chosen."""
    assert spec.section is not None, f"{name} has a section"
    if "name" in spec.section.model_fields:
        return spec.section
    key: Any = (Literal[name], Field(name, description="The algorithm."))  # type: ignore[valid-type]
    return create_model(spec.section.__name__, __base__=spec.section, __doc__=spec.section.__doc__, name=key)


def _engine(base: type[S], engines: Mapping[str, Spec]) -> type[S]:
    engine = (_literal(engines), _described(base, "engine"))
    fields: dict[str, Any] = {"engine": engine, **_sections(base, engines)}
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)


def _sections(base: type[Section], entries: Mapping[str, Spec]) -> dict[str, Any]:
    """The sections of the entries that have keys of their own. SpecError where one would hide what all have."""
    sections: dict[str, Any] = {}
    for name, spec in entries.items():
        if spec.section is not None:
            key = _section_name(name, spec)
            if key in base.model_fields or hasattr(base, key):
                raise SpecError(f"{name}: {base.__name__} has a key or a method {key} of its own; choose another name")
            sections[key] = (spec.section, Field(spec.section(), description=spec.about))
    return sections


def _described(base: type[Section], key: str) -> Any:
    field = base.model_fields[key]
    return Field(field.default, description=field.description)


def _literal(names: Mapping[str, Any]) -> Any:
    return Literal[tuple(names)]
