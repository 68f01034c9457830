"""Creates the environment of a domain from its section of the configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from hpcrl.config import Config, EnvConfig
from hpcrl.config.domains import RunsIn
from hpcrl.data.rows import RowSet, start_domains
from hpcrl.data.tasks import Split
from hpcrl.data.templates import read_template, tiny_template
from hpcrl.envs.environment import Env, reset_problem
from hpcrl.envs.examples import example_messages
from hpcrl.envs.processes import EnvProcesses
from hpcrl.rewards.function import load_module
from hpcrl.rewards.serving.guarded import RAISED
from hpcrl.spec.fields import Section
from hpcrl.spec.options import read_options
from hpcrl.spec.table import load
from hpcrl.spec.tables import ENVS


def env_class(config: EnvConfig, section: str = "default") -> Callable[..., Env]:
    """The constructor of this section's environment. ValueError names a wrong path or wrong options."""
    spec = ENVS[config.name]
    found: Callable[..., Env] = _imported(config.class_path or "", section) if spec.imports_code else spec.load()
    if spec.section is not None:
        return functools.partial(found, _options(spec.section, config, section))
    try:
        inspect.signature(found).bind_partial(**config.options)
    except TypeError as error:
        raise ValueError(
            f"env.{section}.options: {found.__name__} cannot be created with these options: {error}"
        ) from error
    return found


def runs_in(config: EnvConfig, section: str = "default") -> str:
    """thread, task or process: from the section, else from the environment class's `runs_in`."""
    made: Any = env_class(config, section)
    declared = getattr(getattr(made, "func", made), "runs_in", "thread")
    if declared not in get_args(RunsIn):
        known = ", ".join(get_args(RunsIn))
        raise ValueError(f"env.{section}: the environment declares runs_in = {declared!r}; there are {known}")
    where = config.runs_in or str(declared)
    if where == "task" and not _has_coroutines(getattr(made, "func", made)):
        raise ValueError(f"env.{section}.runs_in=task: neither reset() nor step() is a coroutine; use thread")
    return where


def _has_coroutines(made: Any) -> bool:
    """Whether a method of the class is a coroutine; True if the constructor's class is unknown."""
    methods = [inspect.unwrap(getattr(made, name)) for name in ("reset", "step") if hasattr(made, name)]
    return not inspect.isclass(made) or not methods or any(map(inspect.iscoroutinefunction, methods))


def check_env(config: EnvConfig, section: str, chat_template: str = "") -> None:
    """ValueError if an env rank cannot create this section's environment for a model with this template."""
    made = env_class(config, section)
    _probe(config, section, own_code=True)
    if ENVS[config.name].section is not None and "chat_template" in inspect.signature(made).parameters:
        try:
            made(chat_template=chat_template)
        except ValueError as error:
            raise ValueError(f"env.{section}.options.{error}") from error


def _probe(config: EnvConfig, section: str, own_code: bool) -> None:
    spec = ENVS[config.name]
    if not spec.probe or spec.section is None:
        return
    options = _options(spec.section, config, section)
    try:
        load(spec.probe, spec.about)(options, own_code)
    except ValueError as error:
        raise ValueError(f"env.{section}.options.{error}") from error


def _check_template(config: Config, env: EnvConfig, section: str) -> None:
    """ValueError for wrong options, or, if the model's folder is here, options that do not fit its chat template."""
    spec = ENVS[env.name]
    assert spec.section is not None, "only typed options are checked"
    options = _options(spec.section, env, section)
    folder = Path(config.model.path) if config.model.path else None
    if not spec.check_template or (folder is not None and not folder.is_dir()):
        return
    template = tiny_template(config.model.tiny.takes_images) if folder is None else read_template(folder)
    try:
        load(spec.check_template, spec.about)(options, template.text(with_tools=True))
    except ValueError as error:
        raise ValueError(f"env.{section}.options.{error}") from error


def _options(schema: type[Section], config: EnvConfig, section: str) -> Section:
    try:
        return read_options(schema, config.options)
    except ValueError as error:
        raise ValueError(f"env.{section}.options: {error}") from error


