"""What a job of a configuration reads, and the configuration with paths in a bundle."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcrl
from hpcrl.config import Config, ConfigError
from hpcrl.config.folders import conf_dir
from hpcrl.launch.bundle.bundled_code import BundledCode
from hpcrl.launch.bundle.bundled_data import BundledData
from hpcrl.launch.bundle.layout import (
    CACHES,
    FILES,
    FOLDERS,
    FORMAT,
    IMAGE,
    MODELS,
    MODULES,
    WHEELS,
    BundleManifest,
    ConfigKey,
    put,
    texts,
)
from hpcrl.launch.hub import FILES as MODEL_FILES
from hpcrl.launch.model_folder import NO_TOKENIZER, inspect_model
from hpcrl.launch.prepare import prepare
from hpcrl.launch.resources import size
from hpcrl.run_folder.models import folders_of
from hpcrl.spec.problems import dotted

OF_NODES = (
    ("run_dir",),
    ("reference", "cache"),
    ("generate", "target"),
    ("tracking",),
    ("trainer", "deepspeed", "nvme_path"),
    ("cluster",),
    ("data", "system_prompt"),
)
"""Values that name folders to write, or machines: a bundle leaves them as they are."""
PART_FILE = re.compile(r"(.+\.py):([A-Za-z_][\w.]*)")
PART = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_][\w.]*)")
WHEEL_FILES = ("*.whl", "*.tar.gz")


@dataclass
class Collected:
    """The manifest without sizes and digests, and the file of each path in the bundle.

    Attributes:
        config: The configuration; values at `paths` are paths in the bundle.
        files: Path in the bundle -> file.
        notes: What is not in the bundle, a line each.
    """

    words: list[str]
    config: dict[str, Any]
    paths: list[ConfigKey] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def manifest(self) -> BundleManifest:
        """The manifest, whose files are still to be listed."""
        paths = sorted((list(key) for key in self.paths), key=lambda key: [str(part) for part in key])
        return BundleManifest(FORMAT, versions(), self.words, self.config, paths, [])


def versions() -> dict[str, str]:
    """The versions of hpcrl, Python and torch here; without torch, if it is not installed."""
    found = {"hpcrl": hpcrl.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def collect(words: Sequence[str], wheels: Path | None, image: Path | None, caches: Path | None) -> Collected:
    """What a launch of these words reads, with the wheels of a folder, an image file and a folder of compiled code.
    ConfigError has the problems of the launch, ValueError says in one line what cannot be bundled."""
    config, *_ = prepare([*words, "dry_run=true"])
    if config.pipeline_spec.rank0_only:
        raise ValueError(f"pipeline={config.pipeline}: it starts no ranks, so there is nothing to bundle")
    if config.debug == "train_only":
        raise ValueError("debug=train_only: it reads the rollouts of another run, which a bundle does not hold")
    data = config.model_dump(mode="json") | {"dry_run": False}
    own = Path.cwd() / "runs" / config.run_name
    data["run_dir"] = "" if Path(config.run_dir) == own else config.run_dir
    found = Collected(list(words), data)
    _add_models(found, config)
    _add_data(found, config)
    _add_parts(found)
    _add_further(found, wheels, image, caches)
    bundled = set(found.paths)
    for key, text in texts(found.config):
        if key not in bundled and not any(key[: len(own_key)] == own_key for own_key in OF_NODES) and _is_there(text):
            found.notes.append(f"{dotted(key)}: {text} is not in the bundle")
    return found


def _add_models(found: Collected, config: Config) -> None:
    used: dict[str, bool] = {
        "model": True,
        "reference": config.uses_reference,
        "teacher": config.uses_teacher,
        "critic": config.uses_critic,
        "judge": bool(config.asks("judge")),
        "reward_model": bool(config.asks("reward_model")),
    }
    folders: dict[Path, str] = {}
    for name, given in folders_of(found.config).items():
        section, *_ = name.split(".")
        if not used[section]:
            continue
        folder = Path(given).expanduser()
        if folder.is_relative_to(conf_dir()):  # a plan needs no weights
            known = folder.relative_to(conf_dir() / "model")
            raise ValueError(f"{name}: the weights are not in the local cache; run: python -m hpcrl prefetch {known}")
        problems = inspect_model(folder, weightless=config.debug == "fake").problems
        problems = [line for line in problems if section != "critic" or NO_TOKENIZER not in line]
        if problems:
            raise ConfigError([line.replace("model.path", name, 1) for line in problems])
        target = folders.setdefault(folder.resolve(), f"{MODELS}/{len(folders)}")
        for pattern in MODEL_FILES:
            found.files |= {f"{target}/{file.name}": file for file in folder.glob(pattern) if file.is_file()}
        key = ("teacher", "paths", name.removeprefix("teacher.paths.")) if name.count(".") > 1 else (section, "path")
        _replace(found, key, target)


def _add_data(found: Collected, config: Config) -> None:
    data = BundledData()
    for key in (("data", "train"), ("data", "val"), ("imitation", "data")):
        data.add(found.config, key)
    data.add_images(config)
    if config.imitates:
        data.add_images(config.of_imitation())
    found.files |= data.files
    found.paths += data.paths


def _add_parts(found: Collected) -> None:
    """Code by import path or file, and files that rewards and environments name in their keys."""
    code, files = BundledCode(), dict[Path, str]()
    for key, text in list(texts(found.config)):
        if key[0] in ("data", "imitation") or any(key[: len(own)] == own for own in OF_NODES):
            continue
        if (part := PART_FILE.fullmatch(text)) and Path(part[1]).expanduser().is_file():
            _replace(found, key, f"{code.add_file(Path(part[1]).expanduser())}:{part[2]}")
        elif part := PART.fullmatch(text):
            code.add_module(part[1])
        elif key[0] in ("reward", "env") and key[-1] != "cache" and _is_there(text):
            place = Path(text).expanduser().absolute()
            target = files.setdefault(place, f"{FILES}/{len(files)}/{place.name}")
            inner = [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file())
            for file in inner:
                rest = file.relative_to(place).as_posix()
                found.files[target if file == place else f"{target}/{rest}"] = file
            _replace(found, key, target)
    found.files |= code.files


def _is_there(text: str) -> bool:
    """Whether a value is the path of a file or folder: a name alone, such as a domain's, is not."""
    if "/" not in text and not Path(text).suffix:
        return False
    try:
        return len(text) < 4096 and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _add_further(found: Collected, wheels: Path | None, image: Path | None, caches: Path | None) -> None:
    if wheels is not None:
        files = sorted(file for pattern in WHEEL_FILES for file in wheels.glob(pattern) if file.is_file())
        if not files:
            raise ValueError(f"--wheels {wheels}: no files {' or '.join(WHEEL_FILES)} there; pip download makes them")
        found.files |= {f"{WHEELS}/{file.name}": file for file in files}
    given = (found.config.get("cluster") or {}).get("image")
    if image is not None:
        if not image.is_file():
            raise ValueError(f"--image {image}: no such file; an image of a registry is pulled to a file first")
        found.files[f"{IMAGE}/{image.name}"] = image
        if given and Path(given).exists() and Path(given).samefile(image):
            _replace(found, ("cluster", "image"), f"{IMAGE}/{image.name}")
    elif given and Path(given).is_file():
        found.notes.append(f"cluster.image: {given} is not in the bundle; --image {given} adds it")
    if caches is not None:
        found.files |= {f"{CACHES}/{path}": file for path, file in compiled_code(caches).items()}


def compiled_code(folder: Path) -> dict[str, Path]:
    """Relative path -> file of a folder of hpcrl.node.caches, without locks and links. ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"--caches {folder}: no such folder")
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink())
    kept = (file for file in files if file.parent != folder and file.name != "lock" and file.suffix != ".lock")
    return {file.relative_to(folder).as_posix(): file for file in kept}


def _replace(found: Collected, key: ConfigKey, path: str) -> None:
    put(found.config, key, path)
    found.paths.append(key)


def describe(found: Collected) -> list[str]:
    """A line for each folder of the bundle: number and size of its files."""
    lines = []
    for folder in FOLDERS:
        files = [file for path, file in found.files.items() if path.startswith(f"{folder}/")]
        if files:
            num_bytes = sum(file.stat().st_size for file in files)
            lines.append(f"{folder:<7} {len(files)} file{'s' * (len(files) != 1)}, {size(num_bytes)}")
    return lines


def has_modules(manifest: BundleManifest) -> bool:
    """Whether the bundle has code that is imported by name."""
    return any(file.path.startswith(f"{MODULES}/") for file in manifest.files)
