"""Rendezvous of the processes of a job before jax connects them: which are here, which are missing,
and which job they belong to.

What jax finds wrong there ends a process with pages of C++ and no word about which one is meant;
and a process too many takes the place of the one of its number in a job that is running. So they
meet at the coordinator's address first, before its service starts there: each sends the leader its
number and the size of the job, and waits for the verdict. Each process sends and gets one short
message per launch; the leader holds a socket for each meanwhile.

Process 0 leads. Where a job can do with fewer processes, it may be the one that is missing: so
there may be addresses of the next ones, too. Each of these listens, but joins one before it as soon
as that is there, and sends those that came to it there. So the first that is there leads, and
decides when its time is over. Two that can't reach each other might both lead: the lock of the
run's folder stops the second.
"""

import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

from data_pipeline.base.errors import ConfigError, TryAgainError, UserError
from maxtrain.parallel.lobby import AGAIN, JobMembership, Lobby, names, tell

# Seconds between two knocks.
_RETRY = 0.1
# Seconds between two lines about who is missing.
_NEWS = 30.0
# Seconds that another one may take to be connected, if a further one may lead instead; and to say
# that it has heard.
_CONNECT = 2.0
_GREET = 10.0
# Seconds that the leader may take for its verdict when its time is over.
_GRACE = 30.0


def meet(
    addresses: str,
    count: int,
    index: int,
    seconds: float,
    suffices: Callable[[int], bool] | None = None,
) -> JobMembership:
    """Wait until all processes of a job are here, or as many as it can run with.

    Otherwise all raise the same error.

    Args:
        addresses: host:port of process 0; or of the first few processes, with commas between them:
            one of these must be there.
        count: processes in the job.
        index: which one this is.
        seconds: how long to wait for the others.
        suffices: whether the job can run with a number of processes, for the leader; None: only
            with all.

    Raises:
        ConfigError: a process is of a job of another size, or has a number that another one has;
            or an address is none.
        TryAgainError: some did not come; the port is taken; or nobody is there to lead.
    """
    places = _places(addresses)
    if not 0 <= index < count:
        rule = f"mesh.process_id={index} must be less than mesh.num_processes={count}"
        raise ConfigError(f"{rule}. It counts from 0.")
    if len(places) > count:
        rule = f"has {len(places)} addresses, and the job has mesh.num_processes={count}"
        fix = "Set one for process 0, and at most one for each process after it"
        raise ConfigError(f"mesh.coordinator={addresses} {rule}. {fix}.")
    if suffices is None:
        # Process 0 must be there as well.
        places = places[:1]
    me = {"index": index, "count": count, "who": f"{os.getpid()} on {platform.node()}"}
    return _Rendezvous(places, me, time.monotonic() + seconds, suffices).hold()


def _places(addresses: str) -> list[str]:
    """ConfigError: one is not of the form host:port."""
    places = [place.strip() for place in addresses.split(",")]
    for place in places:
        if not re.fullmatch(r"\S+:\d+", place):
            rule = "must be host:port, or several of these with commas between them"
            raise ConfigError(
                f"mesh.coordinator={addresses} {rule}. Set mesh.coordinator=10.0.0.1:8476, for "
                "example."
            )
    return places


