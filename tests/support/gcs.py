"""A server of gs:// on this machine: gcp-storage-emulator, with objects that are written only if
they are not there yet (ifGenerationMatch=0), which it does not look at by itself, and with faults
on demand."""

import contextlib
import http.server
import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

from benchmarks import faulty_s3
from benchmarks.faulty_s3 import RequestFault, RequestFaults, flipped

BUCKET = "bucket"
_PATH = re.compile(r"(?:/upload|/download)?(?:/storage/v1)?/b/([^/]+)(?:/o(?:/(.*))?)?")
# What gcsfs puts between the parts of an upload, and after them.
_BETWEEN = b"\n--==0==\n"
_END = b"\n--==0==--"


class _IsThere(Exception):
    """An object is there that must not be."""


class _Conditional(Storage):
    only_new = False

    def _write_config_to_file(self) -> None:
        """Nothing: that would write what is known of all objects, after each, for nobody to
        read."""

    def create_file(self, bucket_name: str, file_name: str, *arguments: Any) -> None:
        self._check(bucket_name, file_name)
        super().create_file(bucket_name, file_name, *arguments)

    def create_resumable_upload(self, bucket_name: str, file_name: str, file_obj: Any) -> Any:
        self._check(bucket_name, file_name)
        return super().create_resumable_upload(bucket_name, file_name, file_obj)

    def _check(self, bucket: str, name: str) -> None:
        if self.only_new and name in self.objects.get(bucket, {}):
            raise _IsThere


