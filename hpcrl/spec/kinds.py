"""Specifications of parts, one class per kind. Their functions get the Config of a run that uses the part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

from hpcrl.spec.division import Division
from hpcrl.spec.fields import Section
from hpcrl.spec.policy_loss import POLICY_GRADIENT, PolicyLoss
from hpcrl.spec.problems import Path, Problem
from hpcrl.spec.table import load
from hpcrl.spec.weight_layout import RequiredSlices, all_weights

Check = Callable[[Any], Iterable[Problem]]
RowKind = Literal["answers", "pairs", "labelled"]
"""What the rows of a pipeline that does not learn from rewards have (docs/data.md)."""


def _nothing(config: Any) -> Iterable[Problem]:
    return ()


def _no_files(config: Any, resumes: bool) -> Iterable[Problem]:
    return ()


def _unsplit(config: Any, num_ranks: int) -> Division:
    return Division.unsplit(num_ranks)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Common fields of the specifications of all kinds."""

    about: str
    """One line for help and documents."""
    make: str
    """`module:NAME` of the part or its factory, imported on demand."""
    section: type[Section] | None = None
    """The part's keys with their defaults and meanings."""
    check: Check = _nothing
    """Problems of a configuration that uses the part."""
    name: str = "own"
    """Name of its section if the configuration names the part by its path instead of a table's name."""
    section_key: str = ""
    """Key of its section if this is not the part's name in a table, which another section has."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Module that must be installed -> extra of hpcrl, or else package, that installs it."""
    needs_on_gpu: Mapping[str, str] = field(default_factory=dict)
    """Further module that must be installed if its ranks compute on GPUs -> how to install it."""
    tested_versions: Mapping[str, str] = field(default_factory=dict)
    """Module -> beginning of the versions with which the part was tested; the plan mentions any other version."""
    required_versions: Mapping[str, str] = field(default_factory=dict)
    """Module of `needs` -> beginning of the versions whose internals the part uses; another version is refused."""
    not_on_amd: str = ""
    """Why its ranks cannot compute on AMD's GPUs; empty if no reason is known."""
    notes: Callable[[Any], Iterable[str]] = lambda config: ()
    """Notes about the part for a configuration that uses it: lines of the plan."""
    roles: tuple[str, ...] = ()
    """Roles that a run needs because of this part, in addition to the roles needed in any case (RoleSpec.needed)."""
    resume_keys: tuple[str, ...] = ()
    """Keys of its section that may change when a run is resumed, since they do not change its results."""

    def missing_packages(self) -> list[str]:
        """The extras or packages to install before it can be used."""
        return sorted({extra for module, extra in self.needs.items() if not _installed(module)})

    def missing_on_gpu(self) -> str:
        """What to install here before it can compute on GPUs; empty if nothing is missing."""
        missing = {module: way for module, way in self.needs_on_gpu.items() if not _installed(module)}
        return "; ".join(f"on a GPU it needs {module}: {way}" for module, way in missing.items())

    def load(self) -> Any:
        """The object that `make` names. SpecError if it cannot be imported."""
        return load(self.make, self.about)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@dataclass(frozen=True, kw_only=True)
