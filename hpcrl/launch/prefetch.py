"""Downloads models and data for offline compute nodes: run this on a machine with network access, such as the login
node.

    python -m hpcrl prefetch Qwen/Qwen2.5-7B                      a model, into the Hugging Face cache (HF_HOME)
    python -m hpcrl prefetch Qwen/Qwen2.5-7B --folder models/7b   into a separate folder: model.path=models/7b
    python -m hpcrl prefetch datasets/openai/gsm8k/main/train-00000-of-00001.parquet     one file of a data set

Prints the path of each download. The compute nodes must see the cache. The endpoint is HF_ENDPOINT, the token HF_TOKEN,
as usual with Hugging Face. An interrupted download is continued.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.launch.hub import FILES, NOT_FILES
from hpcrl.launch.model_folder import inspect_model
from hpcrl.system.cli import ArgumentParser, use_utf8
from hpcrl.system.exit_codes import ExitCode

DATASETS = "datasets/"


def prefetch(name: str, revision: str | None = None, folder: Path | None = None) -> Path:
    """Download a model (ORG/NAME), or a file (datasets/ORG/NAME/FILE), unless it exists; returns its path. ValueError,
    one line each: why the download is impossible, or errors in the downloaded model."""
    from huggingface_hub.errors import DryRunError, HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        return _file(name, revision, folder) if name.startswith(DATASETS) else _model(name, revision, folder)
    except HFValidationError as error:
        raise ValueError(f"{name}: expected ORG/NAME, or datasets/ORG/NAME/FILE") from error
    except (DryRunError, LocalEntryNotFoundError) as error:  # the cause is the chained exception
        raise ValueError(f"{name} {_explain(error.__cause__ or error)}") from error
    except (HTTPError, OSError) as error:
        raise ValueError(f"{name} {_explain(error)}") from error


def _explain(error: BaseException) -> str:
    """The error of hub, network or disk, and its remedy."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case GatedRepoError():
            return "is gated: accept its terms on the hub and set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"is not on the hub {ENDPOINT}, or it is private and HF_TOKEN is not set"
        case RevisionNotFoundError():
            return "has no such --revision"
        case EntryNotFoundError():
            return "is a data set without that file"
    return f"could not be downloaded from {ENDPOINT}: {type(error).__name__}: {' '.join(str(error).split())}"


def _model(name: str, revision: str | None, folder: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(dry_run: bool) -> object:
        return snapshot_download(
            name,
            revision=revision,
            local_dir=folder,
            allow_patterns=FILES,
            ignore_patterns=NOT_FILES,
            dry_run=dry_run,
        )

    missing = [file for file in fetch(dry_run=True) if file.will_download]  # type: ignore[attr-defined]
    _check_space(name, sum(file.file_size or 0 for file in missing), folder)
    path = Path(str(fetch(dry_run=False)))
    if problems := inspect_model(path).problems:
        raise ValueError("\n".join(problem.replace("model.path", name, 1) for problem in problems))
    return path


def _file(name: str, revision: str | None, folder: Path | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    match name.removeprefix(DATASETS).split("/", 2):
        case [org, repo, file]:
            path = hf_hub_download(f"{org}/{repo}", file, repo_type="dataset", revision=revision, local_dir=folder)
            return Path(path)
    raise HFValidationError(name)


def _check_space(name: str, num_bytes: int, folder: Path | None) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = (folder or Path(HF_HUB_CACHE)).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if num_bytes > free:
        raise ValueError(
            f"{name} needs {num_bytes / 1e9:.1f} GB more, {place} has {free / 1e9:.1f} GB free; "
            "set HF_HOME or --folder to another filesystem"
        )


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    parser = ArgumentParser("hpcrl prefetch", __doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="ORG/NAME or datasets/ORG/NAME/FILE")
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    parser.add_argument("--folder", type=Path, help="target folder instead of the cache; with one NAME")
    try:
        arguments = parser.parse_args(argv)
        if arguments.folder is not None and len(arguments.names) > 1:
            raise ValueError("--folder: a folder can hold one model; give one NAME")
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
            raise ValueError(
                "HF_HUB_OFFLINE is set: nothing can be downloaded; unset it on a machine with network access"
            )
    except ValueError as error:
        print(f"{error} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    code = ExitCode.DONE
    for name in arguments.names:
        try:
            print(prefetch(name, arguments.revision, arguments.folder), flush=True)
        except ValueError as error:
            print(error, file=sys.stderr, flush=True)
            code = ExitCode.BAD_INPUT
    return code


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
