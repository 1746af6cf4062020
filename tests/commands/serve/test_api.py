"""OpenAI's own client against the application, in one process, over a worker that writes given
texts."""

import asyncio
import json
import threading
import traceback

import httpx
import openai
import pytest

from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.commands.serve import constraints
from maxtrain.commands.serve.app import Limits, make_app
from maxtrain.commands.serve.constraints import Grammars
from maxtrain.commands.serve.protocol import ServedModel
from maxtrain.commands.serve.worker import EngineWorker, TextChunk
from maxtrain.inference.chat import Chat
from maxtrain.inference.text import OutputToken

HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %};"
    "{% endfor %}{% if thinks %}<think>\n{% endif %}"
)
THINKING = HERMES + "{# <think> </think> #}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "take")
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
USER = {"role": "user", "content": "What?"}
KEY = "key"


class Writer(EngineWorker):
    """Writes a text, some bytes at a time; the text follows the constraint of its job."""

    def __init__(self):
        super().__init__(lambda: None, ByteTokenizer())
        self.text = ""
        self.jobs = []

    @property
    def is_alive(self):
        return True

    def submit(self, jobs):
        self.jobs = jobs
        threading.Thread(target=self._write_or_fail, args=(jobs,)).start()

    def _write_or_fail(self, jobs):
        try:
            self._write(jobs)
        except Exception:
            traceback.print_exc()
            for job in jobs:
                job.tell(TextChunk("", [], "failed"))

    def _write(self, jobs):
        content = self.text.encode()
        for job in jobs:
            if job.constraint is not None:
                for byte in content:
                    assert job.constraint.allowed()[byte], (content, byte)
                    job.constraint.take(byte)
            scores = []
            if job.scores_prompt:
                scores = [(-1.0 - n, [(65, -0.5), (66, -0.75)]) for n in range(len(job.prompt) - 1)]
            for at in range(0, len(content), 3):
                tokens = [
                    OutputToken(i, -1.0, at + n, [(i, -1.0), (90, -2.0)])
                    for n, i in enumerate(content[at : at + 3])
                ]
                text = content[at : at + 3].decode()
                job.tell(TextChunk(text, tokens, None, scores if at == 0 else ()))
            job.tell(TextChunk("", [], "stop"))

    def cancel(self, jobs):
        pass


class Api:
    """The application with OpenAI's client."""

    def __init__(self, folder, template):
        file = folder / "template.jinja"
        file.write_text(template)
        tokenizer = ByteTokenizer()
        chat = Chat(tokenizer, "bytes", str(file))
        served = ServedModel("small", ("tuned",), tokenizer, (), chat, 4096, 257, 0, 4)
        served = served._replace(grammars=Grammars(tokenizer, served.stop_ids))
        self.worker = Writer()
        self.app = make_app(served, self.worker, Limits(9, 10**6, (KEY,), ()))

    def run(self, function):
        """The result of an asynchronous function of a client."""

        async def job():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport) as http:
                client = openai.AsyncOpenAI(
                    base_url="http://here/v1", api_key=KEY, http_client=http, max_retries=0
                )
                return await function(client)

        return asyncio.run(job())

    def chat(self, text, **values):
        """The answer to a chat when the model writes a text."""
        self.worker.text = text
        values = {"model": "small", "messages": [USER]} | values
        return self.run(lambda client: client.chat.completions.create(**values))

    def stream(self, text, **values):
        """All parts of the answer to a chat."""
        self.worker.text = text
        values = {"model": "small", "messages": [USER], "stream": True} | values

        async def read(client):
            return [part async for part in await client.chat.completions.create(**values)]

        return self.run(read)

    def complete(self, text, **values):
        """The answer to a completion."""
        self.worker.text = text
        return self.run(lambda client: client.completions.create(model="small", **values))

    def prompt(self):
        """The text that the model was given."""
        return ByteTokenizer().decode(self.worker.jobs[0].prompt)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    return Api(tmp_path_factory.mktemp("api"), HERMES)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    return Api(tmp_path_factory.mktemp("thinking"), THINKING)


