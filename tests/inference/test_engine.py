"""The engine: what comes out is what the model says without any cache, whoever else is there."""

import dataclasses
import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import (
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PrecisionConfig,
    RopeConfig,
)
from maxtrain.inference import programs
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.cache import PAGE
from maxtrain.models.registry import build_model
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model, shardings
from maxtrain.weights.hf import load_pretrained
from tests.support.shared import in_time

PARITY = Path(__file__).parents[1] / "data" / "parity"
CONFIG = ModelConfig(
    vocab_size=160,
    num_layers=2,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    max_length=256,
)
FLOAT32 = PrecisionConfig(compute="float32")
GREEDY = Sampling(temperature=0.0)
RANDOM = Sampling(temperature=1.0)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(1, 160, length).tolist() for length in (1, 2, 17, 40, 5, 63)]


# Texts without a constraint.
FREE = [(PROMPTS[3], GREEDY), (PROMPTS[4], RANDOM)]


@functools.cache
def tiny(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: build_model(config, FLOAT32, 3))()


@functools.cache
def pretrained(case):
    return load_pretrained(PARITY / case, dtype="float32")[0]


@nnx.jit
def forward(model, tokens):
    return model(tokens)


def logits_of(model, ids):
    """Return the logits of the token after `ids`, without a cache; of one shape, since later tokens
    can't matter."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(forward(model, tokens)[0, len(ids) - 1])


def without_cache(model, prompt, count):
    """The likeliest tokens and their log-probabilities."""
    ids = list(prompt)
    logprobs = []
    for _ in range(count):
        logits = logits_of(model, ids)
        ids.append(int(logits.argmax()))
        logprobs.append(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return ids[len(prompt) :], logprobs


@pytest.mark.every_dose
@pytest.mark.long
def test_what_comes_out_is_what_the_model_says_without_a_cache():
    """More prompts than slots, of lengths around those of pieces, some of which come later."""
    model = tiny()
    engine = Engine(model, slots=3, chunk=4, piece=16)
    generations = [engine.submit(prompt, 9, GREEDY) for prompt in PROMPTS[:4]]
    assert engine.num_waiting == 4
    engine.step()
    assert (engine.num_active, engine.num_waiting) == (3, 1)
    generations += [engine.submit(prompt, 9, GREEDY) for prompt in PROMPTS[4:]]
    engine.run()
    assert (engine.num_active, engine.num_waiting) == (0, 0)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        ids, logprobs = without_cache(model, prompt, 9)
        assert generation.ids == ids
        np.testing.assert_allclose(generation.logprobs, logprobs, atol=1e-5)
        assert generation.reason == "length"


CASES = ["mistral"]
MORE_CASES = [
    "deepseek_v3",
    "gemma3",
    "gemma2",
    "gpt_oss",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "olmo2",
    "gpt2",
    "llama3",
]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("case", [*CASES, *in_time(MORE_CASES)])
def test_every_family_says_what_it_says_without_a_cache(case):
    """Windows are 16 here, so that rings of 32 columns turn round while prompts are read and while
    tokens are made."""
    model = pretrained(case)
    engine = Engine(model, slots=2, chunk=8, piece=16)
    prompts = [PROMPTS[2], PROMPTS[5], PROMPTS[0]]
    generations = [engine.submit(prompt, 40, GREEDY) for prompt in prompts]
    engine.run()
    for prompt, generation in zip(prompts, generations, strict=True):
        ids, logprobs = without_cache(model, prompt, 40)
        assert generation.ids == ids
        np.testing.assert_allclose(generation.logprobs, logprobs, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [
        RANDOM,
        pytest.param(GREEDY, marks=pytest.mark.long),
        pytest.param(Sampling(0.9, top_k=20, top_p=0.9), marks=pytest.mark.long),
    ],
)
def test_a_text_is_the_same_in_any_company(sampling):
    model = tiny()
    alone = []
    for row, prompt in enumerate(PROMPTS):
        engine = Engine(model, slots=4, chunk=8, piece=16)
        alone.append(engine.submit(prompt, 12, sampling, seed=7, row=row))
        engine.run()
    engine = Engine(model, slots=4, chunk=8, piece=16)
    others = [Sampling(0.3), GREEDY, Sampling(2.0, min_p=0.1, repetition_penalty=1.3)]
    for number, other in enumerate(others):
        engine.submit(PROMPTS[3 - number], 5 + number, other, seed=1)
    engine.step()
    together = []
    for row, prompt in enumerate(PROMPTS):
        together.append(engine.submit(prompt, 12, sampling, seed=7, row=row))
    engine.run()
    assert [g.ids for g in together] == [g.ids for g in alone]
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def count_read(monkeypatch):
    """Return a list to which each read of prompts adds its number of tokens, without padding."""
    counted = []
    read = programs.read_into

    def counting(graphdef, room, from_start, num_top, params, caches, piece):
        counted.append(int(piece.counts.sum()))
        return read(graphdef, room, from_start, num_top, params, caches, piece)

    monkeypatch.setattr(programs, "read_into", counting)
    return counted


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [None, *(pytest.param(case, marks=pytest.mark.long) for case in ("mistral", "deepseek_v3"))],
)
def test_what_prompts_have_in_common_is_read_once(case, monkeypatch):
    """Prompts share a prefix with other prompts, with texts that have ended, and with their own
    completions; where rings have dropped needed tokens, the prefix is read again."""
    model = tiny() if case is None else pretrained(case)
    counted = count_read(monkeypatch)
    prefix = PROMPTS[5][:40]
    prompts = [[*prefix, 7, 8], [*prefix, 9], [*prefix, 7, 8, 11]]

    def texts(sharing):
        counted.clear()
        engine = Engine(model, slots=3, chunk=8, piece=16, sharing=sharing)
        first = [engine.submit(prompt, 24, RANDOM, row=i) for i, prompt in enumerate(prompts)]
        engine.run()
        at_once = sum(counted)
        longer = [*prompts[0], *first[0].ids[:20], 3, 4]
        second = engine.submit(longer, 5, RANDOM, row=9)
        engine.run()
        return [g.ids for g in (*first, second)], at_once, sum(counted) - at_once

    shared, at_once, later = texts(True)
    apart, all_at_once, all_later = texts(False)
    assert shared == apart
    assert all_at_once == 41 + 40 + 42
    assert all_later == 63
    # The first is read whole. The others begin where they differ from it.
    assert at_once == 41 + 0 + 1
    # Of the longer one the last token but one; its last is read when its first new one is made.
    assert later == 1


@pytest.mark.long
@pytest.mark.every_dose
def test_rings_that_have_forgotten_are_not_shared(monkeypatch):
    model = pretrained("mistral")
    counted = count_read(monkeypatch)
    engine = Engine(model, slots=2, chunk=8, piece=16)
    prompt = PROMPTS[5][:40]
    engine.submit(prompt, 40, GREEDY)
    engine.run()
    assert sum(counted) == 39
    # Of 79 columns 47 to 78 are left, and the token at column 30 sees columns 15 to 30.
    short = engine.submit([*prompt[:30], 5], 6, GREEDY)
    engine.run()
    assert sum(counted) == 39 + 30
    assert short.ids == without_cache(model, [*prompt[:30], 5], 6)[0]


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_positions_that_follow_the_length_are_those_of_the_whole_prompt(scaling, monkeypatch):
    """However it is read: in pieces, beside others, and after others that begin alike."""
    more = RopeConfig()
    if scaling == "longrope":
        more = RopeConfig(short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.0, 3.0, 9.0, 20.0))
    model = tiny(rope_scaling=scaling, rope_factor=4.0, rope_original_length=32, rope=more)
    counted = count_read(monkeypatch)
    prompts = [PROMPTS[5], PROMPTS[5][:30], PROMPTS[5][:50]]
    engine = Engine(model, slots=1, chunk=4, piece=16)
    generations = [engine.submit(prompt, 1, GREEDY) for prompt in prompts]
    engine.run()
    for prompt, generation in zip(prompts, generations, strict=True):
        # Of this very length: padding would count.
        logits = forward(model, np.array([prompt], np.int32))[0, -1]
        assert generation.ids == [int(logits.argmax())]
        expected = jax.nn.log_softmax(logits).max()
        np.testing.assert_allclose(generation.logprobs, [expected], atol=1e-5)
    assert sum(counted) == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("case", ["mistral", pytest.param("gemma3", marks=pytest.mark.long)])
def test_a_ring_that_was_shared_knows_how_far_it_was_written(case, slots):
    """A prompt that begins like one that began like a longer one, whose columns are gone."""
    model = pretrained(case)
    text = np.random.default_rng(0).integers(1, 160, 61).tolist()
    prompts = [text, [*text[:45], 7, 8], [*text[:32], 9, 11, 12]]
    engine = Engine(model, slots=slots, chunk=8, piece=16)
    for prompt in prompts:
        generation = engine.submit(prompt, 4, GREEDY)
        engine.run()
        assert generation.ids == without_cache(model, prompt, 4)[0]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("what", ["enlarge", "read_into", "decode", "copy_rows"])
def test_after_a_failure_of_a_device_nothing_is_left_of_what_was(what, monkeypatch):
    """Texts with a slot end as failed, or that alone which there was no room for; those that waited,
    and new ones, are as if alone."""
    model = tiny()
    engine = Engine(model, slots=2, chunk=4, piece=16)
    first = engine.submit(PROMPTS[3], 30, GREEDY)
    engine.step()
    working = getattr(programs, what)

    def failing(*arguments):
        monkeypatch.setattr(programs, what, working)
        raise MemoryError("out of memory")

    monkeypatch.setattr(programs, what, failing)
    second = engine.submit([*PROMPTS[3], *PROMPTS[5], *PROMPTS[5]], 8, GREEDY)
    waiting = engine.submit(PROMPTS[2], 8, GREEDY)
    with pytest.raises(MemoryError):
        for _ in range(3):
            engine.step()
    is_lost = what in ("read_into", "decode")
    assert first.reason == ("failed" if is_lost else None)
    engine.run()
    new = engine.submit(PROMPTS[5], 8, GREEDY)
    engine.run()
    for generation in (first, second, waiting, new):
        if generation.reason != "failed":
            prompt = list(generation.prompt)
            assert generation.ids == without_cache_of(model, prompt, generation.max_tokens)
    assert new.reason == waiting.reason == "length"


def without_cache_of(model, prompt, count):
    """Do the same as `without_cache`, for prompts of up to 250 tokens."""
    ids = list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 256), np.int32)
        tokens[0, : len(ids)] = ids
        ids.append(int(np.asarray(forward(model, tokens)[0, len(ids) - 1]).argmax()))
    return ids[len(prompt) :]


@pytest.mark.long
@pytest.mark.every_dose
def test_a_text_that_another_ones_stop_cancels_leaves_it_alone():
    model = tiny()
    engine = Engine(model, slots=2, chunk=4)
    texts = []

    def cancel_second(ids):
        engine.cancel(texts[1])
        return False

    texts.append(engine.submit(PROMPTS[2], 8, GREEDY, stop=cancel_second))
    texts.append(engine.submit(PROMPTS[3], 8, GREEDY))
    engine.run()
    assert texts[0].ids == without_cache(model, PROMPTS[2], 8)[0]
    assert texts[1].reason == "cancelled"


@pytest.mark.long
@pytest.mark.every_dose
def test_what_is_not_finite_ends_a_text_and_reaches_no_other():
    """The next text in the slot is as if alone."""
    model = tiny()
    engine = Engine(model, slots=1, chunk=4, piece=16)
    first = engine.submit(PROMPTS[3], 8, GREEDY)
    engine.step()
    engine._caches = jax.tree.map(lambda x: x * jnp.nan, engine._caches)
    engine.run()
    assert (first.reason, len(first.ids)) == ("failed", 4)
    second = engine.submit(PROMPTS[2], 8, GREEDY)
    engine.run()
    assert second.ids == without_cache(model, PROMPTS[2], 8)[0]


@pytest.mark.long
def test_a_text_ends_before_a_stop_id_and_says_which():
    model = tiny()
    free = Engine(model, slots=1)
    whole = free.submit(PROMPTS[3], 20, RANDOM)
    free.run()
    stop = whole.ids[11]
    at = whole.ids.index(stop)
    engine = Engine(model, slots=2, chunk=4)
    generation = engine.submit(PROMPTS[3], 20, RANDOM, stop_ids=[stop, 3000])
    other = engine.submit(PROMPTS[2], 20, RANDOM, row=1)
    engine.run()
    assert generation.ids == whole.ids[:at]
    assert (generation.reason, generation.ended_by) == ("stop", stop)
    np.testing.assert_allclose(generation.logprobs, whole.logprobs[: at + 1], atol=1e-5)
    assert len(other.ids) == 20
    assert other.ended_by is None


@pytest.mark.every_dose
@pytest.mark.long
def test_a_text_ends_where_the_model_does():
    model = tiny(max_length=24)
    engine = Engine(model, slots=2, chunk=4)
    generation = engine.submit(PROMPTS[2], 20, GREEDY)
    full = engine.submit(PROMPTS[3][:24], 20, GREEDY)
    engine.run()
    # The last token need not be read.
    assert len(generation.ids) == 24 - 17 + 1
    assert len(full.ids) == 1
    assert generation.reason == full.reason == "window"


@pytest.mark.every_dose
@pytest.mark.long
def test_a_cancelled_text_leaves_its_slot_to_others():
    model = tiny()
    engine = Engine(model, slots=1, chunk=4)
    first = engine.submit(PROMPTS[2], 50, GREEDY)
    second = engine.submit(PROMPTS[3], 6, GREEDY)
    third = engine.submit(PROMPTS[4], 6, GREEDY)
    engine.step()
    engine.cancel(first)
    engine.cancel(third)
    engine.cancel(third)
    engine.run()
    assert (first.reason, len(first.ids)) == ("cancelled", 4)
    assert (third.reason, third.ids) == ("cancelled", [])
    assert second.ids == without_cache(model, PROMPTS[3], 6)[0]
    engine.cancel(second)
    assert second.reason == "length"


@pytest.mark.every_dose
@pytest.mark.long
def test_a_stream_gives_tokens_as_they_come_while_others_go_on():
    engine = Engine(tiny(), slots=2, chunk=4)
    other = engine.submit(PROMPTS[4], 30, GREEDY)
    generation = engine.submit(PROMPTS[2], 10, GREEDY)
    parts = list(engine.stream(generation))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [token for part in parts for token in part] == generation.ids
    assert len(other.ids) == 12


@pytest.mark.parametrize("options", [{"slots": 0}, {"chunk": 0}, {"piece": 24}, {"piece": 8}])
def test_an_engine_that_could_do_nothing_is_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Engine(tiny(), **options)


@pytest.mark.long
@pytest.mark.parametrize("cache_tokens", [None, 512])
def test_prompts_are_scored_as_the_model_scores_them_without_a_cache(cache_tokens):
    """Longer than a piece, beside one of which nothing is wanted, and one that is remembered."""
    model = tiny()
    engine = Engine(model, slots=3, chunk=4, piece=16, cache_tokens=cache_tokens)
    scored = dataclasses.replace(GREEDY, top_logprobs=3)
    plain = engine.submit(PROMPTS[3], 4, GREEDY)
    engine.run()
    texts = [engine.submit(PROMPTS[n], 4, scored, scores_prompt=True) for n in (3, 3, 5, 0)]
    engine.run()
    assert texts[0].ids == texts[1].ids == plain.ids
    for text in texts:
        assert len(text.prompt_logprobs) == len(text.prompt_top) == len(text.prompt) - 1
        assert len(text.top) == len(text.ids)
        everything = [*text.prompt, *text.ids]
        logprobs = [*text.prompt_logprobs, *text.logprobs]
        tops = [*text.prompt_top, *text.top]
        for at, (logprob, top) in enumerate(zip(logprobs, tops, strict=True), 1):
            logits = logits_of(model, everything[:at]).astype(np.float64)
            expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert abs(expected[everything[at]] - logprob) < 1e-4
            best = np.sort(expected)[::-1][:3]
            np.testing.assert_allclose([x for _, x in top], best, atol=1e-4)
            np.testing.assert_allclose([expected[i] for i, _ in top], best, atol=1e-4)


class Alternating:
    """A constraint of even and odd tokens by turns, which ends after six."""

    def __init__(self, dead_end=None):
        self.taken = []
        self.dead_end = dead_end

    def allowed(self):
        allowed = np.arange(160) % 2 == len(self.taken) % 2
        return allowed & (len(self.taken) != self.dead_end)

    def take(self, token):
        self.taken.append(token)

    @property
    def is_complete(self):
        return len(self.taken) == 6


@pytest.mark.long
def test_constraints_bind_their_own_rows_alone():
    model = tiny()
    engine = Engine(model, slots=4, chunk=4)
    free = [engine.submit(prompt, 9, sampling, seed=3) for prompt, sampling in FREE]
    engine.run()
    engine = Engine(model, slots=4, chunk=4)
    bound = engine.submit(PROMPTS[2], 9, GREEDY, constraint=Alternating())
    stuck = engine.submit(PROMPTS[2], 9, RANDOM, constraint=Alternating(dead_end=2))
    beside = [engine.submit(prompt, 9, sampling, seed=3) for prompt, sampling in FREE]
    engine.run()
    assert [text.ids for text in beside] == [text.ids for text in free]
    assert (stuck.reason, len(stuck.ids)) == ("unconstrained", 2)
    assert (bound.reason, len(bound.ids)) == ("stop", 6)
    ids = list(PROMPTS[2])
    for number, token in enumerate(bound.ids):
        logits = logits_of(model, ids)
        logits = np.where(np.arange(160) % 2 == number % 2, logits, -np.inf)
        assert token == logits.argmax()
        ids.append(token)


@pytest.mark.long
def test_few_programs_serve_all_lengths_of_prompts(monkeypatch):
    """Pieces of 16, 32 and 64 tokens, one row or more at a time, from the start or not."""
    read = inspect.unwrap(programs.read_into)
    decode = inspect.unwrap(programs.decode)
    compiled = {"read": 0, "decode": 0}

    def counting(name, function):
        def traced(*arguments):
            compiled[name] += 1
            return function(*arguments)

        return traced

    reads = jax.jit(counting("read", read), static_argnums=(0, 1, 2, 3))
    decodes = jax.jit(counting("decode", decode), static_argnums=(0, 1, 2, 3))
    monkeypatch.setattr(programs, "read_into", reads)
    monkeypatch.setattr(programs, "decode", decodes)
    engine = Engine(tiny(), slots=2, chunk=4, piece=64, sharing=False)
    for length in range(1, 121):
        engine.submit([5] * length, 2, GREEDY)
        engine.run()
    # From the start 16, 32 and 64; behind a first piece of 64, the same.
    assert compiled == {"read": 6, "decode": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "a prompt is empty"),
        ({"prompt": [160]}, r"id 160 of token 0 must be in \[0, 160\)"),
        ({"prompt": [1] * 257}, "a prompt has 257 tokens, .* at most 256 .* Shorten it"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be in"),
        ({"row": -1}, "row=-1, before=0 must be"),
        ({"before": 1 << 31}, "before=2147483648 must be"),
    ],
)
def test_what_can_not_be_continued_is_refused(options, message):
    engine = Engine(tiny(), slots=1)
    arguments = {"prompt": [1], "max_tokens": 4, "sampling": GREEDY, **options}
    with pytest.raises(UsageError, match=message):
        engine.submit(**arguments)
    assert engine.num_waiting == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [None, "deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.slow)]
)
def test_on_a_mesh_the_texts_are_the_same(case):
    single = tiny() if case is None else pretrained(case)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, data=2))
    graphdef, abstract = abstract_model(single.config, single.precision, mesh)
    split = nnx.merge(graphdef, jax.device_put(nnx.state(single), shardings(abstract)))

    def texts(model):
        engine = Engine(model, slots=3, chunk=4, piece=16)
        generations = [engine.submit(p, 9, GREEDY, row=i) for i, p in enumerate(PROMPTS)]
        engine.run()
        return engine.num_slots, [g.ids for g in generations]

    slots, expected = texts(single)
    assert slots == 3
    with jax.set_mesh(mesh):
        slots, found = texts(split)
    assert slots == 4
    assert found == expected


@pytest.mark.long
def test_rows_of_bfloat16_are_as_good_as_their_rounding():
    config = dataclasses.replace(CONFIG, scan_layers=False)
    model = jax.jit(lambda: build_model(config, PrecisionConfig(params="bfloat16"), 3))()
    engine = Engine(model, slots=2, chunk=4)
    generation = engine.submit(PROMPTS[3], 6, GREEDY)
    engine.run()
    assert engine._caches is not None
    assert {leaf.dtype for leaf in jax.tree.leaves(engine._caches)} == {jnp.dtype("bfloat16")}
    for number, logprob in enumerate(generation.logprobs):
        logits = logits_of(model, [*PROMPTS[3], *generation.ids[:number]])
        expected = jax.nn.log_softmax(logits)[generation.ids[number]]
        assert abs(logprob - float(expected)) < 0.05


# Prompts of a few pages, of which some begin alike.
LONG = RNG.integers(1, 160, 150).tolist()
ALIKE = [[*LONG, 5], [*LONG[:130], 9, 9], [*LONG[:70], 3], LONG[:64], PROMPTS[3]]


def read_with(model, prompts, count=12, sampling=GREEDY, **options):
    """The engine and its texts."""
    engine = Engine(model, chunk=4, piece=32, **options)
    texts = []
    for row, prompt in enumerate(prompts):
        texts.append(engine.submit(prompt, count, sampling, row=row))
    engine.run()
    return engine, texts


@pytest.mark.parametrize(
    ("case", "sampling"),
    [
        pytest.param(None, RANDOM, marks=pytest.mark.long),
        pytest.param(None, GREEDY, marks=pytest.mark.long),
        pytest.param("deepseek_v3", RANDOM, marks=pytest.mark.long),
        pytest.param("gemma3", RANDOM, marks=pytest.mark.long),
        pytest.param("mistral", RANDOM, marks=pytest.mark.slow),
    ],
)
def test_texts_in_pages_are_those_in_rings(case, sampling):
    """Layers with a window keep their rings, the others have pages."""
    model = tiny() if case is None else pretrained(case)
    prompts = PROMPTS
    if case is None:
        prompts = ALIKE
    _, expected = read_with(model, prompts, sampling=sampling, slots=3)
    engine, texts = read_with(model, prompts, sampling=sampling, slots=3, cache_tokens=640)
    assert [g.ids for g in texts] == [g.ids for g in expected]
    for ours, theirs in zip(texts, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)
    assert engine.num_active == engine.num_waiting == 0


@pytest.mark.long
def test_texts_wait_for_pages_and_none_is_given_up():
    """Room for two of them at a time, though there are four slots."""
    model = tiny()
    rng = np.random.default_rng(8)
    prompts = [rng.integers(1, 160, 100).tolist() for _ in range(5)]
    _, expected = read_with(model, prompts, count=20, slots=4)
    engine = Engine(model, slots=4, chunk=4, piece=32, cache_tokens=4 * PAGE)
    texts = [engine.submit(prompt, 20, GREEDY, row=i) for i, prompt in enumerate(prompts)]
    most = 0
    while engine.step():
        most = max(most, engine.num_active)
    assert most == 2
    assert [g.ids for g in texts] == [g.ids for g in expected]
    assert {g.reason for g in texts} == {"length"}


@pytest.mark.long
def test_what_texts_have_in_common_is_in_the_same_pages(monkeypatch):
    """Four times the same prompt of two pages and a half: the first of them is read whole, the
    others from the last whole page on, in pages of which each needs one of its own."""
    model = tiny()
    counted = count_read(monkeypatch)
    prompts = [LONG] * 4
    engine, texts = read_with(model, prompts, sampling=RANDOM, slots=4, cache_tokens=6 * PAGE)
    assert sum(counted) == 149 + 3 * 21
    apart, expected = read_with(model, prompts, sampling=RANDOM, slots=4, sharing=False)
    assert [g.ids for g in texts] == [g.ids for g in expected]
    assert apart.num_slots == engine.num_slots


@pytest.mark.long
@pytest.mark.every_dose
def test_pages_that_were_spoiled_are_clean_for_the_next_text():
    model = tiny()
    engine = Engine(model, slots=2, chunk=4, piece=16, cache_tokens=2 * PAGE)
    first = engine.submit(PROMPTS[3], 8, GREEDY)
    engine.step()
    engine._caches = jax.tree.map(lambda x: x * jnp.nan, engine._caches)
    engine.run()
    assert first.reason == "failed"
    # Those that were nobody's stay as they were made here.
    engine._caches = jax.tree.map(jnp.nan_to_num, engine._caches)
    second = engine.submit(PROMPTS[2], 8, GREEDY)
    engine.run()
    assert second.ids == without_cache(model, PROMPTS[2], 8)[0]


@pytest.mark.long
def test_all_pages_come_back(monkeypatch):
    """Whatever happens to texts: ends, cancellations, a failure of the device."""
    rng = np.random.default_rng(3)
    engine = Engine(tiny(), slots=3, chunk=4, piece=32, cache_tokens=8 * PAGE)
    for round_number in range(30):
        prompt = [*LONG[: rng.integers(1, 150)], int(rng.integers(1, 160))]
        text = engine.submit(prompt, int(rng.integers(1, 30)), RANDOM, row=round_number)
        for _ in range(rng.integers(0, 3)):
            engine.step()
        if rng.random() < 0.3:
            engine.cancel(text)
        if round_number == 20:
            engine._abandon()
    engine.run()
    for slot in engine._slots:
        engine._forget(slot)
    assert engine._pages is not None
    assert engine._pages.num_free == engine._pages.count == 8


def test_what_pages_can_not_hold_is_refused():
    engine = Engine(tiny(), slots=2, cache_tokens=2 * PAGE)
    with pytest.raises(UsageError, match=r"need 130 columns .* which have 128\. Ask for fewer"):
        engine.submit([1] * 100, 31, GREEDY)
    engine.submit([1] * 100, 29, GREEDY)
    with pytest.raises(ValueError, match="cache_tokens=63 must be at least 64"):
        Engine(tiny(), cache_tokens=63)
    with (
        jax.set_mesh(make_mesh(MeshConfig(fsdp=8))),
        pytest.raises(ValueError, match="splits rows over 8 devices"),
    ):
        Engine(tiny(), cache_tokens=640)


@pytest.mark.long
@pytest.mark.every_dose
def test_a_long_prompt_does_not_keep_others_waiting():
    """Each chunk of a text is followed by one piece of the prompt; a short prompt that comes later
    is read beside it, and both are as if alone."""
    model = tiny()
    engine = Engine(model, slots=3, chunk=4, piece=16)
    first = engine.submit(PROMPTS[4], 40, GREEDY)
    engine.step()
    assert len(first.ids) == 4
    long = engine.submit(LONG[:120], 4, GREEDY)
    short = engine.submit(PROMPTS[2], 4, GREEDY)
    engine.step()
    engine.step()
    # Of the long one and of the short one a piece, and from then on the short one is made.
    assert (len(first.ids), len(short.ids), long.ids) == (12, 4, [])
    engine.run()
    for text in (first, long, short):
        assert text.ids == without_cache_of(model, list(text.prompt), len(text.ids))
    assert len(long.ids) == 4


@pytest.mark.long
def test_a_text_that_is_cancelled_while_it_is_read_leaves_its_slot():
    model = tiny()
    engine = Engine(model, slots=2, chunk=4, piece=16)
    first = engine.submit(PROMPTS[4], 12, GREEDY)
    engine.step()
    long = engine.submit(LONG[:120], 4, GREEDY)
    engine.step()
    engine.cancel(long)
    assert engine.num_active == 1
    again = engine.submit([*LONG[:14], 3, 4], 4, GREEDY)
    engine.run()
    assert long.ids == []
    assert first.ids == without_cache(model, PROMPTS[4], 12)[0]
    assert again.ids == without_cache(model, [*LONG[:14], 3, 4], 4)[0]


@pytest.mark.long
@pytest.mark.parametrize("piece", [16, 64])
def test_a_cancelled_row_that_was_not_finite_leaves_its_slot_clean(piece):
    """While its prompt is read, and while its tokens are made."""
    model = tiny()
    engine = Engine(model, slots=2, chunk=4, piece=piece)
    texts = []

    def cancel_second(ids):
        if len(ids) > 4:
            engine.cancel(texts[1])
        return False

    texts.append(engine.submit(PROMPTS[2], 12, GREEDY, stop=cancel_second))
    texts.append(engine.submit(PROMPTS[3], 12, GREEDY))
    engine.step()
    caches = jax.tree.map(lambda x: x.at[:, 1].set(jnp.nan), engine._caches)
    engine._caches = caches
    engine.run()
    assert texts[1].reason == "cancelled"
    assert texts[0].ids == without_cache(model, PROMPTS[2], 12)[0]
    after = engine.submit(PROMPTS[3], 8, GREEDY)
    engine.run()
    assert after.ids == without_cache(model, PROMPTS[3], 8)[0]


def test_a_stop_before_a_number_that_is_not_finite_is_a_stop():
    generation = Engine(tiny(), slots=1).submit([1], 8, GREEDY, stop=lambda ids: 5 in ids)
    generation.take([4, 5, 6], [-1.0, -1.0, float("nan")], 256)
    assert (generation.reason, generation.ids) == ("stop", [4, 5])


@pytest.mark.long
def test_prompts_that_share_what_rings_forget_are_read_together(monkeypatch):
    """A window of 16, and 20 tokens in common: nobody waits for what is gone when it is read."""
    model = pretrained("mistral")
    counted = count_read(monkeypatch)
    engine = Engine(model, slots=4, chunk=4, piece=16)
    rng = np.random.default_rng(2)
    common = rng.integers(1, 160, 20).tolist()
    prompts = [[*common, *rng.integers(1, 160, 60).tolist()] for _ in range(4)]
    texts = [engine.submit(prompt, 4, GREEDY) for prompt in prompts]
    engine.run()
    assert counted[0] == 4 * 16
    for text in texts:
        assert text.ids == without_cache(model, list(text.prompt), 4)[0]


@pytest.mark.long
@pytest.mark.every_dose
def test_rings_are_no_longer_than_the_longest_text():
    engine = Engine(tiny(max_length=300), slots=1, piece=256)
    engine.submit([1] * 290, 4, GREEDY)
    engine.run()
    assert engine._columns == 384


@pytest.mark.long
def test_latents_are_read_by_a_kernel_that_generation_has(monkeypatch):
    """A kernel for GPUs only is none of them."""
    config = ModelConfig(
        vocab_size=64,
        family="deepseek_v3",
        num_layers=1,
        embed_dim=16,
        mlp_dim=32,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_length=32,
        attention="cudnn",
        latent=LatentConfig(kv_rank=8, rope_dim=4, value_dim=8),
        moe=MoeConfig(num_experts=2, experts_per_token=1, dense_layers=1),
    )
    model = jax.jit(lambda: build_model(config, FLOAT32, 0))()
    plain = nnx.merge(*nnx.split(model))
    engine = Engine(plain, slots=1)
    text = engine.submit([3, 4, 5], 4, GREEDY)
    engine.run()
    assert text.reason == "length"


def spoil(engine, rows):
    """Set the cache of these slots to numbers that are not finite."""
    pages = sorted({page for row in rows for page in engine._slots[row].pages})
    engine._caches = jax.tree.map(lambda x: x.at[:, jnp.array(pages)].set(jnp.nan), engine._caches)


@pytest.mark.long
def test_a_text_that_is_not_finite_fails_no_other_in_pages():
    """It has the first page, and the text beside it is shorter."""
    model = tiny()
    engine = Engine(model, slots=2, chunk=4, piece=32, cache_tokens=12 * PAGE)
    bad = engine.submit(LONG, 40, GREEDY)
    good = engine.submit(PROMPTS[4], 60, GREEDY)
    while not (bad.ids and good.ids):
        engine.step()
    assert 0 in engine._slots[0].pages
    spoil(engine, [0])
    engine.run()
    assert bad.reason == "failed"
    assert good.ids == without_cache_of(model, PROMPTS[4], 60)


@pytest.mark.long
def test_pages_that_several_failed_texts_had_are_clean_for_others():
    model = tiny()
    engine = Engine(model, slots=3, chunk=4, piece=32, cache_tokens=12 * PAGE)
    bad = [engine.submit(LONG, 20, RANDOM, row=row) for row in range(3)]
    while not all(text.ids for text in bad):
        engine.step()
    spoil(engine, [0, 1, 2])
    engine.run()
    assert {text.reason for text in bad} == {"failed"}
    others = [engine.submit(prompt, 8, GREEDY) for prompt in PROMPTS]
    engine.run()
    for prompt, text in zip(PROMPTS, others, strict=True):
        assert text.ids == without_cache_of(model, prompt, 8)


@pytest.mark.every_dose
@pytest.mark.long
def test_texts_that_wait_for_a_prompt_stay_where_another_finds_no_room(monkeypatch):
    """One text waits for a prompt that is being read, and the next one needs larger caches."""
    model = tiny()
    engine = Engine(model, slots=3, chunk=4, piece=16)
    first = engine.submit(PROMPTS[5], 4, GREEDY)
    alike = engine.submit([*PROMPTS[5][:50], 5], 4, GREEDY)
    large = engine.submit([*LONG, *LONG[:50]], 4, GREEDY)
    working = programs.enlarge

    def failing(*arguments):
        monkeypatch.setattr(programs, "enlarge", working)
        raise MemoryError("out of memory")

    monkeypatch.setattr(programs, "enlarge", failing)
    with pytest.raises(MemoryError):
        engine.step()
    engine.run()
    assert large.reason == "failed"
    assert first.ids == without_cache(model, PROMPTS[5], 4)[0]
    assert alike.ids == without_cache(model, [*PROMPTS[5][:50], 5], 4)[0]


@pytest.mark.long
def test_a_text_that_pages_can_not_hold_yet_costs_no_memory_of_others(monkeypatch):
    model = tiny()
    counted = count_read(monkeypatch)
    engine = Engine(model, slots=3, chunk=4, piece=32, cache_tokens=7 * PAGE)
    engine.submit(LONG[:130], 2, GREEDY)
    engine.run()
    busy = engine.submit(PROMPTS[4], 200, GREEDY)
    engine.step()
    large = engine.submit([*LONG[50:], *LONG[:100]], 30, GREEDY)
    engine.step()
    assert engine.num_waiting == 1
    engine.cancel(large)
    before = sum(counted)
    engine.submit([*LONG[:130], 4], 2, GREEDY)
    engine.step()
    engine.step()
    assert sum(counted) - before <= 2
    engine.cancel(busy)
    engine.run()


@pytest.mark.long
@pytest.mark.every_dose
def test_an_eager_engine_reads_all_prompts_before_it_writes():
    """The texts are those of any other engine."""
    texts = {}
    for eager in (False, True):
        engine = Engine(tiny(), slots=len(PROMPTS), chunk=4, piece=16, eager=eager)
        found = [
            engine.submit(ids, max_tokens=9, sampling=RANDOM, row=row)
            for row, ids in enumerate(PROMPTS)
        ]
        engine.step()
        assert all(len(generation.ids) == 4 for generation in found) == eager
        engine.run()
        texts[eager] = [generation.ids for generation in found]
    assert texts[True] == texts[False]
