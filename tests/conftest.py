"""Shared by all tests: the data folder, which tests may be skipped, and which run alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from hpcrl.spec.trajectory import FIELDS
from hpcrl.system import log

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = "HPCRL_TESTS_SCRATCH"
"""Environment variable: the folder for temporary files of all workers and of what they start, removed at the end."""
REQUIRE_ALL = os.environ.get("HPCRL_REQUIRE_ALL") == "1"
"""Set in continuous integration: what a user's machine may lack must be there, GPUs excepted."""
REQUIRE_OUTSIDE = os.environ.get("HPCRL_REQUIRE_OUTSIDE") == "1"
"""Set by make test-outside: so must the packages of tests marked `outside`."""
ENGINES = ("bitsandbytes", "deepspeed", "megatron", "sglang", "textworld", "vllm")
"""Packages that take seconds to import. Every worker collects all tests, so that a test imports them itself."""


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the public data sets (gsm8k, humaneval, ifeval): $HPCRL_DATA, or ../shared/data beside the checkout."""
    folder = Path(os.environ.get("HPCRL_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder}; set HPCRL_DATA")
    return folder


@pytest.fixture(autouse=True)
def no_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are not for GPUs start their ranks on the CPU, however many GPUs the machine has."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def own_fields() -> Iterator[None]:
    """Fields that a test declares, or reads from a rollout file, are removed after it."""
    built_in = dict(FIELDS)
    yield
    FIELDS.clear()
    FIELDS.update(built_in)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A test may start a program's log, which is stopped after the test."""
    yield
    log.stop()


@pytest.fixture
def console() -> None:
    """Messages go to standard output, as on rank 0 for a user."""
    log.start("rank 0", console="stdout")


def pytest_configure(config: pytest.Config) -> None:
    """One folder for temporary files: killed processes, and ranks at their end, leave temporary files of libraries
    behind."""
    if hasattr(config, "workerinput"):  # inherited
        return
    above = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", above)  # tmp_path stays where pytest keeps it after a failure
    # What is compiled serves the next session with the same instructions (hpcrl.engines.compiling). It is set already
    # where a test's own conftest.py, which is imported before, has imported the compiler.
    instructions = os.environ.get("ATEN_CPU_CAPABILITY", "own")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{above}/torchinductor_{os.getuid()}_{instructions}"
    os.environ["MPLCONFIGDIR"] = f"{above}/matplotlib_{os.getuid()}"  # a run makes its font cache anew otherwise
    os.environ["VLLM_CACHE_ROOT"] = f"{above}/vllm_{os.getuid()}"  # its cache of model information
    os.environ[SCRATCH] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="hpcrl-tests-")
    os.chmod(tempfile.tempdir, 0o711)  # where root runs the tests, sandboxes work as another user below it
    # After multiprocessing, which removes a folder of its own in it with priority -100.
    Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-200)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave soak tests out unless asked for; skip GPU tests without a GPU; run long files first."""
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak and "soak" not in config.option.markexpr:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    # A worker takes the next file when it has done one: at the end there are only short ones to share out. Tests with
    # Slurm, which wait more than they compute, come between the others, so that not all workers wait at once.
    long = {item.path: None for item in items if item.get_closest_marker("slow")}
    waiting = [path for path in long if path.parent.name == "slurm"]
    computing = [path for path in long if path.parent.name != "slurm"]
    place = {path: (i + 0.5) / len(files) for files in (waiting, computing) for i, path in enumerate(files)}
    items.sort(key=lambda item: place.get(item.path, 1.0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a module of tests that imports an engine while it is collected."""
    imported = sorted(set(ENGINES) & set(sys.modules))
    if imported and not session.testsfailed:
        raise pytest.UsageError(f"collecting the tests has imported {', '.join(imported)}: import it within the tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside the time limit of the test
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked alone runs while no other worker runs a test."""
    locks = Path(os.environ[SCRATCH])  # a local folder: the checkout's file system may not lock
    with open(locks / "next", "a") as next_one, open(locks / "inside", "a") as inside:
        fcntl.flock(next_one, fcntl.LOCK_EX)  # in turns, so a test that runs alone does not starve
        fcntl.flock(inside, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(next_one, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Closing is not enough if a test left a child that holds the file.
            fcntl.flock(inside, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A skipped test fails where everything is required."""
    report = yield
    if not (item.get_closest_marker("gpu") or (item.get_closest_marker("outside") and not REQUIRE_OUTSIDE)):
        _require(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """A module that skips itself fails where everything is required."""
    report = yield
    _require(report)
    return report


def _require(report: pytest.TestReport | pytest.CollectReport) -> None:
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a required component is missing: {report.longrepr}"
