"""moto's S3 server on this machine, with faults on demand: requests that are denied, fail, are
slow, lose bytes or are lost themselves."""

import contextlib
import dataclasses
import functools
import io
import logging
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import xml.sax.saxutils
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from data_pipeline.base.remote import RemotePath

BUCKET = "faulty"
_ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    "<Error><Code>{code}</Code><Message>{message}</Message></Error>"
)


@dataclasses.dataclass
class RequestFault:
    """Fault of requests whose method and path, as in `PUT /bucket/key`, match.

    Attributes:
        pattern: a regular expression for all of it.
        status: of the answer, with `code` and `message`; 0: the request is done.
        seconds: that it takes longer.
        keep: number of bytes that are kept of the content; None: all.
        times: that it happens.
        skip: matching requests before the first that it happens to.
        done: the request is done, whatever its answer is.
        pid: of a process that is killed then.
        drop: the connection is closed without an answer.
        lose: it is answered as if it were done.
        flip: the answer has another bit in its middle.
        cut: the connection is closed in the middle of the answer.
        headers: of the answer, in place of its own.
    """

    pattern: str
    status: int = 0
    code: str = ""
    message: str = ""
    seconds: float = 0.0
    keep: int | None = None
    times: float = float("inf")
    skip: int = 0
    done: bool = False
    pid: int = 0
    drop: bool = False
    lose: bool = False
    flip: bool = False
    cut: bool = False
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class RequestFaults:
    """Faults of coming requests: `faults` may change at any time, and `seen` has all
    requests."""

    def __init__(self) -> None:
        self.faults: list[RequestFault] = []
        self.seen: list[str] = []
        self._counting = threading.Lock()

    def fault_of(self, request: str) -> RequestFault | None:
        """Return the fault for a request; None: the request is served."""
        with self._counting:
            self.seen.append(request)
            for fault in self.faults:
                if fault.times < 1 or not re.fullmatch(fault.pattern, request):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def begin(self, faults: list[RequestFault]) -> None:
        """Has these faults from now on, and has seen nothing."""
        with self._counting:
            self.seen.clear()
            self.faults[:] = faults

    def requests(self) -> list[str]:
        """All that were seen."""
        with self._counting:
            return list(self.seen)


class FaultyS3(RequestFaults):
    """A server with a bucket, named by the usual variables while the `with` lasts, for child
    processes too.

    Attributes:
        url: of the bucket.
    """

    url = f"s3://{BUCKET}"

    def __init__(self) -> None:
        super().__init__()
        from moto.server import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
        from werkzeug.serving import make_server  # noqa: PLC0415

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._inner = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def __enter__(self) -> "FaultyS3":
        from s3fs import S3FileSystem  # noqa: PLC0415

        self._before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        # Those of another server of this process would be found, by the same arguments.
        S3FileSystem.clear_instance_cache()
        # Servers of one process have their buckets in common.
        S3FileSystem().makedirs(BUCKET, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        from s3fs import S3FileSystem  # noqa: PLC0415

        for name, value in self._before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        S3FileSystem.clear_instance_cache()
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start: Callable) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        fault = self.fault_of(request)
        if fault is None:
            return self._inner(environ, start)
        time.sleep(fault.seconds)
        if fault.keep is not None:
            environ = _cut_short(environ, fault.keep)
        if fault.done:
            b"".join(self._inner(environ, lambda *_: None))
        if fault.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fault.pid, signal.SIGKILL)
        if fault.drop:
            if not fault.done:
                _read(environ)
            raise _hung_up(environ)
        if fault.status:
            _read(environ)
            message = xml.sax.saxutils.escape(fault.message)
            body = _ERROR.format(code=fault.code, message=message).encode()
            start(f"{fault.status} Fault", [("Content-Type", "application/xml")])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]
        if fault.lose:
            _read(environ)
            start("200 OK", [("ETag", '"0"'), ("Content-Length", "0")])
            return [b""]
        if fault.headers:
            start = functools.partial(_start_with, start, fault.headers)
        content = self._inner(environ, start)
        if fault.flip:
            return [flipped(b"".join(content))]
        if fault.cut:
            return _half(environ, b"".join(content))
        return content

    def contents(self, prefix: str) -> dict[str, bytes]:
        """Return the contents of a folder of the bucket, by name from there; faults don't
        matter.
        """
        keys = _bucket().keys
        found = {name: keys.get(name) for name in list(keys)}
        return {
            name.removeprefix(prefix): key.value
            for name, key in found.items()
            if key is not None and name.startswith(prefix)
        }

    def fill(self, prefix: str, contents: Mapping[str, bytes]) -> None:
        """Makes what is below a folder of the bucket these objects, and nothing else."""
        keys = _bucket().keys
        for name in list(keys):
            if name.startswith(prefix):
                keys.pop(name)
        for name, content in contents.items():
            _backend().put_object(BUCKET, prefix + name, content)


