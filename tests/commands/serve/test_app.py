"""The application over a controllable worker, so that each moment can be chosen."""

import asyncio
import contextlib
import dataclasses
import datetime
import http.client
import json
import socket
import threading
import time
import types

import pytest
import uvicorn
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from data_pipeline.tokenizer import ByteTokenizer, load_tokenizer
from maxtrain.commands.serve.answers import ResponseBuilder
from maxtrain.commands.serve.app import Limits, make_app
from maxtrain.commands.serve.connections import ConnectionLimits, limited_protocol
from maxtrain.commands.serve.protocol import ServedModel, encode, read_chat, read_completion
from maxtrain.commands.serve.request_error import RequestError, log_exception
from maxtrain.commands.serve.tool_formats import CompletionReader
from maxtrain.commands.serve.worker import EngineWorker, TextChunk
from maxtrain.inference.chat import Chat
from maxtrain.inference.text import OutputToken

KEY = "Schlüssel"
LIMITS = Limits(5, 10**7, (KEY, "another"), ())


class ScriptedWorker(EngineWorker):
    """Answers with the letter a, `count` times, one every `seconds`."""

    def __init__(self):
        super().__init__(lambda: None, ByteTokenizer())
        self.count = 1
        self.seconds = 0.0
        self.cancelled = threading.Event()
        self.alive = True

    @property
    def is_alive(self):
        return self.alive

    def submit(self, jobs):
        threading.Thread(target=self._answer, args=(jobs,), daemon=True).start()

    def _answer(self, jobs):
        for number in range(self.count):
            if self.cancelled.wait(self.seconds):
                return
            for job in jobs:
                job.tell(TextChunk("a", [OutputToken(97, -1.0, number)], None))
        for job in jobs:
            job.tell(TextChunk("", [], "length"))

    def cancel(self, jobs):
        self.cancelled.set()


class SlowTokenizer(ByteTokenizer):
    """Encodes when it may."""

    def __init__(self):
        super().__init__()
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.begun = threading.Event()
        self.num_encoded = 0

    def encode(self, text):
        self.num_encoded += 1
        self.begun.set()
        assert self.may_encode.wait(60)
        return super().encode(text)


class Site:
    """The application behind a port of this machine, in a thread of this process."""

    def __init__(self, folder):
        self.worker = ScriptedWorker()
        self.tokenizer = SlowTokenizer()
        chat = Chat(load_tokenizer(folder), folder, "chatml")
        served = ServedModel("small", (), self.tokenizer, (), chat, 4096, 257, 0)
        app = make_app(served, self.worker, LIMITS)
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        http_protocol = limited_protocol(ConnectionLimits(100, 30))
        config = uvicorn.Config(app, http=http_protocol, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[listening]))
        self.thread.start()

    def ask(self, method, path, body=None, key=None):
        """Status, headers and body; `key`: bytes, if not those of the right one."""
        key = key or KEY.encode()
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        headers = {"Content-Type": "application/json", "Authorization": b"Bearer " + key}
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read().decode()
        return answer.status, answer.headers, content

    def post(self, path="/v1/completions", body=b"", **values):
        """Status and JSON."""
        status, _, content = self.ask("POST", path, body or json.dumps(values).encode())
        return status, json.loads(content)

    def metrics(self):
        lines = self.ask("GET", "/metrics")[2].splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@pytest.fixture(scope="module")
def running(pretrained_directory):
    site = Site(pretrained_directory)
    yield site
    site.server.should_exit = True
    site.thread.join(60)


@pytest.fixture
def site(running):
    """A site with a worker that answers at once."""
    worker = running.worker
    worker.count = 1
    worker.seconds = 0.0
    worker.alive = True
    worker.failures_in_a_row = 0
    worker.problem = None
    worker.cancelled.clear()
    return running


def test_a_client_that_leaves_before_a_whole_answer_takes_its_text_along(site):
    """However often parts come."""
    site.worker.count = 10_000
    site.worker.seconds = 0.02
    before = site.metrics()["maxtrain_cancelled_texts_total"]
    body = b'{"prompt": "a"}'
    with socket.create_connection(site.address) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
        kind = f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        client.sendall(head.encode() + kind.encode() + body)
        time.sleep(0.3)
        assert not site.worker.cancelled.is_set()
    assert site.worker.cancelled.wait(30)
    assert site.metrics()["maxtrain_cancelled_texts_total"] == before + 1


