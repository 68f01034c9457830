"""Environments by name. Add your own by import path: env.name=class env.class_path=package.module:Class."""

from __future__ import annotations

import importlib
from typing import Any

from hpcrl.config import EnvConfig
from hpcrl.envs.base import Env
from hpcrl.envs.scripted import ScriptedEnv

ENVS = {"scripted": ScriptedEnv}


def make_env(config: EnvConfig, row: dict[str, Any]) -> Env:
    """A new environment for one sample of a prompt whose data row is {prompt, answer, extra}.

    ValueError names the import path that does not lead to a class.
    """
    if config.name != "class":
        return ENVS[config.name](answer=row["answer"], **config.options)
    module, _, name = (config.class_path or "").partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"env.class_path={config.class_path!r} leads to no class: {error}") from error
    return cls(answer=row["answer"], **config.options)
