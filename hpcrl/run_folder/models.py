"""Checks that the folders of a run's models still hold the models with which it began: by their config.json, and for
models that the run does not train by samples of their weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import ConfigError, parse
from hpcrl.run_folder.changes import differences

SECTIONS = ("model", "reference", "teacher", "critic", "judge", "reward_model")
"""Sections with a key `path`."""
OF_THE_WRITER = ("transformers_version", "_name_or_path")
"""Keys of config.json that identify its writer."""
MAX_SHOWN = 4
WEIGHTS = (".safetensors", ".bin")
FROZEN = ("reference", "teacher", "judge", "reward_model")
"""Sections whose model no run trains."""
BLOCK, SAMPLES = 16 << 10, 16
"""Bytes of a block, and blocks, of the digest of a file of weights."""


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
    if sections["teacher"].get("source", "folder") != "folder":  # nothing reads a recipe's folders
        found.pop("teacher.path", None)
        return found
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


def weights_of(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Key (such as teacher.path) -> name and digest of each file of weights, for each folder whose weights count after
    the start. The digest is of the size, the beginning and samples: the files of large models are not read whole."""
    sections = [*FROZEN, *(["model"] if _reads_model_again(config) else [])]
    found = {}
    for key, path in folders_of(config).items():
        if key.split(".")[0] in sections:
            try:
                files = sorted(each for each in Path(path).iterdir() if each.suffix in WEIGHTS)
                found[key] = {each.name: _sampled(each) for each in files}
            except OSError:
                continue  # reported where the model is read
    return found


def _reads_model_again(config: Mapping[str, Any]) -> bool:
    """Whether model.path counts at a resume: the run trains no model, compares the policy with this one, or has it as
    the first teacher (teacher.sync_every)."""
    try:
        own = parse(dict(config))
    except ConfigError:
        return False  # of another version
    is_reference = own.uses_reference and own.reference.path is None
    is_teacher = own.uses_teacher and own.teacher.source == "policy" and not own.teacher.is_trainer
    return not own.pipeline_spec.trains or is_reference or is_teacher


def _sampled(file: Path) -> str:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest = hashlib.blake2b(str(size).encode(), digest_size=8)
        for place in range(SAMPLES):
            opened.seek(max(size - BLOCK, 0) * place // (SAMPLES - 1))
            digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def check_weights(config: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError if a folder holds other weights than at the first attempt that recorded them."""
    lines = []
    for key, now in weights_of(config).items():
        first = next((then[key] for attempt in attempts if key in (then := attempt.get("weights", {}))), now)
        if now and first and now != first:
            changed = sorted(name for name in {*first, *now} if first.get(name) != now.get(name))
            folder = folders_of(config)[key]
            lines.append(f"{key}: the weights in {folder} have changed since this run began ({changed[0]})")
    if lines:
        lines[-1] += "; put them back, or use another run_name or resume=fresh"
        raise ConfigError(lines)
