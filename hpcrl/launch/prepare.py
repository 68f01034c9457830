"""Everything about a run that can be determined before a process is started."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.checkpoint.commit import problem_of
from hpcrl.cluster.container import check_container
from hpcrl.cluster.layout import RoleLayout, check_layout
from hpcrl.cluster.placement import check_placement
from hpcrl.cluster.profiled import check_profile
from hpcrl.config import Config, ConfigError, LoadedConfig, Problem
from hpcrl.config.abilities import check_family, check_installed, check_length, check_mtp, check_parts, check_trainable
from hpcrl.config.folders import conf_dir, conf_file, shown
from hpcrl.config.judging import as_judges
from hpcrl.config.loss_checks import expert_problems
from hpcrl.config.self_teaching_checks import check_teacher_length
from hpcrl.config.teacher import TeacherConfig
from hpcrl.config.teacher_paths import PATH, PATHS, keys_of_teachers
from hpcrl.launch.frozen import resolve_config
from hpcrl.launch.hub import find_model
from hpcrl.launch.machine import check_machine
from hpcrl.launch.model_folder import (
    NO_TOKENIZER,
    ModelFolder,
    check_chat_template,
    check_first_head,
    check_scalar_head,
    inspect_model,
)
from hpcrl.launch.plan import ShownRows, plan_shape
from hpcrl.launch.render import check_arguments, check_prologue
from hpcrl.launch.resources import check_host_memory
from hpcrl.launch.stored import check_rollouts
from hpcrl.launch.vocabulary import check_embedding, check_vocabulary
from hpcrl.models.shape import CannotPlanError, decoder_keys
from hpcrl.models.transformers_models import SCALAR_HEADS
from hpcrl.planner.image_memory import with_row_tokens
from hpcrl.planner.memory import check_sizes
from hpcrl.planner.served import check_judge_sizes
from hpcrl.run_folder import CONFIG, RunState, check_run
from hpcrl.spec.problems import Path as KeyPath
from hpcrl.spec.problems import dotted
from hpcrl.system.files import step_name, steps_in

if TYPE_CHECKING:
    from hpcrl.data.rows import RowSet
    from hpcrl.data.templates import FolderTemplate
    from hpcrl.models.vision import Vision


def prepare(argv: Sequence[str]) -> tuple[Config, RoleLayout, ModelFolder | None, RunState, ShownRows]:
    """A checked run and its plan's summary of its rows; config.run_dir is the folder that the run will use. Writes
    nothing. ConfigError lists all problems of configuration, layout, data, rewards, model and run folder."""
    resolved = resolve_config(argv)
    reading = resolved.reading
    config = reading.config
    model = run = None
    seen = ShownRows()
    choices = reading.composition.choices.items()
    files = [(f"{group}={option}", conf_file(f"{group}/{option}.yaml")) for group, option in choices]
    of_folders = [f"{choice} is from {shown(file)}" for choice, file in files if not file.is_relative_to(conf_dir())]
    if config is not None:
        reading.add([] if config.dry_run else check_installed(config))
        layout_problems = check_layout(config)
        reading.add(layout_problems)
        if not layout_problems:
            layout = RoleLayout.from_config(config)
            reading.add(check_placement(config, layout))
            reading.add(list(check_profile(config, layout)))
            reading.add([] if config.dry_run else list(check_machine(config, layout)))
        reading.add(check_container(config.cluster))
        reading.add(check_prologue(config.cluster))
        if not config.pipeline_spec.rank0_only:
            config = _find_model(reading, config)
            model = _check_model(reading, config)
            config = _check_judge(reading, config)
            seen = _check_inputs(reading, config, None if layout_problems else layout)
            config = _check_reference(reading, config, model)
            config = _check_teachers(reading, config, model)
            config = _check_critic(reading, config)
            config = _check_reward_model(reading, config)
            if not layout_problems:
                _check_sizes(reading, config, model, seen.image_tokens)
        run = _check_run(reading, config, resolved.explicit)
        if run is not None and run.kind != "finished" and not config.dry_run and not reading.unread:
            config = config.model_copy(update={"run_dir": str(run.run_dir)})
            reading.add(list(config.pipeline_spec.inspect(config, run.kind == "resume")))
        if run is not None and config.cluster.name == "slurm":
            reading.add([Problem((), line, (("run_dir",),)) for line in check_arguments(argv, run.run_dir)])
    if reading.problems or config is None or run is None:
        raise ConfigError(reading.lines())
    config = config.model_copy(update={"run_dir": str(run.run_dir)})
    run = replace(run, arguments=resolved.arguments, ignored=resolved.ignored)
    return config, RoleLayout.from_config(config), model, run, replace(seen, notes=[*of_folders, *seen.notes])


def _check_inputs(reading: LoadedConfig, config: Config, layout: RoleLayout | None) -> ShownRows:
    """Checks prompt files, rewards and stored rollouts; returns the plan's summary. `layout` is None if impossible."""
    from hpcrl.data import READERS, check_answers, check_shares, head_row_reader, parse_row, read_splits
    from hpcrl.data.privileged import with_context_check
    from hpcrl.envs.factory import validate_envs
    from hpcrl.launch.data_summary import (
        check_media,
        check_own_variables,
        check_shown,
        find_vision,
        image_checks,
        most_image_tokens,
        notes_on_marks,
        row_checks,
        show_rows,
    )
    from hpcrl.rewards.seeing import check_questions, notes_on_judges, notes_on_questions, vision_of_judge
    from hpcrl.rewards.serving.router import check_reward_ranks, reward_notes, validate_rewards

    shown = ShownRows()
    if config.debug != "train_only" or config.evaluates:
        template = _check_template(reading, config)
        checks = row_checks(config, template)
        vision, unusable = None, False
        try:
            vision = find_vision(config)
            reading.add(list(check_shown(config, vision)) if template is not None else [])
        except ValueError as error:
            unusable = True
            reading.add([Problem((), str(error), (("model", "path"), ("data", "max_pixels")))])
        seeing = image_checks(config, vision, template, checks, vision_of_judge(config))
        drops = not config.learns_from_rewards and config.data.unusable_rows == "drop"
        read = head_row_reader(config.head_training) if config.trains_head else READERS[config.row_kind]
        read_val = read if config.validates_rows else parse_row
        checked = with_context_check(config, seeing or checks)
        rows, wrong = read_splits(config.data, config.seed, checked, read, drops, read_val)
        wrong += check_own_variables(config, rows)
        wrong += check_media(config, rows, vision) if not unusable else []
        if config.learns_from_rewards:
            wrong += check_shares(config.data, rows, config.rollout.num_prompts)
        elif config.learns:
            wrong += check_answers(rows)
        lacking = tuple(f"{path}: no such file" for path in _still_to_give(reading, config))
        lines = [line for line in wrong if not line.endswith(lacking or ("\n",))]
        reading.add([Problem((), line, (("data",),)) for line in lines])
        reading.add([Problem((), line, (("reward",), ("data",))) for line in validate_rewards(config, rows)])
        reading.add([Problem((), line, (("env",), ("data",))) for line in validate_envs(config, rows)])
        if config.expert_plays and config.envs and "train" in rows:
            involved = (("imitation",), ("loss",), ("env",), ("data",))
            domains = rows["train"].domain_names
            reading.add([Problem((), line, involved) for line in expert_problems(config, domains)])
        ranks = [] if layout is None else check_reward_ranks(config, layout, rows)
        reading.add([Problem((), line, (("layout", "reward"), ("data",))) for line in ranks])
        judged = [check.judged for check in seeing.values()]
        reading.add(list(check_questions(config, judged)))
        _check_imitation(reading, config, template, vision)
        shown = show_rows(config, template, rows, checks)
        shown.image_tokens = most_image_tokens(config, rows, seeing)
        shown.notes += _check_context_lengths(reading, config, template, rows.get("train"), vision)
        shown.notes += reward_notes(config, rows) if config.learns_from_rewards or config.writes_responses else []
        shown.notes += notes_on_marks(seeing)
        shown.notes += notes_on_judges(config, rows) if vision is not None else []
        shown.notes += notes_on_questions(config, judged)
    reading.add(check_rollouts(config))
    return shown


