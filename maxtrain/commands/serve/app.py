"""The HTTP server's application: OpenAI's API over a worker, health and metrics.

One thread answers; the worker's thread generates, and others parse and encode. Places for texts are
taken before their prompts are encoded. When a client leaves, its texts are cancelled. No response
has a CORS header, so that no web page can read one.
"""

import asyncio
import contextlib
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from maxtrain.commands.serve.answers import ResponseBuilder, event
from maxtrain.commands.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    EncodedRequest,
    ServedModel,
    detokenize,
    encode,
    read_body,
    read_chat,
    read_completion,
    tokenize,
)
from maxtrain.commands.serve.request_error import RequestError, escape_controls, log_exception
from maxtrain.commands.serve.worker import EngineWorker, TextChunk, TextJob

# Checks the values of a request.
_Reader = Callable[[Mapping[str, Any], ServedModel], CompletionRequest | ChatRequest]
_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/metrics",
)
# Limit of all bodies that are being received, as a multiple of the largest body.
_BODIES_AT_ONCE = 8
# Bytes of a body that is too long which are read before the answer, as a multiple of the longest.
_DROPPED_BODIES = 4
# One failed step may have been a prompt's, or memory's that was short for a moment.
_FAILURES_OF_ILL_HEALTH = 3
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Limits(NamedTuple):
    """Limits of a server.

    Args:
        texts: that are made or wait at one time; more are refused.
        body_bytes: of a request.
        keys: clients must give one of them; empty: none is needed.
        hosts: names that clients may call the server by; empty: any.
    """

    texts: int
    body_bytes: int
    keys: tuple[str, ...]
    hosts: tuple[str, ...]


class _Metrics:
    """Numbers of one server, in Prometheus' form."""

    def __init__(self, worker: EngineWorker):
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
        warm_ups = Gauge("warm_ups", "warm-ups that are still to come", **common)
        warm_ups.set_function(lambda: worker.num_warm_ups)
        failures = Gauge("failed_steps", "steps of the engine that failed", **common)
        failures.set_function(lambda: worker.num_failures)


class _RequestTexts:
    """The texts of one request on their way, seen from the server's thread."""

    def __init__(self, server: "_ServerState", request: EncodedRequest):
        self._server = server
        self.request = request
        options = request.options
        self.parts: asyncio.Queue[tuple[int, TextChunk]] = asyncio.Queue()
        self._begin = time.monotonic()
        self._begun = set[int]()
        self._open = set(range(len(request.prompts)))
        loop = asyncio.get_running_loop()

        def teller(index: int) -> Callable[[TextChunk], object]:
            def tell(part: TextChunk) -> None:
                # The loop is gone when the server has ended.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self.parts.put_nowait, (index, part))

            return tell

        self.jobs = []
        for index, prompt in enumerate(request.prompts):
            job = TextJob(
                prompt,
                request.max_tokens,
                options.sampling,
                options.seed,
                index,
                (*server.served.stop_ids, *options.stop_ids),
                options.stop,
                teller(index),
                server.served.names.index(options.model),
                constraint=request.constraints[index] if request.constraints else None,
                scores_prompt=options.echo and options.logprobs is not None,
                tokenizer=request.tokenizer,
                find_end=request.find_end(),
            )
            self.jobs.append(job)

    def note(self, index: int, part: TextChunk) -> None:
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
        if part.reason == "unconstrained":
            raise RequestError(
                "the schema is too complex to be followed, or no token of the model follows it. "
                "Simplify it.",
                param="response_format",
            )
        if part.reason == "failed":
            raise RequestError(
                "the model or its device failed; the server's log says more. Try again.", 500
            )

    @property
    def is_open(self) -> bool:
        """Return whether a text goes on."""
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


