"""Convert a checkpoint to HF layout, an HF model to a checkpoint of Megatron-Core, or quantised weights to bfloat16.

    python -m hpcrl.convert --checkpoint runs/NAME --output NAME-hf
    python -m hpcrl.convert --checkpoint megatron/iter_0000500 --model Qwen3-8B --output Qwen3-8B-500 --dtype bf16
    python -m hpcrl.convert --to megatron --checkpoint Qwen3-8B --output megatron/Qwen3-8B
    python -m hpcrl.convert --checkpoint DeepSeek-V3 --output DeepSeek-V3-bf16

Reads torch_dist of Megatron-LM and the checkpoints of hpcrl's trainers; needs no GPU and no Megatron. The checkpoint is
a run folder (its newest checkpoint, or the one of --step), a step_NNNNNN folder of it, or a folder of Megatron-LM; or a
model with quantised weights (fp8, mxfp4), of which bfloat16 is made. Numbers pass through memory in blocks of rows.
After a kill the same command continues with the missing files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.metrics.duration import duration
from hpcrl.system.cli import ArgumentParser, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import is_storage_error

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 on success, 2 on bad input, 18 if a file cannot be written."""
    try:
        words = _parser().parse_args(argv)
        print(_convert(words), flush=True)
    except (ValueError, OSError) as error:
        print(f"hpcrl.convert: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.NOT_SAVED if is_storage_error(error) else ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print("hpcrl.convert: interrupted; the same command continues from here", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _parser() -> ArgumentParser:
    parser = ArgumentParser("hpcrl.convert", __doc__)
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="what to convert")
    parser.add_argument(
        "--step", metavar="N|best", help="of a run folder: the checkpoint of this step, or the best (keep_best.metric)"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--to", choices=("hf", "megatron"), default="hf", help="default: hf")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder with config.json and tokenizer, if the checkpoint has none"
    )
    parser.add_argument(
        "--mtp",
        choices=("keep", "drop"),
        default="keep",
        help="multi-token prediction layers: copy them from the model's folder, or leave them out (keep)",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: as in the checkpoint")
    parser.add_argument(
        "--verify", action="store_true", help="verify the checkpoint's checksums; read the output back and compare it"
    )
    parser.add_argument(
        "--skip-hashes", action="store_true", help="compare a checkpoint of hpcrl with its manifest by file sizes only"
    )
    parser.add_argument("--shard-gb", type=float, default=4.0, help="maximum GB of a file, or one tensor (4)")
    parser.add_argument("--threads", type=int, help="number of writing threads; default: cores, at most 8")
    return parser


def _convert(words: argparse.Namespace) -> str:
    """Run the conversion; returns a one-line summary."""
    for name, value in (("--shard-gb", words.shard_gb), ("--threads", words.threads)):
        if value is not None and not 0 < value < 1e9:
            raise ValueError(f"{name} {value}: a number above 0 and below 1e9 is needed")
    if words.step is not None and words.to == "megatron":
        raise ValueError(f"--step {words.step}: it chooses a checkpoint of a run, and --to megatron reads a model")
    import torch  # torch and modules that import it are imported here, so --help is fast

    from hpcrl.convert.conversions import ConvertOptions, to_hf, to_megatron

    began = time.monotonic()
    dtype = getattr(torch, DTYPES[words.dtype]) if words.dtype else None
    hashes, most_bytes = not words.skip_hashes, int(words.shard_gb * 1e9)
    options = ConvertOptions(
        words.model, dtype, words.verify, hashes, most_bytes, words.threads, step=words.step, mtp=words.mtp
    )
    result = (to_megatron if words.to == "megatron" else to_hf)(words.checkpoint, words.output, options)
    seconds = time.monotonic() - began
    rate = f", {result.written_bytes / 1e6 / seconds:.0f} MB/s" if result.written_bytes else ""
    checked = ", read back and equal" if words.verify else ""
    return (
        f"{result.source} -> {words.output}: {result.num_tensors} tensors, {result.total_bytes / 1e9:.3g} GB in "
        f"{duration(seconds)}{rate}{checked}"
    )


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
