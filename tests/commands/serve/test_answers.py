"""Log-probabilities of answers name the place of each token in the text."""

import queue

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.tokenizer import ByteTokenizer, train_bpe
from maxtrain.commands.serve.answers import ResponseBuilder
from maxtrain.commands.serve.protocol import ServedModel, encode, read_completion
from maxtrain.commands.serve.worker import EngineWorker, TextJob
from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Generation

TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "byte-level BPE": train_bpe(["the cat, été, 日本 und 🦜🦜"] * 4, 300),
}
# Characters of one to four bytes, of which the tokenizers make one to four tokens.
TEXTS = st.text(alphabet="a é日🦜\n", min_size=1, max_size=12)


class WritingEngine(Engine):
    """Writes given ids after each prompt, `step_tokens` at a time, and scores prompts."""

    num_active = 0

    def __init__(self, ids, step_tokens):
        self.ids = ids
        self.step_tokens = step_tokens
        self.open = []

    def submit(self, prompt, max_tokens, sampling, *, seed, row, stop_ids, stop, **_):
        generation = Generation(
            tuple(prompt), max_tokens, sampling, seed, row, 0, (), tuple(stop_ids), stop
        )
        generation.prompt_logprobs = [-1.0] * (len(prompt) - 1)
        generation.prompt_top = [[] for _ in prompt[1:]]
        self.open.append(generation)
        return generation

    def cancel(self, generation):
        generation.reason = generation.reason or "cancelled"

    def step(self):
        changed = [generation for generation in self.open if generation.reason is None]
        for generation in changed:
            made = len(generation.ids)
            new = self.ids[made : made + self.step_tokens][: generation.max_tokens - made]
            generation.take(new, [-2.0] * len(new), 1 << 20)
        self.open = [generation for generation in changed if generation.reason is None]
        return changed


def answer(tokenizer, written, step_tokens, beginning=(), **values):
    """The choice of an answer that came at once, and the same from the parts of a stream."""
    served = ServedModel("small", (), tokenizer, beginning, None, 4096, tokenizer.vocab_size, 0)
    ids = tokenizer.encode(written).tolist()
    request = encode(
        read_completion({"logprobs": 0, "max_tokens": len(ids), **values}, served), served
    )
    parts = queue.Queue()
    options = request.options
    job = TextJob(
        request.prompts[0],
        request.max_tokens,
        options.sampling,
        0,
        0,
        (),
        options.stop,
        parts.put,
        scores_prompt=options.echo,
    )
    worker = EngineWorker(lambda: WritingEngine(ids, step_tokens), tokenizer)
    worker.start()
    worker.submit([job])
    found = []
    while not found or found[-1].reason is None:
        found.append(parts.get(timeout=60))
    worker.end()
    whole = ResponseBuilder(request, served, is_chat=False).whole([found])["choices"][0]
    answers = ResponseBuilder(request, served, is_chat=False)
    streamed = [answers.part(0, part)["choices"][0] for part in found]
    return whole, {
        "text": "".join(choice["text"] for choice in streamed),
        "tokens": [i for choice in streamed for i in choice["logprobs"]["tokens"]],
        "text_offset": [i for choice in streamed for i in choice["logprobs"]["text_offset"]],
    }


def expected_offsets(tokenizer, text, first):
    """The number of the character that each token of a text begins in, counted from `first`."""
    characters = [number for number, c in enumerate(text) for _ in c.encode()]
    found = []
    at = 0
    for i in tokenizer.encode(text).tolist():
        found.append(first + characters[at])
        at += len(tokenizer.token_bytes(i))
    assert at == len(characters)
    return found


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@example(prompt="é", written="日🦜", step_tokens=1, echo=True, stop_length=0)
@example(prompt="a", written="🦜é日", step_tokens=3, echo=False, stop_length=1)
@given(
    prompt=TEXTS,
    written=TEXTS,
    step_tokens=st.integers(1, 5),
    echo=st.booleans(),
    stop_length=st.integers(0, 3),
)
def test_text_offset_counts_the_characters_before_each_token(
    kind, prompt, written, step_tokens, echo, stop_length
):
    tokenizer = TOKENIZERS[kind]
    values = {"prompt": prompt, "echo": echo}
    cut = written
    if stop_length:
        # A stop text that begins within the completion.
        stop = written[len(written) // 2 :][:stop_length]
        values["stop"] = [stop]
        cut = written.partition(stop)[0]
    whole, streamed = answer(tokenizer, written, step_tokens, **values)
    first = len(prompt) if echo else 0
    expected = expected_offsets(tokenizer, prompt, 0) if echo else []
    offsets = expected_offsets(tokenizer, written, first)
    # Tokens of the stop text, and behind it, are not returned.
    expected += [offset for offset in offsets if offset < first + len(cut)]
    text = (prompt if echo else "") + cut
    assert whole["text"] == streamed["text"] == text
    assert whole["logprobs"]["text_offset"] == streamed["text_offset"] == expected
    assert whole["logprobs"]["tokens"] == streamed["tokens"]
    assert len(whole["logprobs"]["token_logprobs"]) == len(expected)


def test_the_token_before_every_text_has_no_place_in_an_echo():
    whole, streamed = answer(TOKENIZERS["bytes"], "é", 8, beginning=(256,), prompt="日a", echo=True)
    assert whole["text"] == "日aé"
    assert whole["logprobs"]["text_offset"] == streamed["text_offset"] == [0, 0, 0, 1, 2, 2]
    # The first token of the text follows the hidden one, so that it has a log-probability.
    assert whole["logprobs"]["token_logprobs"] == [-1.0] * 4 + [-2.0] * 2
