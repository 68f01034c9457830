"""Build the parts of a run: engines of all ranks, groups, data, the newest checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hpcrl.cluster.layout import ENGINE_ROLES, RoleLayout
from hpcrl.cluster.profiled import profiled_ranks
from hpcrl.config import Config
from hpcrl.controller.checkpoints import Adapting, Checkpoints
from hpcrl.controller.clients import Roles, RolloutTransfer, Trainer, Weights
from hpcrl.controller.critic_client import Critic
from hpcrl.controller.debug import FixedWeights, IdleTrainer, StoredRollouts
from hpcrl.controller.evaluation import Evaluation
from hpcrl.controller.generation import replica_capacity
from hpcrl.controller.held_out import HeldOutRows
from hpcrl.controller.imitation import Imitation
from hpcrl.controller.profiles import StepProfiler
from hpcrl.controller.reference_cache import CachedReference
from hpcrl.controller.reference_client import Reference
from hpcrl.controller.responder import Responder
from hpcrl.controller.rollouts import Rollouts
from hpcrl.controller.supervised import AnswerRows
from hpcrl.controller.teacher_client import Teacher
from hpcrl.data import PromptSource
from hpcrl.data.chat import bind
from hpcrl.data.privileged import PrivilegedContext
from hpcrl.data.written_turns import WrittenTurns
from hpcrl.engines.expert_routes import routes_of
from hpcrl.messaging import messages
from hpcrl.messaging.background import Background
from hpcrl.messaging.dispatcher import Controller
from hpcrl.models.families import vision_of
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.run_folder import check_owner
from hpcrl.run_folder.user_errors import UserErrors
from hpcrl.spec.tables import ROLES


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Args:
        first_step: The restored checkpoint's step, or 0 without a checkpoint.
        evaluation: None without validation, or without the ranks for it.
    """

    roles: Roles
    trainer: Trainer
    reference: Reference
    teacher: Teacher
    imitation: Imitation
    critic: Critic
    weights: Weights
    data: Rollouts | StoredRollouts | AnswerRows
    evaluation: Evaluation | HeldOutRows | None
    checkpoint: Checkpoints
    first_step: int
    profiler: StepProfiler


def build(
    controller: Controller,
    background: Background,
    layout: RoleLayout,
    config: Config,
    run_dir: Path,
    model_path: Path,
    attempt: int,
) -> Parts:
    """Build the engines of all ranks and restore the newest checkpoint. `background` is the controller's; it continues
    rollouts generated ahead, and commits saves. ValueError for invalid user input, other errors as in Controller.call()
    and Checkpoints.restore()."""
    tokenizer = _load_tokenizer(model_path, config)
    routes_of(config, model_path)  # declares the field, for the rollout transfer, as _load_tokenizer() does for images
    trainer = (Trainer if config.learns else IdleTrainer)(controller, layout, config)
    weights = (Weights if config.learns else FixedWeights)(controller, layout)
    transfer_group = RolloutTransfer(controller, layout)
    _build_ranks(controller, layout, weights, transfer_group)
    loop = _make_loop(controller, layout, config, run_dir)
    if loop is not None and config.rollout.max_staleness > 0:
        background.on_events(loop.background)
    fence = functools.partial(check_owner, run_dir, attempt)
    data: Rollouts | StoredRollouts | AnswerRows
    if not config.learns_from_rewards:
        data = AnswerRows(trainer, config, tokenizer, model_path)
    elif not config.generates:
        data = StoredRollouts(controller, layout, config)
    else:
        assert loop is not None, "the layout of a run that generates has generators"
        data = _make_rollouts(loop, transfer_group, layout, config, tokenizer, run_dir, fence)
    evaluation: Evaluation | HeldOutRows | None = None
    if config.trains_head and config.validates_rows and isinstance(data, AnswerRows):
        evaluation = HeldOutRows(trainer, data)
    elif loop is not None:
        evaluation = Evaluation(loop, controller, layout, config, tokenizer, run_dir)
    reference = Reference(controller, layout, config, run_dir)
    if isinstance(data, AnswerRows) and config.uses_reference and config.reference.cache is not None:
        reference = CachedReference(controller, layout, config, run_dir, trainer, data, model_path)
    teacher = Teacher(controller, layout, config, run_dir)
    imitation = Imitation(controller, layout, config, trainer, tokenizer, model_path)
    parts: list[Adapting] = [trainer, reference, teacher, imitation]
    checkpoint = Checkpoints(controller, layout, config, run_dir, attempt, data, parts)
    first_step = checkpoint.restore()
    background.check(checkpoint.commit_if_written)
    profiler = StepProfiler(controller, config.profile.steps, profiled_ranks(config, layout), first_step)
    roles, critic = Roles(controller, layout), Critic(controller, layout, config)
    learners = (roles, trainer, reference, teacher, imitation, critic)
    return Parts(*learners, weights, data, evaluation, checkpoint, first_step, profiler)