def test_while_a_long_prompt_is_encoded_others_are_answered(site):
    site.tokenizer.may_encode.clear()
    site.tokenizer.begun.clear()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(site.post(prompt="a")))
    thread.start()
    try:
        assert site.tokenizer.begun.wait(30)
        assert site.ask("GET", "/health")[0] == 200
        assert not answers
    finally:
        site.tokenizer.may_encode.set()
        thread.join(60)
    assert answers[0][0] == 200


def test_too_many_texts_are_refused_before_they_are_encoded():
    class UnencodableTokenizer(ByteTokenizer):
        def encode(self, text):
            raise AssertionError("this was not to be encoded")

    served = ServedModel("small", (), UnencodableTokenizer(), (), None, 4096, 257, 0)
    with pytest.raises(
        RequestError, match="256 texts were requested at once; at most 128 are allowed"
    ):
        read_completion({"prompt": ["a", "b"], "n": 128}, served)


def test_more_texts_than_can_ever_wait_are_an_error_of_the_client(site):
    status, answer = site.post(prompt="a", n=6)
    assert status == 400 and answer["error"]["param"] == "n"
    assert "makes or keeps waiting at most 5. Send several requests." in answer["error"]["message"]
    assert site.post(prompt="a", n=5)[0] == 200


def test_texts_for_which_there_is_no_place_now_are_to_come_later(site):
    site.worker.count = 2
    site.worker.seconds = 0.5
    answers = []
    thread = threading.Thread(target=lambda: answers.append(site.post(prompt="a", n=3)))
    thread.start()
    while site.metrics()["maxtrain_open_texts"] != 3:
        time.sleep(0.02)
    before = site.tokenizer.num_encoded
    status, headers, content = site.ask("POST", "/v1/completions", b'{"prompt": "a", "n": 3}')
    assert status == 429 and headers["Retry-After"] == "1"
    assert json.loads(content)["error"]["type"] == "rate_limit_error"
    assert site.tokenizer.num_encoded == before
    thread.join(60)
    assert answers[0][0] == 200


def test_without_an_engine_requests_are_refused_at_once(site):
    site.worker.alive = False
    status, headers, content = site.ask("POST", "/v1/completions", b'{"prompt": "a"}')
    assert status == 503 and headers["Retry-After"] == "1"
    assert json.loads(content)["error"]["type"] == "server_error"
    assert site.ask("GET", "/health")[0] == 503


def test_one_failed_step_is_counted_and_is_no_ill_health(site):
    before = site.metrics()["maxtrain_failed_steps"]
    site.worker.num_failures += 2
    site.worker.failures_in_a_row = 2
    site.worker.problem = "RuntimeError: no memory"
    assert site.ask("GET", "/health")[0] == 200
    assert site.metrics()["maxtrain_failed_steps"] == before + 2
    site.worker.failures_in_a_row = 3
    status, _, content = site.ask("GET", "/health")
    # Anybody may ask, so that the exception is none of the answer.
    assert status == 503 and "memory" not in content
    assert json.loads(content)["problem"] == "the engine failed several times in a row"


