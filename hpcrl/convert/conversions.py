"""The conversions, as functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from hpcrl.convert.checkpoints import Found, find, is_quantised, read_config
from hpcrl.convert.dequantize import QuantisedWeights, without_quantisation
from hpcrl.convert.mtp import with_mtp
from hpcrl.convert.outputs import (
    hf_files,
    hf_small_files,
    megatron_files,
    megatron_small_files,
    output_dtypes,
)
from hpcrl.convert.sources import ModelWeights, TensorSource, opened
from hpcrl.convert.streaming import OutFile, default_threads, write_folder
from hpcrl.engines.hf_folder import padding_id
from hpcrl.engines.train.megatron.names import VALUE_HEAD
from hpcrl.models.head_labels import label_keys
from hpcrl.models.mtp import MTP, with_mtp_keys

SHARD_BYTES = 4_000_000_000
VOCABULARY_MULTIPLE = 128
"""Embedding rows are padded to a multiple of this; Megatron also loads other paddings."""


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion.

    Args:
        model: Folder with config.json and tokenizer, needed if the checkpoint has none.
        dtype: Data type of the output. None keeps the source's.
        verify: Read the output back and compare it.
        hashes: Check the SHA-256 of each file of an hpcrl checkpoint.
        most_bytes: Maximum size of a weight file.
        num_threads: Number of writing threads, by default the number of cores, at most 8.
        stream: Where progress is shown, by default stderr.
        report_progress: All threads call this between two blocks. Its exception ends the conversion, which an equal
            call resumes.
        fence: Called before the output gets its final name.
        again: Accept a complete output, which an earlier call may have written before it was killed.
        step: Of a run folder, the step whose checkpoint is converted, or `best`; None: the newest.
        mtp: Whether a model in HF layout gets the multi-token prediction layers of the model's folder.
    """

    model: Path | None = None
    dtype: torch.dtype | None = None
    verify: bool = False
    hashes: bool = True
    most_bytes: int = SHARD_BYTES
    num_threads: int | None = None
    stream: TextIO | None = None
    report_progress: Callable[[], None] = lambda: None
    fence: Callable[[], None] = lambda: None
    again: bool = False
    step: str | None = None
    mtp: MTP = "keep"


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    source: Path  # the checkpoint that was read
    num_tensors: int
    total_bytes: int
    written_bytes: int  # by this call; earlier, killed calls wrote the rest


def to_hf(checkpoint: Path, output: Path, options: ConvertOptions) -> Converted:
    """Write a checkpoint, or a model with quantised weights, as a model in HF layout to the new folder `output`.
    ValueError or OSError has a text of one line."""

    def tell(note: str) -> None:
        print(f"hpcrl.convert: {note}", file=options.stream or sys.stderr, flush=True)

    found = find(checkpoint, options.model, options.hashes, tell, options.report_progress, options.step)
    config = read_config(found.model)
    quantised = is_quantised(found.folder)
    whole = QuantisedWeights(found.folder, config) if quantised else opened(found.folder, config, found.model)
    source = with_mtp(whole, config, found.model, options.mtp, tell)
    try:
        dtypes = output_dtypes(source, options.dtype)
        if options.verify:
            source.check_sums(options.report_progress)
        files = hf_files(source, dtypes, options.most_bytes)
        config = with_mtp_keys(without_quantisation(config), config, kept=bool(source.names))
        config |= _scalar(config, found, source.shapes) if source.values else {}
        small = hf_small_files(files, dtypes, config, found.model)
        return _write(found.folder, output, source, dtypes, files, small, options)
    finally:
        source.close()


def to_megatron(checkpoint: Path, output: Path, options: ConvertOptions) -> Converted:
    """Write an HF model as Megatron's torch_dist to the new folder `output`. Errors as in to_hf()."""
    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint} is not a folder; --to megatron needs a model in HF layout")
    if is_quantised(checkpoint):
        raise ValueError(
            f"--checkpoint {checkpoint} has quantised weights; first convert them to bfloat16: python -m hpcrl.convert "
            f"--checkpoint {checkpoint} --output {checkpoint}-bf16"
        )
    model = options.model or checkpoint
    config = read_config(model)
    vocabulary = config.get("vocab_size")
    padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE if isinstance(vocabulary, int) else 0
    source = ModelWeights(checkpoint, config, padded)
    try:
        dtypes = output_dtypes(source, options.dtype)
        files = megatron_files(source, dtypes, options.most_bytes)
        small = megatron_small_files(files, source, dtypes, config, model)
        return _write(checkpoint, output, source, dtypes, files, small, options)
    finally:
        source.close()


def _scalar(config: Mapping[str, Any], found: Found, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json entries that make the model a critic, if its head has a bias, or else a reward model:
    transformers' model for token or for sequence classification, with a label for each head."""
    from transformers import AutoConfig  # the import takes seconds, and only these models need it
    from transformers.models.auto import modeling_auto

    count = shapes[f"{VALUE_HEAD}.weight"][0]
    named = found.labels if len(found.labels) == count else [f"LABEL_{n}" for n in range(count)]
    labels = label_keys(named)
    if f"{VALUE_HEAD}.bias" in shapes:
        name = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[config["model_type"]]
        return {"architectures": [name], **labels}
    name = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config["model_type"]]
    vocabulary = AutoConfig.from_pretrained(found.model, local_files_only=True).get_text_config().vocab_size
    own: dict[str, Any] = {"pad_token_id": padding_id(found.model, vocabulary)}
    if isinstance(text := config.get("text_config"), Mapping):  # of a model that takes images
        own = {"text_config": {**text, **own}}
    return {"architectures": [name], **labels, **own}


def _write(
    folder: Path,
    output: Path,
    source: TensorSource,
    dtypes: Mapping[str, torch.dtype],
    files: list[OutFile],
    small: Callable[[Path], None],
    options: ConvertOptions,
) -> Converted:
    written = write_folder(
        output,
        files,
        source,
        small,
        identity=_identity(folder),
        num_threads=options.num_threads or default_threads(),
        verify=options.verify,
        stream=options.stream or sys.stderr,
        report_progress=options.report_progress,
        fence=options.fence,
        again=options.again,
    )
    return Converted(folder, len(dtypes), sum(file.size for file in files), written)


def _identity(folder: Path) -> Any:
    """Identifies the source's files, since a killed conversion is resumed only if they are unchanged."""
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return str(folder.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
