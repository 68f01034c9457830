"""Abilities of the parts that the configuration selects, and whether they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hpcrl.config.engines import GeneratorConfig, TrainerConfig
from hpcrl.config.judging import JUDGE_ENGINE
from hpcrl.config.schema import Config
from hpcrl.config.self_teaching_checks import check_self_teaching
from hpcrl.config.teacher_checks import check_teacher_paths
from hpcrl.config.teacher_paths import teacher_folders, teachers
from hpcrl.models.families import SEEING
from hpcrl.models.mtp import untrainable
from hpcrl.spec.extras import install, version_of
from hpcrl.spec.freeze import TOWER_PARTS
from hpcrl.spec.kinds import Spec
from hpcrl.spec.problems import Path, Problem, dotted
from hpcrl.spec.table import SpecTable
from hpcrl.spec.tables import ENVS, GEN_ENGINES, REWARDS, ROLES, TRACKERS, TRAIN_ENGINES

CRITIC_ENGINE, ESTIMATOR = ("critic", "engine"), ("algorithm", "advantage_estimator")
TEACHER_ENGINE = ("teacher", "engine")


def chosen(config: Config) -> Iterator[tuple[Path, str, Spec]]:
    """(key, name, specification) of every part that the configuration selects by name."""
    yield ("pipeline",), config.pipeline, config.pipeline_spec
    yield ("trainer", "engine"), config.trainer.engine, TRAIN_ENGINES[config.trainer.engine]
    yield ("generator", "engine"), config.generator.engine, GEN_ENGINES[config.generator.engine]
    if config.uses_critic and (engine := config.critic.engine or config.trainer.engine) != config.trainer.engine:
        yield CRITIC_ENGINE, engine, TRAIN_ENGINES[engine]
    if config.uses_teacher and (engine := config.teacher.engine or config.trainer.engine) != config.trainer.engine:
        yield TEACHER_ENGINE, engine, TRAIN_ENGINES[engine]
    if config.learns:
        for engine in sorted({config.trainer.engine, config.critic_engine if config.uses_critic else ""} - {""}):
            if (optimizer := TRAIN_ENGINES[engine].optimizers.get(config.trainer.optimizer)) is not None:
                yield ("trainer", "optimizer"), config.trainer.optimizer, optimizer
    if config.learns_from_rewards:
        yield ("algorithm",), str(getattr(config.algorithm, "advantage_estimator", "")), config.algorithm_spec
    if config.asks("judge"):
        yield JUDGE_ENGINE, config.judge.engine, GEN_ENGINES[config.judge.engine]
    for domain, reward in config.reward.items():
        yield ("reward", domain, "name"), reward.name, REWARDS[reward.name]
    for domain, env in config.envs.items():
        yield ("env", domain, "name"), env.name, ENVS[env.name]
    for index, name in enumerate(config.trackers):
        yield ("trackers", index), name, TRACKERS[name]


def check_installed(config: Config) -> list[Problem]:
    """Report parts that are not installed or have an unsupported version. In a container the preflight checks installed
    parts."""
    problems = []
    for path, name, spec in chosen(config):
        if (lacking := spec.missing_packages()) and config.cluster.container == "none":
            problems.append(Problem(path, f"{dotted(path)}: {name} is not installed; {install(lacking)}"))
        elif config.cluster.container == "none":
            for module, known in spec.required_versions.items():
                if not (version := version_of(module) or "(of unknown version)").startswith(known):
                    text = f"{module} {version} is installed, but hpcrl supports only {known}*"
                    problems.append(Problem(path, f"{dotted(path)}: {text}; {install([spec.needs[module]])}"))
    return problems


def check_abilities(config: Config) -> Iterator[Problem]:
    """Report requirements that the selected engines cannot meet, and roles that do not exist."""
    train_engine, gen_engine = config.trainer.engine, config.generator.engine
    trainer, generator = TRAIN_ENGINES[train_engine], GEN_ENGINES[gen_engine]
    trains, generates = ("trainer", "engine"), ("generator", "engine")
    if config.deterministic and not trainer.deterministic:
        instead = _able(TRAIN_ENGINES, trains, lambda spec: spec.deterministic)
        text = f"deterministic: the {train_engine} trainer is not deterministic; use false{instead}"
        yield Problem(("deterministic",), text, (trains,))
    if config.deterministic and not generator.deterministic and config.responds:
        instead = _able(GEN_ENGINES, generates, lambda spec: spec.deterministic)
        text = f"deterministic: the {gen_engine} generator is not deterministic; use false{instead}"
        yield Problem(("deterministic",), text, (generates,))
    yield from _optimizers(config)
    yield from _heads(config)
    yield from _lora(config)
    yield from _freeze(config)
    yield from _mtp(config)
    yield from _reference(config)
    yield from _teacher(config)
    yield from _critic(config)
    yield from _segments(config)
    for path, name, spec in chosen(config):
        if unknown := [role for role in spec.roles if role not in list(ROLES)]:
            text = f"{name} needs the unknown role {unknown[0]}; known roles are {', '.join(ROLES)}"
            yield Problem(path, f"{dotted(path)}: {text}; install the package that adds it")
    if not config.learns_from_rewards:
        return
    yield from _divergence(config)
    if config.trainer.router_replay:
        for path, kind, name, able in (
            (trains, "trainer", train_engine, {n: spec.router_replay for n, spec in TRAIN_ENGINES.items()}),
            (generates, "generator", gen_engine, {n: spec.records_routes for n, spec in GEN_ENGINES.items()}),
        ):
            if (kind == "trainer" or config.generates) and not able.get(name, False):
                has = " or ".join(n for n in able if able[n])
                text = f"the {name} {kind} does not support it; use false or {dotted(path)}={has}"
                yield Problem(("trainer", "router_replay"), f"trainer.router_replay: {text}", (path,))
    if config.rollout.on_new_weights == "recompute" and config.rollout.max_staleness and not generator.recompute:
        instead = _able(GEN_ENGINES, generates, lambda spec: spec.recompute)
        text = f"the {gen_engine} generator cannot recompute; use continue or restart{instead}"
        yield Problem(("rollout", "on_new_weights"), f"rollout.on_new_weights: {text}", (generates,))
    if config.learns and (lacking := sorted(config.algorithm_spec.outputs(config.algorithm) - trainer.computes)):
        text = f"the objective needs {', '.join(lacking)}, which the {train_engine} trainer does not compute"
        yield Problem(("algorithm",), f"algorithm: {text}; choose another trainer.engine", (trains,))


def _optimizers(config: Config) -> Iterator[Problem]:
    """Report an optimizer that the policy's or the critic's engine lacks."""
    if not config.learns:
        return
    wanted, engines = config.trainer.optimizer, {"trainer": config.trainer.engine}
    if config.uses_critic and config.critic_engine != config.trainer.engine:
        engines["critic"] = config.critic_engine
    for role, name in engines.items():
        if wanted not in (has := TRAIN_ENGINES[name].optimizers):
            instead = _able(TRAIN_ENGINES, (role, "engine"), lambda spec: wanted in spec.optimizers)
            text = f"the {name} {role} has no {wanted}; use {' or '.join(sorted(has))}{instead}"
            yield Problem(("trainer", "optimizer"), f"trainer.optimizer: {text}", ((role, "engine"),))


def _lora(config: Config) -> Iterator[Problem]:
    """Report an engine without adapter support, and updates of a reference that is the frozen base model."""
    if config.lora is None:
        return
    if config.uses_reference and config.reference_is_base and config.algorithm.ref_update_steps is not None:
        text = "with LoRA (trainer.lora.rank) the reference is the base model, which never changes; use null"
        path = ("algorithm", "ref_update_steps")
        yield Problem(path, f"algorithm.ref_update_steps: {text}", (("trainer", "lora", "rank"),))
    if "experts" in config.lora.parts and config.lora.dropout:
        text = (
            "experts' adapters change their matrices, which dropout of inputs cannot; use 0, or parts without experts"
        )
        at = ("trainer", "lora")
        yield Problem((*at, "dropout"), f"trainer.lora.dropout: {text}", ((*at, "parts"),))
    for role, runs, table in (
        ("trainer", True, TRAIN_ENGINES),
        ("generator", config.published_lora and config.responds, GEN_ENGINES),
    ):
        path, name = (role, "engine"), str(getattr(config, role).engine)
        if runs and not table[name].lora:  # type: ignore[attr-defined]
            instead = _able(table, path, lambda spec: spec.lora)  # type: ignore[arg-type]
            text = f"the {name} {role} does not support adapters; use 0{instead}"
            yield Problem(("trainer", "lora", "rank"), f"trainer.lora.rank: {text}", (path,))


def _freeze(config: Config) -> Iterator[Problem]:
    """Report frozen parameters beside adapters, or of an engine that trains whole models."""
    if not (config.learns and config.trainer.freeze) or config.debug == "fake":
        return
    path, name = ("trainer", "freeze"), config.trainer.engine
    if config.lora is not None:
        text = "trainer.lora freezes all of the model's own weights; leave it out"
        yield Problem(path, f"trainer.freeze: {text}", (("trainer", "lora", "rank"),))
    elif not TRAIN_ENGINES[name].freezes:
        instead = _able(TRAIN_ENGINES, ("trainer", "engine"), lambda spec: spec.freezes)
        text = f"the {name} trainer trains whole models; leave it out{instead}"
        yield Problem(path, f"trainer.freeze: {text}", (("trainer", "engine"),))


def _mtp(config: Config) -> Iterator[Problem]:
    """Report an engine that cannot train MTP layers, and a model without them."""
    if config.model.mtp != "train" or not config.learns or config.debug == "fake":
        return
    path, name = ("model", "mtp"), config.trainer.engine
    if not TRAIN_ENGINES[name].trains_mtp:
        instead = _able(TRAIN_ENGINES, ("trainer", "engine"), lambda spec: spec.trains_mtp)
        text = f"model.mtp: the {name} trainer trains no MTP layers; use keep{instead}"
        yield Problem(path, text, (("trainer", "engine"),))
    elif config.model.path is None:
        yield Problem(path, "model.mtp: model.tiny has no MTP layer to train; use keep", (("model", "path"),))


def check_mtp(config: Config, model: Mapping[str, Any], names: Iterable[str] | None) -> Iterator[Problem]:
    """Check that the MTP layer of the model with this config.json can be trained if model.mtp asks for it. `names` are
    the tensors of its files, None if these are missing."""
    if config.learns and config.model.mtp == "train" and (why := untrainable(model, names)):
        yield Problem(("model", "mtp"), f"model.mtp: {why}; use keep", (("model", "path"),))


def _reference(config: Config) -> Iterator[Problem]:
    """Report a reference.path whose vocabulary cannot be compared with the policy's, or that ref_update_steps would
    replace."""
    if not config.uses_reference or config.reference.path is None:
        return
    yield from _without_policy("reference", config)
    if config.learns_from_rewards and (every := config.algorithm.ref_update_steps) is not None:
        path = ("algorithm", "ref_update_steps")
        text = f"{every}, but the policy's weights do not fit the model of reference.path; use null for one of them"
        yield Problem(path, f"{dotted(path)}: {text}", (("reference", "path"),))


def _without_policy(role: str, config: Config, key: Path = ("path",)) -> Iterator[Problem]:
    """Report the key of a second model if the run creates the policy."""
    if config.model.path is None:
        text = "the run creates the policy (model.tiny), and no other model has its vocabulary"
        path = (role, *key)
        yield Problem(path, f"{dotted(path)}: {text}; give model.path, too", (("model", "path"),))


def _teacher(config: Config) -> Iterator[Problem]:
    """Report a missing teacher, and an engine that cannot be its."""
    if not config.uses_teacher or config.debug == "fake":
        return
    name, key = config.teacher_engine, TEACHER_ENGINE
    yield from check_self_teaching(config)
    if config.teacher_endpoint is not None:
        yield from _without_policy("teacher", config, ("endpoint", "url"))
        return
    if config.teacher.source == "folder" and not teachers(config.teacher):
        text = (
            "there is no model to learn from; give a folder in HF layout with the policy's tokenizer, or folders of "
            "domains (teacher.paths), a server (teacher.endpoint) or the policy itself (teacher.source)"
        )
        involved = (*(("teacher", key) for key in ("paths", "endpoint", "source")), ("algorithm",), ("pipeline",))
        yield Problem(("teacher", "path"), f"teacher.path: {text}", involved)
        return
    yield from check_teacher_paths(config)
    if config.teacher.source == "folder":
        yield from _without_policy("teacher", config, next(iter(teacher_folders(config.teacher)))[1:])
    if config.teacher.form not in (gives := TRAIN_ENGINES[name].teaches):
        instead = _able(TRAIN_ENGINES, key, lambda spec: config.teacher.form in spec.teaches)
        text = f"the {name} teacher gives only {', '.join(sorted(gives))}{instead}"
        yield Problem(("teacher", "form"), f"teacher.form: {config.teacher.form}, but {text}", (key,))
    if config.deterministic and not TRAIN_ENGINES[name].deterministic and name != config.trainer.engine:
        instead = _able(TRAIN_ENGINES, key, lambda spec: spec.deterministic)
        text = f"deterministic: the {name} teacher is not deterministic; use false{instead}"
        yield Problem(("deterministic",), text, (key,))


def _divergence(config: Config) -> Iterator[Problem]:
    """Report a trainer that compares the policy with its teacher only by the tokens that the policy drew."""
    name, form = config.train_engine, config.teacher.form
    if not config.uses_teacher or form == "sampled" or "divergence" in TRAIN_ENGINES[name].computes:
        return
    at, path = ("trainer", "engine"), ("teacher", "form")
    if config.debug == "fake":
        text = f"{form} compares vocabularies, and the trainer of debug=fake has none; use sampled"
        yield Problem(path, f"teacher.form: {text}", (("debug",),))
        return
    instead = _able(TRAIN_ENGINES, at, lambda spec: "divergence" in spec.computes)
    yield Problem(path, f"teacher.form: {form}: the {name} trainer computes no divergence; use sampled{instead}", (at,))


def _heads(config: Config) -> Iterator[Problem]:
    """Report a float32 vocabulary projection in an engine that computes it only in the model's dtype."""
    engines: tuple[tuple[str, bool, TrainerConfig | GeneratorConfig, SpecTable[Any]], ...] = (
        ("trainer", config.learns, config.trainer, TRAIN_ENGINES),
        ("generator", config.responds, config.generator, GEN_ENGINES),
    )
    for role, runs, section, table in engines:
        if runs and section.head_dtype and not table[section.engine].float32_head:
            able = " or ".join(name for name, spec in table.items() if spec.float32_head and spec.selectable)
            text = (
                f"{role}.head_dtype: {section.head_dtype}, but the {section.engine} {role} computes the vocabulary "
                f"projection only in the model's dtype; use null, or {role}.engine={able}"
            )
            yield Problem((role, "head_dtype"), text, ((role, "engine"),))