HUGE = b"1" + b"0" * 400
ASKED = b'"messages": [{"role": "user", "content": "a"}]'
TOOL = b'{"type": "function", "function": {"name": "f"}}'
SURROGATE = b'"hi \\ud83d"'


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (b'"prompt": ' + SURROGATE, "prompt can't be encoded"),
        (b'"prompt": "a", "\\ud83d": 1', r"\ud83d is not supported here"),
        (b'"prompt": "a", "temperature": ' + HUGE, "temperature=1000"),
        (b'"prompt": "a", "min_p": ' + HUGE, "must be a number"),
        (b'"prompt": "a", "stop": ' + SURROGATE, "stop has the lone surrogate U+D83D"),
        (b'"prompt": "a", "model": ' + SURROGATE, "is not served here"),
        (b'"prompt": "a", "n": ' + HUGE, "texts were requested at once"),
        (b'"prompt": "a", "max_tokens": ' + HUGE, "is too much"),
        (b'"prompt": "a", "n": 0', "n=0 must be an integer of at least 1"),
        (b'"prompt": "a", "n": false', "n=False must be an integer of at least 1"),
        (b'"prompt": "a", "stream": ""', "stream= must be true or false"),
        (b'"prompt": "a", "stream_options": {}', "stream_options is for streams alone"),
        (b'"prompt": "a", "stream_options": []', "stream_options may have include_usage"),
        (
            b'"prompt": "a", "stream": true, "stream_options": {"include_obfuscation": "x"}',
            "include_obfuscation=x must be true or false",
        ),
        (
            b'"prompt": "a", "stream": true, "stream_options": {"include_obfuscation": true}',
            "include_obfuscation=true is not supported here",
        ),
        (
            b'"prompt": "a", "stream": true, "stream_options": {"include_usage": 0}',
            "include_usage=0 must be true or false",
        ),
        (b'"prompt": "a", "presence_penalty": false', "presence_penalty=False must be a number"),
        (b'"prompt": "a", "frequency_penalty": 3', "frequency_penalty=3 must be from -2 to 2"),
        (b'"prompt": "a", "best_of": true', "best_of=True must be an integer"),
        (b'"prompt": "a", "best_of": 2', "best_of=2 must be n=1"),
        (b'"prompt": "a", "logprobs": 21', "logprobs=21 must be at most 20"),
        (b'"prompt": "a", "logprobs": ' + HUGE, "must be at most 20"),
        (b'"prompt": "a", "echo": 1', "echo=1 must be true or false"),
        (b'"prompt": "a", "suffix": "b"', 'suffix="b" is not supported'),
        (b'"prompt": "a", "logit_bias": []', "logit_bias must be an object"),
        (b'"prompt": "a", "logit_bias": {"a": 1}', "logit_bias: 'a' must be an id below 257"),
        (b'"prompt": "a", "logit_bias": {"257": 1}', "logit_bias: '257' must be an id below 257"),
        (b'"prompt": "a", "logit_bias": {"1": "a"}', "with a number from -100 to 100"),
        (b'"prompt": "a", "logit_bias": {"1": 101}', "logit_bias=101.0 of token 1"),
        (b'"prompt": "a", "stop_token_ids": [257]', "stop_token_ids must be a list"),
        (b'"prompt": "a", "stop": "' + b"a" * 257 + b'"', "at most 256 are possible"),
        (b'"prompt": "a", "messages": []', "messages is not supported here"),
    ],
)
def test_mistakes_of_a_completion_are_the_client_s(site, values, message):
    status, answer = site.post(body=b"{" + values + b"}")
    assert status in (400, 404) and message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            b'"messages": [{"role": "user", "content": ' + SURROGATE + b"}]",
            "messages[0].content has the lone surrogate U+D83D at character 3",
        ),
        (
            b'"messages": [{"role": "user", "content": "a", ' + SURROGATE + b": 1}]",
            "messages[0] has the lone surrogate U+D83D at character 3",
        ),
        (
            b'"messages": [{"role": "user", "content": "a"}], "logprobs": 1',
            "logprobs=1 must be true or false",
        ),
        (ASKED + b', "n": 0', "n=0 must be an integer"),
        (ASKED + b', "top_logprobs": 3', "top_logprobs is for logprobs=true alone"),
        (ASKED + b', "logprobs": true, "top_logprobs": 21', "top_logprobs=21 must be at most 20"),
        (ASKED + b', "tools": {}', "tools must be a list"),
        (ASKED + b', "tools": [{"type": "x"}]', 'tools[0] must be {"type": "function"'),
        (ASKED + b', "tools": [' + TOOL + b", " + TOOL + b"]", "tools[1].function.name must be"),
        (ASKED + b', "tool_choice": "required"', "tool_choice needs tools"),
        # chatml has no form for calls.
        (ASKED + b', "tools": [' + TOOL + b"]", "has no form of tool calls that is known here"),
        (ASKED + b', "response_format": {"type": "xml"}', "response_format must be"),
        (ASKED + b', "response_format": "json"', "response_format must be"),
        (
            ASKED + b', "response_format": {"type": "json_schema", "json_schema": {"schema": []}}',
            "response_format.json_schema.schema must be a JSON object",
        ),
        (ASKED + b', "chat_template_kwargs": []', "chat_template_kwargs must be an object"),
        (
            ASKED + b', "chat_template_kwargs": {"messages": []}',
            "the variable 'messages' cannot be set",
        ),
        (
            ASKED + b', "chat_template_kwargs": {"a": "<|im_end|>"}',
            "chat_template_kwargs.a has the special token",
        ),
        (
            b'"messages": [{"role": "user", "content": [{"type": "image_url"}]}]',
            "a part of type 'image_url' is not supported",
        ),
        (
            b'"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
            b'"arguments": "{"}}]}]',
            "arguments of a tool call are not JSON",
        ),
        (ASKED + b', "modalities": ["audio"]', 'modalities=["audio"] is not supported'),
    ],
)
def test_mistakes_of_a_chat_are_the_client_s(site, values, message):
    status, answer = site.post("/v1/chat/completions", b"{" + values + b"}")
    assert status == 400 and message in answer["error"]["message"]


