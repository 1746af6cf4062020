"""Errors of HTTP requests, in the form of OpenAI's API."""

import sys
import traceback
from typing import Any

from data_pipeline.base.errors import UsageError

# The `type` of an error by its status; others below 500 are invalid_request_error.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class RequestError(UsageError):
    """A request that cannot be answered.

    Args:
        message: what is wrong, and what to do.
        status: the HTTP status.
        param: the key of the request that the error is about.
        code: a short name for programs.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error as the JSON object of the API."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        param = self.param
        if param is not None:
            param = _encodable(param)
        message = _encodable(str(self))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with the error."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status in (429, 503):
            return {"Retry-After": "1"}
        return {}


def _encodable(text: str) -> str:
    """Return a text with its lone surrogates, which a client's JSON may have, spelled out."""
    return text.encode(errors="backslashreplace").decode()


def log_exception() -> None:
    """Print the current exception with its traceback to stderr.

    Exceptions may quote what a client sent. Control characters are escaped, so that no client can
    write escape sequences to the terminal that shows the log.
    """
    lines = [escape_controls(line) for line in traceback.format_exc().split("\n")]
    print("\n".join(lines), file=sys.stderr, end="")


def escape_controls(text: str) -> str:
    """Return a line with all characters that cannot be printed as Python would write them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
