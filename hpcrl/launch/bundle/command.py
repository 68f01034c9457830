"""Put everything that a job reads into one archive, and unpack it on compute nodes without network.

    python -m hpcrl bundle +experiment=my_run model.path=Qwen/Qwen3-8B --out my_run.tar
    python -m hpcrl bundle --check my_run.tar --start
    python -m hpcrl bundle --unpack my_run.tar --to /scratch/me/my_run

--out: WORDS are those of a launch. The archive has its models with tokenizers and chat templates, data with images,
files and code of rewards and environments, and the compiled code of this node; and its configuration, with paths in the
bundle. Equal files are stored once, equal inputs make equal archives, and nothing is overwritten. A model by hub name
must be in the local cache (python -m hpcrl prefetch).

--unpack: one process of a node unpacks, others wait; if it was done, nothing is done. Every file is compared with its
SHA-256, and the folder appears only when it is complete. Start with FOLDER/config.yaml:

    . FOLDER/env.sh; python -m hpcrl.launch --config FOLDER/config.yaml

--check: reads an archive, or an unpacked folder, and compares every file with its SHA-256. --start also unpacks the
archive temporarily, and starts the configuration with the network off: one step, or only the checks of a launch if
this machine cannot run it.

Exit code 0, or 2 on bad input, or 18 if a file cannot be written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hpcrl.config import ConfigError
from hpcrl.launch.resources import size
from hpcrl.node.caches import place_of_caches
from hpcrl.system.cli import ArgumentParser, in_shell, show, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import is_storage_error

ONLY_FOR = {
    "config": "out",
    "wheels": "out",
    "image": "out",
    "caches": "out",
    "no_caches": "out",
    "words": "out",
    "warm": "unpack",
    "start": "check",
}
"""Option -> the option without which it has no meaning."""


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    try:
        arguments = _parsed(argv)
        steps = _make if arguments.out else _unpack if arguments.unpack else _check
        for line in steps(arguments):
            show(_harmless(line))
    except ConfigError as error:
        print(in_shell(_harmless("\n".join(error.problems))), file=sys.stderr)
        return ExitCode.BAD_INPUT
    except ValueError as error:
        print(in_shell(_harmless(f"hpcrl bundle: {error}")), file=sys.stderr)
        return ExitCode.BAD_INPUT
    except OSError as error:
        print(_harmless(f"hpcrl bundle: {error}"), file=sys.stderr)
        return ExitCode.NOT_SAVED if is_storage_error(error) else ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _harmless(text: str) -> str:
    """The text without control characters, with which the names in an archive of others could change a terminal."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser("hpcrl bundle", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="make this archive: a new NAME.tar or NAME.tar.zst")
    what.add_argument("--unpack", type=Path, metavar="FILE", help="unpack an archive into the folder of --to")
    what.add_argument("--check", type=Path, metavar="FILE", help="verify an archive, or an unpacked folder")
    parser.add_argument("words", nargs="*", metavar="WORD", help="with --out: the words of a launch")
    parser.add_argument("--config", metavar="FILE", help="with --out: as in a launch")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="with --out: add the wheels of a folder")
    parser.add_argument("--image", type=Path, metavar="FILE", help="with --out: add a container image")
    parser.add_argument(
        "--caches", type=Path, metavar="FOLDER", help="with --out: compiled code; default: that of this node, if any"
    )
    parser.add_argument("--no-caches", action="store_true", help="with --out: add no compiled code")
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="with --unpack: a new folder; with --start: where to unpack (TMPDIR)"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="with --unpack: copy compiled code for this kind of node to where all your runs load it from; only for an "
        "archive that you trust",
    )
    parser.add_argument("--start", action="store_true", help="with --check: also start it, with the network off")
    parser.add_argument(
        "--wait-s", type=float, default=3600.0, help="maximum wait for another process or a start, seconds (3600)"
    )
    found = parser.parse_intermixed_args(argv)
    for option, needed in ONLY_FOR.items():
        if getattr(found, option) and getattr(found, needed) in (None, False):
            name = "WORD" if option == "words" else f"--{option.replace('_', '-')}"
            raise ValueError(f"{name}: it goes with --{needed} (see --help)")
    if found.unpack and found.to is None:
        raise ValueError("--to: the folder is missing (see --help)")
    if found.to is not None and not (found.unpack or found.start):
        raise ValueError(f"--to {found.to}: it goes with --unpack or --start (see --help)")
    if found.caches and found.no_caches:
        raise ValueError(f"--caches {found.caches}: --no-caches leaves it out; give one of the two")
    if not 0 < found.wait_s < 1e7:
        raise ValueError(f"--wait-s {found.wait_s}: a number of seconds above 0 and below 1e7 is needed")
    if found.config is not None:
        found.words = ["--config", found.config, *found.words]
    return found


def _make(arguments: argparse.Namespace) -> Iterator[str]:
    from hpcrl.launch.bundle.collecting import collect, describe
    from hpcrl.launch.bundle.writing import check_target, with_digests, write_bundle

    check_target(arguments.out)
    caches = arguments.caches or place_of_caches(os.environ)
    present = arguments.caches is not None or caches.is_dir()
    found = collect(
        arguments.words, arguments.wheels, arguments.image, caches if present and not arguments.no_caches else None
    )
    yield from describe(found)
    yield from (f"note: {note}" for note in found.notes)
    manifest = with_digests(found.manifest(), found.files)
    took = write_bundle(arguments.out, manifest, found.files)
    yield f"{arguments.out}: {len(manifest.files)} files, {size(arguments.out.stat().st_size)} in {took}"
    yield in_shell(f"check it: python -m hpcrl bundle --check {arguments.out} --start")


def _unpack(arguments: argparse.Namespace) -> Iterator[str]:
    from hpcrl.launch.bundle.layout import CONFIG, ENVIRONMENT
    from hpcrl.launch.bundle.unpacking import differences_of_versions, install_caches, manifest_in, unpack

    yield unpack(arguments.unpack, arguments.to, arguments.wait_s)
    folder = arguments.to.expanduser().absolute()
    yield from differences_of_versions(manifest_in(folder))
    if arguments.warm:
        yield install_caches(folder, os.environ)
    yield in_shell(f"start it: . {folder}/{ENVIRONMENT}; python -m hpcrl.launch --config {folder}/{CONFIG}")


def _check(arguments: argparse.Namespace) -> Iterator[str]:
    from hpcrl.launch.bundle.archive import verify
    from hpcrl.launch.bundle.trial import start_offline
    from hpcrl.launch.bundle.unpacking import unpack, verify_folder

    path = arguments.check
    if path.is_dir():
        if arguments.to is not None:
            raise ValueError(f"--to {arguments.to}: {path} is unpacked already; leave it out")
        yield f"{path}: {size(verify_folder(path))} agree with their digests"
        if arguments.start:
            yield from start_offline(path, arguments.wait_s)
    elif not arguments.start:
        yield f"{path}: {size(verify(path))} agree with their digests"
    else:
        if arguments.to is not None and not arguments.to.is_dir():
            raise ValueError(f"--to {arguments.to}: no such folder; --start unpacks into a new folder inside it")
        with TemporaryDirectory(prefix="hpcrl-bundle-", dir=arguments.to) as place:
            yield unpack(path, Path(place) / "bundle", arguments.wait_s)
            yield from start_offline(Path(place) / "bundle", arguments.wait_s)


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