MESSAGES = [{"role": "user", "content": "a"}]
SCHEMA_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "schemas": {}}}
# Each key of OpenAI's API for chats that is not honoured, with values that have no effect, and
# values that change an answer and so are refused.
UNHONOURED = {
    "audio": ([None], [{"voice": "alloy", "format": "wav"}]),
    "function_call": ([None, "none", "auto"], ["required", {"name": "f"}]),
    "functions": ([None, []], [[{"name": "f"}]]),
    "metadata": ([None, {"a": "b"}], []),
    "modalities": ([None, ["text"]], [["text", "audio"]]),
    "moderation": ([None], [{"model": "m"}]),
    "prediction": ([None], [{"type": "content", "content": "a"}]),
    "prompt_cache_key": ([None, "a"], []),
    "prompt_cache_options": ([None, {}], []),
    "prompt_cache_retention": ([None, "24h"], []),
    "reasoning_effort": ([None], ["low", "none"]),
    "safety_identifier": ([None, "a"], []),
    "service_tier": ([None, "auto", "default"], ["flex"]),
    "store": ([None, False], [True]),
    "user": ([None, "a"], []),
    "verbosity": ([None, "medium"], ["low", "high"]),
    "web_search_options": ([None], [{}]),
}
HONOURED = {
    *("frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
    *("messages", "model", "n", "parallel_tool_calls", "presence_penalty", "response_format"),
    *("seed", "stop", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs"),
    "top_p",
}


def test_every_key_of_the_api_has_a_rule():
    keys = chat_params.CompletionCreateParamsBase.__annotations__
    assert set(keys) == HONOURED | UNHONOURED.keys()
    served = no_tokenizer_served()
    for key, (neutral, _) in UNHONOURED.items():
        for value in neutral:
            read_chat({"messages": MESSAGES, key: value}, served)
    for key in completion_params.CompletionCreateParamsBase.__annotations__:
        if key not in ("prompt", "model"):
            read_completion({"prompt": "a", key: None}, served)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key, (_, refused) in UNHONOURED.items() for value in refused),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("response_format", {"type": "text", "json_schema": {}}),
        ("response_format", SCHEMA_FORM),
        ("messages", [{"role": "assistant", "content": "a", "audio": {"id": "1"}}]),
        ("messages", [{"role": "assistant", "content": "a", "refusal": "No."}]),
        ("max_completion_tokens", "3"),
        ("unknown", None),
    ],
)
def test_what_can_not_be_honoured_is_refused(key, value):
    with pytest.raises(RequestError) as raised:
        read_chat({"messages": MESSAGES, key: value}, no_tokenizer_served())
    assert raised.value.status == 400 and raised.value.param == key
    if key not in ("messages", "max_completion_tokens", "response_format"):
        with pytest.raises(RequestError) as raised:
            read_completion({"prompt": "a", key: value}, no_tokenizer_served())
        assert raised.value.param == key


@pytest.mark.parametrize(
    ("prompt", "beginning", "bad"),
    [("aé", (), "195 of token 1"), ("a", (120, 99), "120 of token 0"), ([0, 100], (), "100 of")],
)
def test_ids_that_the_model_lacks_are_refused_before_anything_is_computed(prompt, beginning, bad):
    """A tokenizer whose special tokens are beyond the embedding gives such ids."""
    served = ServedModel("small", (), ByteTokenizer(), beginning, None, 4096, 100, 0)
    with pytest.raises(RequestError, match=bad) as raised:
        encode(read_completion({"prompt": prompt}, served), served)
    assert raised.value.status == 400 and raised.value.param == "prompt"
    served = served._replace(beginning=())
    assert encode(read_completion({"prompt": "a"}, served), served).prompts == [[97]]