def _segments(config: Config) -> Iterator[Problem]:
    """Report episodes by steps with an engine that treats a row as one sequence."""
    if not config.by_steps:
        return
    section = next(name for name, env in config.envs.items() if env.by_steps)
    roles = {"trainer": config.trainer.engine} if config.learns else {}
    roles |= {"critic": config.critic_engine} if config.uses_critic else {}
    roles |= {"teacher": config.teacher_engine} if config.uses_teacher else {}
    for role, name in roles.items():
        if not TRAIN_ENGINES[name].segments:
            instead = _able(TRAIN_ENGINES, (role, "engine"), lambda spec: spec.segments)
            text = f"the {name} {role} treats an episode as one sequence; use trajectory{instead}"
            yield Problem(("env", section, "episode"), f"env.{section}.episode: {text}", ((role, "engine"),))


def _critic(config: Config) -> Iterator[Problem]:
    """Report a critic that its engine does not support, a critic warm-up that leaves no policy step, and a missing
    critic."""
    name = str(getattr(config.algorithm, "advantage_estimator", ""))
    if (
        config.learns_from_rewards
        and config.debug == "rollout_only"
        and config.algorithm_spec.uses_critic(config.algorithm)
    ):
        text = f"{dotted(ESTIMATOR)}: {name} needs values, and debug=rollout_only has no critic; use another algorithm"
        yield Problem(ESTIMATOR, text, (("debug",), ("algorithm",)))
    if not config.uses_critic:
        return
    critic, engine = config.critic, config.critic.engine or config.trainer.engine
    if not TRAIN_ENGINES[engine].make_critic:
        instead = _able(TRAIN_ENGINES, CRITIC_ENGINE, lambda spec: bool(spec.make_critic))
        text = f"critic.engine: {name} needs a critic, and the {engine} engine has no value head; use another algorithm"
        yield Problem(CRITIC_ENGINE, text + instead, (("trainer", "engine"), ("algorithm",)))
    elif config.deterministic and not TRAIN_ENGINES[engine].deterministic:
        instead = _able(TRAIN_ENGINES, CRITIC_ENGINE, lambda spec: spec.deterministic and bool(spec.make_critic))
        text = f"deterministic: the {engine} critic is not deterministic; use false{instead}"
        yield Problem(("deterministic",), text, (CRITIC_ENGINE,))
    if critic.warmup_steps >= config.max_steps:
        text = f"{critic.warmup_steps} of max_steps={config.max_steps} leaves no step that trains the policy"
        yield Problem(("critic", "warmup_steps"), f"critic.warmup_steps: {text}; use fewer", (("max_steps",),))
    if critic.lr_schedule != "constant" and critic.min_lr > critic.lr:
        text = f"critic.min_lr: {critic.min_lr:g} is above critic.lr, which is {critic.lr:g}"
        yield Problem(("critic", "min_lr"), text, (("critic", "lr"),))