class _ServerState:
    """State that all requests share."""

    def __init__(self, served: ServedModel, worker: EngineWorker, limits: Limits):
        self.served = served
        self.worker = worker
        self.limits = limits
        self.metrics = _Metrics(worker)
        # Texts that are made or wait, and those whose prompts are being encoded.
        self._num_open = 0
        # Bytes of bodies that are being received.
        self._num_received = 0

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        return await self._answer(request, read_completion, is_chat=False)

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        return await self._answer(request, read_chat, is_chat=True)

    async def tokenize(self, request: Request) -> Response:
        """/tokenize: the ids of a text, in which special tokens become theirs."""
        values = read_body(await self._body(request))
        return JSONResponse(await asyncio.to_thread(tokenize, values, self.served))

    async def detokenize(self, request: Request) -> Response:
        """/detokenize: the text of ids."""
        values = read_body(await self._body(request))
        return JSONResponse(await asyncio.to_thread(detokenize, values, self.served))

    async def tokenizer_info(self, request: Request) -> Response:
        """/tokenizer_info: special tokens and the chat template."""
        del request
        served = self.served
        names = {i: token for token, i in served.tokenizer.special.items()}
        values: dict[str, Any] = {"tokenizer_class": type(served.tokenizer).__name__}
        values["eos_token"] = names.get(served.tokenizer.eod_id or -1)
        values["bos_token"] = names.get(served.beginning[0]) if served.beginning else None
        values["chat_template"] = served.chat.source if served.chat is not None else None
        return JSONResponse(values)

    async def embeddings(self, request: Request) -> Response:
        """/v1/embeddings."""
        del request
        raise RequestError(
            f"{self.served.name} is a language model, which is not trained to give embeddings of "
            "texts. Use a model that is.",
            status=404,
            code="unsupported_endpoint",
        )

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
        """/health: 200 if texts can be made.

        Anybody may ask, so that the answer never has the text of an exception; the log does.
        """
        del request
        worker = self.worker
        problem = None
        if not worker.is_alive:
            problem = "the engine has ended"
        elif worker.failures_in_a_row >= _FAILURES_OF_ILL_HEALTH:
            problem = "the engine failed several times in a row"
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failing", "problem": problem}, 503)

    async def show_metrics(self, request: Request) -> Response:
        """/metrics."""
        del request
        self.metrics.open.set(self._num_open)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            RequestError: the body is too long or of another type, or other clients send so much
                that there is no memory for it.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError("the content type must be application/json.", 415)
        most = self.limits.body_bytes
        is_too_long = RequestError(f"the body has more than {most:,} bytes. Send less.", 413)
        content = bytearray()
        dropped = 0
        try:
            async for part in request.stream():
                if len(content) + len(part) > most or dropped:
                    # Many clients read the answer only when they have sent all of the body.
                    dropped += len(part)
                    if dropped > _DROPPED_BODIES * most:
                        raise is_too_long
                    continue
                content += part
                self._num_received += len(part)
                if self._num_received > _BODIES_AT_ONCE * most:
                    raise RequestError(
                        "other requests that are being received fill the memory for bodies. "
                        "Try again later.",
                        status=503,
                        code="overloaded",
                    )
        finally:
            self._num_received -= len(content)
        if dropped:
            raise is_too_long
        return bytes(content)

    def _reserve(self, count: int) -> None:
        """Reserve places for `count` texts, before any work is done for them.

        Raises:
            RequestError: there are no places, or the engine has ended.
        """
        most = self.limits.texts
        if count > most:
            raise RequestError(
                f"{count} texts were requested at once, and this server makes or keeps waiting at "
                f"most {most}. Send several requests.",
                param="n",
            )
        if not self.worker.is_alive:
            raise RequestError(
                "the engine has ended; the server's log says why. Start the server again.", 503
            )
        if self._num_open + count > most:
            raise RequestError(
                f"{self._num_open} texts are being made or wait, and at most {most} may. Try again "
                "later.",
                429,
                code="overloaded",
            )
        self._num_open += count

    async def _answer(self, request: Request, read: _Reader, is_chat: bool) -> Response:
        """Answer a request for texts.

        Args:
            request: the request.
            read: checks its values.
            is_chat: whether it is a chat.
        """
        content = await self._body(request)
        # Parsing and encoding take their time, which the tokens of other clients don't wait for.
        checked = await asyncio.to_thread(lambda: read(read_body(content), self.served))
        count = checked.num_texts
        self._reserve(count)
        texts: _RequestTexts | None = None

        def end() -> None:
            if texts is not None:
                texts.leave()
            self._num_open -= count

        is_streaming = False
        try:
            encoded = await asyncio.to_thread(lambda: encode(checked, self.served))
            self.metrics.prompt_tokens.inc(encoded.prompt_tokens)
            texts = _RequestTexts(self, encoded)
            answers = ResponseBuilder(encoded, self.served, is_chat)
            self.worker.submit(texts.jobs)
            if encoded.options.stream:
                is_streaming = True
                return _Stream(self._parts(texts, answers), end)
            return await _while_there(request, self._whole(texts, answers))
        finally:
            if not is_streaming:
                end()

    async def _whole(self, texts: _RequestTexts, answers: ResponseBuilder) -> Response:
        """All texts at once."""
        parts: list[list[TextChunk]] = [[] for _ in texts.jobs]
        while texts.is_open:
            index, part = await texts.parts.get()
            texts.note(index, part)
            parts[index].append(part)
        return JSONResponse(answers.whole(parts))

    async def _parts(self, texts: _RequestTexts, answers: ResponseBuilder) -> AsyncIterator[str]:
        """Server-sent events."""
        counted = 0
        try:
            while texts.is_open:
                index, part = await texts.parts.get()
                texts.note(index, part)
                counted += answers.num_tokens(part)
                frame = answers.part(index, part)
                if frame is not None:
                    yield event(frame)
            if texts.request.options.counts_stream:
                yield event(answers.last_part(counted))
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield event(error.body())


