"""Finds keys that the selected parts do not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hpcrl.config.cluster import GPU_OPTIONS
from hpcrl.config.engines import LoRAConfig, TrainerConfig
from hpcrl.config.own_objective import unread_with_objective
from hpcrl.config.part_names import section_name
from hpcrl.config.roles import check_unused_ranks
from hpcrl.config.rollout import DomainRolloutConfig
from hpcrl.config.scalar_heads import CriticConfig
from hpcrl.config.schema import Config
from hpcrl.config.self_teaching_checks import unread_of_teaching
from hpcrl.config.teacher_checks import unread_teachers
from hpcrl.config.untrained import ANSWER_KEYS, OF_COMPARED, unread_without_trainer
from hpcrl.models.families import has_experts
from hpcrl.spec.kinds import Spec
from hpcrl.spec.policy_loss import CORRECTION_KEYS, SURROGATE_KEYS
from hpcrl.spec.problems import Path, Problem, dotted
from hpcrl.spec.tables import GEN_ENGINES, PIPELINES, ROLES, TRACKERS, TRAIN_ENGINES

SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
"""The keys of rollout that evaluation reads as well."""

STORED_KEYS = (*SAMPLING_KEYS, "num_prompts", "group_size", "min_replicas")
"""The keys of rollout that a run on stored rollouts reads: keys of evaluation, the batch size, and min_replicas."""

ASKED = {
    "judge": "reward.DOMAIN.options.judges.NAME.role=judge",
    "reward_model": "reward.DOMAIN.name=reward_model",
}
"""Role with its own section -> the setting with which a reward uses the role's ranks."""

UNREAD_OF_ROWS = {
    "answers": ("chosen_key", "rejected_key", "label_key"),
    "pairs": ("label_key",),
    "labelled": (),
}
"""Kind of rows (hpcrl.spec.kinds.RowKind) -> keys of data that only other kinds read."""

KEYS_OF_ALL = ("pipeline", "run_name", "run_dir", "resume", "dry_run", "timeouts", "cluster")
"""Keys that a run without roles (PipelineSpec.rank0_only) reads, in addition to its pipeline's section."""


def check_unused_keys(config: Config, given: Mapping[Path, bool], chosen: Iterable[str] = ()) -> list[Problem]:
    """Keys set explicitly that this run does not read.

    Args:
        given: Path of each key -> whether it was set on the command line.
        chosen: The groups whose option was set on the command line.

    A key of the experiment's file is accepted if it is unread because of a setting on the command line.
    """
    by_hand = [path for path, on_command_line in given.items() if on_command_line] + [(group,) for group in chosen]
    problems = []
    for path, on_command_line in given.items():
        for prefix, cause, why in _unread(config):
            if path[: len(prefix)] == prefix and path != cause:
                if on_command_line or not Problem(cause, "").touches(by_hand):
                    problems.append(Problem(path, f"{dotted(path)}: not read here, {why}", (cause,)))
                break
    reported = {problem.path for problem in problems}
    return problems + [found for found in check_unused_ranks(config, by_hand) if found.path not in reported]


