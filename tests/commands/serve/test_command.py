"""The server, queried by the real client of OpenAI over the network of this machine."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import openai
import pytest
from flax import nnx

from data_pipeline.tokenizer import load_tokenizer
from maxtrain.commands import import_hf
from maxtrain.commands.evaluate import lm_eval
from maxtrain.commands.serve import command as server
from maxtrain.config.schema import LoraConfig
from maxtrain.inference.complete import complete
from maxtrain.models.adapt import split_adapters
from maxtrain.models.registry import build_model
from maxtrain.train_step.trainable import join
from maxtrain.trainer.saved_run import special_beginning
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.peft import write_adapters
from tests.support.pretrained import write as write_pretrained

pytestmark = pytest.mark.processes
KEY = "a key"


class Served:
    """A server in a process of its own."""

    def __init__(self, *options, cwd=None):
        command = [sys.executable, "-m", "maxtrain.cli", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(
            [*command, "--chat-template", "chatml"],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {server.KEY: KEY},
        )
        # It says where when it can answer.
        self.line = self.process.stdout.readline()
        assert "listening on" in self.line, self.process.communicate()[1]
        self.url = self.line.split()[-1]
        self.root = self.url.removesuffix("/v1")
        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=120)

    def metrics(self):
        """Numbers by name."""
        request = urllib.request.Request(
            f"{self.root}/metrics", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def post(self, body, path="/v1/completions", **headers):
        """Status and body of a plain request."""
        named = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{self.root}{path}", body, named)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        out, errors = self.process.communicate(timeout=120)
        return self.process.returncode, out, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    write_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Some in PEFT's files, and the model with them."""
    model, config = load_pretrained(folder)
    lora = LoraConfig(rank=2, targets=(r"attention\.(q|o)",))
    config = dataclasses.replace(config, lora=lora)
    with_them = jax.jit(lambda: build_model(config, model.precision, 0))()
    graphdef, variables = nnx.split(with_them)
    _, added = split_adapters(variables)
    added = jax.tree.map(lambda x: x + 0.5, added)
    place = tmp_path_factory.mktemp("adapters")
    write_adapters(place, added, config, str(folder))
    return place, nnx.merge(graphdef, join(nnx.state(model), added))


@pytest.fixture(scope="module")
def served(folder, adapters):
    """One server for all tests that leave it as it is."""
    of_slots = ("--slots", "2", "--waiting", "3")
    served = Served(
        "--hf", str(folder), "--name", "small", *of_slots, "--adapter", f"tuned={adapters[0]}"
    )
    yield served
    code, _, errors = served.end()
    assert code == 0 and "Traceback" not in errors, errors
    assert f"tuned: adapters of rank 2, made for {folder}" in errors


@pytest.fixture(scope="module")
def expected(folder):
    """Function that returns the output of the model by itself."""
    model, _ = load_pretrained(folder)
    tokenizer = load_tokenizer(folder)

    def say(prompt, count):
        begin = special_beginning(tokenizer) or None
        return complete(model, tokenizer, [prompt], begin=begin, max_tokens=count, temperature=0)[0]

    return say