class FaultyGS(RequestFaults):
    """The faults of a server, and what is in its bucket for them.

    Requests have the names that they would have with S3: `PUT /faulty/key` writes, `GET` reads,
    `HEAD` looks at an object, and `GET /faulty/` lists.

    Attributes:
        url: of the bucket.
    """

    url = f"gs://{faulty_s3.BUCKET}"

    def __init__(self) -> None:
        super().__init__()
        self.storage = _Conditional(use_memory_fs=True)
        for name in (BUCKET, faulty_s3.BUCKET):
            buckets.create_bucket(name, self.storage)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below a folder of the bucket, by name relative to it; faults don't
        matter."""
        bucket = faulty_s3.BUCKET
        names = [name for name in self.storage.objects.get(bucket, {}) if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.storage.get_file(bucket, name) for name in names}

    def fill(self, prefix: str, contents: Mapping[str, bytes]) -> None:
        """Makes what is below a folder of the bucket these objects, and nothing else."""
        bucket = faulty_s3.BUCKET
        for name in self.contents(prefix):
            self.storage.delete_file(bucket, prefix + name)
        self.storage.only_new = False
        for name, content in contents.items():
            size = str(len(content))
            made = objects._make_object_resource("", bucket, prefix + name, "", size)
            made = objects._checksums(content, made)
            self.storage.create_file(bucket, prefix + name, content, made)


class _Handler(RequestHandler):
    def __init__(self, gs: FaultyGS, *arguments: Any):
        self._gs = gs
        super().__init__(gs.storage, *arguments)

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def do_PUT(self) -> None:
        self._answer(super().do_PUT)

    def do_DELETE(self) -> None:
        self._answer(super().do_DELETE)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _post(self) -> None:
        path = urlparse(self.path)
        if "/moveTo/" in path.path:
            # Which it does not know, either. gcsfs tries again unless the answer says so, and then
            # copies.
            self._refuse(HTTPStatus.BAD_REQUEST, "moveTo is not known here.")
            return
        asked = parse_qs(path.query)
        self.storage.only_new = asked.get("ifGenerationMatch") == ["0"]
        try:
            super().do_POST()
        except _IsThere:
            said = "At least one of the pre-conditions you specified did not hold."
            self._refuse(HTTPStatus.PRECONDITION_FAILED, said)

    def _answer(self, handle: Callable[[], None]) -> None:
        """Answer a request, or inject a fault instead."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self._gs.fault_of(self._request(body))
        if fault is not None and fault.keep is not None:
            body = _cut_short(body, fault.keep)
        self.rfile = io.BytesIO(body)
        if fault is None:
            handle()
            return
        time.sleep(fault.seconds)
        if fault.drop:
            if fault.done:
                self._answer_to(handle)
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        elif fault.status:
            self._refuse(HTTPStatus(fault.status), fault.message)
        elif fault.lose:
            self._send(HTTPStatus.OK, {})
        else:
            self._spoil(handle, fault)

    def _spoil(self, handle: Callable[[], None], fault: RequestFault) -> None:
        """Answer a request, and change the answer."""
        head, blank, content = self._answer_to(handle).partition(b"\r\n\r\n")
        if fault.flip:
            content = flipped(content)
        if fault.cut:
            content = content[: len(content) // 2]
        self.wfile.write(head + blank + content)

    def _answer_to(self, handle: Callable[[], None]) -> bytes:
        """Return the answer to a request."""
        wire = self.wfile
        answer = io.BytesIO()
        self.wfile = answer
        handle()
        self.wfile = wire
        return answer.getvalue()

    def _request(self, body: bytes) -> str:
        """Return the operation of a request, named as in S3."""
        path = urlparse(self.path)
        asked = parse_qs(path.query)
        method = self.command
        match = _PATH.fullmatch(path.path)
        if match is None:
            return f"{method} {path.path}"
        bucket = match[1]
        key = unquote(match[2] or "")
        if path.path.startswith("/upload/"):
            method = "PUT"
            key = self._uploaded(asked, body)
        elif method == "GET" and key and asked.get("alt") != ["media"]:
            method = "HEAD"
        return f"{method} /{bucket}/{key}"

    def _uploaded(self, asked: Mapping[str, list[str]], body: bytes) -> str:
        """The name of the object that is written."""
        if "name" in asked:
            return asked["name"][0]
        if "upload_id" in asked:
            with contextlib.suppress(NotFound):
                return self.storage.get_resumable_file_obj(asked["upload_id"][0])["name"]
            return ""
        found = re.search(rb'\{"name": .*\}', body)
        return json.loads(found[0])["name"] if found else ""

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send(status, {"error": {"code": status.value, "message": message}})

    def _send(self, status: HTTPStatus, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _cut_short(body: bytes, keep: int) -> bytes:
    """The body of an upload, with fewer bytes of the object."""
    content = _uploaded_bytes(body)
    return body.removesuffix(content + _END) + content[:keep] + _END


def _uploaded_bytes(body: bytes) -> bytes:
    """The object in the body of an upload."""
    _, _, second = body.partition(_BETWEEN)
    _, _, content = second.partition(b"\n\n")
    return content.removesuffix(_END)


def _read_data(handler: _Handler, query: object, read: Callable = emulator._read_data) -> Any:
    """Read the data of a request as the emulator does, which by itself takes a last byte of an
    object that is a carriage return for a part of the line end after it."""
    body = handler.rfile.getvalue()
    found = read(handler, query)
    if isinstance(found, dict) and "content" in found:
        found["content"] = _uploaded_bytes(body)
    return found


class _GcsServer(http.server.HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not wait for the end of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def gcs_server() -> Iterator[FaultyGS]:
    """The server, with two buckets, named by the usual variable, for child processes too."""
    names = (
        "gcp_storage_emulator.server",
        "gcp_storage_emulator.handlers.objects",
        "google.auth._default",
    )
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    emulator._read_data = _read_data
    gs = FaultyGS()
    server = _GcsServer(("127.0.0.1", 0), partial(_Handler, gs))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_address[1]}",
        # Otherwise gcsfs asks a server of gRPC, which is not here, what kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # Credentials are not looked for in Google's cloud.
        "NO_GCE_CHECK": "true",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield gs
    finally:
        server.shutdown()
        server.server_close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
