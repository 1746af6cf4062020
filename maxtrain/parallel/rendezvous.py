"""Before jax connects the processes of a job: who is there, who is missing, which job they mean.

What jax finds wrong there ends a process with pages of C++ and no word about which one is meant;
and a process too many takes the place of the one of its number in a job that is running. So they
meet at the coordinator's address first, before its service starts there: each tells process 0 which
one of how many it is, and waits for the verdict. Two short messages a process, once a launch;
process 0 holds a socket for each meanwhile.
"""

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from data_pipeline.errors import ConfigError, TryAgainError, UserError

_AGAIN = "then run the same command again"
# Seconds between two knocks.
_RETRY = 0.1
# Seconds between two lines about who is missing.
_NEWS = 30.0
# By the number of a process, who it is, and the connection to it.
_Guests = dict[int, tuple[str, socket.socket]]


def meet(
    address: str,
    count: int,
    index: int,
    seconds: float,
    suffices: Callable[[int], bool] | None = None,
) -> tuple[int, int]:
    """Waits until all processes of a job are here, or as many as it can do with.

    Process 0 must be among them. Otherwise all raise the same error.

    Args:
        address: host:port of process 0.
        count: processes in the job.
        index: which one this is.
        seconds: how long to wait for the others.
        suffices: whether the job can do with so many, asked by process 0; None: with all only.

    Returns:
        How many processes the job goes on with, and which of these, in their order, this one is.

    Raises:
        ConfigError: a process is of a job of another size, or has a number that another one has.
        TryAgainError: some did not come; the port is taken; or process 0 is not there.
    """
    if not 0 <= index < count:
        rule = f"mesh.process_id={index} must be less than mesh.num_processes={count}"
        raise ConfigError(f"{rule}. It counts from 0.")
    host, _, port = address.rpartition(":")
    me = {"index": index, "count": count, "who": f"{os.getpid()} on {platform.node()}"}
    deadline = time.monotonic() + seconds
    if index == 0:
        return _receive(address, int(port), me, deadline, suffices), 0
    return _report(address, (host.strip("[]"), int(port)), me, deadline)


def _receive(
    address: str,
    port: int,
    me: dict[str, Any],
    deadline: float,
    suffices: Callable[[int], bool] | None,
) -> int:
    """Process 0: hears all others, and gives all the same verdict; how many it is for."""
    listener = _listen(address, port)
    guests: _Guests = {}
    expected = me["count"]
    count = expected
    error: UserError | None = None
    news = time.monotonic() + _NEWS
    with contextlib.ExitStack() as held:
        held.enter_context(listener)
        while not error:
            missing = _missing(guests, expected)
            if not missing:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                fewer = _enough(guests, suffices)
                if fewer:
                    late = f"{_names(missing)} did not come in time"
                    _tell(f"{late}; goes on with {fewer} of {expected}")
                    count = fewer
                    break
                rule = f"{_names(missing)} did not come in time; {expected} are expected"
                error = TryAgainError(
                    f"mesh.coordinator={address}: {rule}. See their logs, {_AGAIN}."
                )
            elif time.monotonic() >= news:
                _tell(f"waiting for {_names(missing)} of {expected}, {left:.0f} s more")
                news += _NEWS
            listener.settimeout(min(max(left, 0.01), _NEWS, 1.0))
            # It may be that nobody comes, or one that is none of ours.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection, _ = listener.accept()
                held.enter_context(connection)
                index, count_there, who = _introduction(connection)
                error = error or _misfit(address, index, count_there, who, me, guests)
                # One that does not fit is told so as well, by a number that no process has.
                number = index
                if error:
                    number = -len(guests) - 1
                guests[number] = (who, connection)
        _give_verdicts(address, guests, count, error)
    if error:
        raise error
    return count


