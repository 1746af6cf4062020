"""Connections that send slowly or too much, that do not read, or of which there are too many."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn

from maxtrain.commands.serve.connections import HEAD_BYTES, ConnectionLimits, limited_protocol

SECONDS = 0.6
MOST = 4
REQUEST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 3\r\n\r\nabc"
# More than the buffers of a connection hold.
BIG = 64 * 2**20


class App:
    """Reads a body and answers with its length, or with much for the path /big."""

    def __init__(self):
        self.num_ended = 0

    async def __call__(self, scope, receive, send):
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_ended += 1
                return
            length += len(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = str(length).encode()
        if scope["path"] == "/big":
            body = bytes(BIG)
        for start in range(0, len(body), 2**16):
            part = body[start : start + 2**16]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(scope="module")
def running():
    app = App()
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=limited_protocol(ConnectionLimits(MOST, SECONDS)),
        log_level="critical",
        lifespan="off",
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    yield listening.getsockname(), server, app
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def address(running):
    """Address of the server once it has no connections."""
    address, server, _ = running
    end = time.monotonic() + 30
    while server.server_state.connections:
        assert time.monotonic() < end
        time.sleep(0.02)
    return address


@contextlib.contextmanager
def connected(address):
    with socket.create_connection(address, timeout=30) as client:
        yield client


def read_all(client):
    """Status and body of what the server sends until it closes the connection."""
    content = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := client.recv(2**16):
            content += part
    if not content:
        return None, None
    head, _, body = bytes(content).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def read_answer(client):
    """Read one whole answer of the application."""
    content = b""
    while not content.endswith(b"0\r\n\r\n"):
        part = client.recv(2**16)
        assert part, content
        content += part
    assert content.startswith(b"HTTP/1.1 200 OK")


def trickle(client, content, seconds=0.05):
    """Sends a byte at a time until the server closes the connection."""
    client.settimeout(0.001)
    for byte in content:
        try:
            client.sendall(bytes([byte]))
            time.sleep(seconds)
            if client.recv(1, socket.MSG_PEEK):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    client.settimeout(30)
    return read_all(client)


SLOW = {
    "nothing": lambda client: read_all(client),
    "headers a byte at a time": lambda client: trickle(
        client, b"GET / HTTP/1.1\r\nx: " + b"a" * 999
    ),
    "no end of the headers": lambda client: (
        client.sendall(b"GET / HTTP/1.1\r\n") or read_all(client)
    ),
    "no end of the body": lambda client: client.sendall(REQUEST[:-1]) or read_all(client),
    "a body a byte at a time": lambda client: (
        client.sendall(REQUEST.replace(b" 3\r", b" 999\r")) or trickle(client, b"a" * 999)
    ),
    "a chunked body without an end": lambda client: (
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        or trickle(client, b"1\r\na\r\n" * 99)
    ),
}


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("kind", SLOW)
def test_a_client_that_sends_too_slowly_is_refused(address, kind):
    began = time.monotonic()
    with connected(address) as client:
        status, body = SLOW[kind](client)
    assert 0.5 * SECONDS < time.monotonic() - began < 20
    assert status == 408 and "did not come within" in json.loads(body)["error"]["message"]


def test_a_second_request_on_a_connection_has_its_own_time(address):
    with connected(address) as client:
        for _ in range(3):
            client.sendall(REQUEST)
            read_answer(client)
            time.sleep(SECONDS * 0.5)
        client.sendall(REQUEST[:10])
        status, _ = read_all(client)
    assert status == 408


def test_an_idle_connection_is_closed(address):
    with connected(address) as client:
        client.sendall(REQUEST)
        status, body = read_all(client)
    assert status == 200 and b"3" in body


@pytest.mark.long
def test_a_client_that_does_not_read_is_cut_off(address, running):
    with connected(address) as client:
        client.sendall(b"GET /big HTTP/1.1\r\nHost: here\r\n\r\n")
        end = time.monotonic() + 30
        while not running[1].server_state.connections:
            time.sleep(0.01)
        while running[1].server_state.connections:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (HEAD_BYTES + 1), 431),
        (b"GET /" + b"a" * (HEAD_BYTES + 1), 431),
        (b"\x16\x03\x01 is not HTTP\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_is_answered_in_the_form_of_the_api(address, content, status):
    with connected(address) as client:
        client.sendall(content)
        found, body = read_all(client)
    assert found == status and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_connections_above_the_limit_are_refused(address):
    """Up to twice as many get an answer, and those above none."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(address)) for _ in range(MOST)]
        refused = stack.enter_context(connected(address))
        refused.sendall(REQUEST)
        status, body = read_all(refused)
        assert status == 503 and json.loads(body)["error"]["type"] == "server_error"
        for client in idle:
            client.sendall(REQUEST)
            read_answer(client)


def test_far_more_connections_than_there_may_be_do_no_harm(address):
    def try_it(_):
        try:
            with connected(address) as client:
                client.sendall(REQUEST + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                return read_all(client)[0]
        except ConnectionError:
            return None

    with ThreadPoolExecutor(30) as pool:
        statuses = set(pool.map(try_it, range(60)))
    assert statuses <= {200, 503, None}
    assert 200 in statuses
