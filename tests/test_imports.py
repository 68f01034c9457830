"""Imports go one way, heavy libraries stay in their own files, and the installed package equals the source."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from hpcrl.spec.extras import without
from tests.conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OWN_FILE_ONLY = {
    "megatron": ("hpcrl/engines/train/megatron",),
    "deepspeed": ("hpcrl/engines/train/deepspeed",),
    "vllm": ("hpcrl/engines/gen/vllm",),
    "sglang": ("hpcrl/engines/gen/sglang",),
    "gymnasium": ("hpcrl/envs/adapters/gymnasium",),
    "mpi4py": ("hpcrl/messaging/bootstrap",),
    "submitit": ("hpcrl/launch/executor", "hpcrl/launch/sweep"),
    "hydra_plugins": ("hpcrl/launch/sweep_launcher",),
}
"""Library -> how the files that may import it begin."""


def imported(file: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources() -> list[tuple[str, set[str]]]:
    return [(str(file.relative_to(ROOT)), imported(file)) for file in sorted((ROOT / "hpcrl").rglob("*.py"))]


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(PYPROJECT['tool']['importlinter']['contracts'])} kept, 0 broken." in done.stdout


@pytest.mark.slow
def test_code_that_runs_before_the_ranks_imports_no_torch() -> None:
    """Neither on the login node nor in a node agent; functions that only ranks call may import it."""
    packages = (
        "cluster",
        "commands",
        "config",
        "launch",
        "models",
        "node",
        "planner",
        "report",
        "run_folder",
        "spec",
        "system",
    )
    files = [
        file
        for file in sorted((ROOT / "hpcrl").rglob("*.py"))
        if file.relative_to(ROOT / "hpcrl").parts[0].removesuffix(".py") in packages or file.stem == "spec"
    ]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert len(names) > 70
    script = f"""
import importlib, sys
for name in {names!r}:
    if not name.endswith("__main__"):
        importlib.import_module(name)
        heavy = {{"torch", "transformers"}} & set(sys.modules)
        assert not heavy, f"{{name}} imports {{heavy}}"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_import_against_the_direction_is_detected(tmp_path: Path) -> None:
    """Negative control: the same contracts, with one import too many."""
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    for file in (ROOT / "hpcrl").rglob("*.py"):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            file.read_text() + ("\nimport hpcrl.comm\n" if file.parts[-2:] == ("rewards", "reward.py") else "")
        )
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [lint, "--no-cache"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (
        done.returncode == 1
        and "algorithms, rewards and environments know neither ranks nor engines BROKEN" in done.stdout
    )


@pytest.mark.slow
def test_engine_libraries_are_imported_only_in_their_own_files() -> None:
    for file, names in sources():
        for library, homes in OWN_FILE_ONLY.items():
            if any(name.split(".")[0] == library for name in names):
                assert file.startswith(homes), f"{file} imports {library}"


def test_imports_blocked_by_a_test_still_find_loaded_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with without("wave", "pytest"):
        assert import_module("pytest") is pytest
        with pytest.raises(ModuleNotFoundError, match="wave"):
            import_module("wave")
    assert import_module("wave").open


@pytest.mark.slow
def test_plug_in_code_runs_no_collectives_and_ranks_exchange_no_pickles() -> None:
    for file, names in sources():
        if file.startswith(("hpcrl/algorithms", "hpcrl/rewards", "hpcrl/envs")):
            assert "torch.distributed" not in names, file
        if file.startswith(("hpcrl/messaging", "hpcrl/comm", "hpcrl/workers")):
            assert "pickle" not in names, file


ENGINE_FILES = {"spec", "engine", "memory", "critic", "checkpoint", "weights", "traffic", "replay"}
"""Names of files that the folder of every engine may have (docs/architecture.md, To add a part)."""


def test_folders_and_modules_have_distinguishable_names() -> None:
    """No two folders of one name, no more than two modules of one name, and few files next to folders."""
    package = ROOT / "hpcrl"
    files = [file.relative_to(package) for file in sorted(package.rglob("*.py"))]
    folders = Counter(folder.name for folder in {file.parent for file in files})
    assert [name for name, count in folders.items() if count > 1] == []
    modules = Counter(
        file.stem
        for file in files
        if file.stem not in ("__init__", "__main__", "spec")
        and not (file.parts[0] == "engines" and file.stem in ENGINE_FILES)
    )
    assert [name for name, count in modules.items() if count > 2] == []
    assert len([file for file in files if len(file.parts) == 1]) <= 5


def public_types(file: Path) -> set[str]:
    """The public classes and type aliases that a file defines; type variables do not count."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and "TypeVar(" not in ast.unparse(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name) and not target.id.isupper()}
    return {name for name in names if name[0].isupper()}


@pytest.mark.slow
def test_no_two_public_types_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for file in sorted((ROOT / "hpcrl").rglob("*.py")):
        for name in public_types(file):
            places.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.slow
def test_the_wheel_includes_conf_and_launches_without_the_checkout(tmp_path: Path) -> None:
    for name in ("hpcrl", "conf", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    build = [sys.executable, "-c", "from setuptools import build_meta; print(build_meta.build_wheel('.'))"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    installed = tmp_path / "installed"
    zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).extractall(installed)
    here = {str(file.relative_to(ROOT)) for file in (ROOT / "hpcrl").rglob("*.py")}
    assert here == {str(file.relative_to(installed)) for file in installed.rglob("*.py")}
    (entries,) = installed.glob("*.dist-info/entry_points.txt")
    assert "hpcrl = hpcrl.system.cli:main" in entries.read_text()
    code = (
        "import hpcrl.config.folders as c; from hpcrl.config import load;"
        "print(c.conf_dir()); print(load(['+experiment=demo', 'layout=disaggregated']).layout.name);"
        "config = load(['+experiment=mine', '+cluster=mine']); print(config.max_steps, config.cluster.partition)"
    )
    environment = os.environ | {"PYTHONPATH": str(installed), "HPCRL_CONF": "shared"}
    files = {
        "conf/cluster": "name: slurm\npartition: debug\n",
        "shared/experiment": "# @package _global_\ndefaults:\n- demo\nmax_steps: 7\n",
    }
    for group, text in files.items():
        (installed / group).mkdir(parents=True)
        (installed / group / "mine.yaml").write_text(text)
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=installed, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(installed / "hpcrl" / "conf"), "disaggregated", "7", "debug"]
