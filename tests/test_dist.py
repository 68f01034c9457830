"""The published distribution: env/dist.sh builds and tries it like `make dist`, with the installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The tracked files in a separate repository, which a test may change."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = tmp_path / "checkout"
    folder.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=tracked, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All", "--allow-empty"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def dist(checkout: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [checkout / "env" / "dist.sh", sys.executable, "--borrow"]
    environment = os.environ | {"DIST": str(tmp_path / "dist")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_wheel_of_the_sdist_works_in_an_empty_folder(checkout: Path, tmp_path: Path) -> None:
    (checkout / "hpcrl" / "left_behind.py").write_text("")  # untracked: not published
    done = dist(checkout, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    sdist, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    assert [sdist.name, wheel.name] == [f"hpcrl-{VERSION}.tar.gz", f"hpcrl-{VERSION}-py3-none-any.whl"]
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"constraints.txt", "conf/hpcrl.yaml", "tests/test_dist.py", "docs/README.md", "hpcrl/py.typed"} <= names
    assert "hpcrl/left_behind.py" not in names


def test_a_file_missing_in_the_distribution_is_named(checkout: Path, tmp_path: Path) -> None:
    (checkout / "hpcrl" / "rewards" / "table.csv").write_text("")
    commit(checkout)
    done = dist(checkout, tmp_path)
    assert done.returncode == 1
    assert done.stderr == "the sdist lacks (<) or has too much (>):\n< hpcrl/rewards/table.csv\n"


def test_a_tag_for_a_different_version_is_refused(checkout: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "tag", "v99.0.0"], cwd=checkout, check=True)
    done = dist(checkout, tmp_path)
    assert (done.returncode, done.stderr) == (1, f"the tag is v99.0.0, and pyproject.toml says {VERSION}\n")
    assert not (tmp_path / "dist").exists()