class PipelineSpec(Spec):
    """`make` is called on rank 0 with the run (hpcrl.controller.context.Run, hpcrl.controller.rank0_run.Rank0Run,
    hpcrl.controller.evaluation_run.EvaluationRun or hpcrl.controller.generation_run.GenerationRun)."""

    learns_from_rewards: bool = True
    """Whether it learns from generated responses and their rewards; otherwise from the answers of its rows."""
    learns: bool = True
    """Whether it changes the weights."""
    trains: bool = True
    """Whether it has trainer ranks. Without them it only evaluates: generators load the model's folder themselves,
    `make` gets a hpcrl.controller.evaluation_run.EvaluationRun, and keys of training are not read."""
    writes_responses: bool = False
    """Whether, without trainer ranks, it responds to data.train instead of data.val; `make` gets a GenerationRun."""
    rank0_only: bool = False
    """Whether rank 0 runs it without other ranks, engines, data and steps; it then reads none of their keys."""
    inspect: Callable[[Any, bool], Iterable[Problem]] = _no_files
    """`inspect(config, resumes)`: problems of the files that it reads and writes, found before anything starts."""
    needs_reward: bool = True
    """Whether every prompt needs a reward; otherwise a domain without one scores 0 (the reward `none`)."""
    batch_size: Callable[[Any], int] | None = None
    """Rows of a step, if the rows are not prompts with groups of responses."""
    rows: RowKind | Callable[[Any], RowKind] = "answers"
    """What its rows have, if it does not learn from rewards, or a function of the configuration that says it: answers;
    pairs of a chosen and a rejected answer (hpcrl.data.pairs), which become two sequences with one group id, first the
    chosen one (field `chosen`), on one rank in one micro-batch; or answers with a label (hpcrl.data.labelled), which
    becomes the field `chosen`. A function must need only the pipeline's own section."""
    objective: str = ""
    """`module:NAME` of the objective if the run has no algorithm, also if it learns from rewards; called with the
    pipeline's section if it takes an argument."""
    uses_reference: Callable[[Any], bool] = lambda config: False
    """Whether it reads the reference's log-probs, if this depends on the configuration (otherwise see `roles`)."""
    validates_rows: Callable[[Any], bool] = lambda config: False
    """Whether data.val has rows like data.train, on which it computes its loss, instead of prompts."""
    pairs_per_group: Callable[[Any], int] = lambda config: 0
    """Maximum pairs of a better and a worse response to each prompt, by reward, on which it trains
    (hpcrl.rollout.preferences); 0: it trains on all responses."""
    unread: Callable[[Any], Iterable[tuple[Path, Path, str]]] = lambda config: ()
    """(path of a key that it does not read, the key that is the cause, reason)."""
    trains_head: bool = False
    """Whether the trainer's model has a head with one output per token (TrainEngineSpec.make_critic) instead of a
    vocabulary projection. Its section is a hpcrl.config.head_training.HeadTrainingConfig, and its rows are those of
    hpcrl.data.head_rows, also in data.val (validates_rows)."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Its defaults for the keys of the section loss (hpcrl.config.loss_weights) that differ from the section's."""
    work: Callable[[Any], str] | None = None
    """The plan's description of a pipeline without steps."""
    methods: Callable[[Any], Iterable[str]] = lambda config: ()
    """What it learns by, in the plan's words, in addition to an algorithm and a teacher."""

    def row_kind(self, config: Any) -> RowKind:
        """What the rows of this configuration have."""
        return self.rows if isinstance(self.rows, str) else self.rows(config)


@dataclass(frozen=True, kw_only=True)
class RoleSpec(Spec):
    """`make` is called with the rank (hpcrl.workers.role.Rank) and returns a Role."""

    needed: Callable[[Any], bool] = lambda config: False
    """Whether a run of this configuration has ranks of this role even if none of its parts needs them (Spec.roles)."""
    done_by_others: Callable[[Any], bool] = lambda config: False
    """Whether ranks of another role do its work; then it has no ranks, even if a part of the run needs them."""
    num_ranks: int | None = None
    colocate_with: str | None = "trainer"
    """Defaults of `num_ranks` and `colocate_with` in the role's section of the layout."""
    holds_model: bool = False
    """Whether its ranks hold (a part of) a model: they have a GPU, and the plan counts their memory."""
    plan: str = ""
    """`module:NAME` of parts(config, shape, num_ranks) -> list[Part] (hpcrl.planner.memory_parts): the memory of its
    fullest rank during its work, if this does not depend on other roles on the rank."""
    division: Callable[[Any, int], Division] = _unsplit
    """`division(config, num_ranks)`: how its ranks divide rows and parameters. DivisionError if that is impossible."""
    owns_default_group: bool = False
    """Whether its engine uses the default process group; two such roles share all their ranks or none."""
    forms_replicas: bool = False
    """Whether its ranks form replicas of `tensor_parallel` ranks."""
    serves: bool = False
    """Whether its ranks answer requests of rewards (hpcrl.workers.role.Serves), and the question `load`."""
    peers: tuple[str, ...] = ()
    """Roles whose ranks it communicates with, in addition to the controller."""
    min_ranks: Callable[[Any], int] | None = None
    """Minimum number of its ranks for a run to continue; None: the run ends with the first lost rank."""
    imports: Callable[[Any], str] = lambda config: ""
    """The slowest module that its ranks import; all of them import it in parallel before the rendezvous."""


ADAMW = {"adamw": Spec(about="AdamW, torch's own.", make="torch.optim:AdamW")}


