"""The ranks' container (none, Apptainer, or Pyxis): the options for srun, and their checks.

The batch script and hpcrl's checks in it run outside the container. The source tree (the working directory), the run
folder and cluster.mounts are mounted at unchanged paths; `python` is the image's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from hpcrl.config import ClusterConfig, Problem

PULLED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+|[^/]+#.+")
"""Images that are not files: docker://x, oras://x, registry#name:tag."""


def srun_options(cluster: ClusterConfig) -> list[str]:
    """The last arguments of srun before the program, quoted for the shell."""
    image = shlex.quote(cluster.image or "")
    if cluster.container == "pyxis":
        mounts = ",".join(m if ":" in m else f"{m}:{m}" for m in ("$PWD", "$run_dir", *cluster.mounts))
        return [f"--container-image={image}", f'--container-mounts="{mounts}"', '--container-workdir="$PWD"']
    if cluster.container == "apptainer":
        binds = " ".join(f"--bind {m}" for m in ('"$PWD"', '"$run_dir"', *map(shlex.quote, cluster.mounts)))
        return [f'apptainer exec --nv {binds} --pwd "$PWD" {image}']
    return []


def check_container(cluster: ClusterConfig) -> list[Problem]:
    """Report an image that is not given, and an image file or sources of mounts that do not exist; also called on the
    node where the job starts."""
    return list(_check(cluster))


def _check(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.container == "none":
        return
    if cluster.image is None:
        text = f"cluster.image: missing; cluster.container={cluster.container} needs one"
        yield Problem(("cluster", "image"), text, (("cluster", "container"),))
    elif not PULLED.fullmatch(cluster.image) and not Path(cluster.image).exists():
        yield Problem(("cluster", "image"), f"cluster.image: no file {cluster.image}")
    for mount in cluster.mounts:
        source = mount.partition(":")[0]
        if not Path(source).is_absolute() or not Path(source).exists():
            text = f"cluster.mounts: {source} is not the absolute path of an existing folder or file"
            yield Problem(("cluster", "mounts"), text)