def test_a_template_that_writes_ids_that_the_model_lacks_is_refused(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = Chat(ByteTokenizer(), "bytes", str(template))
    served = ServedModel("small", (), ByteTokenizer(), (), chat, 4096, 100, 0)
    encode(read_chat({"messages": MESSAGES}, served), served)
    with pytest.raises(RequestError, match="122 of token 1") as raised:
        encode(read_chat({"messages": [{"role": "user", "content": "az"}]}, served), served)
    assert raised.value.status == 400 and raised.value.param == "messages"


def test_strict_arguments_are_promised_where_they_can_be_kept():
    """A grammar holds them where a call must come, and nothing does with tool_choice=auto."""
    tokenizer = ByteTokenizer()
    chat = types.SimpleNamespace(source="{{ tools }}<tool_call>")
    served = ServedModel("small", (), tokenizer, (), chat, 4096, 257, 0)
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named, "none"):
        read_chat({"messages": MESSAGES, "tools": [tool], "tool_choice": choice}, served)
    for values in ({}, {"tool_choice": "auto"}):
        with pytest.raises(RequestError) as raised:
            read_chat({"messages": MESSAGES, "tools": [tool], **values}, served)
        assert raised.value.status == 400 and raised.value.param == "tools"
    for wrong in (named | {"type": "custom"}, {"function": {"name": "f"}}):
        with pytest.raises(RequestError) as raised:
            read_chat({"messages": MESSAGES, "tools": [tool], "tool_choice": wrong}, served)
        assert raised.value.param == "tool_choice"


def no_tokenizer_served():
    """A model with a chat template, for requests that are checked and not encoded."""
    chat = types.SimpleNamespace(source="")
    return ServedModel("small", (), ByteTokenizer(), (), chat, 4096, 257, 0)


def test_more_candidates_than_there_are_tokens_are_all(site):
    """400 digits are a valid number, however unlikely."""
    assert site.post(body=b'{"prompt": "a", "top_k": ' + HUGE + b"}")[0] == 200


def test_what_clients_send_without_effect_is_taken(site):
    options = {"include_obfuscation": False, "include_usage": True}
    body = {"prompt": "a", "stream": True, "stream_options": options, "presence_penalty": 0.0}
    status, _, content = site.ask("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200 and content.endswith("data: [DONE]\n\n")
    assert site.post(prompt="a", stream=None, n=None, stream_options=None)[0] == 200


def test_a_bug_of_ours_is_an_answer_and_is_counted(site, monkeypatch, capfd):
    def fail(values, served):
        raise ZeroDivisionError("a bug")

    name = 'maxtrain_requests_total{path="/v1/completions",status="500"}'
    before = site.metrics().get(name, 0)
    monkeypatch.setattr("maxtrain.commands.serve.app.read_completion", fail)
    status, answer = site.post(prompt="a")
    assert status == 500 and answer["error"]["type"] == "server_error"
    assert site.metrics()[name] == before + 1
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_a_key_may_have_any_characters(site):
    assert site.ask("GET", "/v1/models")[0] == 200
    assert site.ask("GET", "/v1/models", key=b"Schlussel")[0] == 401
    assert site.ask("GET", "/v1/models", key=KEY.encode("latin-1"))[0] == 401
    assert site.ask("GET", "/v1/models", key=b"another")[0] == 200
    status, headers, content = site.ask("GET", "/v1/models", key=b"anothe")
    assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
    assert json.loads(content)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/v1/\x1b[31m", None, 404),
        ("POST", "/v1/responses", b"{}", 404),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("DELETE", "/v1/models", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[" * 5000, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "prompt": "b"}', 400),
        ("POST", "/v1/completions", b'{"prompt": "' + b"a" * 10**7 + b'"}', 413),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "wizard", "content": ""}]}', 400),
    ],
)
def test_errors_have_the_form_of_the_api(site, method, path, body, status):
    connection = http.client.HTTPConnection(*site.address, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": b"Bearer another"}
    with contextlib.closing(connection):
        connection.putrequest(method, path.replace("\x1b", "%1b"))
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body or b"")))
        connection.endheaders()
        with contextlib.suppress(ConnectionError):
            connection.send(body or b"")
        answer = connection.getresponse()
        content = answer.read().decode()
    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/json"
    error = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and "\x1b" not in error["message"]
    if status == 405:
        assert answer.headers["Allow"]