def _listen(address: str, port: int) -> socket.socket:
    """Where process 0 hears the others; TryAgainError: the port is taken."""
    everywhere: dict[str, Any] = {}
    if socket.has_dualstack_ipv6():
        everywhere = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        return socket.create_server(("", port), backlog=4096, **everywhere)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        rule = f"process 0 on {platform.node()} can't listen there ({why})"
        mend = (
            "End what uses that port, perhaps an earlier attempt or a second process 0, "
            "or set another one"
        )
        raise TryAgainError(f"mesh.coordinator={address}: {rule}. {mend}, {_AGAIN}.") from error


def _introduction(connection: socket.socket) -> tuple[int, int, str]:
    """Which process one is that came, of how many, and who; it is none of ours if that raises."""
    connection.settimeout(5)
    said = json.loads(connection.makefile("rb").readline(4096))
    return int(said["index"]), int(said["count"]), str(said["who"])


def _give_verdicts(address: str, guests: _Guests, count: int, error: UserError | None) -> None:
    """Tells all who came which one of how many they are, or what is wrong."""
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
    # They hang up first: whoever does keeps the port taken for a while.
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


def _missing(guests: _Guests, count: int) -> list[int]:
    """Who has not come.

    Those who have gone again have not, either; that is looked at when nobody else is missing.
    """
    if len(guests) == count - 1:
        _forget_gone(guests)
    return [process for process in range(1, count) if process not in guests]


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
    """What is wrong with one that came."""
    at = f"at mesh.coordinator={address}"
    if count != me["count"]:
        theirs = f"process {index} ({who}) is one of {count}"
        ours = f"process 0 ({me['who']}) one of {me['count']}"
        mend = f"Give all processes {at} the same number"
        return ConfigError(f"mesh.num_processes: {theirs}, and {ours}. {mend}.")
    if index not in guests:
        return None
    earlier, connection = guests[index]
    if _has_gone(connection):
        return None
    rule = f"process {index} is there twice: {earlier}, and {who}"
    mend = f"Give each process {at} a number of its own"
    return ConfigError(f"mesh.process_id: {rule}. {mend}.")


def _report(
    address: str, place: tuple[str, int], me: dict[str, Any], deadline: float
) -> tuple[int, int]:
    """The others: tell process 0 who they are, until it is there, and wait for its verdict.

    Returns:
        How many the job goes on with, and which of these this one is.
    """
    verdict = None
    why = "nobody answers"
    news = time.monotonic() + _NEWS
    while verdict is None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            said = _knock(place, me, left)
            # If it says nothing, it has ended, and may be started again.
            why = "it hung up"
            if said:
                # Such as the service of a job that runs, or is about to end.
                why = "something else answers"
                verdict = dict(json.loads(said))
        except (ValueError, TypeError):
            pass
        except OSError as error:
            why = error.strerror or str(error)
        if verdict is None:
            time.sleep(_RETRY)
            if time.monotonic() >= news:
                _tell(f"waiting for process 0 at {address} ({why}), {left:.0f} s more")
                news += _NEWS
    if verdict is None:
        who = f"process {me['index']} on {platform.node()}"
        rule = f"process 0 did not come in time for {who} ({why})"
        mend = f"See its log and that address, {_AGAIN}"
        raise TryAgainError(f"mesh.coordinator={address}: {rule}. {mend}.")
    if verdict["code"]:
        error = UserError(verdict["text"])
        error.exit_code = verdict["code"]
        raise error
    return verdict["count"], verdict["index"]


def _knock(place: tuple[str, int], me: dict[str, Any], left: float) -> bytes:
    """Tells process 0 who this one is, and returns what it says; empty: it has hung up."""
    with socket.create_connection(place, timeout=max(1.0, min(10.0, left))) as host:
        host.sendall(json.dumps(me).encode() + b"\n")
        host.settimeout(left + 30)
        return host.makefile("rb").readline(65536)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(processes: list[int]) -> str:
    names = f"process {', '.join(map(str, processes[:20]))}"
    if len(processes) > 20:
        names += f" and {len(processes) - 20:,} more"
    return names