@dataclass(frozen=True, kw_only=True)
class TrainEngineSpec(Spec):
    """`make(config, model_path, total_steps, trainable)`, called by all its ranks, returns a TrainEngine
    (hpcrl.engines.train.training_engine); total_steps counts the optimizer steps of the run.

    Its section is trainer.NAME.
    """

    division: Callable[[Any, int], Division] = _unsplit
    """`division(config, num_ranks)`: which of its ranks work on the same rows, hold outputs and publish parameters.
    DivisionError if the configuration does not allow this number of ranks."""
    plan: str = ""
    """`module:NAME` of its TrainPlan (hpcrl.planner.trainer); empty: its memory is not known."""
    unsupported: Callable[[Any, Mapping[str, Any]], Iterable[str]] = lambda section, model: ()
    """`unsupported(section, config.json)`: reasons why it cannot train this model with this section; each continues
    "the NAME trainer ...". Reported before anything starts, with the engines that can train the model."""
    unsharded: Callable[[Any, int], bool] = lambda config, num_ranks: False
    """Whether its engine on this many ranks has plain parameters that a generator in the same process can share
    (hpcrl.engines.train.training_engine.LocalWeights)."""
    computes: frozenset[str] = frozenset()
    """The optional outputs (hpcrl.algorithms.interface.Outputs) that the engine computes for an objective."""
    teaches: frozenset[str] = frozenset({"sampled"})
    """The forms of a divergence (hpcrl.spec.divergence) for which it can be a teacher's engine; all but `sampled` need
    the methods of hpcrl.engines.train.training_engine.Teaches."""
    deterministic: bool = False
    """Whether its results can be bitwise reproducible (deterministic=true)."""
    float32_head: bool = False
    """Whether it can compute the vocabulary projection in float32 in a bfloat16 model (trainer.head_dtype)."""
    optimizers: Mapping[str, Spec] = field(default_factory=lambda: ADAMW)
    """The values of trainer.optimizer that it supports."""
    exchanges_state: bool = False
    """Whether it resumes with AdamW's state from checkpoints of other engines that do, and they from its own
    (hpcrl.engines.train.stored_state)."""
    exchanges_adapters: bool = False
    """Whether this includes checkpoints of adapters."""
    segments: bool = False
    """Whether it computes the segments of a row (hpcrl.rollout.batch.Batch) separately, for episodes by steps."""
    policy_keys: tuple[str, ...] = ()
    """Keys of its section that have their default for a critic and for a reference with another model."""
    router_replay: bool = False
    """Whether it can choose the experts that the generator chose (the field `routes`, hpcrl.engines.expert_routes)."""
    media: frozenset[str] = frozenset()
    """Kinds of media (hpcrl.spec.media) that rows may have."""
    freezes: bool = False
    """Whether it can leave parameters untrained (trainer.freeze)."""
    trains_mtp: bool = False
    """Whether it can train a model's multi-token prediction layers (model.mtp=train)."""
    lora: bool = False
    """Whether it can train adapters of frozen weights (hpcrl.engines.train.training_engine.TrainsAdapters)."""
    make_critic: str = ""
    """`module:NAME` of make_critic(config, model_path, total_steps), which all ranks of a critic call with
    Config.of_critic(), and all trainer ranks of a pipeline that trains a head (PipelineSpec.trains_head) with the run's
    configuration; it returns a ValueEngine (hpcrl.engines.train.training_engine). Empty: it has no value head."""
    adapts_critic: bool = False
    """Whether this engine can train adapters of the frozen weights below a head, with the head itself."""
    selectable: bool = True
    """Whether trainer.engine may name it."""

    def load_critic(self) -> Any:
        """The object that `make_critic` names. SpecError if it cannot be imported."""
        return load(self.make_critic, f"the critic of: {self.about}")


