"""The HTTP server's application: OpenAI's API over a worker, health and metrics.

It answers from memory alone, in one thread; the worker's thread does the work. A client that leaves
takes its texts along: they are cancelled. Web pages in a browser on the same machine can't use the
server: they may not send JSON to another origin without being let in, and nobody is.
"""

import asyncio
import contextlib
import hmac
import json
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from maxtrain.serve.generation import Reason
from maxtrain.serve.protocol import (
    Answers,
    Asked,
    RequestError,
    Served,
    read_body,
    read_chat,
    read_completion,
)
from maxtrain.serve.text import Token
from maxtrain.serve.worker import Job, Part, Worker

# One failed step may have been a prompt's, or memory's that was short for a moment.
_FAILURES_OF_ILL_HEALTH = 3
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Limits(NamedTuple):
    """What a server takes on.

    Args:
        texts: that are made or wait at one time; more are refused.
        body_bytes: of a request.
        key: that clients must give; None: none.
        hosts: names that the server is asked for by; empty: any.
    """

    texts: int
    body_bytes: int
    key: str | None
    hosts: tuple[str, ...]


class _Metrics:
    """Numbers of one server, in Prometheus' form."""

    def __init__(self, worker: Worker):
        self.registry = CollectorRegistry()
        common = {"registry": self.registry, "namespace": "maxtrain"}
        self.requests = Counter("requests", "answered requests", ["path", "status"], **common)
        self.prompt_tokens = Counter("prompt_tokens", "tokens of prompts", **common)
        self.new_tokens = Counter("generated_tokens", "new tokens", **common)
        self.cancelled = Counter("cancelled_texts", "texts whose client had left", **common)
        self.first = Histogram(
            "first_token_seconds",
            "from a request until the first token of a text",
            buckets=_SECONDS,
            **common,
        )
        self.whole = Histogram(
            "text_seconds", "from a request until the end of a text", buckets=_SECONDS, **common
        )
        self.open = Gauge("open_texts", "texts that are made or wait", **common)
        active = Gauge("active_texts", "texts that are made", **common)
        active.set_function(lambda: worker.num_active)
        failures = Gauge("failed_steps", "steps of the engine that failed", **common)
        failures.set_function(lambda: worker.num_failures)


class _Texts:
    """The texts of one request on their way, seen from the server's thread."""

    def __init__(self, server: "_Server", asked: Asked):
        self._server = server
        self.asked = asked
        self.parts: asyncio.Queue[tuple[int, Part]] = asyncio.Queue()
        self._begin = time.monotonic()
        self._begun = set[int]()
        self._open = set(range(len(asked.prompts)))
        loop = asyncio.get_running_loop()

        def teller(index: int) -> Callable[[Part], object]:
            def tell(part: Part) -> None:
                # The loop is gone when the server has ended.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self.parts.put_nowait, (index, part))

            return tell

        self.jobs = []
        for index, prompt in enumerate(asked.prompts):
            job = Job(
                prompt,
                asked.max_tokens,
                asked.sampling,
                asked.seed,
                index,
                server.served.stop_ids,
                asked.stop,
                teller(index),
                server.served.names.index(asked.model),
            )
            self.jobs.append(job)

    def note(self, index: int, part: Part) -> None:
        """Counts a part; RequestError: the text failed."""
        metrics = self._server.metrics
        seconds = time.monotonic() - self._begin
        if part.tokens and index not in self._begun:
            self._begun.add(index)
            metrics.first.observe(seconds)
        metrics.new_tokens.inc(len(part.tokens))
        if part.reason is not None:
            self._open.discard(index)
            metrics.whole.observe(seconds)
        if part.reason == "failed":
            raise RequestError(
                "the model or its device failed; the server's log says more. Try again.", 500
            )

    @property
    def is_open(self) -> bool:
        """Whether a text goes on."""
        return bool(self._open)

    def leave(self) -> None:
        """Nobody wants the rest."""
        if self._open:
            self._server.metrics.cancelled.inc(len(self._open))
            self._server.worker.cancel([self.jobs[index] for index in self._open])
            self._open.clear()