class FaultyS3Process:
    """A `FaultyS3` in a process of its own, which goes when this one does: a program that forks had
    better have no threads."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        # A process of multiprocessing would be waited for by each process that is forked later.
        self._pid = os.fork()
        if not self._pid:
            _serve(theirs, self._pipe)
        theirs.close()
        self.environment: dict[str, str] = self._pipe.recv()

    def begin(self, faults: list[RequestFault]) -> None:
        self._call("begin", faults)

    def requests(self) -> list[str]:
        return self._call("requests")

    def contents(self, prefix: str) -> dict[str, bytes]:
        return self._call("contents", prefix)

    def fill(self, prefix: str, contents: Mapping[str, bytes]) -> None:
        self._call("fill", prefix, contents)

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        os.waitpid(self._pid, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()


def _serve(pipe: Connection, theirs: Connection) -> NoReturn:
    """Answers the calls of a `FaultyS3Process` until that closes its end; ends the process."""
    code = 1
    try:
        # Else this process would hold the other end open itself.
        theirs.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with FaultyS3() as server:
            pipe.send(server.environment)
            while True:
                name, arguments = pipe.recv()
                pipe.send(getattr(server, name)(*arguments))
    except (EOFError, BrokenPipeError):
        code = 0
    finally:
        os._exit(code)


def _backend() -> Any:
    from moto.core import DEFAULT_ACCOUNT_ID  # noqa: PLC0415
    from moto.s3.models import s3_backends  # noqa: PLC0415

    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


def _bucket() -> Any:
    return _backend().buckets[BUCKET]


def _start_with(
    start: Callable,
    changes: Mapping[str, str],
    status: str,
    headers: list[tuple[str, str]],
    *_: Any,
) -> Any:
    """Begins an answer with other headers."""
    changed = {name.lower() for name in changes}
    kept = [(name, value) for name, value in headers if name.lower() not in changed]
    return start(status, [*kept, *changes.items()])


def flipped(content: bytes) -> bytes:
    """Bytes with another bit in their middle."""
    changed = bytearray(content)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


def _hung_up(environ: dict[str, Any]) -> ConnectionResetError:
    """Closes the connection of a request; what to raise then."""
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return ConnectionResetError("a fault on purpose")


def _half(environ: dict[str, Any], content: bytes) -> Iterator[bytes]:
    yield content[: len(content) // 2]
    raise _hung_up(environ)


def _read(environ: dict[str, Any]) -> bytes:
    with contextlib.suppress(ValueError):
        return environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return b""


def _cut_short(environ: dict[str, Any], keep: int) -> dict[str, Any]:
    """Return a request with fewer bytes, and without the headers that would reveal it to the
    server.
    """
    content = _read(environ)[:keep]
    changed = {
        name: value
        for name, value in environ.items()
        if not re.search("CHECKSUM|CONTENT_MD5|SDK_ALGORITHM", name)
    }
    return changed | {"wsgi.input": io.BytesIO(content), "CONTENT_LENGTH": str(len(content))}


def names_below(place: RemotePath) -> list[str]:
    """The names of all objects below a URL, from there."""
    return list(place.tree())
