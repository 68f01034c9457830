"""Skips, allowed on a user's machine and a failure if everything is required; tests that run alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.timeout(300)

MODULES = {
    "test_one.py": "import pytest\n\ndef test_component():\n    pytest.skip('none')\n\ndef test_fine():\n    pass\n",
    "test_two.py": "import pytest\n\npytest.importorskip('no_such_library')\n\ndef test_never():\n    pass\n",
    "test_three.py": "import pytest\n\n@pytest.mark.xfail(strict=True)\ndef test_known():\n    assert False\n",
    "test_five.py": "import pytest\n\n@pytest.mark.gpu\ndef test_gpu():\n    pytest.skip('as if there were none')\n",
    "test_six.py": "import pytest\n\n@pytest.mark.outside\ndef test_outside():\n    pytest.skip('none')\n",
    "test_four.py": "import pytest\n\n@pytest.mark.soak\ndef test_long():\n    assert False\n",
}


def started(folder: Path, require: str, outside: str = "0") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HPCRL_REQUIRE_ALL": require, "HPCRL_REQUIRE_OUTSIDE": outside}
    words = [
        "-q",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:hypothesispytest",
    ]
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)


def closing_line(folder: Path, require: str, outside: str = "0") -> str:
    return started(folder, require, outside).stdout.strip().splitlines()[-1].split(" in ")[0]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    for name, text in MODULES.items():
        (tmp_path / "tests" / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_a_skip_passes_for_users_and_fails_where_all_tests_are_required(suite: Path) -> None:
    assert closing_line(suite, "0") == "1 passed, 4 skipped, 1 deselected, 1 xfailed"
    assert closing_line(suite, "1") == "1 failed, 1 passed, 2 skipped, 1 deselected, 1 xfailed, 1 error"
    assert closing_line(suite, "1", "1") == "2 failed, 1 passed, 1 skipped, 1 deselected, 1 xfailed, 1 error"


@pytest.mark.slow
def test_a_test_module_that_imports_an_engine_at_collection_is_refused(suite: Path) -> None:
    (suite / "tests" / "deepspeed.py").touch()
    (suite / "tests" / "test_seven.py").write_text("import deepspeed\n\ndef test_fine():\n    pass\n")
    done = started(suite, "0")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip() == "ERROR: collecting the tests has imported deepspeed: import it within the tests"


LOG = """
import os, tempfile, time
from pathlib import Path
import pytest
def note(word):
    with (Path(__file__).parent / "log").open("a") as log:
        log.write(word + "\\n")
"""
MANY = """
@pytest.mark.parametrize("number", range(6))
def test_beside_others(number):
    note("in")
    time.sleep(0.5)
    note("out")
"""
ALONE = """
@pytest.mark.alone
def test_alone():
    note("alone")
    tempfile.mkdtemp()
    time.sleep(0.5)
    note("end")
"""


@pytest.mark.slow
def test_a_test_marked_alone_runs_alone_and_leaves_no_temporary_files(suite: Path) -> None:
    for path in (suite / "tests").glob("test_*.py"):
        path.unlink()
    for name, body in {"many_1": MANY, "many_2": MANY, "one": ALONE}.items():
        (suite / "tests" / f"test_{name}.py").write_text(LOG + body)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "-p", "no:cacheprovider"]
    (above := suite / "above").mkdir()
    environment = os.environ | {"TMPDIR": str(above), "PYTEST_DEBUG_TEMPROOT": str(suite)}
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert "13 passed" in done.stdout and not list(above.iterdir())
    words = (suite / "tests" / "log").read_text().split()
    running = [sum(1 if word in ("in", "alone") else -1 for word in words[: end + 1]) for end in range(len(words))]
    assert words[words.index("alone") + 1] == "end" and running[words.index("alone")] == 1
    assert max(running) == 2, "the others run beside each other"
