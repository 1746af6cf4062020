"""The filter of system calls, by an interpreter of its program."""

import errno
import struct

import pytest

from maxtrain.rl.rewards.sandbox.seccomp import build_filter

ALLOW = 0x7FFF0000
X86, ARM = 0xC000003E, 0xC00000B7


def verdict(program, architecture, number, *arguments):
    """Return a filter's verdict on a call."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    place, word = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x20:
            (word,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            word &= value
        elif code == 0x15:
            place += if_true if word == value else if_false
        else:
            return value


def refused(error):
    return 0x00050000 | error


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", X86), ("aarch64", ARM)])
def test_the_filter_of_each_architecture(machine, architecture):
    program = build_filter(machine)
    numbers = {
        "read": (0, 63),
        "clone": (56, 220),
        "clone3": (435, 435),
        "socket": (41, 198),
        "socketpair": (53, 199),
        "sendto": (44, 206),
        "prlimit64": (302, 261),
        "openat": (257, 56),
        "kill": (62, 129),
        "unshare": (272, 97),
        "fchmod": (91, 52),
        "io_uring_setup": (425, 425),
    }
    index = ["x86_64", "aarch64"].index(machine)

    def call(name, *arguments):
        return verdict(program, architecture, numbers[name][index], *arguments)

    thread = 0x3D0F00
    assert call("read") == ALLOW
    assert call("clone", thread) == ALLOW
    assert call("clone", thread | 0x10000000) == refused(errno.EPERM)
    assert call("clone", 17) == refused(errno.EPERM)
    assert call("clone3") == call("unshare") == call("io_uring_setup") == refused(errno.ENOSYS)
    assert call("socket", 1, 1) == call("kill", 1, 9) == refused(errno.EPERM)
    assert call("socketpair", 1, 1 | 0o2000000) == ALLOW
    assert call("socketpair", 1, 2) == call("socketpair", 2, 1) == refused(errno.EPERM)
    assert call("sendto", 3, 5, 1, 0, 0, 0) == ALLOW
    assert call("sendto", 3, 5, 1, 0, 1 << 40, 16) == refused(errno.EPERM)
    assert call("sendto", 3, 5, 1, 0, 8, 16) == refused(errno.EPERM)
    assert call("prlimit64", 0) == ALLOW and call("prlimit64", 5) == refused(errno.EPERM)
    assert call("openat", 0, 0, 0o1101) == ALLOW
    assert call("openat", 0, 0, 0o1000) == refused(errno.EPERM)
    assert call("fchmod") == refused(0)
    assert verdict(program, 0x40000003, 0) == 0x80000000
    assert verdict(program, architecture, 0x40000000 | numbers["read"][index]) != ALLOW
