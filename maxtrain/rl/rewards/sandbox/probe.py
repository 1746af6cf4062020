"""A probe at the start: a program that tries to break out of the sandbox, and must fail at
everything."""

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from maxtrain.rl.rewards.sandbox import confinement
from maxtrain.rl.rewards.sandbox.runner import PASSED, ConfinementError, Sandbox, SandboxResult

_SECONDS = 20.0
_MEMORY_BYTES = 1 << 29
# Each function returns if an attack worked, and raises if it did not.
_PROGRAM = """
import os, socket, threading, time
paths = {paths!r}

def write_outside():
    open(paths["secret"] + ".written", "w").close()

def change_outside():
    os.truncate(paths["secret"], 0)

def read_secret():
    open(paths["secret"]).read()

def list_folder():
    os.listdir(paths["folder"])

def read_environment():
    open(f"/proc/{{paths['parent']}}/environ", "rb").read()

def read_memory():
    open(f"/proc/{{paths['parent']}}/mem", "rb")

def send_signal():
    os.kill(paths["parent"], 0)

def connect_path():
    socket.socket(socket.AF_UNIX).connect(paths["socket"])

def connect_abstract():
    socket.socket(socket.AF_UNIX).connect("\\0" + paths["abstract"])

def connect_tcp():
    socket.create_connection(("127.0.0.1", paths["tcp"]), 2)

def send_udp():
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", paths["udp"]))

def send_by_pair():
    one, _ = socket.socketpair(type=socket.SOCK_DGRAM)
    one.sendto(b"x", paths["socket"])

def start_process():
    if os.fork() == 0:
        os._exit(0)

def start_program():
    os.posix_spawn("/bin/true", ["true"], {{}})

def take_memory():
    bytearray(paths["memory"])

worked = []
attacks = [write_outside, change_outside, read_secret, list_folder, read_environment, read_memory]
attacks += [send_signal, connect_path, connect_abstract, connect_tcp, send_udp, send_by_pair]
attacks += [start_process, start_program, take_memory]
for attack in attacks:
    try:
        attack()
        worked.append(attack.__name__)
    except (OSError, MemoryError):
        pass
print("worked:", *worked)
"""
_FILL = """
import time
for number in range({files}):
    with open(str(number), "wb") as file:
        file.write(bytes({size}))
# Where the folder is on a disk, it is watched.
time.sleep(2)
print("filled")
"""
_FILL_BYTES = 8 << 20


class ConfinementSupport(NamedTuple):
    """The kind of confinement that works here, or "" and why each kind does not."""

    kind: str
    why_not: str


def find_confinement() -> ConfinementSupport:
    """Return the first kind of confinement that the program could not break out of."""
    if sys.platform != "linux":
        return ConfinementSupport(
            "", f"{sys.platform} has neither namespaces nor Landlock: only Linux has"
        )
    reasons = []
    for kind in (confinement.NAMESPACES, confinement.LANDLOCK):
        try:
            worked = attack(kind)
        except ConfinementError as error:
            reasons.append(f"{kind}: {error}")
            continue
        if not worked:
            return ConfinementSupport(kind, "")
        reasons.append(f"{kind}: a program could {', '.join(worked)}")
    return ConfinementSupport("", "; ".join(reasons))


def attack(kind: str) -> list[str]:
    """Return what a program could do that it must not. Raise a ConfinementError if the machine does
    not support this kind of confinement."""
    abstract = f"probe-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        sandbox = stack.enter_context(Sandbox(kind))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="probe-")))
        secret = folder / "secret"
        secret.write_text("secret")
        listeners = {
            "connect_path": _listener(stack, socket.AF_UNIX, str(folder / "socket")),
            "connect_abstract": _listener(stack, socket.AF_UNIX, f"\0{abstract}"),
            "connect_tcp": _listener(stack, socket.AF_INET, ("127.0.0.1", 0)),
        }
        udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        paths = {
            "secret": str(secret),
            "folder": str(folder),
            "socket": str(folder / "socket"),
            "abstract": abstract,
            "tcp": listeners["connect_tcp"].getsockname()[1],
            "udp": udp.getsockname()[1],
            "parent": os.getpid(),
            "memory": 2 * _MEMORY_BYTES,
        }
        ran = _run(sandbox, _PROGRAM.format(paths=paths))
        if not ran.output.startswith("worked:"):
            raise ConfinementError(f"a trial program did not run: {ran.outcome} {ran.output}")
        checks: dict[str, Callable[[], bool]] = {
            "write_outside": lambda: len(list(folder.iterdir())) > 2,
            "change_outside": lambda: secret.read_text() != "secret",
            **{name: _is_reached(each) for name, each in listeners.items()},
            "send_udp": _is_reached(udp),
        }
        worked = ran.output.removeprefix("worked:").split()
        worked += [name for name, is_seen in checks.items() if is_seen() and name not in worked]
        files = 2 * confinement.FOLDER_BYTES // _FILL_BYTES
        if _run(sandbox, _FILL.format(files=files, size=_FILL_BYTES)).outcome == PASSED:
            worked.append("fill_folder")
        return worked


def _run(sandbox: Sandbox, program: str) -> SandboxResult:
    ends = time.monotonic() + _SECONDS
    return sandbox.run_script(program, "", _SECONDS, _MEMORY_BYTES, ends)


def _listener(stack: contextlib.ExitStack, family: int, address: object) -> socket.socket:
    listener = stack.enter_context(socket.socket(family))
    listener.bind(address)  # pyright: ignore
    listener.listen()
    listener.setblocking(False)
    return listener


def _is_reached(listener: socket.socket) -> Callable[[], bool]:
    def is_reached() -> bool:
        try:
            if listener.type == socket.SOCK_DGRAM:
                listener.recv(1)
            else:
                listener.accept()[0].close()
        except OSError:
            return False
        return True

    return is_reached
