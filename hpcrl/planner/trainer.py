"""Memory and traffic of trainer, reference, teacher and critic ranks, from their engine's plan.

A teacher rank is a reference rank with the teacher's model and keys. A critic rank is a trainer rank with the critic's
model and keys, a head of one row and no logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, cast

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem
from hpcrl.config.teacher_paths import keys_of_teachers
from hpcrl.models.families import shape_of
from hpcrl.models.shape import CannotPlanError, ModelShape, Parameter
from hpcrl.planner.activations import Tokens, forward_logits_bytes, forward_only
from hpcrl.planner.image_memory import with_row_tokens
from hpcrl.planner.memory_parts import BYTES, PHASES, Change, Part, Phase, PlanRow, has_gpus, samples_of_a_step
from hpcrl.planner.taught_memory import field_parts, head_parts
from hpcrl.planner.traffic import Sent, StepWork
from hpcrl.spec.problems import Path, dotted
from hpcrl.spec.table import load
from hpcrl.spec.tables import TRAIN_ENGINES

REFERENCE_PATH: Path = ("reference", "path")


class TrainPlan(Protocol):
    """A training engine's plan: functions of only the configuration and the model's shape."""

    def check(self, config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
        """Problems between the engine's sizes and the model or the ranks."""

    def trainer_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        """Memory parts of the fullest trainer rank. The sizes must be valid (check)."""

    def reference_parts(self, config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
        """Memory parts of the fullest reference rank."""

    def checkpoint_bytes(self, config: Config, shape: ModelShape) -> int:
        """Bytes of weights and optimizer state in one checkpoint, for all ranks together."""

    def largest_tensor(self, shape: ModelShape) -> int:
        """Elements of the largest tensor that is sent to the generators at once."""

    def num_senders(self, config: Config, num_ranks: int) -> int:
        """Number of trainer ranks among which the sending of every tensor is divided."""

    def step_traffic(self, config: Config, shape: ModelShape, num_ranks: int, work: StepWork) -> list[Sent]:
        """Maximum traffic from a trainer rank to the others in one optimizer step, if every data-parallel rank has this
        work; empty if there is none. The sizes must be valid (check). CannotPlanError if the traffic is not known."""

    def changes(self, config: Config, shape: ModelShape) -> dict[str, list[Change]]:
        """Changes of the engine's keys that save memory, by what they cost."""

    def rows(self, config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[PlanRow]:
        """Lines of the plan that show how model and batch are split. The sizes must be valid (check)."""


def train_plan(config: Config) -> TrainPlan:
    """The training engine's plan. CannotPlanError for an engine without a plan."""
    engine = config.trainer.engine
    if not (path := TRAIN_ENGINES[engine].plan):
        raise CannotPlanError(f"the memory of trainer.engine={engine} is not known")
    return cast(TrainPlan, load(path, f"the plan of trainer.engine={engine}"))


def trainer_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """See TrainPlan. CannotPlanError for an engine without a plan."""
    parts = train_plan(config).trainer_parts(config, shape, num_ranks)
    if config.trains_head:
        return [part for part in parts if part.name != "logits"]
    fields = field_parts(config, RoleLayout.from_config(config), "trainer")
    return [*parts, *head_parts(config), *fields, *_own_teaching_parts(config, shape, num_ranks)]


def _with_rows_of(policy: ModelShape, folder: str, key: str) -> ModelShape:
    """The shape of another model that gets the policy's rows."""
    tokens = policy.tower.row_tokens if policy.tower is not None else 0
    return with_row_tokens(shape_of(folder, key), tokens)


def reference_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The reference's parameters. `policy` is the policy model's shape. CannotPlanError if reference.path cannot be
    read."""
    return policy if config.reference.path is None else _with_rows_of(policy, config.reference.path, "reference.path")


def reference_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """See TrainPlan. `shape` is the policy model's. CannotPlanError as above."""
    own = config.of_reference()
    return train_plan(own).reference_parts(own, reference_shape(config, shape), num_ranks)


def check_reference(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[Problem]:
    """Problems of the engine with the reference model in reference.path, for these sizes and ranks. CannotPlanError as
    above."""
    own, sizes = config.of_reference(), reference_shape(config, shape)
    yield from _check_frozen(REFERENCE_PATH, own, layout, sizes)
    if config.learns_from_rewards:  # a generator may draw any row
        yield from _check_rows(REFERENCE_PATH, own, sizes, shape)


def teacher_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Memory parts of the fullest teacher rank: the weights of every teacher, and of what only its pass needs the
    largest, since the teachers work one after another. `shape` is the policy model's. CannotPlanError as above."""
    lasting: list[Part] = []
    passing: dict[str, Part] = {}
    known = list(_teachers(config, shape))
    for keys, own, sizes in known:
        for part in train_plan(own).reference_parts(own, sizes, num_ranks):
            if part.during == ("reference",):
                held = replace(part, role="teacher", during=("teacher",))
                passing[part.name] = max(passing.get(part.name, held), held, key=lambda each: each.num_bytes)
            else:
                of = f" of {', '.join(str(key[-1]) for key in keys)}" if len(known) > 1 else ""
                lasting.append(replace(part, role="teacher", name=f"{part.name}{of}"))
    return [*lasting, *passing.values(), *field_parts(config, RoleLayout.from_config(config), "teacher")]


def _teachers(config: Config, policy: ModelShape) -> Iterator[tuple[Sequence[Path], Config, ModelShape]]:
    """(keys, own configuration, sizes) of each model on the teacher's ranks; none of an endpoint."""
    for folder, keys in keys_of_teachers(config.teacher).items():
        yield keys, config.of_teacher(folder), _with_rows_of(policy, folder, dotted(keys[0]))
    if config.teacher.source == "policy":
        yield [("teacher", "source")], config.of_teacher(), policy


def _own_teaching_parts(config: Config, shape: ModelShape, num_ranks: int) -> Iterator[Part]:
    """What a trainer rank needs beside its weights to compute a teacher's values of sequences with teacher.context,
    which may be longer than those that it trains on. CannotPlanError as above."""
    if config.teacher_is_trainer and config.teacher.context is not None:
        own = config.of_teacher()
        for part in train_plan(own).reference_parts(own, shape, num_ranks):
            if part.during == ("reference",):
                yield replace(part, role="trainer", name=f"{part.name} of teaching", during=("teacher",))


def check_teacher(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[Problem]:
    """Problems of the engine with the models in teacher.path or teacher.paths, as check_reference()."""
    for (key, *_), own, sizes in _teachers(config, shape):
        yield from _check_frozen(key, own, layout, sizes)
        if config.teacher.form != "sampled":  # where a token that the teacher lacks has a log-prob
            yield from _check_rows(key, own, sizes, shape)


def _check_frozen(key: Path, own: Config, layout: RoleLayout, sizes: ModelShape) -> Iterator[Problem]:
    """Problems of an engine with a frozen model in the folder of `key`, for its configuration and the model's sizes."""
    for problem in train_plan(own).check(own, layout, sizes):
        yield Problem(problem.path, f"{problem.text} ({dotted(key)})", (*problem.involves, key))


def _check_rows(key: Path, own: Config, sizes: ModelShape, policy: ModelShape) -> Iterator[Problem]:
    """A frozen model, in the folder of `key`, whose vocabulary has fewer rows than the policy's."""
    if sizes.vocab_size < policy.vocab_size:
        text = f"{own.model.path} has a vocabulary of {sizes.vocab_size} rows, the policy's {policy.vocab_size}"
        yield Problem(key, f"{dotted(key)}: {text}; give a model with at least as many", (("model", "path"),))


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """See TrainPlan. CannotPlanError as above."""
    return train_plan(config).checkpoint_bytes(config, shape)


def forward_parts(
    config: Config, shape: ModelShape, num_ranks: int, weights: int, gathered: int, on_host: bool, sharing: int = 1
) -> list[Part]:
    """Memory parts of a rank with frozen weights that computes one layer at a time. `sharing` is the number of ranks
    that split the tokens of their common rows."""
    samples = samples_of_a_step(config)
    compute = BYTES[config.trainer.param_dtype]
    tokens = Tokens.of(config, -(-samples * sharing // num_ranks), shape.tower).shared(sharing)
    chunk, in_float32 = config.trainer.logits_chunk_tokens, bool(config.trainer.head_dtype)
    logits = forward_logits_bytes(shape, tokens, chunk, compute, in_float32)
    activations = forward_only(shape, tokens, compute, has_gpus(config, ("reference",)))
    return [
        Part("reference", "weights", weights, PHASES, on_host),
        Part("reference", "gathered weights", gathered, ("reference",)),
        Part("reference", "activations", activations, ("reference",)),
        Part("reference", "logits", logits, ("reference",)),
    ]


PHASE_OF: dict[Phase, Phase] = {"train": "critic", "update": "critic_update"}
"""Maps a trainer's phase to the critic's phase with the same work."""


def critic_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The critic's parameters. `policy` is the policy model's shape. CannotPlanError if critic.path cannot be read."""
    shape = policy if config.critic.path is None else _with_rows_of(policy, config.critic.path, "critic.path")
    body = tuple(p for p in shape.parameters if not p.name.startswith("lm_head."))
    head = (Parameter("score.weight", (1, shape.hidden_size), "whole"), Parameter("score.bias", (1,), "whole"))
    return replace(shape, parameters=(*body, *head))


def trained_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The trained model's parameters: `policy`, or if the pipeline trains a head, its decoder with this head."""
    if not config.trains_head:
        return policy
    body = tuple(p for p in policy.parameters if not p.name.startswith(("lm_head.", "score.")))
    head = Parameter("score.weight", (len(config.head_training.labels), policy.hidden_size), "whole")
    return replace(policy, parameters=(*body, head))


def critic_parts(config: Config, shape: ModelShape, num_ranks: int) -> list[Part]:
    """Memory parts of the fullest critic rank. `shape` is the policy model's. CannotPlanError for an engine without a
    plan."""
    own = config.of_critic()
    parts = train_plan(own).trainer_parts(own, critic_shape(config, shape), num_ranks)
    found = []
    for part in parts:
        during = part.during if part.during == PHASES else tuple(PHASE_OF[p] for p in part.during if p in PHASE_OF)
        if part.name != "logits" and during:
            found.append(replace(part, role="critic", during=during))
    return found


def check_critic(config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
    """Problems between the critic's sizes and its model or its ranks. CannotPlanError as above."""
    own, sizes = config.of_critic(), critic_shape(config, shape)
    problems = train_plan(own).check(own, layout, sizes)
    if sizes.vocab_size < shape.vocab_size:
        text = (
            f"critic.path: {config.critic.path} has {sizes.vocab_size} tokens, the policy's model {shape.vocab_size}; "
            "give a model with the same tokenizer"
        )
        problems.append(Problem(("critic", "path"), text, (("model", "path"),)))
    return problems


def critic_checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of weights and optimizer state in one checkpoint, for all ranks together. CannotPlanError as above."""
    own = config.of_critic()
    return train_plan(own).checkpoint_bytes(own, critic_shape(config, shape))
