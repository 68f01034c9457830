"""Checks that types cannot express: impossible combinations of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any

from hpcrl.config.abilities import (
    CRITIC_ENGINE,
    TEACHER_ENGINE,
    check_abilities,
    check_family,
    check_length,
    check_parts,
    check_trainable,
    chosen,
)
from hpcrl.config.cluster import SET_FOR_SBATCH, SET_FOR_SRUN
from hpcrl.config.domains import EnvConfig, RewardConfig
from hpcrl.config.endpoint_checks import check_teacher_endpoint
from hpcrl.config.engines import TrainerConfig
from hpcrl.config.judging import JUDGE_ENGINE, as_judges, check_judge, check_reward_model
from hpcrl.config.keeping import check_keep_best, check_resume_from
from hpcrl.config.loss_checks import check_loss_weights
from hpcrl.config.off_policy import check_off_policy
from hpcrl.config.rollout import MAX_MEMBERS, MAX_VALIDATION_PROMPTS, RolloutConfig
from hpcrl.config.scalar_heads import CriticConfig
from hpcrl.config.schema import Config
from hpcrl.config.untrained import check_training_data
from hpcrl.spec.kinds import Spec
from hpcrl.spec.problems import PLACEHOLDER, Path, Problem, dotted
from hpcrl.spec.table import SpecTable
from hpcrl.spec.tables import ENVS, REWARDS

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0


FREE_TEXT = frozenset(("system_prompt", "stop", "options", "chat_template_kwargs"))
"""Keys with text for the model, in which <answer> is not a placeholder."""


def check(config: Config) -> list[Problem]:
    """Every impossible combination of values."""
    return [
        *_debug(config),
        *_reinforcement(config),
        *_sampling(config),
        *_policy_loss(config),
        *check_off_policy(config),
        *check_loss_weights(config),
        *_filters(config),
        *_fake(config),
        *_redundancy(config),
        *_environments(config),
        *_asynchronous(config),
        *_evaluation(config),
        *check_keep_best(config),
        *check_resume_from(config),
        *check_training_data(config),
        *_domain_shares(config),
        *_optimizer(config),
        *_model(config),
        *_user_code(config),
        *_dialogues(config),
        *check_abilities(config),
        *check_judge(config),
        *check_reward_model(config),
        *check_teacher_endpoint(config),
        *(problem for path, _, spec in chosen(config) for problem in _check_part(config, path, spec)),
        *_components(config),
        *_slurm_options(config),
        *_unsupported(config),
        *_warning(config),
    ]


def _check_part(config: Config, path: Path, spec: Spec) -> Iterable[Problem]:
    """The problems that the selected part itself reports for the configuration."""
    if path == JUDGE_ENGINE:
        return map(as_judges, spec.check(config.of_judge()))
    of_role = {CRITIC_ENGINE: config.of_critic, TEACHER_ENGINE: config.of_teacher}
    return spec.check(of_role[path]() if path in of_role else config)


def check_placeholders(data: Mapping[str, Any]) -> list[Problem]:
    """Values that are still placeholders, such as CHANGE_ME. `data` are the composed values before type checks."""
    return [
        Problem(path, f"{dotted(path)}: {value!r} is a placeholder; give the value")
        for path, value in _values(data)
        if isinstance(value, str) and PLACEHOLDER.search(value) and FREE_TEXT.isdisjoint(path)
    ]


def _values(data: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    if not isinstance(data, Mapping | list):
        yield at, data
        return
    inner: Iterable[tuple[Any, Any]] = data.items() if isinstance(data, Mapping) else enumerate(data)
    for key, value in inner:
        yield from _values(value, (*at, key))


def _debug(config: Config) -> Iterator[Problem]:
    if config.debug == "none":
        return
    if not config.learns_from_rewards:
        text = (
            f"debug: {config.debug} is for pipelines that generate and train; the {config.pipeline} pipeline does not"
        )
        yield Problem(("debug",), text, (("pipeline",),))
    elif config.debug == "train_only" and config.load_rollouts is None:
        yield Problem(
            ("load_rollouts",), "load_rollouts: debug=train_only needs the run folder with the rollouts", (("debug",),)
        )
    elif config.debug == "rollout_only" and config.algorithm.kl_reward_coef > 0:
        text = (
            f"algorithm.kl_reward_coef: {config.algorithm.kl_reward_coef:g} needs log-probs, and debug=rollout_only "
            "computes none; use 0"
        )
        yield Problem(("algorithm", "kl_reward_coef"), text, (("debug",),))


def _reinforcement(config: Config) -> Iterator[Problem]:
    if not config.learns_from_rewards:
        return
    algorithm, rollout = config.algorithm, config.rollout
    if config.algorithm_spec.compares_group(algorithm) and rollout.group_size == 1:
        name = getattr(algorithm, "advantage_estimator", "the algorithm")
        text = f"rollout.group_size: {name} compares the responses of a group and needs at least 2, got 1"
        yield Problem(("rollout", "group_size"), text, (("algorithm",),))
    for key, greedy, remedy in (("temperature", 0, "1"), ("top_k", 1, "0 (off) or at least 2"), ("min_p", 1, "less")):
        if getattr(rollout, key) == greedy and config.generates:
            text = f"{greedy} makes the responses of a group equal, so there is nothing to learn from; use {remedy}"
            yield Problem(("rollout", key), f"rollout.{key}: {text}")
    samples, parts = rollout.num_prompts * rollout.group_size, algorithm.num_mini_batches
    if samples % parts:
        text = (
            f"algorithm.num_mini_batches: {parts} does not divide {rollout.num_prompts} prompts x "
            f"{rollout.group_size} = {samples} responses"
        )
        yield Problem(("algorithm", "num_mini_batches"), text, (("rollout", "num_prompts"), ("rollout", "group_size")))


def _sampling(config: Config) -> Iterator[Problem]:
    """Report values that the engines' number types cannot represent, or that end every response before its first
    token."""
    given: dict[Path, float] = {("rollout",): config.rollout.temperature, ("eval",): config.eval.temperature}
    given |= {("eval", "sets", name): own.temperature or 0.0 for name, own in config.eval.sets.items()}
    for place, temperature in given.items():
        if 0 < temperature < MIN_TEMPERATURE or temperature > MAX_TEMPERATURE:
            text = (
                f"{dotted(place)}.temperature: {temperature:g} is out of range; use {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}" + (", or 0 for greedy" if place[0] == "eval" else "")
            )
            yield Problem((*place, "temperature"), text)
    for index, text in enumerate(config.rollout.stop):
        if not text:
            yield Problem(("rollout", "stop", index), "rollout.stop: '' ends every response before its first token")


def _policy_loss(config: Config) -> Iterator[Problem]:
    """Report keys of the loss and of the masks that need or contradict each other."""
    algorithm, section = config.algorithm, "algorithm"
    if not (config.learns_from_rewards and config.learns):
        return
    if algorithm.loss_aggregation == "seq-mean-token-sum-norm" and algorithm.loss_norm_tokens is None:
        text = "seq-mean-token-sum-norm divides by algorithm.loss_norm_tokens; give it, such as rollout.max_new_tokens"
        yield Problem((section, "loss_aggregation"), f"algorithm.loss_aggregation: {text}")
    if algorithm.surrogate == "kl_cov" and algorithm.optimizer_steps == 1 and algorithm.ratio_to == "trainer":
        text = (
            "kl_cov penalises how far tokens moved from the policy before the step, which is 0 in the only optimizer "
            "step; use algorithm.num_mini_batches or algorithm.ppo_epochs above 1"
        )
        yield Problem((section, "surrogate"), f"algorithm.surrogate: {text}", ((section, "num_mini_batches"),))
    if algorithm.surrogate == "clip_cov" and algorithm.cov_low >= algorithm.cov_high:
        text = f"algorithm.cov_low: {algorithm.cov_low:g} must be below algorithm.cov_high, which is "
        yield Problem((section, "cov_low"), f"{text}{algorithm.cov_high:g}", ((section, "cov_high"),))
    low, high = algorithm.difficulty_low_threshold, algorithm.difficulty_high_threshold
    if algorithm.difficulty_mask and low >= high:
        text = f"algorithm.difficulty_low_threshold: {low:g} must be below difficulty_high_threshold, which is {high:g}"
        yield Problem((section, "difficulty_low_threshold"), text, ((section, "difficulty_high_threshold"),))


def _thresholds(config: Config, rollout: RolloutConfig, at: Path) -> Iterator[Problem]:
    """Report filters, of one section, that would reject every group."""
    low, high, key = rollout.filter_mean_low, rollout.filter_mean_high, ".".join(map(str, at))
    if low is not None and high is not None and low >= high:
        text = f"{key}.filter_mean_low: {low:g} must be below {key}.filter_mean_high, which is {high:g}"
        yield Problem((*at, "filter_mean_low"), text, ((*at, "filter_mean_high"),))
    elif not config.envs and all(REWARDS[reward.name].scores_in_unit_interval for reward in config.reward.values()):
        scores = "scores are between 0 and 1, so every group would be rejected"
        if low is not None and low >= 1:
            yield Problem((*at, "filter_mean_low"), f"{key}.filter_mean_low: {low:g}, and {scores}; use less than 1")
        if high is not None and high <= 0:
            yield Problem((*at, "filter_mean_high"), f"{key}.filter_mean_high: {high:g}, and {scores}; use more than 0")
    active = [
        name
        for name in ("filter_mean_low", "filter_mean_high", "filter_std")
        if getattr(rollout, name) not in (None, False)
    ]
    if config.algorithm_spec.greedy_baseline and "filter_std" in active:
        active.remove("filter_std")  # it also compares with the greedy response
    if active and rollout.group_size == 1:
        text = f"{key}.{active[0]}: a filter compares the responses of a group, and rollout.group_size is 1"
        yield Problem((*at, active[0]), text, (("rollout", "group_size"),))


def _evaluation(config: Config) -> Iterator[Problem]:
    if not config.evaluates:
        return
    places: list[Path] = [("eval",), *(("eval", "sets", name) for name in config.eval.sets)]
    for place in places:
        asked = config.eval.of_domain(str(place[-1]) if len(place) > 1 else "")
        if asked.samples > 1 and asked.temperature == 0:
            text = (
                f"{asked.samples} greedy responses to a prompt are all equal; set {dotted(place)}.temperature above 0"
            )
            involved = ((*place, "temperature"), ("eval", "temperature"), ("eval", "samples"))
            yield Problem((*place, "samples"), f"{dotted(place)}.samples: {text}", involved)
    for name, own in config.eval.sets.items():
        limit = config.rollout.of_domain(name).max_new_tokens if name in config.rollout.domains else None
        if limit is not None and (own.max_new_tokens or 0) > limit:
            at, key = ("eval", "sets", name, "max_new_tokens"), f"rollout.domains.{name}.max_new_tokens"
            text = f"{dotted(at)}: {own.max_new_tokens} is above {key}={limit}, which also limits validation"
            yield Problem(at, text, (("rollout", "domains", name, "max_new_tokens"),))
    if (most := config.eval.most_prompts) > MAX_VALIDATION_PROMPTS:
        text = (
            f"eval.sets: {most} prompts with eval.num_prompts, and an evaluation has at most {MAX_VALIDATION_PROMPTS}"
        )
        yield Problem(("eval", "sets"), text, (("eval", "num_prompts"),))


def _filters(config: Config) -> Iterator[Problem]:
    if not config.generates:
        return
    rollout = config.rollout
    yield from _thresholds(config, rollout, ("rollout",))
    for domain, own in rollout.domains.items():
        place = ("rollout", "domains", domain)
        if own.model_fields_set:
            yield from _thresholds(config, rollout.of_domain(domain), place)
        if own.max_new_tokens is not None and own.max_new_tokens > rollout.max_new_tokens:
            text = f"{'.'.join(place)}.max_new_tokens: {own.max_new_tokens} is above rollout.max_new_tokens"
            involved = (("rollout", "max_new_tokens"),)
            yield Problem((*place, "max_new_tokens"), f"{text}, which is {rollout.max_new_tokens}", involved)
    wanted, limit = rollout.num_prompts + rollout.extra_prompts, rollout.most_generated_groups
    at, extra = ("rollout", "max_generated_groups"), ("rollout", "extra_prompts")
    if limit < wanted and rollout.max_generated_groups is not None:
        text = (
            f"rollout.max_generated_groups: {limit} is less than num_prompts + extra_prompts = {wanted}, "
            f"which a step always starts; use at least {wanted}"
        )
        yield Problem(at, text, (("rollout", "num_prompts"), extra))
    elif limit < wanted:
        text = (
            f"rollout.extra_prompts: with {rollout.extra_prompts} a step always starts {wanted} groups, and "
            f"rollout.max_generated_groups=null allows 20 x num_prompts = {limit}; use at most "
            f"{limit - rollout.num_prompts}, or rollout.max_generated_groups={wanted}"
        )
        yield Problem(extra, text, (("rollout", "num_prompts"), at))


def _fake(config: Config) -> Iterator[Problem]:
    """Report random rewards that reject every group; environments give their own rewards."""
    rollout, rate, at = config.rollout, config.fake.pass_rate, ("fake", "pass_rate")
    if not config.learns_from_rewards or config.debug != "fake" or config.envs or rate not in (0, 1):
        return
    remedy = "use a share between 0 and 1, or rollout"
    if rollout.filter_std:
        text = (
            f"fake.pass_rate: {rate:g} makes the rewards of a group equal, and rollout.filter_std rejects such groups; "
            f"{remedy}.filter_std=false"
        )
        yield Problem(at, text, (("rollout", "filter_std"),))
    low, high = rollout.filter_mean_low, rollout.filter_mean_high
    for key, bound, rejects in (
        ("filter_mean_low", low, low is not None and rate <= low),
        ("filter_mean_high", high, high is not None and rate >= high),
    ):
        if rejects:
            text = (
                f"fake.pass_rate: {rate:g} is the mean score of every group, and rollout.{key}={bound:g} rejects it; "
                f"{remedy}.{key}=null"
            )
            yield Problem(at, text, (("rollout", key),))


def _redundancy(config: Config) -> Iterator[Problem]:
    if not config.generates:
        return
    rollout, members = config.rollout, ("rollout", "extra_members")
    if config.deterministic and rollout.restart_failed_episodes:
        at = ("rollout", "restart_failed_episodes")
        text = "true, but with deterministic=true generation cannot depend on the time of an error; use false"
        yield Problem(at, f"rollout.restart_failed_episodes: {text}", (("deterministic",),))
    for domain, env in config.envs.items() if config.deterministic else ():
        if env.max_seconds is not None:
            key = f"env.{domain}.max_seconds"
            text = f"{key}: {env.max_seconds:g}, but with deterministic=true no episode ends by the clock; use null"
            yield Problem(("env", domain, "max_seconds"), text, (("deterministic",),))
    if config.deterministic and rollout.extra_members:
        text = (
            f"rollout.extra_members: {rollout.extra_members}, but deterministic=true waits for all members of a group, "
            "so redundant members save no time; use 0"
        )
        yield Problem(members, text, (("deterministic",),))
    count = rollout.group_size + rollout.extra_members
    if count > MAX_MEMBERS:
        size, most = rollout.group_size, MAX_MEMBERS - rollout.group_size
        text = f"rollout.extra_members: {rollout.extra_members} with group_size {size}; use at most {most}"
        yield Problem(members, text, (("rollout", "group_size"),))


def check_replicas(config: Config, replicas: int) -> Iterator[Problem]:
    """Report settings that are impossible with `replicas` generator replicas."""
    if not config.generates:
        return
    rollout, layout, cap = config.rollout, ("layout", "generator"), ("generator", "max_requests")
    if rollout.min_replicas > replicas:
        text = (
            f"rollout.min_replicas: {rollout.min_replicas}, but layout.generator gives {replicas} replicas; lower "
            "rollout.min_replicas or raise layout.generator.num_ranks"
        )
        yield Problem(("rollout", "min_replicas"), text, (layout,))
    room, greedy = replicas * config.generator.most_requests, config.algorithm_spec.greedy_baseline
    members = rollout.group_size + rollout.extra_members + greedy
    has = f"but {replicas} replicas get at most {room} concurrent responses"
    if config.generator.max_requests is not None and members > room:
        text = (
            f"generator.max_requests: {config.generator.max_requests}: a prompt has {members} responses, {has}; raise "
            "generator.max_requests or lower rollout.group_size"
        )
        yield Problem(cap, text, (("rollout", "group_size"), layout))
    elif rollout.extra_members and members > room:
        text = (
            f"rollout.extra_members: a prompt has {members} responses, {has}, so redundant responses only start "
            "after others have ended; raise generator.max_requests or lower rollout.extra_members"
        )
        yield Problem(("rollout", "extra_members"), text, (cap, layout))
    if rollout.extra_prompts and rollout.extra_prompts * members > room:
        text = (
            f"rollout.extra_prompts: {rollout.extra_prompts} redundant prompts have {rollout.extra_prompts * members} "
            f"responses, {has}; lower rollout.extra_prompts or raise generator.max_requests"
        )
        yield Problem(("rollout", "extra_prompts"), text, (cap, layout))


def _asynchronous(config: Config) -> Iterator[Problem]:
    rollout, at = config.rollout, ("rollout", "max_staleness")
    if not config.generates or rollout.max_staleness == 0:
        return
    if config.deterministic:
        text = (
            f"rollout.max_staleness: {rollout.max_staleness:g}, but deterministic=true generates nothing ahead; use 0"
        )
        yield Problem(at, text, (("deterministic",),))
    whole, part = divmod(rollout.max_staleness, 1)
    if 0 < part * rollout.num_prompts < 1 - 1e-9:
        text = (
            f"rollout.max_staleness: {part:.3g} of {rollout.num_prompts} prompts is less than one, so nothing can be "
            f"generated ahead; use {whole:g} or at least {whole + 1 / rollout.num_prompts:.4g}"
        )
        yield Problem(at, text, (("rollout", "num_prompts"),))
    furthest = config.max_steps - 1  # the last step trains version max_steps - 1, the oldest rollouts have version 0
    if ceil(rollout.max_staleness) > furthest:
        text = (
            f"rollout.max_staleness: {rollout.max_staleness:g}, but with max_steps={config.max_steps} no staleness "
            f"can be above {furthest}; use at most {furthest}"
        )
        yield Problem(at, text, (("max_steps",),))
    ahead = int(rollout.max_staleness * rollout.num_prompts + 1e-9)
    wanted, limit = rollout.num_prompts + rollout.extra_prompts + ahead, rollout.max_generated_groups
    if limit is not None and wanted - ahead <= limit < wanted:
        text = (
            f"rollout.max_generated_groups: {limit} is less than the {wanted} that a step may start with max_staleness "
            f"{rollout.max_staleness:g}; use at least {wanted}"
        )
        yield Problem(("rollout", "max_generated_groups"), text, (at,))


def _domain_shares(config: Config) -> Iterator[Problem]:
    total = sum(config.data.domain_interleave_probs.values())
    if config.data.domain_interleave_probs and abs(total - 1) > 1e-6:
        text = f"data.domain_interleave_probs: the shares must add up to 1, got {total:g}"
        yield Problem(("data", "domain_interleave_probs"), text)


def _optimizer(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.lr_schedule != "constant" and trainer.min_lr > trainer.lr:
        text = f"trainer.min_lr: {trainer.min_lr:g} is above trainer.lr, which is {trainer.lr:g}"
        yield Problem(("trainer", "min_lr"), text, (("trainer", "lr"),))
    per_step = getattr(config.algorithm, "optimizer_steps", 1) if config.learns_from_rewards else 1
    yield from _decay("trainer", trainer, (config.max_steps - config.policy_waits) * per_step)
    if config.uses_critic:
        yield from _decay("critic", config.critic, config.max_steps * per_step)
    for index, beta in enumerate(trainer.betas):
        if beta == 1:
            yield Problem(("trainer", "betas", index), f"trainer.betas.{index}: must be below 1, got 1")
    if config.model.dtype == "bfloat16" and trainer.param_dtype == "float32":
        text = "trainer.param_dtype: float32 has no advantage with bfloat16 weights (model.dtype); set bfloat16"
        yield Problem(("trainer", "param_dtype"), text, (("model", "dtype"),))


def _decay(name: str, section: TrainerConfig | CriticConfig, steps: int) -> Iterator[Problem]:
    """Report a decay of the learning rate that does not fit between warm-up and the last of these optimizer steps."""
    decay, warmup = section.lr_decay_steps, section.lr_warmup_steps
    if section.lr_schedule == "wsd" and decay is not None and warmup + decay > steps:
        text = f"{decay} and lr_warmup_steps={warmup} are more than the {steps} optimizer steps of the run; use fewer"
        yield Problem(
            (name, "lr_decay_steps"), f"{name}.lr_decay_steps: {text}", ((name, "lr_warmup_steps"), ("max_steps",))
        )


def _model(config: Config) -> Iterator[Problem]:
    if config.model.path is not None:
        return  # hpcrl.launch.model_folder reads them from the folder
    tiny, at = config.model.tiny, ("model", "tiny")
    if tiny.num_heads % tiny.num_kv_heads:
        text = f"model.tiny.num_kv_heads: {tiny.num_kv_heads} does not divide num_heads, which is {tiny.num_heads}"
        yield Problem((*at, "num_kv_heads"), text, ((*at, "num_heads"),))
    if tiny.hidden_size % (2 * tiny.num_heads):
        text = (
            f"model.tiny.hidden_size: {tiny.hidden_size} must be a multiple of 2 x num_heads = {2 * tiny.num_heads} "
            "(rotary embeddings need an even head size)"
        )
        yield Problem((*at, "hidden_size"), text, ((*at, "num_heads"),))
    for key, least in tiny.least.items():
        if (value := getattr(tiny, key)) < least:
            text = f"model.tiny.{key}: {value}, but {tiny.architecture} needs {least} or more"
            yield Problem((*at, key), text, ((*at, "architecture"),))
    yield from check_family(config, tiny.architecture, (*at, "architecture"))
    yield from check_trainable(config, {"model_type": tiny.architecture}, (*at, "architecture"))
    yield from check_parts(config, {"model_type": tiny.architecture})
    yield from check_length(config, tiny.max_position_embeddings, "model.tiny.max_position_embeddings")


def _environments(config: Config) -> Iterator[Problem]:
    for domain, env in config.envs.items():
        if env.memory_mib is not None and env.runs_in != "process":
            text = f"env.{domain}.memory_mib: {env.memory_mib}, but only episode processes have this limit"
            yield Problem(
                ("env", domain, "memory_mib"),
                f"{text}; use env.{domain}.runs_in=process or env.{domain}.memory_mib=null",
                (("env", domain, "runs_in"),),
            )


def _user_code(config: Config) -> Iterator[Problem]:
    for domain, reward in config.reward.items():
        yield from _imported_code(("reward", domain), reward, REWARDS)
    for domain, env in config.envs.items():
        at, name = ("env", domain), f"env.{domain}"
        yield from _imported_code(at, env, ENVS)
        if config.turn_timeout_s(env) >= config.timeouts.command_s:
            text = (
                f"{name}.timeout_s: {config.turn_timeout_s(env):g} must be below timeouts.command_s, which is "
                f"{config.timeouts.command_s:g}, after which the whole rank counts as lost"
            )
            yield Problem((*at, "timeout_s"), text, (("timeouts", "command_s"),))


def _dialogues(config: Config) -> Iterator[Problem]:
    """Report an environment's keys that its prompts cannot follow: examples without an expert, or thinking that
    cannot be cut."""
    for domain, env in config.envs.items():
        at, name = ("env", domain), f"env.{domain}"
        if env.examples and env.examples_path is None and not ENVS[env.name].has_expert:
            able = ", ".join(known for known, spec in ENVS.items() if spec.has_expert)
            text = (
                f"{name}.examples: {env.name} has no expert ({able} have one); give dialogues by {name}.examples_path"
            )
            yield Problem((*at, "examples"), text, ((*at, "name"),))
        if env.thinking == "cut" and not env.by_steps:
            text = f"{name}.thinking: cut, but an episode by trajectory keeps every token; use {name}.episode=steps"
            yield Problem((*at, "thinking"), text, ((*at, "episode"),))
        if env.max_sequence_tokens is not None:
            yield from _sequence_limit(config, domain, env.max_sequence_tokens)


def _sequence_limit(config: Config, domain: str, limit: int) -> Iterator[Problem]:
    at, key = ("env", domain), f"env.{domain}.max_sequence_tokens"
    if config.envs[domain].by_steps:
        text = f"{key}: {limit}, but by steps every turn is a separate sequence; use env.{domain}.episode=trajectory"
        yield Problem((*at, "max_sequence_tokens"), text, ((*at, "episode"),))
    elif limit < config.max_turn_tokens:
        prompt, response = config.data.max_prompt_tokens, config.max_response_tokens
        text = f"{key}: {limit} leaves no room for one turn: prompt {prompt} + response {response} tokens"
        involved = (("data", "max_prompt_tokens"), ("rollout", "max_new_tokens"), ("eval",))
        yield Problem((*at, "max_sequence_tokens"), text, involved)


def _imported_code(at: Path, section: RewardConfig | EnvConfig, table: SpecTable[Any]) -> Iterator[Problem]:
    """Report a key that names user code if it is missing but required, or given but not read."""
    keys = {name: spec.imports_code for name, spec in table.items() if spec.imports_code}
    for name, key in keys.items():
        given, where = getattr(section, key), (*at, "name")
        if section.name == name and given is None:
            text = f"{dotted(at)}.{key}: name={name} needs an import path, package.module:NAME"
            yield Problem((*at, key), text, (where,))
        elif section.name != name and given is not None:
            text = f"{dotted(at)}.{key}: read only with name={name}, and name is {section.name}"
            yield Problem((*at, key), text, (where,))


def _components(config: Config) -> Iterator[Problem]:
    """Report components without memory: sbatch applies another component's --mem to them."""
    given = {name: spec.memory for name, spec in config.cluster.components.items()}
    if any(given.values()):
        for name in (name for name, memory in given.items() if memory is None):
            path = ("cluster", "components", name, "memory")
            text = (
                f"{dotted(path)}: missing; Slurm would use the value of another component, so give it for all or none"
            )
            yield Problem(path, text, (("cluster", "components"),))