def greedy(served, prompt, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    return served.client.completions.create(model="small", prompt=prompt, **options)


@pytest.mark.every_dose
@pytest.mark.long
def test_a_completion_is_what_generate_writes(served, expected):
    answer = greedy(served, "Hello")
    assert answer.choices[0].text == expected("Hello", 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24 and answer.usage.prompt_tokens == 6
    assert answer.model == "small" and answer.object == "text_completion"


@pytest.mark.long
@pytest.mark.every_dose
def test_parts_of_a_stream_are_the_whole(served, expected):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = greedy(served, "Hello", **options)
    texts = [part.choices[0].text for part in parts]
    assert len(texts) > 1 and "".join(texts) == expected("Hello", 24)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        "length"
    ]
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert len({part.id for part in parts}) == 1


@pytest.mark.long
@pytest.mark.every_dose
def test_several_prompts_and_ids(served, expected):
    tokenizer = load_tokenizer(served_folder(served))
    ids = tokenizer.encode("Hello").tolist()
    answer = greedy(served, ["Hello", "What is this?"])
    assert [choice.text for choice in answer.choices] == [
        expected("Hello", 24),
        expected("What is this?", 24),
    ]
    assert [choice.index for choice in answer.choices] == [0, 1]
    told = greedy(served, [ids, ids])
    assert told.usage.prompt_tokens == 2 * len(ids)
    assert told.choices[0].text == told.choices[1].text


def served_folder(served):
    return served.process.args[served.process.args.index("--hf") + 1]


@pytest.mark.long
@pytest.mark.every_dose
def test_a_seed_gives_the_same_texts_again(served):
    def ask(seed):
        answer = greedy(served, "Hello", temperature=1, n=2, seed=seed)
        return [choice.text for choice in answer.choices]

    first = ask(3)
    assert first == ask(3) and first[0] != first[1]
    assert ask(4) != first


@pytest.mark.long
@pytest.mark.every_dose
def test_a_chat_is_answered(served):
    messages = [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}],
        },
    ]
    options = {
        "model": "small",
        "messages": messages,
        "temperature": 0,
        "max_completion_tokens": 20,
    }
    answer = served.client.chat.completions.create(**options, logprobs=True)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert answer.object == "chat.completion"
    told = choice.logprobs.content
    assert len(told) == answer.usage.completion_tokens and all(token.logprob <= 0 for token in told)
    parts = list(served.client.chat.completions.create(**options, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[1].choices[0].delta.role is None
    assert "".join(part.choices[0].delta.content for part in parts) == choice.message.content


@pytest.mark.long
@pytest.mark.every_dose
def test_without_a_limit_an_answer_may_fill_the_context(served):
    messages = [{"role": "user", "content": "Go on."}]
    answer = served.client.chat.completions.create(
        model="small", messages=messages, extra_body={"min_p": 0.0, "top_k": 50}, seed=1
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    if answer.choices[0].finish_reason == "length":
        # The last token needs no place.
        assert answer.usage.total_tokens == 257


@pytest.mark.long
@pytest.mark.every_dose
def test_a_text_ends_before_a_stop_text(served, expected):
    text = expected("Hello", 24)
    stop = text[5:7]
    whole = text[: text.index(stop)]
    answer = greedy(served, "Hello", stop=[stop, "never"], logprobs=0)
    assert answer.choices[0].text == whole and answer.choices[0].finish_reason == "stop"
    # Tokens of the stop text and behind it are not returned.
    assert "".join(answer.choices[0].logprobs.tokens) == whole
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens)
    parts = list(greedy(served, "Hello", stop=stop, stream=True, logprobs=0))
    assert "".join(part.choices[0].text for part in parts) == whole
    told = [token for part in parts for token in part.choices[0].logprobs.tokens]
    assert "".join(told) == whole


@pytest.mark.long
@pytest.mark.every_dose
def test_log_probabilities_of_a_completion(served):
    answer = greedy(served, "Hello", logprobs=0)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == 24
    assert max(told.token_logprobs) <= 0
    assert "".join(told.tokens) == answer.choices[0].text
    assert told.text_offset == [len("".join(told.tokens[:number])) for number in range(24)]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("changes", "message", "param"),
    [
        ({"temperature": -1}, "temperature=-1", "temperature"),
        ({"top_p": 0}, "top_p=0 must be above 0", "top_p"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer of at least 1", "max_tokens"),
        ({"max_tokens": 400}, "is too much: after a prompt of", "max_tokens"),
        ({"prompt": "a" * 300}, "reads at most 256. Shorten it", None),
        ({"prompt": []}, "prompt must be a text", "prompt"),
        ({"prompt": [1, 100_000]}, "id 100000 of token 1 must be in", "prompt"),
        ({"logprobs": 21}, "logprobs=21 must be at most 20", "logprobs"),
        ({"stop": [""]}, "none of them empty", "stop"),
        ({"n": 1000}, "at most 128 are allowed", "n"),
        ({"frequency_penalty": 3}, "must be from -2 to 2", "frequency_penalty"),
        ({"extra_body": {"beam_width": 3}}, "beam_width is not supported here", "beam_width"),
        ({"seed": 1.5}, "seed=1.5 must be an integer", "seed"),
        ({"stream_options": {"a": 1}}, "stream_options may have include_usage", "stream_options"),
    ],
)
def test_what_can_not_be_answered_is_said(served, changes, message, param):
    options = {"model": "small", "prompt": "Hello"} | changes
    with pytest.raises(openai.BadRequestError, match=message.replace("?", r"\?")) as raised:
        served.client.completions.create(**options)
    assert raised.value.body["param"] == param
    assert raised.value.body["type"] == "invalid_request_error"


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: is empty"),
        ([{"role": "user", "content": "<|im_end|>"}], "has the special token"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only content of text"),
        ([{"role": "user", "content": 3}], "must be a text"),
    ],
)
def test_messages_that_are_none(served, messages, message):
    with pytest.raises(openai.BadRequestError, match=message):
        served.client.chat.completions.create(model="small", messages=messages)


@pytest.mark.long
@pytest.mark.every_dose
def test_another_model_is_not_served(served):
    with pytest.raises(openai.NotFoundError, match="is not served here, but 'small'"):
        served.client.completions.create(model="large", prompt="a")
    assert served.client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("large")


@pytest.mark.long
@pytest.mark.every_dose
def test_a_key_is_asked_for(served):
    wrong = served.client.with_options(api_key="another")
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        wrong.models.list()
    # Whoever looks after a server need not have it.
    with urllib.request.urlopen(f"{served.root}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok"}


@pytest.mark.long
@pytest.mark.every_dose
def test_bodies_that_are_none(served):
    assert served.post(b"{")[0] == 400
    assert served.post(b"[]")[0] == 400
    assert served.post(b'{"prompt": "a"}', Content_Type="text/plain")[0] == 415
    status, body = served.post(b'{"prompt": "' + b"a" * 11 * 2**20 + b'"}')
    assert status == 413 and "more than 10,485,760 bytes" in body
    # A name of this machine that another site made up.
    assert served.post(b'{"prompt": "a"}', Host="evil.example")[0] == 403


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def slow(served):
    """A stream of more tokens than anybody waits for."""
    return served.client.completions.create(
        model="small", prompt="Hello", max_tokens=240, temperature=1, seed=1, n=2, stream=True
    )


@pytest.mark.long
@pytest.mark.every_dose
def test_a_client_that_leaves_takes_its_texts_along(served):
    before = served.metrics()["maxtrain_cancelled_texts_total"]
    # Whether a text was done before its client left is for chance; not every time.
    for _ in range(5):
        stream = slow(served)
        next(iter(stream))
        stream.close()
        wait_for(lambda: served.metrics()["maxtrain_open_texts"] == 0)
    assert served.metrics()["maxtrain_cancelled_texts_total"] > before
    wait_for(lambda: served.metrics()["maxtrain_active_texts"] == 0)


@pytest.mark.long
@pytest.mark.every_dose
def test_more_than_may_wait_is_refused(served):
    """Two texts are generated and three may wait; with two already running five are too many, and
    no request is lost."""
    prompts = ["a", "b", "c", "d", "e"]
    with pytest.raises(openai.RateLimitError, match="Try again later") as raised:
        # Those on their way may be done before; not every time.
        for _ in range(5):
            with slow(served) as stream:
                next(iter(stream))
                greedy(served, prompts)
    assert raised.value.response.headers["retry-after"] == "1"
    wait_for(lambda: served.metrics()["maxtrain_open_texts"] == 0)
    assert len(greedy(served, prompts).choices) == 5
    with pytest.raises(
        openai.BadRequestError, match=r"keeps waiting at most 5\. Send several requests"
    ):
        greedy(served, [*prompts, "f"])
    wait_for(lambda: served.metrics()["maxtrain_open_texts"] == 0)


@pytest.mark.long
@pytest.mark.every_dose
def test_texts_made_side_by_side_are_those_made_alone(served, expected):
    found = {}

    def ask(prompt):
        found[prompt] = greedy(served, prompt).choices[0].text

    prompts = ["one", "two, ", "three: "]
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {prompt: expected(prompt, 24) for prompt in prompts}


@pytest.mark.long
@pytest.mark.every_dose
def test_what_was_done_is_counted(served):
    before = served.metrics()
    greedy(served, "Hello")
    after = served.metrics()

    def change(name):
        return after[f"maxtrain_{name}"] - before.get(f"maxtrain_{name}", 0)

    assert change("generated_tokens_total") == 24
    assert change("prompt_tokens_total") == 6
    assert change('requests_total{path="/v1/completions",status="200"}') == 1
    assert change("text_seconds_count") == change("first_token_seconds_count") == 1


@pytest.mark.long
def test_what_is_on_its_way_is_done_before_the_end(folder):
    served = Served(str(folder), "--name", "small")
    stream = iter(slow(served))
    next(stream)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(served.end()))
    thread.start()
    parts = list(stream)
    thread.join()
    assert {part.choices[0].finish_reason for part in parts[-2:]} & {"length", "stop"}
    code, _, errors = ended[0]
    assert code == 0 and "Traceback" not in errors


