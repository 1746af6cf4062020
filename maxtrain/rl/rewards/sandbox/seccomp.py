"""A system call filter (seccomp-BPF) for untrusted programs.

The filter is an allow-list. A process under it cannot start processes, open or address sockets,
send signals, trace or read other processes, change their limits, or gain privileges. It can use
threads, a pair of stream sockets, and files, which other means limit (confinement.py).
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator
from typing import NamedTuple

# Calls that touch only the process itself, its open files, and paths, which Landlock or the mount
# namespace limits. Numbers: x86-64, aarch64; None: the architecture has no such call.
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "lseek": (8, 62),
    "creat": (85, None),
    "close": (3, 57),
    "close_range": (436, 436),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fadvise64": (221, 223),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "mincore": (27, 232),
    "msync": (26, 227),
    "brk": (12, 214),
    "membarrier": (324, 283),
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "arch_prctl": (158, None),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "getcpu": (309, 168),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpriority": (140, 141),
    "getrlimit": (97, 163),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
}
# Calls that report success and do nothing: Landlock does not limit them.
_PRETENDED = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
}
# Calls that fail with EPERM. All others fail with ENOSYS, as on an older kernel.
_REFUSED = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "truncate": (76, 45),
    "ptrace": (101, 117),
}
# Calls whose arguments decide; see `_conditions`.
_CHECKED = {
    "open": (2, None),
    "openat": (257, 56),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "clone": (56, 220),
    "setsockopt": (54, 208),
}
# Index of an architecture in the tables, and its number in the kernel's data about a call.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Instructions of classic BPF.
_LOAD = 0x20  # load a word of the call's data
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16
# What a filter returns.
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

_O_ACCMODE_AND_TRUNC = 0o3 | 0o1000
_O_RDONLY_TRUNC = 0o1000
# All CLONE_NEW... flags, and CLONE_THREAD.
_CLONE_NAMESPACES = 0x7E020080
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_TYPE_MASK = 0xF
_ALL_BITS = 0xFFFFFFFF
# TCGETS, FIONBIO, FIONREAD, TIOCGWINSZ, FIOCLEX, FIONCLEX.
_IOCTLS = (0x5401, 0x5421, 0x541B, 0x5413, 0x5451, 0x5450)
# F_DUPFD to F_SETLKW, the open file description locks, F_DUPFD_CLOEXEC, sizes of pipes. F_SETOWN
# is left out: its signals reach other processes.
_FCNTLS = (*range(8), 36, 37, 38, 1030, 1031, 1032)
# PR_SET_NAME and PR_GET_NAME. PR_SET_PDEATHSIG would keep a process alive after its parent.
_PRCTLS = (15, 16)


class _Condition(NamedTuple):
    """The low word of argument `index`, under a mask, must equal one of `values`."""

    index: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS
    is_high: bool = False


def _conditions(name: str) -> list[_Condition]:
    """Return the conditions that must all hold for a call to be allowed."""
    match name:
        case "open":
            # Landlock before ABI 3 lets O_RDONLY|O_TRUNC empty a file that may be read.
            truncates = _O_ACCMODE_AND_TRUNC
            return [_Condition(1, tuple(_open_modes()), truncates)]
        case "openat":
            return [_Condition(2, tuple(_open_modes()), _O_ACCMODE_AND_TRUNC)]
        case "fcntl":
            return [_Condition(1, _FCNTLS)]
        case "ioctl":
            return [_Condition(1, _IOCTLS)]
        case "prctl":
            return [_Condition(0, _PRCTLS)]
        case "prlimit64":
            # Only the process itself.
            return [_Condition(0, (0,))]
        case "socketpair":
            # A pair of datagram sockets could send to any address.
            return [_Condition(0, (_AF_UNIX,)), _Condition(1, (_SOCK_STREAM,), _SOCK_TYPE_MASK)]
        case "sendto":
            # Without an address.
            return [_Condition(4, (0,)), _Condition(4, (0,), is_high=True)]
        case "clone":
            return [_Condition(0, (_CLONE_THREAD,), _CLONE_THREAD | _CLONE_NAMESPACES)]
        case "setsockopt":
            # SOL_SOCKET alone.
            return [_Condition(1, (1,))]
    raise AssertionError(name)


def _open_modes() -> Iterator[int]:
    for access in range(4):
        for truncate in (0, _O_RDONLY_TRUNC):
            if access | truncate != _O_RDONLY_TRUNC:
                yield access | truncate


def is_available() -> bool:
    """Return whether the tables support this processor. A probe checks whether the kernel supports
    filters."""
    return platform.machine() in _ARCHITECTURES


def build_filter(machine: str) -> bytes:
    """Return the program of the filter for an architecture, as an array of `struct sock_filter`."""
    index, architecture = _ARCHITECTURES[machine]
    program = [
        _op(_LOAD, _ARCHITECTURE_OFFSET),
        _op(_JUMP_IF_EQUAL, architecture, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER_OFFSET),
    ]
    simple = [
        (_ALLOWED, _ALLOW),
        (_PRETENDED, _ERRNO),
        (_REFUSED, _ERRNO | errno.EPERM),
    ]
    for table, action in simple:
        for numbers in table.values():
            if numbers[index] is not None:
                program += [_op(_JUMP_IF_EQUAL, numbers[index], 0, 1), _op(_RETURN, action)]
    for name, numbers in _CHECKED.items():
        if numbers[index] is not None:
            body = _checked(_conditions(name))
            program += [_op(_JUMP_IF_EQUAL, numbers[index], 0, len(body)), *body]
    program.append(_op(_RETURN, _ERRNO | errno.ENOSYS))
    return b"".join(program)


def _checked(conditions: list[_Condition]) -> list[bytes]:
    """Allow the call if all conditions hold; otherwise EPERM."""
    body: list[bytes] = []
    for condition in conditions:
        high = 4 if condition.is_high else 0
        body.append(_op(_LOAD, _ARGUMENTS_OFFSET + 8 * condition.index + high))
        body.append(_op(_AND, condition.mask))
        for place, value in enumerate(condition.values):
            # Jump over the other values and the refusal.
            body.append(_op(_JUMP_IF_EQUAL, value, len(condition.values) - place, 0))
        body.append(_op(_RETURN, _ERRNO | errno.EPERM))
    return [*body, _op(_RETURN, _ALLOW)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def install(program: bytes) -> None:
    """Apply a filter to this process permanently. Raise an OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and a pointer to them.
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    argument = ctypes.create_string_buffer(header, len(header))
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS failed")
    pointer = ctypes.c_void_p(ctypes.addressof(argument))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), pointer, zero, zero):
        raise OSError(ctypes.get_errno(), "seccomp filters are not available")