@dataclass(frozen=True, kw_only=True)
class GenEngineSpec(Spec):
    """`make(config, model_path, tokenizer, replica)`, called by every rank of a replica (ReplicaRanks), returns a
    GenEngine without weights (both hpcrl.engines.gen.generation_engine).

    Its section is generator.NAME.
    """

    required_slices: Callable[[Any, Any, str, tuple[int, ...], int, int], RequiredSlices] = all_weights
    """`need(config, model, name, shape, index, num_ranks)`: the required shard of this weight for rank `index` of a
    replica's num_ranks. `model` is the ModelShape (hpcrl.models.shape), None if its parameters are not known.
    load_weights() gets full-shape tensors for each weight of which this rank needs a shard; values outside are
    undefined."""
    families: tuple[str, ...] | None = None
    """Model families it runs, as config.json's model_type; None: all."""
    unsupported: Callable[[Mapping[str, Any], int], Iterable[str]] = lambda model, longest: ()
    """`unsupported(config.json, tokens of the longest sequence)`: features of a model of its families that it lacks."""
    tensor_parallel: bool = False
    """Whether a replica may have several ranks."""
    plan: str = ""
    """`module:NAME` of cache(config, shape) -> (bytes of the KV cache with all slots in use, minimum bytes with which
    it can run, or None); empty: the plan assumes the full length for each slot."""
    decoding_plan: str = ""
    """`module:NAME` of bytes(config, shape) -> bytes of a layer's products while it decodes, if these can be more than
    those of a prefill."""
    memory_share: Callable[[Any], float] = lambda config: 1.0
    """Maximum share of a GPU's memory for its weights, its working memory and its KV cache together."""
    check_sizes: str = ""
    """`module:NAME` of check(config, shape) -> iterator of Problem, for its section and a model of this shape."""
    recompute: bool = False
    """Whether it can recompute the KV cache of running responses (rollout.on_new_weights=recompute)."""
    deterministic: bool = False
    """Whether a response's bits depend only on its request (deterministic=true)."""
    float32_head: bool = False
    """Whether it can compute the vocabulary projection in float32 in a bfloat16 model (generator.head_dtype)."""
    keeps_weights: bool = False
    """Whether it can keep some weights in an update (hpcrl.engines.gen.generation_engine.KeepsWeights)."""
    shares_weights: bool = False
    """Whether it can read weights from a trainer's parameters (hpcrl.engines.gen.generation_engine.SharesWeights)."""
    records_routes: bool = False
    """Whether it can record the experts that it chooses (the field `routes`, hpcrl.engines.expert_routes)."""
    media: frozenset[str] = frozenset()
    """Kinds of media (hpcrl.spec.media) that it accepts with a prompt (Request.media)."""
    media_families: tuple[str, ...] | None = None
    """Values of model_type of models with which it accepts media; None: of all models that it runs."""
    kept_image_tokens: int = 0
    """Maximum tokens of images whose features it keeps for later prefills; a single larger image is kept as well."""
    reserves_for_images: bool = False
    """Whether it reserves memory for kept_image_tokens and an image of maximum size, whatever images the rows have."""
    lora: bool = False
    """Whether it can apply adapters to the weights of the model's folder (trainer.lora)."""
    several_in_process: bool = False
    """Whether a process can have two engines of this kind, for a generator and a judge."""
    sleeps: bool = False
    """Whether it releases its memory while the trainer works on the same GPU."""
    shows_peers: Callable[[Any], bool] = lambda config: False
    """Whether a rank must see, after its own GPU, the GPUs of its replica's other ranks on the node."""
    selectable: bool = True
    """Whether generator.engine may name it."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(Spec):
    """An advantage estimator, which `make(section)` makes, and an objective (hpcrl.algorithms.interface)."""

    section: type[PolicyLoss]
    objective: str
    """`module:NAME` of the objective, called with the section, the temperature of the rollouts and, if the run learns
    from one, the divergence from a teacher (hpcrl.spec.divergence)."""
    weighs_losses: bool = False
    """Whether an objective of its own reads the fields policy_weights, ce_weights and divergence_weights."""
    outputs: Callable[[Any], frozenset[str]] = lambda section: section.outputs
    """The optional outputs of the engine that its objective needs or logs (hpcrl.algorithms.interface.Outputs)."""
    uses_reference: Callable[[Any], bool] = lambda section: section.uses_reference
    """Whether it needs the reference policy's log-probs."""
    uses_critic: Callable[[Any], bool] = lambda section: False
    """Whether it needs a critic's values."""
    compares_group: Callable[[Any], bool] = lambda section: False
    """Whether the advantage estimator compares the responses to a prompt, so a group needs at least two."""
    greedy_baseline: bool = False
    """Whether every prompt gets one more response, decoded greedily, whose reward the advantage estimator reads
    (RewardTable.baselines) and which is not trained on."""
    decoupling_eps: Callable[[Any], float | None] = lambda section: None
    """The number added to standard deviations of decoupled rewards (hpcrl.rollout.scheduling.policies), which the
    advantage estimator reads (RewardTable.decoupled); None: it does not read them."""

    def without_rewards(self) -> AlgorithmSpec:
        """The same objective with advantages of 0."""
        return replace(
            self,
            make="hpcrl.algorithms.no_advantage:NoAdvantage",
            uses_critic=lambda section: False,
            compares_group=lambda section: False,
            greedy_baseline=False,
            decoupling_eps=lambda section: None,
        )

    @property
    def reads_weights(self) -> bool:
        """Whether its objective reads the weights of the section loss."""
        return self.weighs_losses or self.objective == POLICY_GRADIENT