def test_what_a_client_sent_is_logged_without_control_characters(capsys):
    try:
        raise ValueError("\x1b[2J\r\x9b")
    except ValueError:
        log_exception()
    logged = capsys.readouterr().err
    assert "ValueError: \\x1b[2J\\r\\x9b\n" in logged and "\x1b" not in logged


def in_process(limits, headers, path="/v1/models"):
    """The status of a GET, without a socket."""
    served = ServedModel("small", (), ByteTokenizer(), (), None, 4096, 257, 0)
    app = make_app(served, ScriptedWorker(), limits)
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "headers": pairs,
        "query_string": b"",
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"]


HOSTS = ("127.0.0.1", "localhost", "[::1]")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost"}, 200),
        ({"host": "LocalHost:8000"}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "[::1]"}, 200),
        # DNS rebinding: a name of an attacker's that leads here.
        ({"host": "evil.example:8000"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "[::1].evil.example"}, 403),
        ({"host": ""}, 403),
        ({}, 403),
        # A page of another site, or of a file.
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
    ],
)
def test_web_pages_can_not_use_a_server_without_a_key(headers, status):
    assert in_process(Limits(5, 10**7, (), HOSTS), headers) == status


def test_a_page_that_knows_the_key_may_ask():
    limits = Limits(5, 10**7, ("key",), ())
    headers = {"host": "any.example", "origin": "https://any.example"}
    assert in_process(limits, headers) == 401
    for given in ("Bearer key", "bearer  key"):
        assert in_process(limits, headers | {"authorization": given}) == 200
    for given in ("Bearer key2", "Bearer ke", "Basic key", "key", "Bearer", ""):
        assert in_process(limits, headers | {"authorization": given}) == 401


def test_texts_that_can_never_fit_are_refused_before_they_are_encoded(pretrained_directory):
    class UnencodableTokenizer(ByteTokenizer):
        def encode(self, text):
            raise AssertionError("this was not to be encoded")

    chat = Chat(load_tokenizer(pretrained_directory), pretrained_directory, "chatml")
    served = ServedModel(
        "small", (), UnencodableTokenizer(), (), chat, 100, 257, 0, longest_token=2
    )
    for prompt in ("a" * 201, ["a", "a" * 201], [1] * 101):
        with pytest.raises(RequestError) as raised:
            read_completion({"prompt": prompt}, served)
        assert raised.value.code == "context_length_exceeded"
    one = {"role": "user", "content": "a"}
    for messages in ([one] * 101, [{"role": "user", "content": "a" * 200}]):
        with pytest.raises(RequestError) as raised:
            read_chat({"messages": messages}, served)
        assert raised.value.code == "context_length_exceeded"
    read_completion({"prompt": "a" * 200}, served)


def test_log_probabilities_have_bytes_and_places():
    served = ServedModel("small", (), ByteTokenizer(), (), None, 4096, 257, 0)
    request = encode(read_completion({"prompt": "a", "logprobs": 0}, served), served)
    tokens = [OutputToken(0xC3, -1.0, 0), OutputToken(0xA9, -2.0, 0), OutputToken(97, -3.0, 1)]
    told = ResponseBuilder(request, served, is_chat=False).whole(
        [[TextChunk("éa", tokens, "length")]]
    )
    assert told["choices"][0]["logprobs"] == {
        "tokens": ["\ufffd", "\ufffd", "a"],
        "token_logprobs": [-1.0, -2.0, -3.0],
        "top_logprobs": None,
        "text_offset": [0, 0, 1],
    }
    request = dataclasses.replace(request, reader=lambda: CompletionReader(None, {}))
    told = ResponseBuilder(request, served, is_chat=True).whole(
        [[TextChunk("éa", tokens, "length")]]
    )
    content = told["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [97]]


def test_the_date_of_a_template_is_that_of_the_day(pretrained_directory, tmp_path, monkeypatch):
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(pretrained_directory)
    chat = Chat(tokenizer, pretrained_directory, str(template))

    class Later(datetime.date):
        @classmethod
        def today(cls):
            return cls(2031, 5, 17)

    monkeypatch.setattr("maxtrain.inference.chat.datetime.date", Later)
    ids = chat.ids([{"role": "user", "content": "!"}])
    assert tokenizer.decode(ids) == "2031-05-17!"
