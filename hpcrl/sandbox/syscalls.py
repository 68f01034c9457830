"""The seccomp filter of sandboxed processes: system calls that are not listed here are refused.

The list has all calls that a program needs to compute, to use its own files and to start and wait for children. It
lacks all sockets except connected pairs, signals to and limits of other processes, tracing, namespaces, mounts, kernel
keys, System V and POSIX queues and segments (which outlive a process), memory files (which no limit counts), and
changes of modes, owners and attributes, which Landlock does not check.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence

_TABLE = """
read 0 63; write 1 64; open 2 -; openat 257 56; close 3 57; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79;
statx 332 291; poll 7 -; lseek 8 62; mmap 9 222; mprotect 10 226; munmap 11 215; brk 12 214; mremap 25 216;
msync 26 227; mincore 27 232; madvise 28 233; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132; pread64 17 67;
pwrite64 18 68; readv 19 65; writev 20 66; preadv 295 69; pwritev 296 70; access 21 -; faccessat 269 48;
faccessat2 439 439; pipe 22 -; pipe2 293 59; select 23 -; pselect6 270 72; ppoll 271 73; sched_yield 24 124; dup
32 23; dup2 33 -; dup3 292 24; pause 34 -; nanosleep 35 101; clock_nanosleep 230 115; getitimer 36 102;
setitimer 38 103; alarm 37 -; getpid 39 172; getppid 110 173; gettid 186 178; getpgid 121 155; getpgrp 111 -;
getsid 124 156; setsid 112 157; setpgid 109 154; getuid 102 174; getgid 104 176; geteuid 107 175; getegid 108
177; getresuid 118 148; getresgid 120 150; getgroups 115 158; capget 125 90; sendfile 40 71; sendto 44 206;
recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; shutdown 48 210; getsockname 51 204; getpeername 52 205;
getsockopt 55 209; setsockopt 54 208; socketpair 53 199; clone 56 220; fork 57 -; vfork 58 -; execve 59 221;
exit 60 93; exit_group 231 94; wait4 61 260; waitid 247 95; kill 62 129; tgkill 234 131; uname 63 160; fcntl 72
25; flock 73 32; fsync 74 82; fdatasync 75 83; ftruncate 77 46; fallocate 285 47; getdents 78 -; getdents64 217
61; getcwd 79 17; chdir 80 49; fchdir 81 50; rename 82 -; renameat 264 38; renameat2 316 276; mkdir 83 -;
mkdirat 258 34; rmdir 84 -; creat 85 -; link 86 -; linkat 265 37; unlink 87 -; unlinkat 263 35; symlink 88 -;
symlinkat 266 36; readlink 89 -; readlinkat 267 78; umask 95 166; mknod 133 -; mknodat 259 33; utimensat 280 88;
statfs 137 43; fstatfs 138 44; fadvise64 221 223; copy_file_range 326 285; splice 275 76; tee 276 77;
gettimeofday 96 169; time 201 -; times 100 153; clock_gettime 228 113; clock_getres 229 114; getrlimit 97 163;
prlimit64 302 261; getrusage 98 165; sysinfo 99 179; getpriority 140 141; sched_getaffinity 204 123;
sched_setaffinity 203 122; sched_getparam 143 121; sched_getscheduler 145 120; sched_get_priority_max 146 125;
sched_get_priority_min 147 126; getcpu 309 168; set_tid_address 218 96; set_robust_list 273 99; get_robust_list
274 100; futex 202 98; arch_prctl 158 -; prctl 157 167; rseq 334 293; membarrier 324 283; restart_syscall 219
128; getrandom 318 278; ioctl 16 29; close_range 436 436; epoll_create 213 -; epoll_create1 291 20; epoll_ctl
233 21; epoll_wait 232 -; epoll_pwait 281 22; eventfd 284 -; eventfd2 290 19; signalfd4 289 74; timerfd_create
283 85; timerfd_settime 286 86; timerfd_gettime 287 87; timer_create 222 107; timer_settime 223 110;
timer_gettime 224 108; timer_getoverrun 225 109; timer_delete 226 111; clone3 435 435; openat2 437 437
"""
"""Name, number on x86_64 and on aarch64 (-: does not exist)."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column of the table, and AUDIT_ARCH."""
FIRST_OF_LATER = 424
"""No program requires calls from this number on: C libraries have fallbacks for these newer calls."""