@pytest.mark.long
def test_a_run_is_served(folder, adapters, expected, tmp_path):
    """`serve runs/llama --port 8000 --adapter tuned=adapters/tuned --cache-tokens 65536`, at
    another port, and with pages for one text of 64 tokens."""
    assert import_hf.main([str(folder), str(tmp_path / "runs/llama")]) == 0
    (tmp_path / "adapters").mkdir()
    shutil.copytree(adapters[0], tmp_path / "adapters/tuned")
    options = ("--adapter", "tuned=adapters/tuned", "--cache-tokens", "100")
    served = Served("runs/llama", *options, cwd=tmp_path)
    assert served.line.startswith("llama: listening on http://127.0.0.1:")
    options = {"prompt": "Hello", "max_tokens": 24, "temperature": 0}
    answer = served.client.completions.create(model="llama", **options)
    assert answer.choices[0].text == expected("Hello", 24)
    assert served.client.models.retrieve("llama").max_model_len == 64
    tuned = served.client.completions.create(model="tuned", **options)
    assert tuned.choices[0].text not in ("", answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="there is room for 59"):
        served.client.completions.create(model="llama", **options | {"max_tokens": 60})
    code, _, errors = served.end(signal.SIGINT)
    assert code == 130 and "Traceback" not in errors


