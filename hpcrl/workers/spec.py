"""The roles other than the controller, in the order in which ranks are assigned to them."""

from __future__ import annotations

from typing import Any

from hpcrl.spec.division import Division
from hpcrl.spec.kinds import RoleSpec
from hpcrl.spec.tables import GEN_ENGINES, TRAIN_ENGINES


def _tokenizer(config: Any) -> str:
    return "transformers.models.auto.tokenization_auto"


def _train_engine(config: Any) -> str:
    return str(TRAIN_ENGINES[config.train_engine].make).partition(":")[0]


def _division(config: Any, num_ranks: int) -> Division:
    return TRAIN_ENGINES[config.train_engine].division(config, num_ranks)


def _teacher_engine(config: Any) -> str:
    if config.teacher_endpoint is not None:
        return "hpcrl.workers.teacher_endpoint"
    return str(TRAIN_ENGINES[config.teacher_engine].make).partition(":")[0]


def _teacher_division(config: Any, num_ranks: int) -> Division:
    if config.teacher_endpoint is not None:  # other ranks have rows of their engine's division
        apart = config.layout.of("teacher").colocate_with is None
        return Division.unsplit(num_ranks) if apart else _division(config, num_ranks)
    return TRAIN_ENGINES[config.teacher_engine].division(config.of_teacher(), num_ranks)


def _critic_engine(config: Any) -> str:
    return str(TRAIN_ENGINES[config.critic_engine].make_critic).partition(":")[0]


def _critic_division(config: Any, num_ranks: int) -> Division:
    return TRAIN_ENGINES[config.critic_engine].division(config.of_critic(), num_ranks)


def _judge_engine(config: Any) -> str:
    return str(GEN_ENGINES[config.judge.engine].make).partition(":")[0]


def _generates(config: Any) -> bool:
    return bool(config.responds or not config.pipeline_spec.trains)


TRAINER = RoleSpec(
    about="Ranks that train.",
    make="hpcrl.workers.trainer:TrainerRole",
    plan="hpcrl.planner.trainer:trainer_parts",
    needed=lambda config: bool(config.pipeline_spec.trains),
    num_ranks=2,
    colocate_with=None,
    holds_model=True,
    division=_division,
    owns_default_group=True,
    peers=("trainer", "generator", "reference", "teacher", "critic"),
    imports=_train_engine,
)

GENERATOR = RoleSpec(
    about="Ranks that generate.",
    make="hpcrl.workers.generator:GeneratorRole",
    needed=_generates,
    holds_model=True,
    forms_replicas=True,
    peers=("trainer", "generator", "reference", "teacher", "critic", "reward", "env"),
    min_ranks=lambda config: config.rollout.min_replicas,
    imports=_tokenizer,
)

REFERENCE = RoleSpec(
    about="Ranks of the frozen reference; only with a KL term or in a pipeline that needs it, and with trainer.lora "
    "only if reference.path is given.",
    make="hpcrl.workers.trainer:ReferenceRole",
    plan="hpcrl.planner.trainer:reference_parts",
    needed=lambda config: config.uses_reference,
    done_by_others=lambda config: config.reference_is_base,
    holds_model=True,
    division=_division,
    owns_default_group=True,
    peers=("trainer", "generator", "reference"),
    imports=_train_engine,
)

TEACHER = RoleSpec(
    about="Ranks of the teacher; only in pipeline=distill or with loss.NAME.divergence, and unless the trainer's ranks "
    "compute its values (teacher.source).",
    make="hpcrl.workers.teacher_endpoint:make_teacher",
    plan="hpcrl.planner.trainer:teacher_parts",
    needed=lambda config: config.uses_teacher,
    done_by_others=lambda config: config.teacher_is_trainer,
    holds_model=True,
    division=_teacher_division,
    owns_default_group=True,
    peers=("trainer", "generator", "teacher"),
    imports=_teacher_engine,
)

CRITIC = RoleSpec(
    about="Ranks of the critic; only with an algorithm that has one (gae, turn_gae).",
    make="hpcrl.workers.critic:CriticRole",
    plan="hpcrl.planner.trainer:critic_parts",
    needed=lambda config: config.uses_critic,
    holds_model=True,
    division=_critic_division,
    owns_default_group=True,
    peers=("trainer", "generator", "critic"),
    imports=_critic_engine,
)


def _serving(role: str) -> dict[str, Any]:
    """Arguments of RoleSpec that are common to roles that serve a frozen model to rewards."""
    return {
        "needed": lambda config: bool(config.asks(role)),
        "num_ranks": 1,
        "colocate_with": None,
        "holds_model": True,
        "serves": True,
        "peers": ("reward",),
        "min_ranks": lambda config: config.layout.of(role).min_ranks,
    }


JUDGE = RoleSpec(
    about="Ranks that serve the model of `judge`; only with a reward whose judge has role=judge.",
    make="hpcrl.workers.judge:JudgeRole",
    plan="hpcrl.planner.served:judge_parts",
    imports=_judge_engine,
    **_serving("judge"),
)

REWARD_MODEL = RoleSpec(
    about="Ranks that serve the model of `reward_model`; only with a reward of this name.",
    make="hpcrl.workers.reward_model:RewardModelRole",
    plan="hpcrl.planner.served:reward_model_parts",
    imports=lambda config: "hpcrl.engines.scalar",
    **_serving("reward_model"),
)

REWARD = RoleSpec(
    about="Ranks that score.",
    make="hpcrl.workers.reward:RewardRole",
    needed=_generates,
    peers=("generator", "judge", "reward_model"),
    min_ranks=lambda config: config.layout.reward.min_ranks,
)

ENV = RoleSpec(
    about="Ranks that run environments; only with env.",
    make="hpcrl.workers.env:EnvRole",
    needed=lambda config: _generates(config) and bool(config.envs),
    peers=("generator",),
    min_ranks=lambda config: config.layout.env.min_ranks,
    imports=_tokenizer,
)