def _check_context_lengths(
    reading: LoadedConfig,
    config: Config,
    template: FolderTemplate | None,
    rows: RowSet | None,
    vision: Vision | None,
) -> list[str]:
    """Checks the lengths of prompts with teacher.context; returns notes for the plan."""
    from hpcrl.launch.context_lengths import context_lengths

    if template is None or rows is None or (lengths := context_lengths(config, template, rows, vision)) is None:
        return []
    problems = list(lengths.problems(config))
    reading.add(problems)
    return [] if problems else list(lengths.notes(config))


def _check_imitation(
    reading: LoadedConfig, config: Config, template: FolderTemplate | None, vision: Vision | None
) -> None:
    """Checks the rows of imitation.data as pipeline=sft would."""
    if not config.imitates:
        return
    from hpcrl.data import check_answers, read_splits
    from hpcrl.launch.data_summary import check_media, row_checks

    own = config.of_imitation()
    rows, wrong = read_splits(own.data, own.seed, row_checks(own, template), drop=own.data.unusable_rows == "drop")
    lines = [line.replace("data.train", "imitation.data") for line in [*wrong, *check_answers(rows)]]
    lines += [line.replace("data.train", "imitation.data") for line in check_media(own, rows, vision)]
    reading.add([Problem((), line, (("imitation",), ("data",))) for line in dict.fromkeys(lines)])


