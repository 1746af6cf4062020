"""Confinement of a process on Linux: files, network, other processes, memory.

`NAMESPACES`: the zygote enters its own user, mount, network and IPC namespaces, whose root has only
Python and system libraries, read-only. Each process gets an in-memory folder of limited size.
`LANDLOCK`: Landlock lets a process read the same files and write to one folder, whose size the
runner watches. Both come with the system call filter of seccomp.py. `NOTHING` is for `unsafe` only.
"""

import contextlib
import ctypes
import functools
import os
import platform
import resource
import site
import struct
import sys
import sysconfig
from pathlib import Path

from maxtrain.rl.rewards.sandbox import seccomp

NAMESPACES = "namespaces"
LANDLOCK = "landlock"
NOTHING = "nothing"

# Bytes and entries of the folder of a process; bytes of one file; open files.
FOLDER_BYTES = 64 << 20
FOLDER_ENTRIES = 4096
_FILE_BYTES = 16 << 20
_OPEN_FILES = 64
# The folder of a process in a mount namespace.
FOLDER = "/program"

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MOUNT_ATTR_RDONLY_NOSUID = 1 | 2
# Numbers of system calls which the C library need not know: the same on all architectures, or
# x86-64 and aarch64.
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522

# Rights of Landlock on files, by the first ABI that has them.
_RIGHTS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
# Neither executing, nor devices, sockets and named pipes.
_NOT_IN_FOLDER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 15
_ALL_TCP = 1 | 2
_ALL_SCOPES = 1 | 2


@functools.cache
def readable_paths() -> list[str]:
    """Return the files and folders of Python and of the system that programs may read."""
    base = [sys.base_prefix, sys.base_exec_prefix]
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [f"{prefix}/lib" for prefix in base]
    paths += [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    paths += [each for each in site.getsitepackages() if each not in paths]
    paths += _SYSTEM
    kept: list[str] = []
    for path in sorted({os.path.abspath(each) for each in paths}):
        is_inside = any(path.startswith(f"{other}/") for other in kept)
        if not is_inside and os.path.exists(path):
            kept.append(path)
    return kept


def enter_namespaces() -> None:
    """Move this process into namespaces of its own. Raise an OSError if the system does not allow
    it."""
    flags = os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC
    uid, gid = os.getuid(), os.getgid()
    paths = readable_paths()
    os.unshare(flags | os.CLONE_NEWUTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    # Any folder can carry the new root, because the mount is visible to this process only.
    root = "/dev"
    files = [(path, _opened(path)) for path in (*paths, *_DEVICES) if os.path.exists(path)]
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for path, fd in files:
        target = root + path
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            Path(target).touch()
        _mount(f"/proc/self/fd/{fd}", target, None, _MS_BIND | _MS_REC)
        os.close(fd)
    os.mkdir(root + FOLDER)
    if not os.path.exists(f"{root}/tmp"):
        os.symlink(FOLDER, f"{root}/tmp")
    os.chdir(root)
    _call(_PIVOT_ROOT[platform.machine()], b".", b".")
    _check(_libc().umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY_NOSUID, 0, 0, 0)
    _call(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))


def landlock_abi() -> int:
    """Return the version of Landlock in this kernel; 0: it has none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc().syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def confine(kind: str, folder: str, seconds: float, memory_bytes: int, filter_: bytes) -> None:
    """Drop the rights of this process permanently.

    Args:
        kind: NAMESPACES, LANDLOCK or NOTHING.
        folder: the writable folder; with NAMESPACES, FOLDER.
        seconds: limit of CPU time, rounded up.
        memory_bytes: limit of the address space.
        filter_: the filter of system calls.

    Raises:
        OSError: a part of the confinement is not possible.
    """
    if kind == NAMESPACES:
        os.unshare(os.CLONE_NEWNS)
        options = f"mode=700,size={FOLDER_BYTES},nr_inodes={FOLDER_ENTRIES}"
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(folder)
    if kind == LANDLOCK:
        _restrict_files(folder)
    _limit(seconds, memory_bytes, strict=kind != NOTHING)
    if kind != NOTHING:
        _drop_capabilities()
        seccomp.install(filter_)


def _restrict_files(folder: str) -> None:
    abi = landlock_abi()
    if abi < 1:
        raise OSError("Landlock is not available")
    handled = 0
    for version, rights in _RIGHTS:
        if abi >= version:
            handled |= rights
    attributes = struct.pack("QQQ", handled, _ALL_TCP, _ALL_SCOPES)
    # The kernel knows the size of an older version by its fields.
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call(_LANDLOCK_CREATE_RULESET, attributes[:size], size, 0)
    rules = [(path, _READ_FILE | _READ_DIR) for path in readable_paths()]
    rules += [(path, _READ_FILE | _WRITE_FILE) for path in _DEVICES]
    rules.append((folder, handled & ~_NOT_IN_FOLDER))
    for path, rights in rules:
        with contextlib.suppress(FileNotFoundError):
            fd = _opened(path)
            if not os.path.isdir(path):
                rights &= _READ_FILE | _WRITE_FILE
            _call(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
            os.close(fd)
    # Landlock requires this or a capability.
    _check(_libc().prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))), "PR_SET_NO_NEW_PRIVS")
    _call(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _limit(seconds: float, memory_bytes: int, strict: bool) -> None:
    cpu = max(1, int(seconds + 0.999))
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_AS, memory_bytes),
    ]
    for which, limit in limits:
        _, most = resource.getrlimit(which)
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most - (which == resource.RLIMIT_CPU))
        hard = limit
        if which == resource.RLIMIT_CPU:
            # At the soft limit the process gets SIGXCPU, which identifies the cause.
            hard += 1
        try:
            resource.setrlimit(which, (limit, hard))
        except (ValueError, OSError):
            # Not every system has every limit.
            if strict:
                raise


def _drop_capabilities() -> None:
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _call(_CAPSET[platform.machine()], header, bytes(24))


def _opened(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if each is None else each.encode() for each in (source, target, kind)]
    options = data.encode() if data else None
    _check(_libc().mount(*texts, ctypes.c_ulong(flags), options), f"mount on {target}")


def _call(number: int, *arguments: int | bytes) -> int:
    converted = [
        ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each)
        for each in arguments
    ]
    result = _libc().syscall(ctypes.c_long(number), *converted)
    _check(result, f"system call {number}")
    return result


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
