"""Starts the configuration of an unpacked bundle with the network off, for one step; or only checks it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hpcrl
from hpcrl.config import ConfigError, parse
from hpcrl.config.config_file import write_config
from hpcrl.config.folders import FOLDERS
from hpcrl.launch.bundle.layout import MODULES, config_in
from hpcrl.launch.bundle.offline import ASKED
from hpcrl.launch.bundle.unpacking import OFFLINE, manifest_in
from hpcrl.system.exit_codes import ExitCode

CACHED = re.compile(r"(HF|HUGGINGFACE|TRANSFORMERS)_\w*(CACHE|HOME)\w*|HPCRL_DATA|PYTHONPATH")
"""Variables that lead to files outside the bundle."""
MAX_SHOWN_LINES = 20


def start_offline(folder: Path, timeout_s: float) -> Iterator[str]:
    """Lines about a run of one step on this machine, in an empty folder, with the bundle's files only; or about a dry
    run, if such a run is refused here before it starts, as on a login node without GPUs.

    ValueError has the last lines of a start or dry run that failed, or says that it took longer than `timeout_s`
    seconds.
    """
    folder = folder.absolute()
    with TemporaryDirectory(prefix="hpcrl-bundle-start-") as empty:
        here = Path(empty)
        (here / "start.yaml").write_bytes(write_config(_one_step(folder, here), None))
        words = ["--config", str(here / "start.yaml")]
        code, output, how = _launch(folder, here, words, timeout_s)
        yield how
        if code == ExitCode.DONE:
            yield "start: all checks and one step ended with exit code 0"
            return
        if code != ExitCode.BAD_INPUT or (here / "run").exists():
            raise ValueError(f"{folder}: the start failed with exit code {code}:\n{_last(output)}")
        reason = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        code, output, _ = _launch(folder, here, [*words, "dry_run=true"], timeout_s)
        if code != ExitCode.DONE:
            raise ValueError(f"{folder}: the dry run failed with exit code {code}:\n{_last(output)}")
        yield f"not started on this machine: {reason}"
        yield "dry run: all checks ended with exit code 0"


def _one_step(folder: Path, here: Path) -> dict[str, Any]:
    """The bundle's configuration, for one step on this machine."""
    config = config_in(manifest_in(folder), folder)
    try:
        trains = parse(config).pipeline_spec.trains
    except ConfigError as error:
        raise ValueError(f"{folder}: the configuration is not one of this version: {error.problems[0]}") from error
    config["run_dir"] = str(here / "run")
    config["trackers"] = []
    config["cluster"] = (config.get("cluster") or {}) | {"name": "local", "container": "none"}
    if trains:
        config |= {"max_steps": 1, "eval_every": 0, "keep_best": (config.get("keep_best") or {}) | {"metric": None}}
    return config


def _launch(folder: Path, here: Path, words: list[str], timeout_s: float) -> tuple[int, str, str]:
    """(exit code, output, how the network was off) of a launch in the empty folder `here`."""
    environ = {name: value for name, value in os.environ.items() if not CACHED.fullmatch(name) and name != FOLDERS}
    search = [str(folder / MODULES), str(Path(hpcrl.__file__).parents[1])]
    environ |= OFFLINE | {"HF_HOME": str(here / "no_cache"), "PYTHONPATH": os.pathsep.join(search)}
    told, log = here / "network", here / "log"
    launch = [sys.executable, "-m", "hpcrl.launch", *words]
    command = [sys.executable, "-m", "hpcrl.launch.bundle.offline", str(told), *launch]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=here, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ValueError(f"{folder}: a start took longer than {timeout_s:g} s (--wait-s)") from error
            raise
    text = log.read_text(errors="replace")
    return code, text, told.read_text() if told.exists() else ASKED


def _last(output: str) -> str:
    return "\n".join(f"  {line}" for line in output.splitlines()[-MAX_SHOWN_LINES:])