def _check_template(reading: LoadedConfig, config: Config) -> FolderTemplate | None:
    """The policy's chat template; None if it is not known."""
    from hpcrl.launch.data_summary import check_variables, find_template

    try:
        template = find_template(config)
    except ValueError as error:
        reading.add([Problem((), str(error), (("model", "path"),))])
        return None
    reading.add(list(check_variables(config, template)) if template is not None else [])
    return template


def _still_to_give(reading: LoadedConfig, config: Config) -> list[str]:
    """Prompt files named by a recipe, which a plan does not need; files given on the command line must exist."""
    if not config.dry_run:
        return []
    from hpcrl.data.rows import sources

    by_hand = [path for path, on_command_line in reading.composition.given().items() if on_command_line]
    return [
        source.path
        for split in ("train", "val")
        if not any(path[:2] == ("data", split) for path in by_hand)
        for source in sources(config.data, split)
    ]


def _find_model(reading: LoadedConfig, config: Config) -> Config:
    """The configuration with a model's hub name replaced by its folder; unchanged if the folder is not available."""
    if config.model.path is None:
        return config
    try:
        path = find_model(config.model.path, plan_only=config.dry_run)
    except ValueError as error:
        key = ("model", "path")
        reading.add([Problem(key, str(error))])
        reading.unread.append(key)  # nothing more can be checked
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _check_model(reading: LoadedConfig, config: Config) -> ModelFolder | None:
    """The model folder, if one is given; None for the tiny model."""
    if config.model.path is None:
        return None
    model = inspect_model(Path(config.model.path), to_plan=config.dry_run, weightless=config.debug == "fake")
    wrong = list(check_first_head(config, model)) if config.trains_head else []
    wrong = wrong or model.problems
    reading.add([Problem((), line, (("model", "path"),)) for line in wrong])
    reading.add([Problem((), line, (("model", "path"),)) for line in check_embedding(model.path, model.config)])
    if model.model_type:
        reading.add(list(check_family(config, model.model_type, ("model", "path"), model.config)))
        reading.add(list(check_trainable(config, model.config, ("model", "path"))))
        reading.add(list(check_parts(config, model.config)))
        reading.add(list(check_mtp(config, model.config, model.shapes or None)))
    if model.max_positions is not None:
        name = f"max_position_embeddings of {model.path}"
        reading.add(list(check_length(config, model.max_positions, name)))
        if config.teacher.source != "folder":
            reading.add(list(check_teacher_length(config, model.max_positions, name)))
    if config.uses_teacher and config.teacher.source != "folder":
        reading.add(list(_check_teacher(config.teacher, model, ("model", "path"))))
    return model


def _check_reference(reading: LoadedConfig, config: Config, policy: ModelFolder | None) -> Config:
    """The configuration with the folder of reference.path in place of a hub name."""
    if not config.uses_reference:
        return config
    changes: dict[str, str] = {}
    if config.reference.cache is not None:
        cache = Path(config.reference.cache).expanduser().absolute()
        reading.add(list(_check_cache(cache)))
        changes["cache"] = str(cache)
    if config.reference.path is not None:
        key = ("reference", "path")
        changes["path"], _ = _check_frozen(key, config.reference.path, reading, config, config, policy)
    return config.model_copy(update={"reference": config.reference.model_copy(update=changes)})