def build_evaluation(
    controller: Controller, layout: RoleLayout, config: Config, run_dir: Path, model_path: Path
) -> Evaluation:
    """Build the roles of all ranks of a run without trainers; the generators load the model's folder. Errors as in
    build()."""
    tokenizer = _load_tokenizer(model_path, config)
    loop = _build_generators(controller, layout, config, run_dir)
    return Evaluation(loop, controller, layout, config, tokenizer, run_dir)


def build_responder(
    controller: Controller, layout: RoleLayout, config: Config, run_dir: Path, model_path: Path
) -> Responder:
    """Build the roles of all ranks of a run that only writes responses, as build_evaluation()."""
    tokenizer = _load_tokenizer(model_path, config)
    source = PromptSource(config.data, "train", tokenizer, config.seed, 1)
    loop = _build_generators(controller, layout, config, run_dir)
    return Responder(loop, controller, layout, config, source, WrittenTurns(tokenizer))


def _build_generators(controller: Controller, layout: RoleLayout, config: Config, run_dir: Path) -> RolloutLoop:
    """The loop over the generators of a run without trainers."""
    _build_roles(controller, layout)
    controller.built = True
    loop = _make_loop(controller, layout, config, run_dir)
    assert loop is not None, "the layout of a run that generates has generators"
    return loop


def _build_ranks(controller: Controller, layout: RoleLayout, weights: Weights, transfer_group: RolloutTransfer) -> None:
    """Build engines and groups."""
    _build_roles(controller, layout)
    if any(layout.ranks[role] for role in ("generator", *ENGINE_ROLES) if role != "trainer"):
        transfer_group.build()
    weights.build_groups()
    controller.built = True


def _build_roles(controller: Controller, layout: RoleLayout) -> None:
    """Build engines role by role, on all ranks of a role at once: making a default group is collective."""
    controller.await_world()
    services: dict[str, list[str]] = {}
    for role in sorted(ROLES, key=lambda name: not ROLES[name].owns_default_group):
        ranks = list(layout.ranks[role])
        if ranks:
            built = controller.call(dict.fromkeys(ranks, messages.BuildRole(role, ranks, services=services)))
            if addresses := [built[rank].address for rank in ranks if built[rank].address]:
                services[role] = addresses


def _make_loop(controller: Controller, layout: RoleLayout, config: Config, run_dir: Path) -> RolloutLoop | None:
    if not layout.replicas:
        return None
    return RolloutLoop(
        controller,
        layout.replicas,
        layout.ranks["reward"],
        layout.ranks["env"],
        seed=config.seed,
        decode_chunk_tokens=config.generator.decode_chunk_tokens,
        deterministic=config.deterministic,
        free=[replica[0] for replica in layout.free_replicas],
        scorers_of=layout.scorers_of if layout.scorers else None,
        errors=UserErrors(run_dir),
        timeline=controller.timeline,
    )


def _make_rollouts(
    loop: RolloutLoop,
    transfer_group: RolloutTransfer,
    layout: RoleLayout,
    config: Config,
    tokenizer: Any,
    run_dir: Path,
    fence: Callable[[], None],
) -> Rollouts:
    context = PrivilegedContext.of(config)
    source = PromptSource(config.data, "train", tokenizer, config.seed, config.rollout.num_prompts, context)
    return Rollouts(loop, transfer_group, replica_capacity(config, layout), config, source, run_dir, fence)


def _load_tokenizer(model_path: Path, config: Config) -> Any:
    """The model's tokenizer, with its chat template's variables. ValueError if the folder has no working tokenizer."""
    try:
        given = config.data
        vision = vision_of(model_path, given.max_pixels)
        return bind(AutoTokenizer.from_pretrained(model_path), given.chat_template_kwargs, vision)
    except Exception as error:  # for a damaged file, any exception is possible
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"model.path: config and tokenizer of {model_path} cannot be loaded: {text}") from error