def _unread(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """(prefix of unread keys, key whose value is the cause, reason)."""
    for part in (_not_chosen, _unread_of_pipeline, _unread_of_sections, _unread_models, _unread_services):
        yield from part(config)


def _unread_of_pipeline(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """Keys that are unread because of the pipeline, the debug mode or an environment's other keys."""
    if config.pipeline_spec.rank0_only:
        for key in type(config).model_fields:
            if key not in (*KEYS_OF_ALL, config.pipeline):
                yield (key,), ("pipeline",), f"the {config.pipeline} pipeline neither trains nor generates"
    if not config.pipeline_spec.trains:
        yield from unread_without_trainer(config)
    elif not config.learns_from_rewards:
        for section in ("algorithm", "loss", "imitation", *(() if config.evaluates else ("env",))):
            yield (section,), ("pipeline",), f"the {config.pipeline} pipeline has no {section}"
        for key in type(config.rollout).model_fields:
            if key not in SAMPLING_KEYS:
                what = "generates only for evaluation" if config.evaluates else "generates nothing"
                yield ("rollout", key), ("pipeline",), f"the {config.pipeline} pipeline {what}"
        for key in UNREAD_OF_ROWS[config.row_kind]:
            yield ("data", key), ("pipeline",), f"the rows of the {config.pipeline} pipeline are {config.row_kind}"
    else:
        for key in OF_COMPARED if config.imitates else ANSWER_KEYS:
            yield ("data", key), ("pipeline",), f"the {config.pipeline} pipeline does not learn from answers"
        if not config.has_algorithm:
            yield from unread_with_objective(config)
        yield from _unread_objective(config)
        yield from _unread_policies(config)
    yield from config.pipeline_spec.unread(config)
    if not config.learns_from_rewards or config.debug != "none":
        cause, what = (
            ("debug", f"debug={config.debug}") if config.learns_from_rewards else ("pipeline", config.pipeline)
        )
        yield ("trainer", "max_mismatch"), (cause,), f"{what} does not train on generated responses"
        if config.debug != "train_only":
            yield ("trainer", "router_replay"), (cause,), f"{what} trains no model on rollouts"
    for name, env in config.envs.items():
        if not env.by_steps:
            text = "with episode=trajectory the model sees all turns"
            yield ("env", name, "history"), ("env", name, "episode"), text
        if not env.examples:
            yield ("env", name, "examples_path"), ("env", name, "examples"), "no examples are shown"
    if config.debug != "train_only":
        yield ("load_rollouts",), ("debug",), f"debug is {config.debug}"
    if config.debug != "fake":
        yield ("fake",), ("debug",), f"debug is {config.debug}"


def _unread_of_sections(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """Keys that are unread because of another key's value, mostly in the same section."""
    if config.cluster.after != "chain":
        yield ("cluster", "num_links"), ("cluster", "after"), "an unfinished run is requeued"
    imitation = config.imitation
    if imitation.data is None:
        yield ("imitation", "num_rows"), ("imitation", "data"), "imitation.data is null"
    if not imitation.expert_turns:
        text = "imitation.expert_turns is 0"
        yield ("imitation", "expert_decay_prompts"), ("imitation", "expert_turns"), text
        if imitation.data is None:
            yield ("imitation", "ce"), ("imitation", "data"), f"imitation.data is null and {text}"
    if config.keep_best.metric is None:
        yield ("keep_best", "mode"), ("keep_best", "metric"), "keep_best.metric is null"
    if config.cluster.container == "none":
        for key in ("image", "mounts"):
            yield ("cluster", key), ("cluster", "container"), "the ranks run in no container"
    if set(GPU_OPTIONS) & set(config.cluster.sbatch_options):
        asks, text = ("cluster", "sbatch_options"), "cluster.sbatch_options requests the GPUs"
        yield ("cluster", "gpu_request"), asks, text
        yield from ((("cluster", "components", name, "gpu_request"), asks, text) for name in config.cluster.components)
    for name, spec in config.cluster.components.items():
        if not spec.gpus_per_node:
            at = ("cluster", "components", name)
            for key in ("gpu_type", "gpu_request"):
                yield (*at, key), (*at, "gpus_per_node"), "the component requests no GPUs"
    if not config.timeline.enabled:
        yield ("timeline", "keep_steps"), ("timeline", "enabled"), "nothing is recorded"
    if not config.profile.steps:
        yield ("profile",), ("profile", "steps"), "profile.steps is empty"
    if config.model.path is not None:
        yield ("model", "tiny"), ("model", "path"), "model.path is given"
    if not has_experts(config.model.tiny.architecture):
        yield ("model", "tiny", "num_experts"), ("model", "tiny", "architecture"), "the model has no experts"
    if config.data.val is None:
        yield ("eval",), ("data", "val"), "data.val is null"
        if config.eval_every and config.pipeline_spec.trains:
            yield ("eval_every",), ("data", "val"), "data.val is null, so there is nothing to evaluate on"
    if config.uses_critic and config.critic_engine != config.trainer.engine:
        engine = TRAIN_ENGINES[config.critic_engine]
        for key in engine.policy_keys:
            yield ("trainer", engine.name, key), ("critic", "engine"), "only the critic has this engine"
    if config.model.mtp != "train" and TRAIN_ENGINES[config.trainer.engine].trains_mtp:
        at = ("trainer", config.trainer.engine, "mtp_loss")
        yield at, ("model", "mtp"), f"model.mtp is {config.model.mtp}"
    if not config.trainer.lora.rank:
        for key in [name for name in LoRAConfig.model_fields if name != "rank"]:
            yield ("trainer", "lora", key), ("trainer", "lora", "rank"), "trainer.lora.rank is 0"


def _unread_models(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """Keys of reference, teacher and critic, if the run has none."""
    if config.has_algorithm:
        name = getattr(config.algorithm, "advantage_estimator", "the algorithm")
        cause = "algorithm" if config.learns else "debug"
    else:
        name, cause = config.pipeline, "debug" if config.debug == "rollout_only" else "pipeline"
    if not config.uses_reference:
        lacks = "has no KL term (kl_loss_coef, kl_reward_coef)" if cause == "algorithm" else "has no reference"
        yield ("reference",), (cause,), f"{name} {lacks}"
    elif config.learns_from_rewards:
        yield ("reference", "cache"), ("pipeline",), f"every step of the {config.pipeline} pipeline has new responses"
    if not config.uses_teacher:
        if cause == "algorithm":
            yield ("teacher",), ("loss",), "no domain learns from a teacher (loss.NAME.divergence)"
        else:
            yield ("teacher",), (cause,), f"{name} has no teacher"
    else:
        yield from unread_teachers(config)
        yield from unread_of_teaching(config)
    if config.uses_teacher and config.teacher.form != "top_k":
        yield ("teacher", "top_k"), ("teacher", "form"), f"form is {config.teacher.form}"
    if config.teacher.endpoint.url is None:
        yield ("teacher", "endpoint"), ("teacher", "endpoint", "url"), "teacher.endpoint.url is null"
    else:
        yield ("teacher", "engine"), ("teacher", "endpoint", "url"), "the teacher is behind teacher.endpoint.url"
    if config.teacher.form == "sampled":
        yield ("teacher", "beta"), ("teacher", "form"), "form is sampled, the reverse KL"
    if not config.uses_critic:
        yield ("critic",), (cause,), f"{name} has no critic"
    else:
        yield from _unread_of_schedule(config.critic, "critic")


def _unread_of_schedule(section: TrainerConfig | CriticConfig, name: str) -> Iterator[tuple[Path, Path, str]]:
    """Keys that the section's learning-rate schedule does not read."""
    cause = (name, "lr_schedule")
    if section.lr_schedule == "constant":
        yield (name, "min_lr"), cause, "the learning rate is constant"
    if section.lr_schedule != "wsd":
        yield (name, "lr_decay_steps"), cause, f"the learning rate is {section.lr_schedule}"


def _unread_services(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """Keys of served models, trackers and ranks that the run does not have."""
    for role, how in ASKED.items():
        if not config.asks(role):
            yield (role,), ("reward",), f"no reward uses it ({how})"
            yield ("layout", role), ("reward",), f"no reward uses it ({how})"
    yield from _unread_of_schedule(config.trainer, "trainer")
    for name, tracker in TRACKERS.items():
        if name not in config.trackers and tracker.section is not None:
            yield ("tracking", name), ("trackers",), f"the trackers are {', '.join(config.trackers) or 'none'}"
    if not config.trackers:
        yield ("tracking",), ("trackers",), "there is no tracker"
    fewer = [name for name, role in ROLES.items() if role.min_ranks is not None and not role.forms_replicas]
    for role in (name for name in ROLES if name not in fewer):
        yield ("layout", role, "min_ranks"), (), f"only {' and '.join(fewer)} continue with fewer ranks"
    for role in (name for name in ROLES if name != "reward"):
        yield ("layout", role, "domains"), (), "only the ranks of reward can be limited to domains"


def _unread_objective(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """Keys of the algorithm that are unread because of another algorithm key's value."""
    for place in ("reward", "loss"):
        if not getattr(config.algorithm, f"kl_{place}_coef"):
            yield ("algorithm", f"kl_{place}_estimator"), ("algorithm",), f"kl_{place}_coef is 0"
    if not config.algorithm.uses_reference:
        for key in ("kl_target", "ref_update_steps"):
            yield ("algorithm", key), ("algorithm",), "kl_reward_coef and kl_loss_coef are 0"
    for key, cause in (("kl_horizon", "kl_target"), ("entropy_coef_step", "entropy_target")):
        if getattr(config.algorithm, cause) is None:
            yield ("algorithm", key), ("algorithm", cause), f"{cause} is null"
    for threshold in ("low", "high"):
        if not config.algorithm.difficulty_mask:
            key = f"difficulty_{threshold}_threshold"
            yield ("algorithm", key), ("algorithm", "difficulty_mask"), "difficulty_mask is false"
    if (mode := config.algorithm.loss_aggregation) != "seq-mean-token-sum-norm":
        yield ("algorithm", "loss_norm_tokens"), ("algorithm", "loss_aggregation"), f"loss_aggregation is {mode}"
    surrogate = config.algorithm.surrogate
    for key in frozenset().union(*SURROGATE_KEYS.values()) - SURROGATE_KEYS[surrogate]:
        yield ("algorithm", key), ("algorithm", "surrogate"), f"surrogate is {surrogate}"


def _not_chosen(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """The sections of pipelines and engines that the run does not use."""
    choices: list[tuple[Path, Path, str, Iterable[tuple[str, Spec]]]] = [
        ((), ("pipeline",), config.pipeline, PIPELINES.items()),
        (("trainer",), ("trainer", "engine"), config.trainer.engine, TRAIN_ENGINES.items()),
        (("generator",), ("generator", "engine"), config.generator.engine, GEN_ENGINES.items()),
        (("judge",), ("judge", "engine"), config.judge.engine, GEN_ENGINES.items()),
    ]
    others = [config.critic.engine] if config.uses_critic else []
    others += [config.teacher.engine] if config.uses_teacher else []
    own = section_name(config.pipeline, config.pipeline_spec)
    for section, key, chosen, entries in choices:
        for name, spec in entries:
            shared = (section == ("trainer",) and name in others) or (not section and (spec.section_key or name) == own)
            if name != chosen and spec.section is not None and not shared:
                yield (*section, spec.section_key or name), key, f"the {key[-1]} is {chosen}"


def _unread_policies(config: Config) -> Iterator[tuple[Path, Path, str]]:
    rollout, correction = config.rollout, config.algorithm.correction
    if config.debug == "train_only":
        unread = [("rollout", key) for key in type(rollout).model_fields if key not in (*STORED_KEYS, "domains")]
        filters = [key for key in DomainRolloutConfig.model_fields if key not in SAMPLING_KEYS]
        for path in (*unread, *(("rollout", "domains", name, key) for name in rollout.domains for key in filters)):
            yield path, ("debug",), "debug=train_only generates nothing to train on"
    if config.debug == "rollout_only":
        for path in (("loss",), ("imitation",), *(("algorithm", key) for key in ("correction", *CORRECTION_KEYS))):
            yield path, ("debug",), "debug=rollout_only does not train"
    if rollout.max_staleness == 0:
        for key in ("on_stale", "on_new_weights"):
            yield ("rollout", key), ("rollout", "max_staleness"), "max_staleness is 0, so nothing is generated ahead"
    if config.deterministic:
        for key in ("group_affinity", "prompt_affinity", "routing", "speed_aware_routing"):
            yield ("rollout", key), ("deterministic",), "deterministic=true distributes responses by their ids"
    for key, readers in CORRECTION_KEYS.items():
        if correction not in readers:
            yield ("algorithm", key), ("algorithm", "correction"), f"correction is {correction}"
    if config.algorithm.rejection_level is None:
        for key in ("rejection_low", "rejection_high"):
            yield ("algorithm", key), ("algorithm", "rejection_level"), "rejection_level is null"