def _check_teachers(reading: LoadedConfig, config: Config, policy: ModelFolder | None) -> Config:
    """The configuration with the folders of teacher.path or teacher.paths in place of hub names."""
    two_ways = config.teacher_endpoint is not None or (config.teacher.path is not None and config.teacher.paths)
    if not config.uses_teacher or config.teacher.source != "folder" or two_ways:
        return config
    teacher, places = config.teacher, dict[KeyPath, str]()
    for folder, keys in keys_of_teachers(teacher).items():
        own = config.of_teacher(folder)
        path, found = _check_frozen(keys[0], folder, reading, config, own, policy)
        reading.add([] if found is None else list(_check_teacher(teacher, found, keys[0])))
        places |= dict.fromkeys(keys, path)
    changes = {"path": places.get(PATH), "paths": {name: places[*PATHS, name] for name in teacher.paths}}
    return config.model_copy(update={"teacher": teacher.model_copy(update=changes)})


def _check_frozen(
    key: KeyPath, folder: str, reading: LoadedConfig, config: Config, own: Config, policy: ModelFolder | None
) -> tuple[str, ModelFolder | None]:
    """(folder, its model) of a frozen model given by `key`. `own` is what its engine reads."""
    role = "teacher" if key[0] == "teacher" else "trainer"
    path, found, problems = _look_into(key, folder, config.dry_run)
    if found is not None and policy is not None:
        lines = check_vocabulary(dotted(key), found.path, policy.path)
        problems += [Problem(key, line, (("model", "path"),)) for line in lines]
    if found is not None and found.model_type:
        problems += check_trainable(own, found.config, key, role)
    if found is not None and found.max_positions is not None:
        whose = path if key[-1] == "path" else f"{path} ({dotted(key)})"
        problems += check_length(config, found.max_positions, f"max_position_embeddings of {whose}")
        if role == "teacher":
            problems += check_teacher_length(config, found.max_positions, f"max_position_embeddings of {whose}")
    reading.add(problems)
    return path, found


def _check_teacher(teacher: TeacherConfig, found: ModelFolder, key: KeyPath) -> Iterator[Problem]:
    """Why the model of a folder, given by `key`, cannot judge tokens in the form of teacher.form."""
    names = found.config.get("architectures")
    if isinstance(names, list) and any(str(name).endswith(SCALAR_HEADS) for name in names):
        text = f"{found.path} is of {names[0]}, whose head gives no probabilities of tokens; give a language model"
        yield Problem(key, f"{dotted(key)}: {text}")
    words = decoder_keys(found.config).get("vocab_size")
    if teacher.form == "top_k" and isinstance(words, int) and teacher.top_k > words:
        text = f"{teacher.top_k} exceeds vocab_size of {found.path} = {words}; use teacher.form=full, or at most that"
        yield Problem(("teacher", "top_k"), f"teacher.top_k: {text}", (key,))


def _check_critic(reading: LoadedConfig, config: Config) -> Config:
    """The configuration with the folder of critic.path in place of a hub name; the folder needs no tokenizer."""
    if not config.uses_critic or config.critic.path is None:
        return config
    path, _, problems = _look_into(("critic", "path"), config.critic.path, config.dry_run)
    reading.add([problem for problem in problems if NO_TOKENIZER not in problem.text])
    return config.model_copy(update={"critic": config.critic.model_copy(update={"path": path})})


def _check_judge(reading: LoadedConfig, config: Config) -> Config:
    """The configuration with the folder of judge.path in place of a hub name."""
    if not config.asks("judge") or config.judge.path is None:
        return config
    path, found, problems = _look_into(("judge", "path"), config.judge.path, config.dry_run, check_chat_template)
    config = config.model_copy(update={"judge": config.judge.model_copy(update={"path": path})})
    own = config.of_judge()
    if found is not None and found.model_type:
        problems += map(as_judges, check_family(own, found.model_type, ("model", "path"), found.config))
    if found is not None and found.max_positions is not None:
        length = check_length(own, found.max_positions, f"max_position_embeddings of {path}")
        problems += map(as_judges, length)
    if found is not None and found.model_type:
        from hpcrl.rewards.seeing import check_judges

        problems += check_judges(config)
    reading.add(problems)
    if not problems:
        with contextlib.suppress(CannotPlanError):
            reading.add(list(check_judge_sizes(config)))
    return config