LOAD, EQUAL, GREATER, AT_LEAST, ANY_BIT, MASK, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
KILL, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

AF_UNIX, SOCK_STREAM, TYPE_MASK = 1, 1, 0xF
CLONE_THREAD, FOREIGN_CLONE = 0x10000, 0x7E028000  # new namespaces, and CLONE_PARENT
O_TRUNC, O_ACCMODE = 0x200, 3
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)  # owners of signals, leases, notifications
IOCTL_ALLOWED = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal queries, flags of the file
PRCTL_ALLOWED = (1, 2, 3, 15, 16, 23, 38, 39, 0x53564D41)

Step = tuple[int, int, int, int]


def available() -> bool:
    """Whether the table has this processor's system calls."""
    return platform.machine() in ARCHITECTURES


def program(processes: bool, signals: bool) -> bytes:
    """The calling process's filter, an array of struct sock_filter. processes: whether it may start other processes;
    signals: whether it may signal every process that it sees, instead of only itself."""
    column, arch = ARCHITECTURES[platform.machine()]
    numbers = {
        words[0]: int(words[1 + column])
        for words in map(str.split, _TABLE.split(";"))
        if words and words[1 + column] != "-"
    }
    special = {name: steps for name, steps in _special(processes, signals).items() if name in numbers}
    steps: list[Step] = [_load(ARCH), (EQUAL, 1, 0, arch), _leave(KILL), _load(NUMBER)]
    for name, block in special.items():
        steps += [(EQUAL, 0, len(block), numbers.pop(name)), *block]
    for first, last in _ranges(numbers.values()):
        steps += [(GREATER, 2, 0, last), (AT_LEAST, 0, 1, first), _leave(ALLOW)]
    steps += [(AT_LEAST, 1, 0, FIRST_OF_LATER), _refuse(errno.EPERM), _refuse(errno.ENOSYS)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _special(processes: bool, signals: bool) -> dict[str, list[Step]]:
    """Calls that depend on their arguments -> steps that end in a decision."""
    self, refuse, allow = os.getpid(), _refuse(errno.EPERM), _leave(ALLOW)
    own = [_argument(0), (EQUAL, 1, 0, self), refuse, allow]
    own_or_none = [_argument(0), (EQUAL, 2, 0, 0), (EQUAL, 1, 0, self), refuse, allow]
    no_truncation = [(MASK, 0, 0, O_TRUNC | O_ACCMODE), (EQUAL, 0, 1, O_TRUNC), refuse, allow]
    missing = {name: [_refuse(errno.ENOSYS)] for name in ("clone3", "openat2")}
    thread = [(ANY_BIT, 1, 0, CLONE_THREAD), refuse]
    return missing | {
        "socketpair": [
            *(_argument(0), (EQUAL, 1, 0, AF_UNIX), refuse),
            *(_argument(1), (MASK, 0, 0, TYPE_MASK), (EQUAL, 1, 0, SOCK_STREAM), refuse, allow),
        ],
        "kill": [allow] if signals else own,
        "tgkill": [allow] if signals else own,
        "prlimit64": own_or_none,
        "sched_setaffinity": own_or_none,
        "clone": [_argument(0), (ANY_BIT, 0, 1, FOREIGN_CLONE), refuse, *([] if processes else thread), allow],
        "fork": [allow if processes else refuse],
        "vfork": [allow if processes else refuse],
        "open": [_argument(1), *no_truncation],  # truncation by readers is not checked before Landlock 3
        "openat": [_argument(2), *no_truncation],
        "fcntl": [_argument(1), *_among(FCNTL_REFUSED, refuse), allow],
        "ioctl": [_argument(1), *_among(IOCTL_ALLOWED, allow), _refuse(errno.ENOTTY)],
        "prctl": [_argument(0), *_among(PRCTL_ALLOWED, allow), refuse],
        "utimensat": [_refuse(0)],  # succeeds without effect: touch and cp would fail otherwise
    }


def _among(values: Sequence[int], then: Step) -> list[Step]:
    return [step for value in values for step in ((EQUAL, 0, 1, value), then)]


def _load(offset: int) -> Step:
    return LOAD, 0, 0, offset


def _argument(place: int) -> Step:
    """Load the lower half: the kernel takes these arguments as 32 bits."""
    return _load(ARGUMENTS + 8 * place)


def _leave(action: int) -> Step:
    return RETURN, 0, 0, action


def _refuse(number: int) -> Step:
    return _leave(ERRNO | number)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found
