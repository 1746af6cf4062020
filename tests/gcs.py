"""A server of gs:// on this machine: gcp-storage-emulator, with objects that are written only if they
are not there yet (ifGenerationMatch=0), which it does not look at by itself."""

import http.server
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlparse

from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"


class _IsThere(Exception):
    """An object is there that must not be."""


class _Conditional(Storage):
    only_new = False

    def create_file(self, bucket_name: str, file_name: str, *arguments: Any) -> None:
        self._check(bucket_name, file_name)
        super().create_file(bucket_name, file_name, *arguments)

    def create_resumable_upload(self, bucket_name: str, file_name: str, file_obj: Any) -> Any:
        self._check(bucket_name, file_name)
        return super().create_resumable_upload(bucket_name, file_name, file_obj)

    def _check(self, bucket: str, name: str) -> None:
        if self.only_new and name in self.objects.get(bucket, {}):
            raise _IsThere


class _Handler(RequestHandler):
    storage: _Conditional

    def do_POST(self) -> None:
        path = urlparse(self.path)
        if "/moveTo/" in path.path:
            # Which it does not know, either. gcsfs tries again unless it is told so, and then copies.
            self._refuse(HTTPStatus.BAD_REQUEST, "moveTo is not known here.")
            return
        asked = parse_qs(path.query)
        self.storage.only_new = asked.get("ifGenerationMatch") == ["0"]
        try:
            super().do_POST()
        except _IsThere:
            said = "At least one of the pre-conditions you specified did not hold."
            self._refuse(HTTPStatus.PRECONDITION_FAILED, said)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"error": {"code": status.value, "message": message}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(http.server.HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not wait for the end of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def gcs_server() -> Iterator[None]:
    """The server, with a bucket, named by the usual variable, for child processes too."""
    names = (
        "gcp_storage_emulator.server",
        "gcp_storage_emulator.handlers.objects",
        "gcsfs",
        "google.auth._default",
    )
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    storage = _Conditional(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    server = _Server(("127.0.0.1", 0), partial(_Handler, storage))
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
        yield
    finally:
        server.shutdown()
        server.server_close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
