"""A node with GPUs as hpcrl examines it before a rank starts: a library and a program, in folders named by environment
variables, replace NVIDIA's driver."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

LIBCUDA = r"""
#include <stdlib.h>
#include <string.h>
static int from(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }
int cuDriverGetVersion(int *version) { *version = from("FAKE_CUDA"); return 0; }
int cuInit(unsigned flags) { return from("FAKE_ERROR"); }
int cuGetErrorString(int error, const char **text) { *text = error ? getenv("FAKE_TEXT") : ""; return 0; }
int cuDeviceGetCount(int *count) {  /* numbers below FAKE_GPUS, up to the first other; one part of a GPU at most */
  char list[256]; strcpy(list, getenv("CUDA_VISIBLE_DEVICES")); *count = 0;
  for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
    int part = !strncmp(name, "MIG-", 4), known = part ? !strstr(name, "unknown") : atoi(name) < from("FAKE_GPUS");
    if (!known || (part && *count)) break;
    ++*count;
  }
  return 0;
}
"""
SMI = """#!/bin/sh
case "$1" in
--query-gpu=index,uuid,memory.total,memory.used,mig.mode.current,name)
    [ -s "$FAKE_SMI/later" ] && { cat "$FAKE_SMI/gpus"; mv "$FAKE_SMI/later" "$FAKE_SMI/gpus"; exit; }
    cat "$FAKE_SMI/gpus" ;;
--query-compute-apps=gpu_uuid,pid,used_memory,process_name) cat "$FAKE_SMI/apps" ;;
*) exit 1 ;;
esac
"""
STUCK = """#!{python}
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
if not os.fork():
    os.setsid()
    libc.ptrace(0x4206, os.getppid(), None, None)
    os.closerange(0, 3)
    time.sleep(9)
    os._exit(0)
time.sleep(1000)
"""
"""A program that a debugger of its own keeps, once it is killed, from being waited for, as one that is blocked in the
kernel: for 9 s."""
FREE = "{0}, GPU-{0}0ab, 81559, 4, Disabled, NVIDIA H100\n"


@functools.cache
def driver() -> Path:
    """A folder with libcuda, which answers by environment variables."""
    folder = Path(tempfile.mkdtemp())
    (folder / "cuda.c").write_text(LIBCUDA)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), str(folder / "cuda.c")]
    subprocess.run(command, check=True, timeout=60)
    return folder


class GpuNode:
    """`environ`: variables of its processes. It has num_gpus GPUs, a driver for CUDA 13.0 and torch for CUDA 13.0."""

    def __init__(self, folder: Path, num_gpus: int = 2, cuda: int = 13000):
        for name in ("bin", "site/torch", "dev"):
            (folder / name).mkdir(parents=True)
        self.folder, self.devices, self.site = folder, folder / "dev", folder / "site"
        self.program("nvidia-smi", SMI)
        for number in range(num_gpus):
            (folder / f"dev/nvidia{number}").touch()
        self.environ = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus))),
            "LD_LIBRARY_PATH": str(driver()),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_GPUS": str(num_gpus),
            "FAKE_CUDA": str(cuda),
            "FAKE_TEXT": "system not yet initialized",
            "FAKE_SMI": str(folder),
        }
        self.smi([FREE.format(number) for number in range(num_gpus)])
        self.torch("2.13.0+cu130", cuda="13.0")

    def program(self, name: str, text: str) -> Path:
        """A program of the node."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def smi(self, gpus: list[str], apps: str = "", later: str = "") -> None:
        """Set nvidia-smi's output for GPUs and processes; `later`: for GPUs from the second call on."""
        for name, text in (("gpus", "".join(gpus)), ("apps", apps), ("later", later)):
            (self.folder / name).write_text(text)

    def torch(self, version: str, cuda: str | None = None, hip: str | None = None) -> None:
        """The torch of its processes, which they may inspect but not import."""
        (self.site / "torch/__init__.py").write_text("raise ImportError('before the ranks start')")
        (self.site / "torch/version.py").write_text(
            f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
            f"hip: Optional[str] = {hip!r}\n"
        )
        self.package("torch", version)
        self.environ["PYTHONPATH"] = str(self.site)

    def package(self, name: str, version: str, *requires: str) -> None:
        """Metadata of an installed package."""
        for old in self.site.glob(f"{name}-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        folder = self.site / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), ""]))
