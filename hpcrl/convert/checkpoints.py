"""Find the checkpoint in a folder, and its model's folder with config.json and tokenizer. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.best import read_best
from hpcrl.checkpoint.commit import MANIFEST, METADATA, FileEntry, find_latest, first_damage, problem_of
from hpcrl.models.quantisation import quantisation
from hpcrl.run_folder import CONFIG, stored_config
from hpcrl.system.files import step_name, steps_in

CHECKPOINTS = "checkpoints"
ITERATION = "latest_checkpointed_iteration.txt"
DEPTH, MAX_SHOWN = 4, 3
"""How many levels of subfolders are searched, and how many checkpoints a message names if there are several."""
TOLD_BYTES = 10_000_000_000
OTHER_FORMATS = {
    "mp_rank_*": "Megatron's old format; save it as torch_dist (--ckpt-format torch_dist)",
    "*/model_optim_rng.pt": "Megatron's old format; save it as torch_dist (--ckpt-format torch_dist)",
    ".zarray": "Megatron's zarr format; save it as torch_dist (--ckpt-format torch_dist)",
    "*/.zarray": "Megatron's zarr format; save it as torch_dist (--ckpt-format torch_dist)",
    "zero_pp_rank_*": "a DeepSpeed checkpoint, which is not supported; use the model in the run's folder hf",
    "model_world_size_*_rank_*.pt": "a checkpoint of verl's FSDP trainer, which python -m verl.model_merger converts",
    "*.safetensors": "a model in HF layout already, without quantised weights; --to megatron converts it to Megatron's",
}


@dataclass(frozen=True)
class Found:
    """A checkpoint: its folder, the model folder with config.json and tokenizer, and in the run of a reward model the
    names of its heads."""

    folder: Path
    model: Path
    labels: tuple[str, ...] = ()


def find(
    path: Path,
    model: Path | None,
    hashes: bool,
    tell: Callable[[str], None],
    report_progress: Callable[[], None] = lambda: None,
    step: str | None = None,
) -> Found:
    """Find a checkpoint. `path` is a run folder of hpcrl (its newest valid checkpoint is found), a step folder or the
    critic's folder in it, or a Megatron-LM checkpoint or a folder of such (the newest is found).

    Args:
        step: Of a run folder, the checkpoint of this step instead, or with `best` the one that BEST names.
        hashes: Check the SHA-256 of each file of an hpcrl checkpoint, instead of only its size.
        tell: Called with a line of text before a long operation.
        report_progress: Called repeatedly during the search; its exception ends the search.

    ValueError if there is no checkpoint, it is damaged, or its model is unknown.
    """

    def damage(folder: Path, entries: Sequence[FileEntry]) -> str:
        size = sum(entry.size for entry in entries)
        if hashes and size > TOLD_BYTES:
            tell(f"hashing the {size / 1e9:.0f} GB of {folder} (--skip-hashes compares sizes only)")
        return first_damage(folder, entries, lambda _: report_progress()) if hashes else ""

    if not path.is_dir():
        raise ValueError(f"--checkpoint {path} is not a folder")
    if step is not None:
        path = _of_step(path, step)
    if is_quantised(path):
        return Found(path, model or path)
    folder, run = path, None
    if (path / CHECKPOINTS).is_dir() or (path / CONFIG).is_file():
        run = path
        latest = find_latest(path / CHECKPOINTS, damage)
        for problem in latest.problems:
            tell(problem)
        if latest.path is None:
            raise ValueError(f"--checkpoint {path}: this run has no checkpoint yet")
        folder = latest.path
    elif saved := next((at for at in (path, path.absolute().parent) if (at / MANIFEST).is_file()), None):
        if problem := problem_of(saved, damage):
            raise ValueError(f"--checkpoint {path} is damaged: {problem}")
        run = saved.parent.parent
    elif steps_in(path):
        raise ValueError(
            f"--checkpoint {path} has several checkpoints; name the run folder {path.parent} or one of them"
        )
    elif (path / ITERATION).is_file():
        folder = _iteration(path)
    if not (folder / METADATA).is_file():
        folder = _inside(folder)
        tell(f"reading {folder}")
    return Found(folder, model or _model_of(folder, run), _labels(run))


def _of_step(run: Path, step: str) -> Path:
    """The folder of a run's checkpoint of this step, or of the best one. ValueError if it is not there."""
    root = run / CHECKPOINTS
    if not root.is_dir():
        raise ValueError(f"--step {step}: {run} is no run folder with checkpoints; it is only read with one")
    present = f"there are checkpoints of steps {', '.join(map(str, steps_in(root))) or 'none'}"
    if step == "best":
        best = read_best(root)
        if best is None:
            raise ValueError(f"--step best: {root} names no best checkpoint (keep_best.metric); {present}")
        number = best.step
    elif re.fullmatch(r"\d{1,12}", step):
        number = int(step)
    else:
        raise ValueError(f"--step {step}: expected a step's number or best; {present}")
    if number not in steps_in(root):
        raise ValueError(f"--step {step}: {root} has no checkpoint of step {number}; {present}")
    return root / step_name(number)


