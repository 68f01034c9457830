"""The batch scripts of slurm/, rendered from every experiment that specifies its nodes.

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
from hpcrl.config.folders import conf_dir, options_of
from hpcrl.launch.render import render
from hpcrl.system.cli import use_utf8

HEADER = """\
# {about}
#
#   sbatch {file} [KEY=VALUE ...]
#
# Set account and partition with SBATCH_ACCOUNT and SBATCH_PARTITION. Submit from the top of the checkout. To change the
# nodes or the #SBATCH lines, use `python -m hpcrl.launch {arguments} KEY=VALUE ...` instead.
# `make recipes` renders this file from conf/experiment/{name}.yaml: edit that file.
"""


def recipes() -> dict[str, str]:
    """File name -> script, for all recipes. Raises ConfigError like hpcrl.config.load."""
    found = {}
    for name in options_of(conf_dir(), "experiment"):
        arguments = ["+cluster=slurm", f"+experiment={name}"]
        config = load(arguments)
        if config.cluster.components:
            script = render(config, Placement.from_config(config, RoleLayout.from_config(config)), arguments)
            found[f"{name}.sbatch"] = _with_header(script, name, arguments)
    return found


def _with_header(script: str, name: str, arguments: Sequence[str]) -> str:
    """The script with a header: the first comment of the experiment's file, and how to submit the script."""
    first, rest = script.split("\n", 1)
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    about = [line for line in takewhile(lambda line: line.startswith("#"), lines) if not line.startswith("# @")]
    header = HEADER.format(
        about="\n".join(about).removeprefix("# "), file=f"slurm/{name}.sbatch", arguments=" ".join(arguments), name=name
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
    use_utf8()
    sys.exit(main(sys.argv[1:]))