def _check_reward_model(reading: LoadedConfig, config: Config) -> Config:
    """The configuration with the folder of reward_model.path in place of a hub name."""
    if not config.asks("reward_model") or config.reward_model.path is None:
        return config
    own = config.reward_model
    check = functools.partial(check_scalar_head, weights=own.head_weights)
    at = ("reward_model", "path")
    path, found, problems = _look_into(at, config.reward_model.path, config.dry_run, check)
    if found is not None and found.max_positions is not None and own.max_tokens > found.max_positions:
        text = f"{own.max_tokens} exceeds max_position_embeddings of {path} = {found.max_positions}"
        at = ("reward_model", "max_tokens")
        problems.append(Problem(at, f"reward_model.max_tokens: {text}", (("reward_model", "path"),)))
    reading.add(problems)
    return config.model_copy(update={"reward_model": own.model_copy(update={"path": path})})


def _check_cache(cache: Path) -> Iterator[Problem]:
    """Why log-probs cannot be stored in this folder, which need not exist yet."""
    there = next(path for path in (cache, *cache.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not a folder" if not there.is_dir() else "is not writable"
        yield Problem(("reference", "cache"), f"reference.cache: {there} {why}; give a folder for stored log-probs")


def _look_into(
    key: KeyPath, path: str, plan_only: bool, check: Callable[[ModelFolder], Iterable[str]] = lambda found: ()
) -> tuple[str, ModelFolder | None, list[Problem]]:
    """(folder, its model, problems) of a model given by `key`, a folder or a hub name, which is returned unchanged if
    the model is not found. `check` yields lines that begin with model.path, as inspect_model()'s lines do."""
    found = None
    try:
        path = find_model(path, plan_only=plan_only)
    except ValueError as error:
        lines = [str(error)]
    else:
        found = inspect_model(Path(path), to_plan=plan_only)
        lines = [*found.problems, *check(found)]
    return path, found, [Problem(key, line.replace("model.path", dotted(key))) for line in lines]


def _check_sizes(reading: LoadedConfig, config: Config, model: ModelFolder | None, image_tokens: int | None) -> None:
    """Conflicts between the model's sizes and the layout; none for an unknown family, which the plan reports.
    `image_tokens` are a row's at most, None if they were not counted."""
    with contextlib.suppress(CannotPlanError):
        layout = RoleLayout.from_config(config)
        shape = with_row_tokens(plan_shape(config, model), image_tokens)
        problems = check_sizes(config, layout, shape)
        reading.add(problems)
        if not problems and not config.dry_run:
            reading.add(list(check_host_memory(config, layout, shape)))


def _check_run(reading: LoadedConfig, config: Config, explicit: Sequence[str] | None) -> RunState | None:
    """The run folder, and the files of a checkpoint that a branch begins from. If keys were unreadable, a
    stored run cannot be compared and is not checked."""
    if reading.unread and (Path(config.run_dir) / CONFIG).exists():
        return None
    try:
        started = config.model_copy(update={"dry_run": False})
        run = check_run(started.model_dump(mode="json"), config.run_dir, config.resume, explicit)
        if run.branch is not None:
            _check_checkpoint(run.run_dir / "checkpoints", run.branch.step, content=config.dry_run)
        return run
    except ConfigError as error:
        reading.add([Problem((), line, (("run_dir",), ("run_name",))) for line in error.problems])
        return None


def _check_checkpoint(root: Path, step: int, content: bool) -> None:
    """ConfigError if a checkpoint's files do not have their committed sizes or, if it is asked for, their content; a
    start reads it anyway."""
    path = root / step_name(step)
    if problem := problem_of(path) if content else problem_of(path, lambda folder, entries: ""):
        others = ", ".join(str(other) for other in steps_in(root) if other != step) or "none"
        text = f"resume_from: the checkpoint of step {step} in {root} is damaged: {problem}"
        raise ConfigError([f"{text}; choose another (checkpoints of steps {others})"])
