"""Write a small project of your own: rows, a reward with its test, a warm-up and an RL run that learns in minutes.

    python -m hpcrl init DIR

DIR is a new or an empty folder; nothing is overwritten. Its README.md has the commands, and says what to change.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.system.cli import ArgumentParser, use_utf8
from hpcrl.system.exit_codes import ExitCode

FILES = Path(__file__).parent / "project"
NEXT = """\
{folder} has {names}. Next:
    cd {folder}
    {python} make_data.py
    {hpcrl} launch --config sft.yaml
    {hpcrl} launch --config rl.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the project; returns the exit code."""
    use_utf8()
    parser = ArgumentParser("hpcrl init", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    try:
        folder = parser.parse_args(argv).folder
        names = write_project(folder)
    except (ValueError, OSError) as error:
        print(f"hpcrl init: {error} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    python, script = shlex.quote(sys.executable), shutil.which("hpcrl")
    on_path = script is not None and Path(script).parent == Path(sys.executable).parent
    hpcrl = "hpcrl" if on_path else f"{python} -m hpcrl"
    print(NEXT.format(folder=shlex.quote(str(folder)), names=", ".join(names), python=python, hpcrl=hpcrl), end="")
    return ExitCode.DONE


def write_project(folder: Path) -> list[str]:
    """Copy the project's files into the folder; returns their names. ValueError if the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(file for file in FILES.iterdir() if file.is_file())
    for file in files:
        shutil.copyfile(file, folder / file.name)  # with the user's own permissions, also from a read-only package
    return [file.name for file in files]


if __name__ == "__main__":
    sys.exit(main())
