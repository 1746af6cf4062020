"""Limits of time, number and size for the server's connections.

uvicorn waits for ever for headers and bodies, and for clients that do not read. The protocol class
of this module ends such connections, and answers errors in the form of OpenAI's API.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from maxtrain.commands.serve.request_error import RequestError

# Largest head of a request: its first line and all its headers.
HEAD_BYTES = 32 * 1024
# An idle connection is kept open for so long.
KEEP_ALIVE_SECONDS = 15


class ConnectionLimits(NamedTuple):
    """Limits of the server for network connections.

    Args:
        connections: at one time; requests on further ones get status 503, and above twice as many
            they are closed at once.
        seconds: in which a client must send a request's headers, then its body, and read what is
            sent.
    """

    connections: int
    seconds: float


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return the protocol class for uvicorn's `http` setting."""

    class LimitedProtocol(_LimitedProtocol):
        connection_limits = limits

    return LimitedProtocol


class _LimitedProtocol(H11Protocol):
    """One connection with HTTP/1.1."""

    connection_limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # What the client is being waited for: "headers", "body" or nothing.
        self._awaited = ""
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # Any: the transports of uvloop are no subclasses of those of asyncio.
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self.connection_limits.connections
        if len(self.connections) > 2 * most:
            transport.abort()
            return
        if len(self.connections) > most:
            self.app = _refuse_connection  # type: ignore[assignment]
        self._await("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        self._follow_state()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()

    def pause_writing(self) -> None:
        """Give the client its time to read: the buffer of the connection is full."""
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_send_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too large headers."""
        del msg
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # A response has begun, so no other status can be sent.
            self.transport.close()
        elif self._has_large_head():
            self._refuse(
                RequestError(
                    f"the headers have more than {HEAD_BYTES:,} bytes. Send fewer.", status=431
                )
            )
        else:
            self._refuse(RequestError("this is not a request of HTTP/1.1."))

    def _has_large_head(self) -> bool:
        head, _ = self.conn.trailing_data
        return len(head) > HEAD_BYTES

    def _follow_state(self) -> None:
        """Start or stop the timer that fits the state of the connection."""
        if self.transport.is_closing() or self.timeout_keep_alive_task is not None:
            self._await("")
        elif self.conn.their_state is h11.IDLE:
            self._await("headers")
        elif self.conn.their_state is h11.SEND_BODY:
            self._await("body")
        else:
            self._await("")

    def _await(self, what: str) -> None:
        """Wait for a part of a request; a wait for the same part goes on."""
        if what == self._awaited:
            return
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        self._awaited = what
        if what:
            self._receive_timer = self.loop.call_later(
                self.connection_limits.seconds, self._receive_timeout
            )

    def _receive_timeout(self) -> None:
        seconds = self.connection_limits.seconds
        error = RequestError(
            f"the {self._awaited} of a request did not come within {seconds:g} s. Send faster.",
            status=408,
        )
        if (
            self.cycle is not None
            and self.cycle.response_started
            and (not self.cycle.response_complete or self._awaited == "body")
        ):
            self.transport.abort()
            return
        self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error, outside the application, and close the connection."""
        content = json.dumps(error.body()).encode()
        head = [
            b"HTTP/1.1 %d %s" % (error.status, STATUS_PHRASES[error.status]),
            b"content-type: application/json",
            b"content-length: %d" % len(content),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + content)
        self.transport.close()
        self._abort_later()
        self._await("")

    def _abort_later(self) -> None:
        """Close the connection without sending the rest if the client does not read it in time."""
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(
                self.connection_limits.seconds, self.transport.abort
            )

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


async def _refuse_connection(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
    """Answer every request of a connection above the limit."""
    del scope, receive
    error = RequestError("the server has too many connections. Try again later.", status=503)
    content = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
        *[(name.lower().encode(), value.encode()) for name, value in error.headers().items()],
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})