class _Stream(StreamingResponse):
    """A stream that tidies up however it ends."""

    def __init__(self, content: AsyncIterator[str], end: Callable[[], object]):
        super().__init__(content, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


class _Server:
    """What all requests share."""

    def __init__(self, served: Served, worker: Worker, limits: Limits):
        self.served = served
        self.worker = worker
        self.limits = limits
        self.metrics = _Metrics(worker)
        self._num_open = 0

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        asked = await self._read(request, read_completion)
        return await self._answer(request, asked, is_chat=False)

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        asked = await self._read(request, read_chat)
        return await self._answer(request, asked, is_chat=True)

    async def _read(
        self, request: Request, read: Callable[[dict[str, Any], Served], Asked]
    ) -> Asked:
        """What a request asks for."""
        content = await self._body(request)
        # A long prompt takes seconds to encode, and templates take their time, too: the others'
        # tokens don't wait for that.
        return await asyncio.to_thread(lambda: read(read_body(content), self.served))

    async def models(self, request: Request) -> Response:
        """/v1/models."""
        del request
        models = [self._model(name) for name in self.served.names]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """/v1/models/NAME."""
        name = request.path_params["name"]
        if name not in self.served.names:
            raise RequestError(f"model {name!r} is not served here.", 404, "model")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        values = {
            "id": name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "maxtrain",
            "max_model_len": self.served.max_length,
        }
        if name != self.served.name:
            values["parent"] = self.served.name
        return values

    async def health(self, request: Request) -> Response:
        """/health: 200 if texts can be made."""
        del request
        worker = self.worker
        is_ill = worker.failures_in_a_row >= _FAILURES_OF_ILL_HEALTH
        if is_ill or not worker.is_alive:
            problem = worker.problem or "the engine has ended"
            return JSONResponse({"status": "failing", "problem": problem}, 503)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        """/metrics."""
        del request
        self.metrics.open.set(self._num_open)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _body(self, request: Request) -> bytes:
        """The body of a request; RequestError: it is too long, or of another type."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError("the content type must be application/json.", 415)
        most = self.limits.body_bytes
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > most:
                raise RequestError(f"the body has more than {most:,} bytes. Send less.", 413)
        return bytes(content)

    async def _answer(self, request: Request, asked: Asked, is_chat: bool) -> Response:
        count = len(asked.prompts)
        if count > self.limits.texts:
            raise RequestError(
                f"{count} texts are asked for at once, and this server makes or keeps waiting at "
                f"most {self.limits.texts}. Ask several times.",
                param="n",
            )
        if not self.worker.is_alive:
            raise RequestError(
                "the engine has ended; the server's log says why. Start the server again.", 503
            )
        if self._num_open + count > self.limits.texts:
            raise RequestError(
                f"{self._num_open} texts are being made or wait, and at most {self.limits.texts} "
                "may. Try again later.",
                429,
                code="overloaded",
            )
        self._num_open += count
        self.metrics.prompt_tokens.inc(asked.prompt_tokens)
        texts = _Texts(self, asked)
        answers = Answers(asked, self.served, is_chat)

        def end() -> None:
            texts.leave()
            self._num_open -= count

        self.worker.submit(texts.jobs)
        if asked.stream:
            return _Stream(self._parts(texts, answers), end)
        try:
            return await _while_there(request, self._whole(texts, answers))
        finally:
            end()

    async def _whole(self, texts: _Texts, answers: Answers) -> Response:
        """All texts at once."""
        count = len(texts.jobs)
        written = [""] * count
        tokens: list[list[Token]] = [[] for _ in range(count)]
        reasons: list[Reason] = ["stop"] * count
        while texts.is_open:
            index, part = await texts.parts.get()
            texts.note(index, part)
            written[index] += part.text
            tokens[index] += part.tokens
            if part.reason is not None:
                reasons[index] = part.reason
        return JSONResponse(answers.whole(written, tokens, reasons))

    async def _parts(self, texts: _Texts, answers: Answers) -> AsyncIterator[str]:
        """Server-sent events."""
        begun = set[int]()
        counted = 0
        try:
            while texts.is_open:
                index, part = await texts.parts.get()
                texts.note(index, part)
                counted += len(part.tokens)
                is_first = index not in begun
                begun.add(index)
                yield _event(answers.part(index, part.text, part.tokens, part.reason, is_first))
            if texts.asked.counts_stream:
                yield _event(answers.last_part(counted))
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.body())


async def _while_there(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What some work gives. ClientDisconnect: the client left before, and the work has ended."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leaves(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _leaves(request: Request) -> None:
    """Until the client has left; its body must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def make_app(served: Served, worker: Worker, limits: Limits) -> Starlette:
    """The application.

    Args:
        served: what is served.
        worker: that has begun.
        limits: what is taken on.
    """
    server = _Server(served, worker, limits)

    def route(
        path: str, answer: Callable[[Request], Awaitable[Response]], method: str, is_open: bool
    ) -> Route:
        async def guarded(request: Request) -> Response:
            response = await _guarded(request, answer, limits, is_open)
            server.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, guarded, methods=[method])

    middleware = []
    if limits.hosts:
        # A name that another site gave to this machine is none of them.
        hosts = list(limits.hosts)
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
    return Starlette(
        routes=[
            route("/v1/completions", server.completions, "POST", False),
            route("/v1/chat/completions", server.chat, "POST", False),
            route("/v1/models", server.models, "GET", False),
            route("/v1/models/{name:path}", server.model, "GET", False),
            route("/health", server.health, "GET", True),
            route("/metrics", server.show_metrics, "GET", False),
        ],
        middleware=middleware,
    )


async def _guarded(
    request: Request,
    answer: Callable[[Request], Awaitable[Response]],
    limits: Limits,
    is_open: bool,
) -> Response:
    """An answer, or why there is none."""
    try:
        if limits.key is not None and not is_open:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            # Headers are bytes, which are read as Latin-1.
            if not hmac.compare_digest(given.encode("latin-1"), limits.key.encode()):
                raise RequestError("the API key is missing or wrong.", 401, code="invalid_api_key")
        return await answer(request)
    except RequestError as error:
        headers = {}
        if error.status in (429, 503):
            headers["Retry-After"] = "1"
        return JSONResponse(error.body(), error.status, headers)
    except ClientDisconnect:
        # Nobody reads this.
        return Response(status_code=499)
    except Exception:
        # A bug of ours, which the client can't mend.
        traceback.print_exc()
        error = RequestError("the server failed; its log says more. Try again.", 500)
        return JSONResponse(error.body(), 500)
