"""The types of an installed hpcrl (PEP 561): mypy knows the types that tests/typed_program.py, a user's program,
uses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROGRAM = ROOT / "tests" / "typed_program.py"
SETTINGS = """\
[mypy]
strict = true
follow_imports = skip

[mypy-hpcrl.*,numpy.*,pydantic.*,pydantic_core.*,submitit.*,torch,torch._C.*,torch._tensor]
follow_imports = silent
"""
"""Strict, without the libraries whose types are not revealed, which take ten times as long as the others."""
REVEALED = re.compile(r":(\d+): note: Revealed type is \"(.*)\"$", re.M)


def mypy(folder: Path, package: Path) -> str:
    """Mypy's output for the program with this package of hpcrl and the libraries of this environment."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (site / "libraries.pth").write_text("\n".join([str(package.parent), *libraries]))
    (folder / "mypy.ini").write_text(SETTINGS)
    shutil.copy(PROGRAM, folder)
    words = ["--config-file", "mypy.ini", "--cache-dir", "cache", "--python-executable", environment / "bin" / "python"]
    command = [Path(sys.executable).with_name("mypy"), *words, PROGRAM.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_users_program_sees_the_types_of_the_interfaces_it_uses(tmp_path: Path) -> None:
    said = mypy(tmp_path, ROOT / "hpcrl")
    assert ": error: " not in said, said
    lines = PROGRAM.read_text().splitlines()
    revealed = {int(number): kind for number, kind in REVEALED.findall(said)}
    assert [n for n, line in enumerate(lines, 1) if "reveal_type(" in line and n not in revealed] == [], "not reached"
    assert len(revealed) > 100
    unknown = {n for n, kind in revealed.items() if re.search(r"\bAny\b", kind)}
    told = {n for n in revealed if "# Any: " in lines[n - 1]}
    assert [f"{n}: {lines[n - 1].strip()} is {revealed[n]}" for n in sorted(unknown - told)] == []
    assert [f"{n}: {lines[n - 1].strip()} is {revealed[n]}" for n in sorted(told - unknown)] == [], "known by now"


@pytest.mark.slow
def test_without_py_typed_no_types_are_known(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "hpcrl", tmp_path / "site" / "hpcrl", ignore=shutil.ignore_patterns("py.typed", "__pycache__")
    )
    assert 'Skipping analyzing "hpcrl.rewards.reward"' in mypy(tmp_path, tmp_path / "site" / "hpcrl")