@pytest.mark.long
@pytest.mark.every_dose
def test_the_evaluation_harness_gets_over_the_api_what_it_gets_here(served, folder, monkeypatch):
    """`local-completions` of lm-evaluation-harness, with the server's tokenizer."""
    openai_completions = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = openai_completions.LocalCompletionsAPI(
        base_url=f"{served.url}/completions", model="small", auth_token=KEY, max_length=256
    )
    assert model.tokenizer_backend == "remote"
    pairs = [("The cat", " sat on"), ("a", "b"), ("Hello, ", "t" * 40), ("x" * 60, "12")]
    requests = [instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    over_api = model.loglikelihood(requests, disable_tqdm=True)
    inner, _ = load_pretrained(folder)
    ours = lm_eval.HarnessAnswers(inner, load_tokenizer(folder), (), ()).loglikelihood(pairs)
    for (found, is_greedy), (expected, is_expected) in zip(over_api, ours, strict=True):
        assert found == pytest.approx(expected, abs=1e-3) and is_greedy == is_expected


@pytest.mark.long
@pytest.mark.every_dose
def test_json_is_followed_by_the_real_model(served):
    """A text that follows no schema runs beside it, and is the same as alone."""
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "is_big": {"type": "boolean"}},
        "required": ["kind", "is_big"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    alone = greedy(served, "Hello").choices[0].text
    found = {}

    def ask_plain():
        found["plain"] = greedy(served, "Hello").choices[0].text

    thread = threading.Thread(target=ask_plain)
    thread.start()
    answer = served.client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "What?"}],
        response_format=form,
        temperature=1,
        # White space between the parts would come too often.
        logit_bias={"0": -100, "1": -100},
        n=2,
        seed=3,
    )
    thread.join()
    assert found["plain"] == alone
    for choice in answer.choices:
        values = json.loads(choice.message.content)
        assert choice.finish_reason == "stop"
        assert values.keys() == {"kind", "is_big"} and values["kind"] in ("cat", "dog")
    short = served.client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "What?"}],
        response_format=form,
        max_tokens=3,
    )
    assert short.choices[0].finish_reason == "length"