@dataclass(frozen=True, kw_only=True)
class PairLossSpec(Spec):
    """A loss of pipeline=dpo. `make(chosen, rejected, section)` gets float32 [P] scores of P pairs and returns the
    pairs' losses [P] (hpcrl.algorithms.pairs.objective); for `labelled` losses it is `make(ratios, chosen, kl,
    section)`."""

    keys: tuple[str, ...] = ()
    """Keys of the section that not all losses read, and this one does."""
    beta: float = 0.1
    """Default of `beta`."""
    sft_weight: float = 0.0
    """Default of `sft_weight`."""
    reference: bool = True
    """Whether scores are ratios to the reference's log-probs."""
    per_token: bool = False
    """Whether scores are always means per token."""
    labelled: bool = False
    """Whether it is a loss of single answers that are labelled good or bad."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec(Spec):
    """`make` gets a domain's RewardConfig and returns a Reward (hpcrl.rewards.reward); the section types its
    options."""

    compares_answer: bool = False
    """Whether it needs the row's answer."""
    asks: Callable[[Mapping[str, Any]], Iterable[str]] = lambda options: ()
    """`asks(options)`: roles to whose ranks it sends requests. The options are unchecked and may have any type."""
    shown_images: Callable[[Mapping[str, Any], bool], bool] = lambda options, judge_sees: False
    """`shown_images(options, judge_sees)`: whether it gets the images of prompts (RewardItem.images). judge_sees: the
    run's ranks of the role judge take images. The options are unchecked."""
    imports_code: str = ""
    """The key of RewardConfig that names user code, which is imported in worker processes only."""
    scores_in_unit_interval: bool = True
    """Whether scores are between 0 and 1."""
    part_weights: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda options: {}
    """`part_weights(options)`: weights of the parts whose weighted sum is the reward, by the metric that reports the
    part; empty: it has no parts. ValueError if it has parts and is another function of them."""


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(Spec):
    """`make(run, section)`, called in a thread of rank 0, returns a Tracker (both hpcrl.metrics.trackers.tracker).
    `section` is its section tracking.NAME, None without one."""

    rewinds: bool = False
    """Whether it deletes steps past the checkpoint, which a resumed run logs again; else it keeps the old steps."""
    live: bool = False
    """Whether it has only present values: it gets neither missed steps nor finished runs."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec(Spec):
    """`make` is called with the columns of a row and the options, and returns an Env (hpcrl.envs.environment). If a
    section types the options, they are one argument, an object of the section."""

    imports_code: str = ""
    """The key of EnvConfig that names a user-defined class."""
    has_expert: bool = False
    """Whether its class has expert(rng, noise), which writes a good response (hpcrl.envs.games.game)."""
    expert_obstacle: Callable[[Any], str] = lambda options: ""
    """Why there is no expert with these options, an object of its section; empty if there is one."""
    row_obstacle: Callable[[Any], str] = lambda options: ""
    """Why an episode with these options needs a row; empty if it needs none."""
    expert_problem_of_row: str = ""
    """`module:NAME` of a function of a row's columns that returns why the expert cannot play it, or ""."""
    shows: Callable[[Any], frozenset[str] | None] = lambda options: None
    """Kinds of media (hpcrl.spec.media) that its observations have with these options, an object of its section or,
    without one, a mapping; None if not known."""
    probe: str = ""
    """`module:NAME` of `probe(section, own_code)`, which tries valid options with the libraries of `needs` and raises
    ValueError if they fail. It imports a user's code only with `own_code`, in env ranks."""
    check_template: str = ""
    """`module:NAME` of `check_template(section, chat_template)`, which raises ValueError if a model with this chat
    template cannot play it; called before the start if the model's folder exists."""
    problem_of_row: str = ""
    """`module:NAME` of a function of a row's columns that returns why the environment cannot play it, or ""."""
