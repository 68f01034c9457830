"""The batch scripts of slurm/: what the renderer makes of every experiment that says which nodes it needs.

python -m hpcrl.launch.recipes [FOLDER]     writes them (make recipes)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import load
from hpcrl.config.compose import conf_dir, groups
from hpcrl.launch.render import render

HEADER = """\
# {about}
#
#   sbatch {file} [KEY=VALUE ...]
#
# The account and the partition are SBATCH_ACCOUNT's and SBATCH_PARTITION's. Submit from the top of the checkout. What
# changes the nodes or the #SBATCH lines goes through `python -m hpcrl.launch {words} KEY=VALUE ...` instead.
# Made by `make recipes` from conf/experiment/{name}.yaml: change that.
"""


def recipes() -> dict[str, str]:
    """File name -> script, of all recipes. ConfigError as in hpcrl.config.load."""
    found = {}
    for name in groups()["experiment"]:
        words = ["+cluster=slurm", f"+experiment={name}"]
        config = load(words)
        if config.cluster.components:
            script = render(config, Placement.from_config(config, RoleLayout.from_config(config)), words)
            found[f"{name}.sbatch"] = _with_header(script, name, words)
    return found


def _with_header(script: str, name: str, words: Sequence[str]) -> str:
    """The script with the first comment of its experiment's file, and how to submit it, below its first line."""
    first, rest = script.split("\n", 1)
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    about = [line for line in takewhile(lambda line: line.startswith("#"), lines) if not line.startswith("# @")]
    header = HEADER.format(
        about="\n".join(about).removeprefix("# "), file=f"slurm/{name}.sbatch", words=" ".join(words), name=name
    )
    return f"{first}\n{header}{rest}"


def main(argv: Sequence[str]) -> int:
    """Command line."""
    folder = Path(argv[0] if argv else "slurm")
    folder.mkdir(exist_ok=True)
    scripts = recipes()
    for file in folder.glob("*.sbatch"):
        if file.name not in scripts:
            file.unlink()
    for name, script in scripts.items():
        (folder / name).write_text(script)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
