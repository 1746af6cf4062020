"""The lock of a run behind a URL: numbered objects, each of which one process alone can create.

    URL/lock/00000007    who holds it, or that it is free

The highest number counts. Its holder writes the object again every few seconds. Who wants the lock
creates the next number when the highest says that it is free, when its process is known to have
ended, or when it has not been written for LEASE seconds by the clock of the one who waits: clocks
of several hosts are never compared. A holder that was taken for dead finds a higher number before
it next makes anything count, and stops.

A store must create an object only if it is not there (If-None-Match), which is tried each time.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.errors import LockedError, StorageError
from data_pipeline.base.remote import RemotePath

FOLDER = "lock"
# Seconds without a sign of life after which a holder is taken for dead.
LEASE = 60.0
# Signs of life, and looks for them, in that time.
_BEATS = 4
_LOOKS = 12
# Times that a lock is read which this process has just made.
_READS = 3


class Lease:
    """Lock of the run at a URL, held until `free`.

    Args:
        url: of the run.
        tell: gets a line if the lock has to be waited for.

    Raises:
        LockedError: another process has it; the message names it.
        StorageError: the store can't be written, or has no locks.
    """

    def __init__(self, url: RemotePath, tell: Callable[[str], object]):
        self._url = url
        self._token = secrets.token_hex(8)
        self._beats = 0
        self._number = self._take(tell)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._thread.start()

    def _take(self, tell: Callable[[str], object]) -> int:
        while True:
            before, content = self._newest()
            if before and not _is_free(content):
                self._await_silence(before, content, tell)
            number = before + 1
            is_made = self._place(number).create(self._content("held"))
            # An answer may have been lost, or the store may not keep to the condition.
            if not self._is_ours(number):
                if is_made:
                    self._require_overtaken(number)
                continue
            if self._place(number).create(self._content("held")):
                self._place(number).write_bytes(self._content("free"))
                raise StorageError(
                    f"{self._place(number)}: this store writes over what is there despite a "
                    "conditional request (If-None-Match), so two runs could write at the same "
                    "time. Set output_dir to a store that can do this, or to a path."
                )
            newest, _ = self._newest()
            if newest == number:
                break
            # Slower than others, who have gone on meanwhile.
            self._place(number).remove()
        for old in self._numbers():
            if old < number:
                self._place(old).remove()
        return number

    def _is_ours(self, number: int) -> bool:
        """Return whether a lock is this process's. It is read again: bytes may be damaged on their
        way.
        """
        return any(self._read(number).get("token") == self._token for _ in range(_READS))

    def _require_overtaken(self, number: int) -> None:
        """Check that another process was faster, for a lock that this process wrote but does not
        hold.

        StorageError: the lock object is missing although no other process took it: the object
        store is not read-after-write consistent.
        """
        if self._newest()[0] > number:
            return
        why = "was written, but is not there"
        if self._place(number).exists():
            why = "was written, but other bytes are read"
        raise StorageError(
            f"{self._place(number)}: {why}. "
            "Set output_dir to a store that keeps what is written, or to a path."
        )

    def _await_silence(
        self, number: int, content: dict[str, Any], tell: Callable[[str], object]
    ) -> None:
        """Returns when the holder has given no sign of life for long enough.

        LockedError: it lives.
        """
        who = content.get("who", "a process that does not say which it is")
        tell(f"{self._url} is locked by {who}. Waiting up to {LEASE:.0f} s for its heartbeat.")
        begin = time.monotonic()
        while time.monotonic() - begin < LEASE:
            time.sleep(LEASE / _LOOKS)
            newest, now = self._newest()
            if newest == number and _is_free(now):
                return
            if (newest, now) != (number, content):
                raise LockedError(
                    f"{self._url} is being written by {who}. "
                    "Wait for it or end it, or set run_name to another name."
                )

    def require(self) -> None:
        """LockedError: another process has taken this one for dead, and goes on with the run."""
        newest, content = self._newest()
        if newest != self._number:
            who = content.get("who", "another process")
            raise LockedError(
                f"{self._url}: {who} has taken the lock, since this process gave no sign of life "
                f"for {LEASE:.0f} s. Nothing more is written there. Let that one go on."
            )

    def free(self) -> None:
        """Lets others have it, unless they do already."""
        self._ended.set()
        self._thread.join()
        # It is then taken for dead.
        with contextlib.suppress(StorageError):
            self.require()
            self._place(self._number).write_bytes(self._content("free"))

    def _live(self) -> None:
        while not self._ended.wait(LEASE / _BEATS):
            # The next sign of life may get there.
            with contextlib.suppress(StorageError):
                self.require()
                self._beats += 1
                self._place(self._number).write_bytes(self._content("held"))

    def _content(self, state: str) -> bytes:
        fields = {"state": state, "token": self._token, "beats": self._beats} | _identity()
        return json.dumps(fields).encode()

    def _place(self, number: int) -> RemotePath:
        return self._url / FOLDER / f"{number:08d}"

    def _numbers(self) -> list[int]:
        names = [found.path.name for found in (self._url / FOLDER).files(depth=1)]
        return sorted(int(name) for name in names if name.isdecimal())

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """The highest number, and what it says; 0: there is none."""
        numbers = self._numbers()
        if not numbers:
            return 0, {}
        return numbers[-1], self._read(numbers[-1])

    def _read(self, number: int) -> dict[str, Any]:
        """Return the content of a lock; nothing if it is just being written, or gone."""
        try:
            content = strict_json.loads(self._place(number).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        if not isinstance(content, dict):
            return {}
        return content


def _is_free(content: dict[str, Any]) -> bool:
    """Return whether a lock is given back, or is of a process that this one knows to have ended."""
    if content.get("state") == "free":
        return True
    ours = _identity()
    if content.get("system") != ours["system"]:
        return False
    pid = content.get("pid")
    return isinstance(pid, int) and _start_of(pid) != content.get("start")


def _identity() -> dict[str, Any]:
    """Return an identity that distinguishes this process from all others.

    Process ids are unique within one boot of a system and one pid namespace.
    """
    pid = os.getpid()
    system = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        system = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    if not system:
        # Nothing is known of the processes of others.
        system = secrets.token_hex(8)
    return {
        "who": f"process {pid} on {platform.node()}",
        "system": system,
        "pid": pid,
        "start": _start_of(pid),
    }


def _start_of(pid: int) -> str:
    """Return when a process was started, by the system's clock; empty if no process has this id."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name of the program, in brackets, may have any characters.
    _, _, rest = text.rpartition(")")
    fields = rest.split()
    # A zombie: a process that has ended, and whose parent has not read its exit code.
    if fields[0] in ("Z", "X"):
        return ""
    return fields[19]
