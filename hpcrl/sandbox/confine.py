"""Confines a process on Linux, through libc: namespaces, mounts, Landlock, seccomp, ids and limits.

Every function acts on the calling process, which must have one thread. OSError names the call that the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hpcrl.sandbox.syscalls import program

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
LOCKED = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs -> flags of mount, which a remount in a user namespace must keep."""
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 8, 22, 36, 38
CAP_DAC_READ_SEARCH = 2
CAPABILITIES_V3 = 0x20080522
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ, EXECUTE = 0b1100, 0b0001
OF_FILES = 0b1100_0000_0000_0111  # rights that apply to a file: execute, write, read, truncate, ioctl
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
STACK_BYTES = 64 << 20


def _call(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object, what: str) -> int:
    return _call(_libc.syscall(ctypes.c_long(number), *arguments), what)


def _prctl(option: int, *values: object) -> None:
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    _call(_libc.prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words))), f"prctl {option}")


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, which can then end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exit at once if the parent has already ended. `parent`:
    its id as getppid() returns it, 0 for a parent in another PID namespace."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def readable_paths(packages: Sequence[str]) -> list[str]:
    """Folders and files that a program needs: the system's libraries and programs, Python, and the packages."""
    system = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    python = [f"{sys.base_prefix}/lib"]  # the interpreter's own library, and conda's libraries
    python += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *packages]
    python += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if len(Path(path).parts) > 2]
    python += [sys.executable, os.path.realpath(sys.executable)]
    found: list[str] = []
    for path in [*system, *python]:
        if os.path.exists(path) and not any(path == seen or path.startswith(f"{seen}/") for seen in found):
            found.append(path)
    return found


def hidden_from_others(paths: Sequence[str]) -> bool:
    """Whether a folder above the paths is accessible only to its owner or group."""
    folders = {folder for path in paths for name in (path, os.path.realpath(path)) for folder in Path(name).parents}
    return any(not folder.stat().st_mode & 1 for folder in folders)


def leave_namespaces() -> None:
    """Enter new PID, network, IPC and host name namespaces; as an ordinary user also a new user namespace, in which
    this process keeps its ids. The next child is the first process of the PID namespace."""
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _call(_libc.unshare(flags), "unshare")
        return
    _call(_libc.unshare(flags | CLONE_NEWUSER), "unshare with a user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _call(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data else None), f"mount {target}")


def mount_room(folder: str, num_bytes: int, num_files: int) -> None:
    """Mount an empty in-memory file system of limited size."""
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={num_bytes},nr_inodes={num_files},mode=755")


def unmount(folder: str) -> None:
    """Remove a mount; its files are freed when no process uses them."""
    _call(_libc.umount2(os.fsencode(folder), MNT_DETACH), f"umount {folder}")


def enter_new_root(base: str, readable: Sequence[str], room: str) -> None:
    """Enter a new mount namespace with a new root folder, mounted on the folder `base`, that has the readable paths,
    read-only, a few devices, and an empty folder `room`."""
    _call(_libc.unshare(CLONE_NEWNS), "unshare of mounts")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in [*readable, *DEVICES]:
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.path.realpath(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            Path(target).touch()
        _mount(path, target, None, MS_BIND | MS_REC)
    for target in _mounts_below(base):
        kept = os.statvfs(target).f_flag
        flags = sum(flag for bit, flag in LOCKED.items() if kept & bit) | MS_NOSUID
        if target.removeprefix(base) not in DEVICES:  # a read-only mount would forbid writing to a device
            _mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    os.mkdir(base + room)
    _mount("none", base, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(base)
    here = ctypes.c_char_p(b".")
    _syscall(SYS_PIVOT_ROOT[os.uname().machine], here, here, what="pivot_root")
    unmount(".")
    os.chdir("/")


def _mounts_below(base: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [place for place in places if place.startswith(f"{base}/")]


def landlock_version() -> int:
    """The version of Landlock in the kernel; 0 without it."""
    null = ctypes.c_void_p(None)
    return max(0, int(_libc.syscall(ctypes.c_long(LANDLOCK_CREATE), null, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock_rules(readable: Sequence[str], writable: Sequence[str]) -> int:
    """File descriptor of rules that allow reading and executing below `readable` and everything below `writable`,
    and, if the kernel supports it, forbid TCP, and signals and abstract sockets out of the sandbox."""
    version = landlock_version()
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    words = [every, *([0b11] if version >= 4 else []), *([0b11] if version >= 6 else [])]
    attributes = ctypes.create_string_buffer(struct.pack(f"<{len(words)}Q", *words))
    rules = _syscall(
        LANDLOCK_CREATE, attributes, ctypes.c_size_t(8 * len(words)), ctypes.c_uint32(0), what="landlock_create_ruleset"
    )
    for path in [*readable, *writable, *DEVICES]:
        rights = READ | EXECUTE if path in readable else every
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("<Qi", rights & every, place))
        _syscall(LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0), what="landlock_add_rule")
        os.close(place)
    return rules


def no_new_privileges() -> None:
    """Prevent programs that this process executes from gaining rights by setuid bits or file capabilities."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def enforce(rules: int) -> None:
    """Restrict this process and its descendants by Landlock."""
    _syscall(LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0), what="landlock_restrict_self")
    os.close(rules)


def become(user: int, reads_all: bool) -> None:
    """As root: become this user, without groups. With reads_all, keep CAP_DAC_READ_SEARCH, which allows reading files
    whatever their permissions, within Landlock's rules."""
    _prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    keep_capabilities((1 << CAP_DAC_READ_SEARCH) if reads_all else 0)


def keep_capabilities(kept: int) -> None:
    """Drop all capabilities except these bits, and these too at the next exec."""
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITIES_V3, 0))
    sets = ctypes.create_string_buffer(struct.pack("<6I", kept, kept, 0, 0, 0, 0))
    _syscall(SYS_CAPSET[os.uname().machine], header, sets, what="capset")


def filter_calls(processes: bool, signals: bool) -> None:
    """Restrict this process and its descendants by seccomp."""
    code = program(processes, signals)
    filled = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(filled)))
    _prctl(PR_SET_SECCOMP, 2, ctypes.byref(head))


def limit(memory_bytes: int, file_bytes: int, cpu_s: int, processes: int | None) -> None:
    """Set each process's resource limits. processes: maximum number of all processes of its user; None: no limit."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: STACK_BYTES,
    }
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = processes
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
