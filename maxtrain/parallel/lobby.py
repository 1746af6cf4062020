"""Lobby where the leader of a job hears the other processes, before jax connects them; see
rendezvous.py.
"""

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from data_pipeline.base.errors import ConfigError, TryAgainError, UserError

AGAIN = "then run the same command again"
# By the number of a process, who it is, and the connection to it.
_Guests = dict[int, tuple[str, socket.socket]]


class JobMembership(NamedTuple):
    """Outcome of the rendezvous of a job."""

    # Processes, and which one of these, in their order, this one is.
    count: int
    index: int
    # host:port of the first of them.
    address: str


class Lobby:
    """Server of a possible leader: it hears the other processes, and gives all the same verdict.

    TryAgainError: the port is taken.
    """

    def __init__(self, address: str, me: dict[str, Any]):
        self._address = address
        self._me = me
        self._guests: _Guests = {}
        self._error: UserError | None = None
        _, _, port = address.rpartition(":")
        self._held = contextlib.ExitStack()
        self._listener = self._held.enter_context(_listen(me["index"], address, int(port)))

    def hear(self, seconds: float, patience: float) -> None:
        """Accept processes for `seconds` seconds, or until all are here; each is sent how long the
        leader waits.
        """
        end = time.monotonic() + seconds
        while not self._error and self.missing():
            left = end - time.monotonic()
            if left <= 0:
                return
            self._listener.settimeout(left)
            # It may be that nobody comes, or one that is none of ours.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection, _ = self._listener.accept()
                # Also one whose place another one takes later.
                self._held.enter_context(connection)
                self._receive(connection, patience)

    def _receive(self, connection: socket.socket, patience: float) -> None:
        index, count, who = _introduction(connection)
        connection.sendall(json.dumps({"patience": max(0.0, patience)}).encode() + b"\n")
        self._error = self._error or _misfit(
            self._address, index, count, who, self._me, self._guests
        )
        # A process that does not fit also gets a reply, under a number that no process has.
        number = index
        if self._error:
            number = -len(self._guests) - 1
        self._guests[number] = (who, connection)

    def outcome(self, left: float, suffices: Callable[[int], bool] | None) -> JobMembership | None:
        """The verdict, which all have been given; None: it is too early.

        UserError: what is wrong.
        """
        expected = self._me["count"]
        missing = self.missing()
        count = expected
        if missing and not self._error:
            if left > 0:
                return None
            count = _enough(self._guests, suffices)
            late = f"{names(missing)} did not come in time"
            if count:
                tell(f"{late}; goes on with {count} of {expected}")
            else:
                rule = f"{late}; {expected} are expected"
                self._error = TryAgainError(
                    f"mesh.coordinator={self._address}: {rule}. See their logs, {AGAIN}."
                )
        # Nobody else is to be left waiting for an answer here.
        self._listener.close()
        _give_verdicts(self._address, self._guests, count, self._error)
        if self._error:
            raise self._error
        return JobMembership(count, 0, self._address)

    def missing(self) -> list[int]:
        """Return the processes that have not come.

        Processes that left again count as missing; this is checked if no other process is
        missing.
        """
        others = [process for process in range(self._me["count"]) if process != self._me["index"]]
        if len(self._guests) == len(others):
            _forget_gone(self._guests)
        return [process for process in others if process not in self._guests]

    def send_away(self) -> None:
        """Another one leads: those who came here look for it."""
        self._listener.close()
        for _, connection in self._guests.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"another_leads": True}).encode() + b"\n")
        _await_end(self._guests)
        self.close()

    def close(self) -> None:
        """Nobody is heard any more."""
        self._held.close()


def _listen(index: int, address: str, port: int) -> socket.socket:
    """Return where a process hears the others; TryAgainError: the port is taken."""
    everywhere: dict[str, Any] = {}
    if socket.has_dualstack_ipv6():
        everywhere = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        return socket.create_server(("", port), backlog=4096, **everywhere)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        rule = f"process {index} on {platform.node()} can't listen there ({why})"
        fix = (
            "End what uses that port, perhaps an earlier attempt or a second process 0, "
            "or set another one"
        )
        raise TryAgainError(f"mesh.coordinator={address}: {rule}. {fix}, {AGAIN}.") from error


def _introduction(connection: socket.socket) -> tuple[int, int, str]:
    """Return which process one is that came, of how many, and who; it is none of ours if that
    raises.
    """
    connection.settimeout(5)
    said = json.loads(connection.makefile("rb").readline(4096))
    return int(said["index"]), int(said["count"]), str(said["who"])


def _give_verdicts(address: str, guests: _Guests, count: int, error: UserError | None) -> None:
    """Send each process its number and the number of processes, or the error."""
    for place, index in enumerate(sorted(guests), 1):
        why = error
        if not why and place >= count:
            rule = f"the job goes on with {count} processes, without process {index}"
            why = TryAgainError(f"mesh.coordinator={address}: {rule}.")
        if why:
            verdict = {"code": why.exit_code, "text": str(why)}
        else:
            verdict = {"code": 0, "count": count, "index": place}
        _, connection = guests[index]
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(verdict).encode() + b"\n")
    _await_end(guests)


def _await_end(guests: _Guests) -> None:
    """Wait until the guests close their connections: the side that closes first keeps the port
    taken for a while.
    """
    for _, connection in guests.values():
        with contextlib.suppress(OSError):
            connection.recv(1)


def _enough(guests: _Guests, suffices: Callable[[int], bool] | None) -> int:
    """The most of those who are here that the job can do with; 0: it can't."""
    _forget_gone(guests)
    if suffices is None:
        return 0
    for count in range(1 + len(guests), 0, -1):
        if suffices(count):
            return count
    return 0


def _forget_gone(guests: _Guests) -> None:
    gone = [index for index, (_, connection) in guests.items() if _has_gone(connection)]
    for index in gone:
        del guests[index]


def _has_gone(guest: socket.socket) -> bool:
    guest.setblocking(False)
    try:
        # They say nothing more: all that comes is the end.
        return guest.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        guest.settimeout(5)


def _misfit(
    address: str,
    index: int,
    count: int,
    who: str,
    me: dict[str, Any],
    guests: _Guests,
) -> UserError | None:
    """Return the problem with a process that came."""
    at = f"at mesh.coordinator={address}"
    if count != me["count"]:
        theirs = f"process {index} ({who}) is one of {count}"
        ours = f"process {me['index']} ({me['who']}) one of {me['count']}"
        fix = f"Give all processes {at} the same number"
        return ConfigError(f"mesh.num_processes: {theirs}, and {ours}. {fix}.")
    if index not in guests:
        return None
    earlier, connection = guests[index]
    if _has_gone(connection):
        return None
    rule = f"process {index} is there twice: {earlier}, and {who}"
    fix = f"Give each process {at} a number of its own"
    return ConfigError(f"mesh.process_id: {rule}. {fix}.")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def names(processes: list[int]) -> str:
    names = f"process {', '.join(map(str, processes[:20]))}"
    if len(processes) > 20:
        names += f" and {len(processes) - 20:,} more"
    return names
