"""Folders for code that libraries compile."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.node.caches import ABANDONED_S, FOLDERS, cache_folders, kind_of_node


def test_all_attempts_on_a_node_use_the_same_scratch_folders(tmp_path: Path) -> None:
    first, second = (cache_folders({"TMPDIR": str(tmp_path)}) for _ in range(2))
    assert first == second and first.keys() == FOLDERS.keys() and len(set(first.values())) == len(FOLDERS)
    (own,) = tmp_path.iterdir()
    assert own.name == f"hpcrl-caches-{os.getuid()}" and stat.S_IMODE(own.stat().st_mode) == 0o700
    assert all(Path(folder).is_dir() and own in Path(folder).parents for folder in first.values())


def test_variables_set_by_the_user_are_kept(tmp_path: Path) -> None:
    found = cache_folders({"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/mine", "CUDA_CACHE_PATH": ""})
    assert found.keys() == FOLDERS.keys() - {"TRITON_CACHE_DIR"}


def test_a_folder_that_another_user_may_have_prepared_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"hpcrl-caches-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert cache_folders({"TMPDIR": str(tmp_path)}) == {} and not list((tmp_path / "elsewhere").iterdir())
    assert cache_folders({"TMPDIR": str(tmp_path / "missing")}) == {}


def node(root: Path, flags: str, *gpus: str) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"processor : 0\nflags\t: {flags}\nMHz : {time.time()}\n")
    for number, model in enumerate(gpus):
        folder = root / f"proc/driver/nvidia/gpus/0000:{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: {time.time()}\n")
    return root


def test_only_nodes_of_one_kind_share_folders(tmp_path: Path) -> None:
    plain, alike = (kind_of_node({}, node(tmp_path / str(n), "sse avx2", "H100", "H100")) for n in range(2))
    assert plain == alike
    others = [
        kind_of_node({}, node(tmp_path / "cpu", "sse avx512", "H100", "H100")),
        kind_of_node({}, node(tmp_path / "gpu", "sse avx2", "A100")),
        kind_of_node({"ATEN_CPU_CAPABILITY": "avx2"}, tmp_path / "0"),
    ]
    assert len({plain, *others}) == 4


def test_the_stale_lock_of_a_killed_compilation_is_removed(tmp_path: Path) -> None:
    folder = Path(cache_folders({"TMPDIR": str(tmp_path)})["TORCH_EXTENSIONS_DIR"])
    old, new = folder / "cpu_adam/lock", folder / "other/lock"
    for lock in (old, new):
        lock.parent.mkdir()
        lock.touch()
    os.utime(old, times=(time.time() - 2 * ABANDONED_S,) * 2)
    cache_folders({"TMPDIR": str(tmp_path)})
    assert not old.exists() and new.exists()


ASK = """
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.cpp_extension import _get_build_directory
import triton.knobs
print(cache_dir(), _get_build_directory("x", False), triton.knobs.cache.dir)
"""


@pytest.mark.slow
def test_the_libraries_use_these_folders(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folders = cache_folders({"TMPDIR": str(tmp_path)})
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | folders, capture_output=True, text=True, timeout=60, check=True
    )
    names = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
    assert done.stdout.split() == [folders[names[0]], f"{folders[names[1]]}/x", folders[names[2]]]


@pytest.mark.slow
def test_ranks_that_start_together_share_them(tmp_path: Path) -> None:
    code = "import os; from hpcrl.node.caches import cache_folders; print(len(cache_folders(os.environ)))"
    environ = {name: value for name, value in os.environ.items() if name not in FOLDERS} | {"TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [str(len(FOLDERS))] * 4