def read_config(model: Path) -> dict[str, Any]:
    """The config.json of a model folder. ValueError if there is none."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; set --model to the model's folder") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return config


def is_quantised(folder: Path) -> bool:
    """Whether a folder is a model in HF layout with quantised weights."""
    if (folder / METADATA).is_file() or next(folder.glob("*.safetensors"), None) is None:
        return False
    try:
        return bool(quantisation(read_config(folder)))
    except ValueError:  # reported by who reads the file
        return False


def _iteration(path: Path) -> Path:
    word = (path / ITERATION).read_text(errors="replace").strip()
    folder = path / (f"iter_{int(word):07d}" if re.fullmatch(r"\d{1,9}", word) else word[:40])
    if not folder.is_dir():
        raise ValueError(f"{path / ITERATION} names {word[:40]!r}, but there is no folder {folder}")
    return folder


def _inside(folder: Path) -> Path:
    """The only checkpoint in subfolders, where verl and ROLL write it. ValueError if there are none or several."""
    levels = ["/".join("*" * depth) for depth in range(1, DEPTH + 1)]
    found = sorted(path.parent for level in levels for path in folder.glob(f"{level}/{METADATA}"))
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(map(str, found[:MAX_SHOWN])) + (", ..." if len(found) > MAX_SHOWN else "")
        raise ValueError(f"--checkpoint {folder} has {len(found)} checkpoints below it: name one of {some}")
    for pattern, text in OTHER_FORMATS.items():
        places = (path for level in (".", *levels) for path in folder.glob(f"{level}/{pattern}"))
        if path := next(places, None):
            raise ValueError(f"--checkpoint {folder} is {text} ({path.relative_to(folder)})")
    text = f"no {METADATA} in it or below it (torch_dist of Megatron, or a checkpoint of hpcrl)"
    raise ValueError(f"--checkpoint {folder} is not a checkpoint: {text}")


def _labels(run: Path | None) -> tuple[str, ...]:
    if run is None or not (run / CONFIG).is_file():
        return ()
    stored = stored_config(run)
    return tuple(stored.head_training.labels) if stored.trains_head else ()


def _model_of(folder: Path, run: Path | None) -> Path:
    beside = (folder / at / name for at in ("", "..", "../..") for name in ("", "huggingface", "hf_model"))
    if near := next((path for path in beside if (path / "config.json").is_file()), None):
        return near.resolve()
    if run is not None and (run / CONFIG).is_file():
        stored = stored_config(run)
        path = (stored.critic.path if folder.name == "critic" else None) or stored.model.path
        if path is None:
            return run / "model"
        if (Path(path) / "config.json").is_file():
            return Path(path)
        raise ValueError(f"the run's model, {path}, has no config.json here; set --model to a copy of the model")
    raise ValueError(f"{folder} has no config.json: set --model to the model's folder (config.json, tokenizer)")