@functools.cache
def _imported(class_path: str, section: str) -> Callable[..., Env]:
    """The class at an import path; a file is executed once per process. ValueError if the path is wrong."""
    at = f"env.{section}.class_path"
    module, _, name = class_path.rpartition(":")
    try:
        found = getattr(load_module(module, class_path), name)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error
    except RAISED as error:
        raise ValueError(f"{at}: {class_path}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{at}: {class_path!r} is not a class but {found!r}")
    lacking = [f"{method}()" for method in ("reset", "step") if not hasattr(found, method)]
    # Any other callable may create any object.
    own = inspect.isclass(found) and found.__new__ is object.__new__ and not hasattr(found, "__getattr__")
    if lacking and own:
        raise ValueError(f"{at}: {class_path!r} is not an environment: no {' and no '.join(lacking)}")
    if own and (problem := reset_problem(found)):
        raise ValueError(f"{at}: {class_path!r}: {problem}")
    make: Callable[..., Env] = found
    return make


def make_env(config: EnvConfig, row: dict[str, Any], chat_template: str = "") -> Env:
    """A new environment for one sample. If its class sets `max_turns = None`, it gets the section's value.

    Args:
        row: The prompt's row, as {prompt, answer, messages, extra: other columns}.
        chat_template: The tokenizer's template, or an empty text, for a constructor with this parameter.
    """
    made = env_class(config)
    known = {**row["extra"], **{name: row.get(name) for name in ("prompt", "answer", "messages")}}
    parameters = inspect.signature(made).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = {name: value for name, value in known.items() if name in names}
    if "chat_template" in names:
        known["chat_template"] = chat_template
    env = made(**(known if ENVS[config.name].section is not None else known | config.options))
    if getattr(type(env), "max_turns", 0) is None:
        env.max_turns = config.max_turns  # type: ignore[attr-defined]
    return env


def validate_envs(config: Config, rows: Mapping[Split, RowSet]) -> list[str]:
    """Problems of environments, one line each: wrong options (of typed sections whose library is installed here), a
    class that cannot be imported, unplayable rows, a domain without prompts, episode starts without an environment,
    and unusable examples. Checks only the rows that could be read."""
    problems = [
        f"data.{split}: {path} gives starts of an environment; set "
        + " or ".join(dict.fromkeys([f"env.{domain}.name", "env.default.name"]))
        for split in rows
        for domain, path in start_domains(config.data, split).items()
        if config.env_of(domain) is None
    ]
    for name, env in config.envs.items():
        if ENVS[env.name].section is not None:
            try:
                _check_template(config, env, name)
                if config.cluster.container == "none" and not ENVS[env.name].missing_packages():
                    _probe(env, name, own_code=False)
                    if env.runs_in == "task":
                        runs_in(env, name)
            except ValueError as error:
                problems.append(str(error))
        if env.class_path is not None and env.name == "class" and config.cluster.container == "none":
            try:
                EnvProcesses(env, name).close()  # imports the class in another process
            except ValueError as error:
                problems.append(str(error))
        if env.examples_path is not None:
            try:
                example_messages(env, name, config.seed)
            except ValueError as error:
                problems.append(str(error))
    problems += _row_problems(config, rows)
    named = [name for name in config.env if name != "default"]
    domains = dict.fromkeys(name for split in rows.values() for name in split.domain_names)
    there = ", ".join(domains)
    return problems + [
        f"env.{name}: no prompt has this domain; there are: {there}"
        for name in named
        if domains and name not in domains and config.pipeline_spec.trains
    ]


def _row_problems(config: Config, rows: Mapping[Split, RowSet]) -> list[str]:
    """Reports the first row of each domain that its environment, or an expert that has turns, cannot play, with the
    number of such rows."""
    problems = []
    for split, found in rows.items():
        for domain in found.domain_names:
            env = config.env_of(domain)
            if env is None:
                continue
            spec = ENVS[env.name]
            plays = config.expert_plays and split == "train"
            paths = [path for path in (spec.problem_of_row, spec.expert_problem_of_row if plays else "") if path]
            checks = [load(path, spec.about) for path in paths]
            if not checks:
                continue
            read = (
                (where, next(filter(None, (check(row.extra) for check in checks)), ""))
                for where, row in found.read_rows(domain)
            )
            if wrong := [f"{where}: {problem}" for where, problem in read if problem]:
                problems.append(f"{wrong[0]}; data.{split} has {len(wrong)} such rows of domain {domain}")
    return problems
