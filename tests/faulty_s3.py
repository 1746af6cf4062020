"""moto's S3 server on this machine, with faults on demand: requests that are denied, fail, are slow
or lose bytes."""

import contextlib
import dataclasses
import io
import logging
import os
import re
import threading
import time
import xml.sax.saxutils
from collections.abc import Callable, Iterable
from typing import Any

from data_pipeline.remote import RemotePath

_ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    "<Error><Code>{code}</Code><Message>{message}</Message></Error>"
)


@dataclasses.dataclass
class Fault:
    """What happens to requests whose method and path, as in `PUT /bucket/key`, match.

    Attributes:
        pattern: a regular expression for all of it.
        status: of the answer, with `code` and `message`; 0: the request is done.
        seconds: that it takes longer.
        keep: so many bytes of what is written are; None: all.
        times: that it happens.
    """

    pattern: str
    status: int = 0
    code: str = ""
    message: str = ""
    seconds: float = 0.0
    keep: int | None = None
    times: float = float("inf")


class FaultyS3:
    """A server with a bucket, named by the usual variables while the `with` lasts, for child
    processes too; `faults` may change at any time, and `seen` has all requests."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
        from werkzeug.serving import make_server  # noqa: PLC0415

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        self._inner = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def __enter__(self) -> "FaultyS3":
        from s3fs import S3FileSystem  # noqa: PLC0415

        self._before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        # Those of another server of this process would be found, by the same arguments.
        S3FileSystem.clear_instance_cache()
        # Servers of one process have their buckets in common.
        S3FileSystem().makedirs("faulty", exist_ok=True)
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
        self.seen.append(request)
        for fault in self.faults:
            if fault.times < 1 or not re.fullmatch(fault.pattern, request):
                continue
            fault.times -= 1
            time.sleep(fault.seconds)
            if fault.keep is not None:
                environ = _cut_short(environ, fault.keep)
            if fault.status:
                _read(environ)
                message = xml.sax.saxutils.escape(fault.message)
                body = _ERROR.format(code=fault.code, message=message).encode()
                start(f"{fault.status} Fault", [("Content-Type", "application/xml")])
                return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]
        return self._inner(environ, start)


def _read(environ: dict[str, Any]) -> bytes:
    with contextlib.suppress(ValueError):
        return environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return b""


def _cut_short(environ: dict[str, Any], keep: int) -> dict[str, Any]:
    """A request with fewer bytes, and without what would tell the server so."""
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
