"""Memory that is mapped from files on the node's local disk (trainer.deepspeed.nvme_path)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, UntypedStorage

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems whose files are in host memory."""
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class LocalDisk:
    """Tensors in files of a folder. The kernel reads and writes their pages on use, and caches as many as fit in host
    memory. A file has no name, so ranks cannot share it, and it disappears when its process ends in any way."""

    def __init__(self, folder: str):
        """`folder` may contain environment variables of the node. ValueError if its files are not on a disk."""
        self.folder = Path(os.path.expandvars(folder))
        self._made: list[UntypedStorage] = []
        if not self.folder.is_absolute() or not self.folder.is_dir():
            raise ValueError(f"{self._key}: there is no such folder on {os.uname().nodename}")
        if (kind := _file_system(self.folder)) in IN_MEMORY:
            raise ValueError(f"{self._key} is {kind}, whose files are in host memory; name a folder on a disk")
        self.new(mmap.PAGESIZE)

    @property
    def _key(self) -> str:
        return f"trainer.deepspeed.nvme_path={self.folder}"

    def new(self, num_bytes: int) -> UntypedStorage:
        """Zeros in a separate file. ValueError if the file cannot be written."""
        try:
            file, path = tempfile.mkstemp(prefix="hpcrl-", dir=self.folder)
        except OSError as error:
            raise ValueError(f"{self._key} cannot be written: {error.strerror}") from None
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        try:
            os.unlink(path)
            if num_bytes > free:  # a file that is too large would fill the disk before it fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(file, 0, num_bytes)  # else a full disk would kill the process when a page is written
            # The mapping keeps no descriptor open: a frozen model has a file per parameter, and a process often may
            # open only 1024 files.
            storage = cast(UntypedStorage, UntypedStorage.from_file(f"/proc/self/fd/{file}", True, num_bytes))
        except RuntimeError as error:
            raise ValueError(f"{self._key}: a file of {num_bytes / 1e9:.1f} GB cannot be mapped: {error}") from None
        except OSError as error:
            why = f"only {free / 1e9:.1f} GB are free" if error.errno == errno.ENOSPC else error.strerror
            raise ValueError(f"{self._key}: no file of {num_bytes / 1e9:.1f} GB can be made, {why}") from None
        finally:
            os.close(file)
        self._made.append(storage)
        return storage

    def copy(self, storage: UntypedStorage) -> UntypedStorage:
        """A copy in a file. ValueError as above."""
        copy = self.new(storage.nbytes())
        copy.copy_(storage)
        return copy

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros of this shape and type in a file. ValueError as above."""
        storage = self.new(tensor.numel() * tensor.element_size())
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), tensor.stride())

    def release(self) -> None:
        """Tell the kernel that the pages are not needed now, so they leave the process's resident memory."""
        for storage in self._made:
            _LIBC.madvise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED)


def _file_system(folder: Path) -> str:
    """The folder's file system type; empty where the kernel does not report it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as file:
        return next((line.partition(" - ")[2].split()[0] for line in file if line.split()[2] == number), "")