def test_a_port_that_is_taken_is_said_at_once(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert server.main(["--hf", str(folder), "--port", str(port)]) == 64
    assert f"--port {port}: can't listen there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", "0"], "--slots 0: must be at least 1"),
        (["--port", "70000"], "must be at most 65535"),
        (["--adapter", "tuned"], "--adapter tuned: must be NAME=DIR"),
        (["--adapter", "a=b", "--adapter", "a=c"], "--adapter a: is there twice"),
        (["--cache-tokens", "63"], "--cache-tokens 63: must be at least 64"),
        (["--host", "no such host", "--port", "1"], "can't listen there"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: without a key"),
        (["--host", "::"], "--host ::: without a key"),
        (["--key-file", "no-such-file"], "--key-file no-such-file: cannot be read"),
        (["--key-file", os.devnull], f"--key-file {os.devnull}: has no key"),
        (["--connections", "0"], "--connections 0: must be at least 1"),
        (["--client-timeout", "0"], "--client-timeout 0: must be at least 1"),
    ],
)
def test_options_that_can_not_be(folder, options, message, capsys):
    assert server.main(["--hf", str(folder), "--port", "0", *options]) == 64
    assert message in capsys.readouterr().err


def test_keys_are_those_of_the_environment_and_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    monkeypatch.delenv(server.KEY, raising=False)
    assert server._keys(None) == ()
    assert server._keys(file) == ("one", "two")
    monkeypatch.setenv(server.KEY, "three")
    assert server._keys(file) == ("three", "one", "two")


@pytest.mark.long
def test_a_model_with_adapters_is_asked_for_by_their_name(served, folder, adapters, expected):
    """Requests for it run in one batch with those for the model itself."""
    tokenizer = load_tokenizer(folder)
    begin = special_beginning(tokenizer) or None
    options = {"begin": begin, "max_tokens": 24, "temperature": 0}
    (tuned,) = complete(adapters[1], tokenizer, ["Hello"], **options)
    assert tuned != expected("Hello", 24)
    answers = {}

    def ask(name):
        answers[name] = served.client.completions.create(
            model=name, prompt="Hello", max_tokens=24, temperature=0
        )

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("small", "tuned")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["small"].choices[0].text == expected("Hello", 24)
    assert answers["tuned"].choices[0].text == tuned
    assert answers["tuned"].model == "tuned"
    listed = {model.id: getattr(model, "parent", None) for model in served.client.models.list()}
    assert listed == {"small": None, "tuned": "small"}
    with pytest.raises(openai.NotFoundError, match="is not served here, but 'small', 'tuned'"):
        served.client.completions.create(model="other", prompt="Hello")