def test_a_call_is_a_call(api):
    answer = api.chat("I add.\n" + CALL, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3})
    assert call.type == "function" and len(call.id) == 9
    assert '"take"' in api.prompt()
    plain = api.chat("No call.", tools=TOOLS).choices[0]
    assert plain.message.tool_calls is None and plain.finish_reason == "stop"


def test_calls_come_in_a_stream(api):
    parts = api.stream("I add.\n" + CALL + "\n" + CALL, tools=TOOLS)
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1] and calls[0].id != calls[1].id
    assert all(json.loads(call.function.arguments) == {"a": 3} for call in calls)
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_without_a_choice_of_tools_the_model_is_told_of_none(api):
    answer = api.chat(CALL, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.content == CALL and answer.message.tool_calls is None
    assert "take" not in api.prompt()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_must_come_is_the_only_thing_that_can(api, choice):
    answer = api.chat(CALL, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    allowed = api.worker.jobs[0].constraint
    # After one call, no other may come.
    assert allowed.is_complete


@pytest.mark.parametrize("choice", [None, "auto"])
def test_without_parallel_calls_there_is_one_at_most(api, choice):
    values = {"tools": TOOLS, "parallel_tool_calls": False}
    if choice is not None:
        values["tool_choice"] = choice
    text = "I add.\n" + CALL + "\n" + CALL + "\nmore"
    answer = api.chat(text, **values).choices[0]
    assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"
    assert answer.message.content == "I add."
    find_end = api.worker.jobs[0].find_end
    assert find_end(text) == len("I add.\n" + CALL)
    deltas = [part.choices[0].delta for part in api.stream(text, **values)]
    assert len([call for delta in deltas for call in delta.tool_calls or []]) == 1
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    assert api.chat("No call.", **values).choices[0].message.content == "No call."
    api.chat(text, tools=TOOLS)
    assert api.worker.jobs[0].find_end is None


def test_a_choice_that_is_no_tool_is_refused(api):
    choice = {"type": "function", "function": {"name": "other"}}
    for tool_choice in (choice, "always", {"type": "function"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice must be"):
            api.chat("", tools=TOOLS, tool_choice=tool_choice)
    with pytest.raises(openai.BadRequestError, match="cannot be combined"):
        api.chat("", tools=TOOLS, response_format={"type": "json_object"})


def test_calls_and_results_of_a_conversation_are_given_to_the_template(api):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]},
    ]
    api.chat("It is 4.", messages=messages)
    assert api.prompt() == "user:What?;assistant:add(3);tool:4;"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_json_of_a_schema(api):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = api.chat('{"a": 3}', response_format=form, n=2)
    assert [choice.message.content for choice in answer.choices] == ['{"a": 3}'] * 2
    assert api.worker.jobs[0].constraint is not api.worker.jobs[1].constraint
    api.chat('{"b": [1]}', response_format={"type": "json_object"})
    assert api.worker.jobs[0].constraint.is_complete
    api.chat("text", response_format={"type": "text"})
    assert api.worker.jobs[0].constraint is None
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        api.chat("", response_format=bad)


def test_reasoning_is_told_apart(thinking):
    message = thinking.chat("<think>\nWell.\n</think>\n\nYes.").choices[0].message
    assert message.content == "Yes." and message.reasoning_content == "Well."
    values = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
    message = thinking.chat("Well.\n</think>\n\nYes.", **values).choices[0].message
    assert thinking.prompt().endswith("<think>\n")
    assert message.content == "Yes." and message.reasoning_content == "Well."
    parts = thinking.stream("Well.\n</think>\n\nYes.", **values)
    deltas = [part.choices[0].delta for part in parts]
    said = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert said == "Well." and "".join(delta.content or "" for delta in deltas) == "Yes."


def test_json_may_come_behind_reasoning(thinking):
    values = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
    text = 'Is it {"a"?\n</think>\n\n{"a": 3}'
    answer = thinking.chat(text, response_format={"type": "json_object"}, **values)
    assert answer.choices[0].message.content == '{"a": 3}'


def test_the_likeliest_tokens_of_a_chat(api):
    answer = api.chat("abc", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "b", "c"]
    assert [(top.token, top.logprob) for top in content[1].top_logprobs] == [("b", -1), ("Z", -2)]
    assert api.worker.jobs[0].sampling.top_logprobs == 2


def test_a_prompt_is_echoed_with_its_log_probabilities(api):
    answer = api.complete("xyz", prompt="abc", echo=True, logprobs=2, n=2).choices[1]
    assert answer.text == "abcxyz"
    told = answer.logprobs
    assert told.tokens == list("abcxyz") and told.text_offset == list(range(6))
    assert told.token_logprobs == [None, -1.0, -2.0, -1.0, -1.0, -1.0]
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[2] == {"A": -0.5, "B": -0.75, "c": -2.0}
    assert told.top_logprobs[3] == {"x": -1.0, "Z": -2.0}
    only = api.complete("x", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    assert only.choices[0].text == "abc" and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs == [None, -1.0, -2.0]
    assert only.choices[0].finish_reason == "length"
    assert api.complete("x", prompt="abc", echo=True).choices[0].text == "abcx"


def test_settings_reach_the_engine(api):
    api.complete(
        "x",
        prompt="a",
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"65": -100, "66": 3},
        best_of=2,
        n=2,
        extra_body={"repetition_penalty": 1.5, "min_p": 0.1, "top_k": 4, "stop_token_ids": [66]},
    )
    job = api.worker.jobs[0]
    sampling = job.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert (sampling.repetition_penalty, sampling.min_p, sampling.top_k) == (1.5, 0.1, 4)
    assert sampling.logit_bias == ((65, -100.0), (66, 3.0))
    assert 66 in job.stop_ids


def test_models_and_what_there_is_not(api):
    listed = api.run(lambda client: client.models.list()).data
    assert [(model.id, model.object, model.owned_by) for model in listed] == [
        ("small", "model", "maxtrain"),
        ("tuned", "model", "maxtrain"),
    ]
    assert api.run(lambda client: client.models.retrieve("tuned")).parent == "small"
    with pytest.raises(openai.NotFoundError, match="not trained to give embeddings"):
        api.run(lambda client: client.embeddings.create(model="small", input="a"))
    with pytest.raises(openai.NotFoundError, match="there is no /v1/responses here"):
        api.run(lambda client: client.responses.create(model="small", input="a"))


def test_texts_are_tokenized_and_back(api):
    async def ask(client):
        http = client._client
        headers = {"Authorization": f"Bearer {KEY}"}
        info = await http.get("http://here/tokenizer_info", headers=headers)
        ids = await http.post("http://here/tokenize", headers=headers, json={"prompt": "é"})
        text = await http.post("http://here/detokenize", headers=headers, json={"tokens": [97]})
        wrong = await http.post("http://here/detokenize", headers=headers, json={"tokens": "a"})
        return info.json(), ids.json(), text.json(), wrong.status_code

    info, ids, text, wrong = api.run(ask)
    assert info["chat_template"] == HERMES
    assert ids["tokens"] == [0xC3, 0xA9] and ids["count"] == 2
    assert text == {"prompt": "a"} and wrong == 400


def test_an_extra_that_is_missing_is_named(api, monkeypatch):

    def missing(name, extra, wanted_by):
        raise constraints.UsageError(f"{wanted_by}: needs {name}. Install maxtrain[{extra}]")

    monkeypatch.setattr(constraints, "load_package", missing)
    with pytest.raises(openai.BadRequestError, match=r"maxtrain\[structured\]"):
        api.chat("{}", response_format={"type": "json_object"})
