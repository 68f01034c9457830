"""What `quota` and `lfs quota` print, from machines of other people; stand-ins for the commands."""

from __future__ import annotations

import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.system import quotas
from hpcrl.system.quotas import Allowance, Mount, Quotas, free_space, mount_of, quota_rows

HEAD = "     Filesystem  {}   quota   limit   grace   files   quota   limit   grace\n"
LFS, QUOTA = HEAD.format("kbytes"), HEAD.format("blocks")
PRINTED = {  # as published by sites and in bug reports
    "Isambard-AI, a project": (
        f"Disk quotas for prj 1483801647 (pid 1483801647):\n{LFS}/lus/lfs1aip2/projects/b5ak\n"
        "                78173842908       0 214748364800       - 4044325       0 51200000       -\n",
        {"/lus/lfs1aip2/projects/b5ak": ((78173842908, 0, 214748364800, "-"), (4044325, 0, 51200000, "-"))},
    ),
    "Eagle, exceeded": (
        f"Disk quotas for prj 110255 (pid 110255):\n \n{LFS} \n"
        "/projects/csc000 3165308*   3072    4096       -      48  1073741824 2147483648       -\n",
        {"/projects/csc000": ((3165308, 3072, 4096, "-"), (48, 1073741824, 2147483648, "-"))},
    ),
    "inexact": (
        f"Disk quotas for user root (uid 0):\n{LFS}        /univ_1 [10200224]       0       0       -   17724       0"
        "       0       -\nSome errors happened when getting quota info. Some devices may be not working or "
        'deactivated. The data in "[]" is inaccurate.\n',
        {"/univ_1": ((10200224, 0, 0, "-"), (17724, 0, 0, "-"))},
    ),
    "Mila, defaults": (
        f"Disk quotas for usr u (uid 1471600598):\n{LFS}/home/mila/n/u\n"
        "                95747836       0 104857600       -  908722       0 1048576       -\n"
        "uid 1471600598 is using default block quota setting\nuid 1471600598 is using default file quota setting\n",
        {"/home/mila/n/u": ((95747836, 0, 104857600, "-"), (908722, 0, 1048576, "-"))},
    ),
    "ext4, in its grace": (
        f"Disk quotas for user foo (uid 505):\n{QUOTA}/dev/mapper/vg_foo_baz-lv_home\n"
        "                6500004* 6000000 6500000   6days   41437       0       0\n",
        {"/dev/mapper/vg_foo_baz-lv_home": ((6500004, 6000000, 6500000, "6days"), (41437, 0, 0, ""))},
    ),
    "ext4, blank graces": (
        f"Disk quotas for user john (uid 1011): \n{QUOTA}"
        "              /      28  2621440 2359296               5       0       0        \n",
        {"/": ((28, 2621440, 2359296, ""), (5, 0, 0, ""))},
    ),
    "Linux 2.2": (
        "Disk quotas for user wp (uid 500):\n     Filesystem  blocks   quota   limit   files   quota   limit\n"
        "      /dev/hda6      28*     10      10       2      10      10\n",
        {"/dev/hda6": ((28, 10, 10, ""), (2, 10, 10, ""))},
    ),
    "raw graces": (
        f"{QUOTA}filer:/vol/home 604 500 1000 1700000000 3 0 0 0\n",
        {"filer:/vol/home": ((604, 500, 1000, "1700000000"), (3, 0, 0, "0"))},
    ),
    "no quota": ("Disk quotas for user oliver (uid 1000): none\n", {}),
    "denied": ("lfs quota: cannot resolve uid\nPermission denied.\n", {}),
    "human": (f"{QUOTA}      /dev/sdb1  12690M  20480M  30720M            161k       0       0        \n", {}),
    "bytes": ("\x00\xff1 2 3\n\n", {}),
}


@pytest.mark.parametrize(("text", "rows"), PRINTED.values(), ids=PRINTED)
def test_rows_of_other_machines(text: str, rows: dict[str, object]) -> None:
    assert quota_rows(text) == rows


MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/root rw
31 22 0:30 / {lustre} rw shared:1 - lustre 10.0.0.1@o2ib:/scratch rw,flock
32 22 0:31 / {home} rw - nfs4 filer:/vol/home rw,vers=4.2
33 22 0:32 / /with\040blank rw master:7 - xfs /dev/sd\134b rw
broken
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quotas, "QUOTA_S", 60.0)  # for stand-ins on a busy machine
    (tmp_path / "lustre/run").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS.format(lustre=tmp_path / "lustre", home=tmp_path / "home"))
    return path


def test_the_file_system_of_a_folder(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "lustre/run")
    lustre = Mount("lustre", "10.0.0.1@o2ib:/scratch", str(tmp_path / "lustre"))
    assert mount_of(tmp_path / "link", mounts) == mount_of(tmp_path / "lustre", mounts) == lustre
    assert mount_of(tmp_path / "lustre2", mounts) == Mount("ext4", "/dev/root", "/"), "a name that only begins alike"
    assert mount_of(Path("/with blank/run"), mounts) == Mount("xfs", "/dev/sd\\b", "/with blank")


def stand_in(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{script}')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_lustre_tells_the_quotas_of_user_group_and_project(
    tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, own = tmp_path / "lustre", (os.getuid(), os.getegid())
    script = f"""case "$1 $3" in
"project "*) echo "110255 P {at}/run" ;;
"quota -u") echo "{at} 1024 0 3072 - 7 0 10 -" ;;
"quota -g") echo "{at} 1024 0 0 - 7 0 0 -" ;;
"quota -p") echo "{at} 3165308* 3072 4096 - 48 0 0 -" ;;
esac"""
    stand_in(tmp_path, "lfs", script, monkeypatch)
    asked = Quotas(at / "run", mounts)
    assert asked.left() == [
        Allowance(f"the quota of user {own[0]}", 2 << 20, 3),
        Allowance(f"the quota of group {own[1]}", math.inf, math.inf),
        Allowance("the quota of project 110255", 0, math.inf),
    ]
    assert calls(tmp_path)[0] == f"project -d {at}/run" and calls(tmp_path)[-1] == f"quota -q -p 110255 {at}"
    assert asked.left() and len(calls(tmp_path)) == 4, "remembered"
    asked.forget()
    assert asked.left() and len(calls(tmp_path)) == 8


def test_quota_counts_only_for_the_folders_own_file_system(
    tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with code 1 if any quota is exceeded."""
    row = "filer:/vol/home 900* 500 1000 %d 3 0 0 0"
    script = f'[ "$3" = -u ] && printf "/dev/sda 9 0 9 0 9 0 9 0\\n{row}\\n"; exit 1'
    later, before = int(time.time()) + 9999, int(time.time()) - 9999
    for grace, left in ((later, 100 << 10), (before, 0)):
        stand_in(tmp_path, "quota", script % grace, monkeypatch)
        assert Quotas(tmp_path / "home", mounts).left() == [
            Allowance(f"the quota of user {os.getuid()}", left, math.inf)
        ]
    assert Quotas(tmp_path, mounts).left() == []


def test_what_cannot_be_told_is_unknown(tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "QUOTA_S", 0.3)
    stand_in(tmp_path, "quota", "exec sleep 60", monkeypatch)
    started, run = list[Any](), subprocess.run  # the stand-in may be killed before it records its call

    def counted(command: Any, **more: Any) -> Any:
        started.append(command)
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    asked = Quotas(tmp_path / "home", mounts)
    assert asked.left() == []
    asked.forget()
    assert asked.left() == [] and len(started) == 1, "not asked again"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert Quotas(tmp_path / "home", mounts).left() == []
    assert Quotas(tmp_path / "home", tmp_path / "none").left() == []
    assert Quotas(tmp_path / "gone", mounts).left() == []


def test_free_space_is_what_the_kernel_says(tmp_path: Path) -> None:
    found, kernel = free_space(tmp_path), os.statvfs(tmp_path)
    assert found.num_bytes == pytest.approx(kernel.f_bavail * kernel.f_frsize, rel=0.1) and found.num_files > 0