def check_length(config: Config, limit: int, name: str) -> Iterator[Problem]:
    """Check that the longest sequence fits into the model's `limit` positions; `name` is the key of this limit."""
    if config.trains_head:
        if (longest := config.head_training.max_tokens) > limit:
            at = (config.pipeline_spec.section_key, "max_tokens")
            yield Problem(at, f"{dotted(at)}: {longest} tokens exceed {name} = {limit}", (("model",),))
        return
    prompt, response = config.data.max_prompt_tokens, config.max_response_tokens
    turns = config.max_sequence_turns
    total = config.max_sequence_tokens
    if total > limit:
        sum_of = f"prompt {prompt} + response {response}" if turns == 1 else f"{turns} turns x ({prompt} + {response})"
        sum_of = sum_of if total == turns * config.max_turn_tokens else "env.NAME.max_sequence_tokens"
        text = f"data.max_prompt_tokens: {sum_of} = {total} tokens exceed {name} = {limit}"
        if turns > 1 and config.max_turn_tokens <= limit:
            text += f"; env.NAME.max_sequence_tokens={limit} ends episodes that reach it"
        involved = (("rollout", "max_new_tokens"), ("eval",), ("model",), ("env",))
        yield Problem(("data", "max_prompt_tokens"), text, involved)


def check_family(
    config: Config, model_type: str, path: Path, model: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """Check that the generation engine, if the run needs one, supports this model family and all features of `model`, a
    config.json. `path` is the model's key."""
    if not config.responds:
        return
    name, spec = config.generator.engine, GEN_ENGINES[config.generator.engine]
    if spec.needs and config.cluster.container != "none":
        model = None  # the version of the library in the image is not known here
    if spec.families is not None and model_type not in spec.families:
        wrong = f"supports {', '.join(spec.families)}, not {model_type}"
    elif features := list(spec.unsupported(model, config.max_sequence_tokens)) if model is not None else []:
        wrong = f"lacks {' and '.join(features)}"
    else:
        return
    able = " or ".join(n for n, other in GEN_ENGINES.items() if other.selectable and not other.families and n != name)
    text = f"{dotted(path)}: the {name} generator {wrong}; generator.engine={able} runs all models of its library"
    yield Problem(path, text, (("generator", "engine"), ("model",)))


def check_trainable(config: Config, model: Mapping[str, Any], path: Path, role: str = "trainer") -> Iterator[Problem]:
    """Check that the training engine, if the run needs one, can train the model of this config.json, whose key is
    `path`. `role` is that of the ranks; its section has the key of their engine."""
    name = config.trainer.engine
    pipeline, spec = config.pipeline_spec, TRAIN_ENGINES[name]
    if not pipeline.learns or config.debug == "fake":
        return
    own = None if spec.section is None else config.trainer.section(spec.section)
    if lacking := list(spec.unsupported(own, model)):
        default = {other: spec.section() if spec.section else None for other, spec in TRAIN_ENGINES.items()}
        able = [
            other
            for other, spec in TRAIN_ENGINES.items()
            if spec.selectable and other != name and not list(spec.unsupported(default[other], model))
        ]
        remedy = f"; use {role}.engine={' or '.join(able)}" if able else ""
        involved = ((role, "engine"), ("trainer", name), ("model",))
        yield Problem(path, f"{dotted(path)}: the {name} {role} {' and '.join(lacking)}{remedy}", involved)


def check_parts(config: Config, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that the model of this config.json has a tower if trainer.freeze names its parts."""
    parts, family = [entry for entry in config.trainer.freeze if entry in TOWER_PARTS], model.get("model_type")
    if config.learns and parts and family not in SEEING and not model.get("vision_config"):
        text = f"{family} has no {' and no '.join(dict.fromkeys(parts))}; leave it out"
        yield Problem(("trainer", "freeze"), f"trainer.freeze: {text}", (("model",),))


def _able(table: SpecTable[Any], path: Path, can: Callable[[Any], bool]) -> str:
    """Names the engines with an ability, as a remedy."""
    names = [name for name, spec in table.items() if spec.selectable and can(spec)]
    return f", or {dotted(path)}={' or '.join(names)}" if names else ""