async def _while_there(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what some work gives. ClientDisconnect: the client left before, and the work has
    ended.
    """
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
    """Wait until the client has left; its body must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def make_app(served: ServedModel, worker: EngineWorker, limits: Limits) -> Starlette:
    """The application.

    Args:
        served: what is served.
        worker: that has begun.
        limits: what is taken on.
    """
    server = _ServerState(served, worker, limits)

    def route(
        path: str, answer: Callable[[Request], Awaitable[Response]], method: str, is_open: bool
    ) -> Route:
        async def guarded(request: Request) -> Response:
            response = await _guarded(request, answer, limits, is_open)
            server.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, guarded, methods=[method])

    return Starlette(
        routes=[
            route("/v1/completions", server.completions, "POST", False),
            route("/v1/chat/completions", server.chat, "POST", False),
            route("/v1/embeddings", server.embeddings, "POST", False),
            route("/tokenize", server.tokenize, "POST", False),
            route("/detokenize", server.detokenize, "POST", False),
            route("/tokenizer_info", server.tokenizer_info, "GET", False),
            route("/v1/models", server.models, "GET", False),
            route("/v1/models/{name:path}", server.model, "GET", False),
            route("/health", server.health, "GET", True),
            route("/metrics", server.show_metrics, "GET", False),
        ],
        middleware=[Middleware(_BrowserGuard, limits=limits)],
        exception_handlers={HTTPException: _http_error},
    )


class _BrowserGuard:
    """Refuses what web pages in a browser may send to a server that asks for no key.

    A page may send requests to any address that its browser reaches. Two headers, which no page
    can set or leave out, give it away: `Host` has the name in the page's address, which is none of
    this machine's own if an attacker's domain leads here (DNS rebinding); and `Origin` comes with
    every POST of a page.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http":
            error = self._problem(Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await _error_response(error)(scope, receive, send)

    def _problem(self, headers: Headers) -> RequestError | None:
        hosts = self._limits.hosts
        if hosts and _host_name(headers.get("host", "")) not in hosts:
            known = ", ".join(hosts)
            return RequestError(
                f"the Host header must be one of {known}, since the server listens on this "
                "machine alone. Use such an address.",
                status=403,
                code="host_not_allowed",
            )
        if not self._limits.keys and "origin" in headers:
            return RequestError(
                "requests of web pages (with an Origin header) are refused, since this server "
                "asks for no key. Start it with a key, and send that.",
                status=403,
                code="origin_not_allowed",
            )
        return None


def _host_name(value: str) -> str:
    """Return the name in a Host header, without its port."""
    return re.sub(r":[0-9]*$", "", value.strip().lower())


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a path or a method that there is not, in the API's form."""
    assert isinstance(error, HTTPException)
    path = escape_controls(request.url.path)[:200]
    what = f"{request.method[:20]} {path}: {error.detail}."
    if error.status_code == 404:
        what = f"there is no {path} here. Known are {', '.join(_PATHS)}."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        what = f"{request.method[:20]} is not possible for {path}. Use {allowed}."
    answer = _error_response(RequestError(what, error.status_code))
    answer.headers.update(error.headers or {})
    return answer


def _error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())


def _has_key(request: Request, keys: Sequence[str]) -> bool:
    """Return whether a request has one of the keys, in time that says nothing about them."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are bytes, which are read as Latin-1. Digests have the same length for any key.
    digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
    found = False
    for key in keys:
        found |= hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
    return found and scheme.lower() == "bearer"


async def _guarded(
    request: Request,
    answer: Callable[[Request], Awaitable[Response]],
    limits: Limits,
    is_open: bool,
) -> Response:
    """Return the answer to a request, or an error in the API's form."""
    try:
        if limits.keys and not is_open and not _has_key(request, limits.keys):
            raise RequestError(
                "the API key is missing or wrong. Send the header Authorization: Bearer KEY.",
                401,
                code="invalid_api_key",
            )
        return await answer(request)
    except RequestError as error:
        return _error_response(error)
    except ClientDisconnect:
        # Nobody reads this.
        return Response(status_code=499)
    except Exception:
        # A bug of ours, which the client can't fix.
        log_exception()
        return _error_response(
            RequestError("the server failed; its log says more. Try again.", 500)
        )
