"""Convert a checkpoint to a model in HF layout, as a job in which rank 0 does all the work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hpcrl.models.mtp import MTP
from hpcrl.spec.fields import NUMBER, Section
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem

if TYPE_CHECKING:
    from hpcrl.controller.rank0_run import Rank0Run

KEYS = {
    "--checkpoint": "convert.source",
    "--output": "convert.target",
    "--step": "convert.step",
    "--model": "convert.model",
    "--skip-hashes": "convert.hashes=false",
}
"""Command-line options in hpcrl.convert's messages -> configuration keys."""


class ConvertConfig(Section):
    """The convert pipeline: a checkpoint becomes a model in HF layout."""

    source: str | None = None
    """Run folder whose newest checkpoint is read, one of its checkpoints, or a checkpoint of Megatron-LM."""
    step: Annotated[str, Field(pattern=r"^(\d{1,12}|best)$")] | None = None
    """Of a run folder, the step whose checkpoint is read, or best: the one that keep_best.metric keeps; null: the
    newest."""
    target: str | None = None
    """New folder for the model; null: hf in the folder of this run."""
    model: str | None = None
    """Folder with config.json and tokenizer; null: the folder of the checkpoint or its run."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; null: as in the checkpoint."""
    verify: bool = False
    """Read the model back from the disk, and compare it with the checkpoint."""
    shard_gb: Annotated[float, Field(gt=0, le=1000), NUMBER] = 4.0
    """Maximum size of a weight file, GB; a larger tensor has its own file."""
    mtp: MTP = "keep"
    """Multi-token prediction layers: `keep` copies them from the model's folder, `drop` leaves them out."""
    hashes: bool = True
    """Check the SHA-256 of every file of an hpcrl checkpoint before the conversion; false: check file sizes only."""


def _check(config: Any) -> Iterator[Problem]:
    if config.convert.source is None:
        text = "convert.source: set it to the run folder or the checkpoint to convert"
        yield Problem(("convert", "source"), text, (("pipeline",),))


def _inspect(config: Any, resumes: bool) -> Iterator[Problem]:
    from hpcrl.convert.checkpoints import find, read_config

    section, target = config.convert, _target(config.convert, config.run_dir)
    if section.source is None:
        return
    try:
        model, step = _path(section.model), section.step
        read_config(find(Path(section.source), model, hashes=False, tell=lambda _: None, step=step).model)
    except (ValueError, OSError) as error:
        yield Problem(("convert", "source"), _by_key(error), (("convert", "model"),))
    if not resumes and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        text = f"convert.target: {target} exists, and nothing is overwritten; name another folder or remove it"
        yield Problem(("convert", "target"), text)


def _work(config: Any) -> str:
    return f"convert {config.convert.source} to {_target(config.convert, config.run_dir)}"


SPEC = PipelineSpec(
    about="Conversion of a checkpoint to a model in HF layout.",
    make="hpcrl.pipelines.convert:convert",
    section=ConvertConfig,
    check=_check,
    learns_from_rewards=False,
    learns=False,
    rank0_only=True,
    inspect=_inspect,
    work=_work,
)


def convert(run: Rank0Run) -> None:
    """Write the model. A later attempt writes the files that earlier attempts have not completed."""
    import torch

    from hpcrl.convert.conversions import ConvertOptions, to_hf

    section = run.config.section(ConvertConfig)
    target = _target(section, run.run_dir)
    options = ConvertOptions(
        model=_path(section.model),
        dtype=getattr(torch, section.dtype) if section.dtype else None,
        verify=section.verify,
        hashes=section.hashes,
        most_bytes=int(section.shard_gb * 1e9),
        stream=sys.stdout,
        report_progress=run.report_progress,
        fence=run.fence,
        again=run.resumes,
        step=section.step,
        mtp=section.mtp,
    )
    try:
        done = to_hf(Path(section.source or ""), target, options)
    except ValueError as error:
        raise ValueError(_by_key(error)) from error
    checked = ", read back and equal" if section.verify else ""
    run.reason = f"{done.source} -> {target}: {done.num_tensors} tensors, {done.total_bytes / 1e9:.3g} GB{checked}"


def _target(section: ConvertConfig, run_dir: str | Path) -> Path:
    return Path(section.target) if section.target is not None else Path(run_dir) / "hf"


def _path(folder: str | None) -> Path | None:
    return Path(folder) if folder is not None else None


def _by_key(error: Exception) -> str:
    """The error message, with options replaced by configuration keys."""
    text = str(error)
    for option, key in KEYS.items():
        text = text.replace(option, key)
    return text