class _Rendezvous:
    """The meeting, as one process sees it.

    Args:
        places: of the processes that may lead, by their numbers.
        me: what this one says of itself.
        deadline: when its time is over, by the monotonic clock.
        suffices: see `meet`.
    """

    def __init__(
        self,
        places: Sequence[str],
        me: dict[str, Any],
        deadline: float,
        suffices: Callable[[int], bool] | None,
    ):
        index: int = me["index"]
        self._me = me
        self._deadline = deadline
        self._suffices = suffices
        # Those that lead rather than this one; and where it would, if it may.
        self._before = places[:index]
        self._own: str | None = None
        if index < len(places):
            self._own = places[index]
        self._lobby: Lobby | None = None
        self._news = time.monotonic() + _NEWS
        self._why = "nobody answers"

    def hold(self) -> JobMembership:
        """Wait until there is a verdict."""
        try:
            while True:
                met = self._join()
                if met is None and self._own is not None:
                    met = self._lead(self._own)
                if met is not None:
                    return met
                if self._own is None:
                    self._wait()
        finally:
            if self._lobby is not None:
                self._lobby.close()

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _join(self) -> JobMembership | None:
        """The verdict of one that leads rather than this one; None: there is none."""
        for place in self._before:
            longest = max(1.0, min(10.0, self._left()))
            if len(self._before) > 1 or self._own is not None:
                longest = min(_CONNECT, longest)
            try:
                host = _knock(place, self._me, longest)
            except OSError as error:
                self._why = error.strerror or str(error)
                continue
            if self._lobby is not None:
                self._lobby.send_away()
                self._lobby = None
            met = host.verdict()
            if met is not None:
                return met
            self._why = "it hung up"
        return None

    def _lead(self, address: str) -> JobMembership | None:
        """Hears others for a moment; the verdict, if it is time for one."""
        if self._lobby is None:
            try:
                self._lobby = Lobby(address, self._me)
            except TryAgainError:
                if not self._before:
                    raise
                # Another one leads.
                self._own = None
                return None
        lobby = self._lobby
        lobby.hear(min(max(self._left(), 0.01), _NEWS, 1.0), self._left())
        met = lobby.outcome(self._left(), self._suffices)
        if met is None and time.monotonic() >= self._news:
            missing = names(lobby.missing())
            tell(f"waiting for {missing} of {self._me['count']}, {self._left():.0f} s more")
            self._news += _NEWS
        return met

    def _wait(self) -> None:
        """Wait before the next attempt to join. TryAgainError: the time is over."""
        where = " or ".join(self._before)
        left = self._left()
        if left <= 0:
            who = f"process {self._me['index']} on {platform.node()}"
            rule = f"process 0 did not come in time for {who} ({self._why})"
            fix = f"See its log and that address, {AGAIN}"
            raise TryAgainError(f"mesh.coordinator={where}: {rule}. {fix}.")
        time.sleep(_RETRY)
        if time.monotonic() >= self._news:
            tell(f"waiting for process 0 at {where} ({self._why}), {self._left():.0f} s more")
            self._news += _NEWS


class _RendezvousHost(NamedTuple):
    """One that leads, and has heard this process."""

    address: str
    connection: socket.socket
    reader: BinaryIO
    # Seconds that it waits for others.
    patience: float

    def verdict(self) -> JobMembership | None:
        """Return how the job goes on; None: it has gone, or another one leads now.

        UserError: what is wrong.
        """
        with self.connection, self.reader:
            self.connection.settimeout(self.patience + _GRACE)
            try:
                said = dict(json.loads(self.reader.readline(65536)))
            except (OSError, ValueError, TypeError):
                return None
        if said.get("another_leads"):
            return None
        if said["code"]:
            error = UserError(said["text"])
            error.exit_code = said["code"]
            raise error
        return JobMembership(said["count"], said["index"], self.address)


def _knock(address: str, me: dict[str, Any], seconds: float) -> _RendezvousHost:
    """Send a possible leader the number and job of this process.

    OSError: there is no leader, or its answer is not valid.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    try:
        connection.sendall(json.dumps(me).encode() + b"\n")
        connection.settimeout(_GREET)
        reader = connection.makefile("rb")
        said = reader.readline(4096)
        # If it says nothing, it has ended, and may be started again.
        if not said:
            raise ConnectionError("it hung up")
        try:
            patience = float(json.loads(said)["patience"])
        except (ValueError, TypeError, KeyError) as error:
            # Such as the service of a job that runs, or is about to end.
            raise ConnectionError("something else answers") from error
    except OSError:
        connection.close()
        raise
    return _RendezvousHost(address, connection, reader, patience)