def _slurm_options(config: Config) -> Iterator[Problem]:
    """Report options that conflict with options that hpcrl itself passes to sbatch or srun."""
    for key, taken in (("sbatch_options", SET_FOR_SBATCH), ("srun_options", SET_FOR_SRUN)):
        for name in getattr(config.cluster, key):
            meant = next((full for full in taken if full.startswith(name)), "")  # Slurm accepts abbreviated names
            if meant:
                instead = f"; use {taken[meant]}" if taken[meant] else ""
                text = f"cluster.{key}: --{name} is set by hpcrl itself{instead}"
                yield Problem(("cluster", key, name), text)


def _unsupported(config: Config) -> Iterator[Problem]:
    """Refuse a site on which hpcrl cannot run."""
    if config.cluster.unsupported is not None:
        path = ("cluster", "unsupported")
        yield Problem(path, f"cluster: hpcrl cannot run on this site: {config.cluster.unsupported}")


def _warning(config: Config) -> Iterator[Problem]:
    """Report a signal lead that is not below the time limit: the job would be requeued before its first step,
    forever."""
    cluster = config.cluster
    if cluster.name == "slurm" and cluster.signal_lead_s >= cluster.time_s:
        text = (
            f"cluster.signal_lead_s: {cluster.signal_lead_s} s is not below the job's time limit of "
            f"{cluster.time_s} s; lower it or raise cluster.time"
        )
        yield Problem(("cluster", "signal_lead_s"), text, (("cluster", "time"),))
