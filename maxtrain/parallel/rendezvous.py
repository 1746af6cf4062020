"""Before jax connects the processes of a job: who is there, who is missing, and whether they mean
the same job.

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
_RETRY = 0.1  # seconds between two knocks
_NEWS = 30.0  # seconds between two lines about who is missing


def meet(
    address: str,
    count: int,
    index: int,
    seconds: float,
    suffices: Callable[[int], bool] = lambda count: False,
) -> tuple[int, int]:
    """How many processes the job goes on with, and which of them this one is, once all that come
    are here.

    Those that are, in their order, if some do not come; process 0 must. Otherwise all raise the
    same error.

    Args:
        address: host:port of process 0.
        count: processes in the job.
        index: which one this is.
        seconds: how long to wait for the others.
        suffices: whether the job can do with so many, asked by process 0.

    Raises:
        ConfigError: a process is of a job of another size, or has a number that another one has.
        TryAgainError: some did not come; the port is taken; or process 0 is not there.
    """
    if not 0 <= index < count:
        raise ConfigError(
            f"mesh.process_id={index} must be less than mesh.num_processes={count}. It counts from 0."
        )
    host, _, port = address.rpartition(":")
    me = {"index": index, "count": count, "who": f"{os.getpid()} on {platform.node()}"}
    if index == 0:
        return _receive(address, int(port), me, time.monotonic() + seconds, suffices), 0
    return _report(address, (host.strip("[]"), int(port)), me, time.monotonic() + seconds)


def _receive(
    address: str, port: int, me: dict[str, Any], deadline: float, suffices: Callable[[int], bool]
) -> int:
    """Process 0: hears all others, and gives all the same verdict; how many it is for."""
    try:
        everywhere = (
            {"family": socket.AF_INET6, "dualstack_ipv6": True}
            if socket.has_dualstack_ipv6()
            else {}
        )
        listener = socket.create_server(("", port), backlog=4096, **everywhere)
    except OSError as error:
        rule = (
            f"process 0 on {platform.node()} can't listen there ({os.strerror(error.errno or 0)})"
        )
        mend = "End what uses that port, perhaps an earlier attempt or a second process 0, or set another one"
        raise TryAgainError(f"mesh.coordinator={address}: {rule}. {mend}, {_AGAIN}.") from error
    guests: dict[int, tuple[str, socket.socket]] = {}
    with contextlib.ExitStack() as held:
        held.enter_context(listener)
        error, count, news = None, 0, time.monotonic() + _NEWS
        while not error and (missing := _missing(guests, me["count"])):
            left = deadline - time.monotonic()
            if left <= 0 and (count := _enough(guests, suffices)):
                _tell(
                    f"{_names(missing)} did not come in time; goes on with {count} of {me['count']}"
                )
                break
            if left <= 0:
                rule = f"{_names(missing)} did not come in time; {me['count']} are expected"
                error = TryAgainError(
                    f"mesh.coordinator={address}: {rule}. See their logs, {_AGAIN}."
                )
            elif time.monotonic() >= news:
                _tell(f"waiting for {_names(missing)} of {me['count']}, {left:.0f} s more")
                news += _NEWS
            listener.settimeout(min(max(left, 0.01), _NEWS, 1.0))
            with contextlib.suppress(
                OSError, ValueError, KeyError, TypeError
            ):  # nobody, or one that is none of ours
                guest = held.enter_context(listener.accept()[0])
                guest.settimeout(5)
                said = json.loads(guest.makefile("rb").readline(4096))
                index, count_there, who = int(said["index"]), int(said["count"]), str(said["who"])
                error = error or _misfit(address, index, count_there, who, me, guests)
                guests[-len(guests) - 1 if error else index] = (
                    who,
                    guest,
                )  # one that does not fit is told so as well
        count = count or me["count"]
        for place, index in enumerate(sorted(guests), 1):
            verdict = {"code": 0, "count": count, "index": place}
            if error or place >= count:
                rule = f"the job goes on with {count} processes, without process {index}"
                why = error or TryAgainError(f"mesh.coordinator={address}: {rule}.")
                verdict = {"code": why.exit_code, "text": str(why)}
            with contextlib.suppress(OSError):
                guests[index][1].sendall(json.dumps(verdict).encode() + b"\n")
        for (
            _,
            guest,
        ) in guests.values():  # they hang up first: whoever does keeps the port taken for a while
            with contextlib.suppress(OSError):
                guest.recv(1)
    if error:
        raise error
    return count


def _enough(guests: dict[int, tuple[str, socket.socket]], suffices: Callable[[int], bool]) -> int:
    """The most of those who are here that the job can do with; 0: it can't."""
    _forget_gone(guests)
    return next(filter(suffices, range(1 + len(guests), 0, -1)), 0)


def _missing(guests: dict[int, tuple[str, socket.socket]], count: int) -> list[int]:
    """Who has not come; those who have gone again, which is looked at when nobody else is missing,
    have not."""
    if len(guests) == count - 1:
        _forget_gone(guests)
    return [process for process in range(1, count) if process not in guests]


def _forget_gone(guests: dict[int, tuple[str, socket.socket]]) -> None:
    for index in [index for index, (_, guest) in guests.items() if _has_gone(guest)]:
        del guests[index]


def _has_gone(guest: socket.socket) -> bool:
    guest.setblocking(False)
    try:
        return guest.recv(1) == b""  # they say nothing more
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
    guests: dict[int, tuple[str, socket.socket]],
) -> UserError | None:
    """What is wrong with one that came."""
    if count != me["count"]:
        rule = f"process {index} ({who}) is one of {count}, and process 0 ({me['who']}) one of {me['count']}"
        return ConfigError(
            f"mesh.num_processes: {rule}. Give all processes at mesh.coordinator={address} the same number."
        )
    if index in guests and not _has_gone(guests[index][1]):
        rule = f"process {index} is there twice: {guests[index][0]}, and {who}"
        return ConfigError(
            f"mesh.process_id: {rule}. Give each process at mesh.coordinator={address} a number of its own."
        )
    return None


def _report(
    address: str, place: tuple[str, int], me: dict[str, Any], deadline: float
) -> tuple[int, int]:
    """The others: tell process 0 who they are, until it is there, and wait for its verdict: of how
    many it is which one."""
    verdict, why, news = None, "nobody answers", time.monotonic() + _NEWS
    while verdict is None and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=max(1.0, min(10.0, left))) as host:
                host.sendall(json.dumps(me).encode() + b"\n")
                host.settimeout(left + 30)
                said = host.makefile("rb").readline(65536)
            why = "it hung up"
            if said:  # else it has ended, and may be started again
                why = "something else answers"  # as the service of a job that runs, or is about to end
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
        rule = (
            f"process 0 did not come in time for process {me['index']} on {platform.node()} ({why})"
        )
        raise TryAgainError(
            f"mesh.coordinator={address}: {rule}. See its log and that address, {_AGAIN}."
        )
    if verdict["code"]:
        error = UserError(verdict["text"])
        error.exit_code = verdict["code"]
        raise error
    return verdict["count"], verdict["index"]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(processes: list[int]) -> str:
    more = f" and {len(processes) - 20:,} more" if len(processes) > 20 else ""
    return f"process {', '.join(map(str, processes[:20]))}{more}"
