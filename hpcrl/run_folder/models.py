"""Checks that the folders of a run's models still hold the models with which it began: by their config.json, and for an
evaluation by the sizes and times of their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import ConfigError
from hpcrl.run_folder.changes import differences

SECTIONS = ("model", "reference", "teacher", "critic", "judge", "reward_model")
"""Sections with a key `path`."""
OF_THE_WRITER = ("transformers_version", "_name_or_path")
"""Keys of config.json that identify its writer."""
MAX_SHOWN = 4
WEIGHTS = (".safetensors", ".bin")


def models_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Key (such as model.path) -> config.json, for each model given as a folder whose config.json is readable."""
    found = {}
    for name, path in folders_of(config).items():
        try:
            content = json.loads((Path(path) / "config.json").read_text())
        except (OSError, ValueError, RecursionError):
            continue  # reported where the model is read
        if isinstance(content, dict):
            found[name] = {key: content[key] for key in content if key not in OF_THE_WRITER}
    return found


def folders_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Key (such as model.path or teacher.paths.DOMAIN) -> folder."""
    sections = {section: config.get(section) or {} for section in SECTIONS}
    found = {f"{section}.path": path for section, own in sections.items() if (path := own.get("path"))}
    of_domains = sections["teacher"].get("paths") or {}
    return found | {f"teacher.paths.{domain}": folder for domain, folder in of_domains.items()}


def check_models(config: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError if a folder holds another model than at the first attempt that could read it."""
    now, lines = models_of(config), []
    for key, content in now.items():
        first = next((then[key] for attempt in attempts if key in (then := attempt.get("models", {}))), content)
        if changed := [line for _, line in differences(first, content)]:
            folder = folders_of(config)[key]
            more = f", and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
            shown = ", ".join(changed[:MAX_SHOWN]) + more
            lines.append(f"{key}: {folder}/config.json is of another model than when the run began ({shown})")
    if lines:
        lines[-1] += "; put that model back, or use another run_name or resume=fresh"
        raise ConfigError(lines)


def weights_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Name -> size and time in ns of each file of weights of the policy's model; none if it is not a folder."""
    path = (config.get("model") or {}).get("path")
    if not path:
        return {}
    try:
        files = sorted(each for each in Path(path).iterdir() if each.suffix in WEIGHTS)
        return {each.name: [(seen := each.stat()).st_size, seen.st_mtime_ns] for each in files}
    except OSError:
        return {}  # reported where the model is read


def check_weights(config: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError if an evaluation's model has other weights than at its first attempt; attempts of earlier versions
    did not record them."""
    first = next((then for attempt in attempts if (then := attempt.get("weights"))), None)
    now = weights_of(config)
    if config.get("pipeline") == "evaluate" and first and now and now != first:
        changed = sorted(name for name in {*first, *now} if first.get(name) != now.get(name))
        folder = config["model"]["path"]
        text = f"model.path: the weights in {folder} have changed since this evaluation began ({changed[0]})"
        raise ConfigError([f"{text}; use another run_name or resume=fresh"])
