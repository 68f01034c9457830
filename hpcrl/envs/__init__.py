"""Environments by name. Add your own by import path: env.name=class env.class_path=package.module:Class."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from hpcrl.config import EnvConfig
from hpcrl.envs.base import Env
from hpcrl.envs.scripted import ScriptedEnv

ENVS = {"scripted": ScriptedEnv}


def env_class(config: EnvConfig) -> Callable[..., Env]:
    """What makes an environment of this section. ValueError names a path that leads to none or odd options."""
    found = ENVS[config.name] if config.name != "class" else _imported(config)
    try:
        inspect.signature(found).bind(answer="", **config.options)
    except TypeError as error:
        raise ValueError(f"env.options: {found.__name__} is made with answer and these options: {error}") from error
    return found


def _imported(config: EnvConfig) -> Callable[..., Env]:
    module, _, name = (config.class_path or "").partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"env.class_path: {config.class_path!r} leads to no class: {text}") from error
    if not callable(found):
        raise ValueError(f"env.class_path: {config.class_path!r} is no class but {found!r}")
    return found


def make_env(config: EnvConfig, row: dict[str, Any]) -> Env:
    """A new environment for one sample of a prompt whose data row is {prompt, answer, extra}."""
    return env_class(config)(answer=row["answer"], **config.options)
