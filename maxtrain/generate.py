"""The job that continues text: prompts in, completions out, with a key/value cache.

Prompts of a batch end in the same column; shorter ones have padding on their left, of another
segment, so that no token sees it. Rows never see each other either, and a row's random numbers
depend on seed, row and number of tokens before: a completion is the same in any company.

A text that grows beyond model.max_length is read again from its middle: the last max_length / 2
tokens become the prompt of what follows, at positions from 0 on, which the model has been trained
on.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key
from rich.console import Console
from rich.text import Text

from data_pipeline.errors import UsageError, run_command
from data_pipeline.tokenizer import JsonTokenizer, Tokenizer
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.model_source import add_model_arguments, check_model_arguments, load_model
from maxtrain.models.decoder import Decoder
from maxtrain.models.stack import Caches, cache_columns
from maxtrain.parallel.distributed import start
from maxtrain.parallel.sharding import batch_shards, constrain

_PROMPT_UNIT = (
    64  # prompts are padded to a multiple, so that a few compiled programs serve all lengths
)
_MOST_TOKENS = 1 << 31  # positions are int32
_COLDEST = 1e-6  # as a divisor of logits; in float32, much less gives infinities
_LOOK_EVERY = 16  # tokens between looks at what came, to see which rows have ended


class _Choice(NamedTuple):
    """How tokens are chosen; compiled in."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        size = logits.shape[-1]
        ids, logits = jnp.arange(size)[None], logits / self.temperature
        if self.top_k is not None or self.top_p is not None:
            logits, ids = jax.lax.top_k(logits, min(self.top_k or size, size))
        if self.top_p is not None:
            weights = jax.nn.softmax(logits, axis=-1)
            before = jnp.cumsum(weights, axis=-1) - weights
            kept = (
                (before < self.top_p).at[:, 0].set(True)
            )  # also where top_p is 0 in the numbers of the logits
            logits = jnp.where(kept, logits, -jnp.inf)
        picked = jax.vmap(jax.random.categorical)(keys, logits)
        return jnp.take_along_axis(ids, picked[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Speed(NamedTuple):
    """What generation took; the first token of a window comes from reading its prompt, the others
    one by one."""

    first_seconds: float  # reading prompts, and compiling
    tokens: int  # that came one by one
    seconds: float  # of these


class _State(NamedTuple):
    starts: Int[Array, " B"]  # column of each prompt's first token
    keys: Key[Array, " B"]  # of each row
    before: Int[Array, " B"]  # tokens of each row that were made in earlier windows
    tokens: Int[Array, "B N"]  # new ones, `step` of each row
    step: Int[Array, ""]
    cache: Caches


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    report: Callable[[Speed], object] | None = None,
) -> list[list[int]]:
    """New token ids that follow each prompt.

    Args:
        model: on one device, or split over the current mesh.
        prompts: ids, at least one each; lengths may differ. Of one beyond the model's max_length,
            the end is read.
        max_tokens: new tokens of each prompt, at most.
        temperature: that logits are divided by, at least 1e-6; 0: always the likeliest token.
        top_k, top_p: choose among so many likeliest tokens, and the likeliest of these that
        together have this probability.
        seed: of the random choices, in [0, 2**32).
        stop_ids: a row ends before any of these.
        stop: called with a row's new tokens every few tokens; the row ends when it says True.
        report: called at the end with what it took.

    Raises:
        UsageError: an empty prompt, an id outside the vocabulary, or an option outside its range.
    """
    _check_options(max_tokens, temperature, top_k, top_p, seed)
    _check_prompts(model, prompts)
    choice, length = _Choice(temperature, top_k, top_p), model.config.max_length
    begin = time.perf_counter()
    made: list[list[int]] = [[] for _ in prompts]
    one_by_one, seconds = 0, 0.0
    going = list(range(len(prompts)))

    def ends(row: int, new: list[int], came: int) -> bool:
        return len(new) < came or (stop is not None and stop([*made[row], *new]))

    while going:
        contexts = [in_window([*prompts[row], *made[row]], length) for row in going]
        rooms = [
            min(length - len(ids) + 1, max_tokens - len(made[row]))
            for row, ids in zip(going, contexts)
        ]
        window = _Window(
            model, choice, contexts, max(rooms), seed, going, [len(made[row]) for row in going]
        )
        started, ended, new = time.perf_counter(), set[int](), [[] for _ in going]
        for limit in range(_LOOK_EVERY, max(rooms) + _LOOK_EVERY, _LOOK_EVERY):
            for i, (row, room, came) in enumerate(zip(going, rooms, window.tokens(limit))):
                came = came[:room]
                new[i] = list(itertools.takewhile(lambda token: token not in stop_ids, came))
                if ends(row, new[i], len(came)):
                    ended.add(row)
            if all(row in ended or limit >= room for row, room in zip(going, rooms)):
                break
        one_by_one += sum(max(0, len(ids) - 1) for ids in new)
        seconds += time.perf_counter() - started
        for row, ids in zip(going, new):
            made[row] += ids
        going = [row for row in going if row not in ended and len(made[row]) < max_tokens]
    if report:
        report(Speed(time.perf_counter() - begin - seconds, one_by_one, seconds))
    return made


def in_window(ids: Sequence[int], max_length: int) -> list[int]:
    """What the model reads of a text: all of it, or the last max_length / 2 tokens if it is longer
    than max_length."""
    return list(ids if len(ids) <= max_length else ids[-max(1, max_length // 2) :])


class _Window:
    """Rows that are continued side by side, up to the length that the model is meant for.

    Args:
        contexts: ids that each row goes on from.
        room: most new tokens of a row.
        rows: the number of each row, which its random numbers depend on.
        before: tokens of each row that are made already, likewise.
    """

    def __init__(
        self,
        model: Decoder,
        choice: _Choice,
        contexts: Sequence[list[int]],
        room: int,
        seed: int,
        rows: Sequence[int],
        before: Sequence[int],
    ):
        extra = -len(contexts) % batch_shards()  # rows that nobody wants, to share a mesh evenly
        self._count, self._room = len(contexts), room
        contexts = [*contexts, *[contexts[0]] * extra]
        rows, before = [*rows, *[rows[0]] * extra], [*before, *[before[0]] * extra]
        self._width = -(-max(map(len, contexts)) // _PROMPT_UNIT) * _PROMPT_UNIT
        starts = [self._width - len(ids) for ids in contexts]
        tokens = [[0] * start + ids for start, ids in zip(starts, contexts)]
        self._choice = choice
        self._graphdef, self._params = nnx.split(model)
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(
            np.array(rows, np.uint32)
        )
        inputs = (
            np.array(tokens, np.int32),
            np.array(starts, np.int32),
            keys,
            np.array(before, np.int32),
        )
        self._state = _prefill(self._graphdef, choice, room, self._params, *inputs)
        self._state = jax.block_until_ready(self._decode(0))  # compiles, and makes nothing

    def tokens(self, limit: int) -> list[list[int]]:
        """The first `limit` new tokens of each row, or all there is room for."""
        self._state = self._decode(min(limit, self._room))
        return np.asarray(self._state.tokens)[: self._count, : int(self._state.step)].tolist()

    def _decode(self, limit: int) -> _State:
        return _decode(self._graphdef, self._choice, self._width, self._params, self._state, limit)


def _check_options(
    max_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """What can be said of options without a model. UsageError: one is outside its range."""
    room = "Set 64, for example."
    for good, problem in (
        (max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1. {room}"),
        (
            max_tokens < _MOST_TOKENS,
            f"max_tokens={max_tokens} must be below {_MOST_TOKENS}. {room}",
        ),
        (
            temperature == 0 or _COLDEST <= temperature < float("inf"),
            f"temperature={temperature} must be 0 or a number of at least {_COLDEST}. Set 0 (the likeliest token) or 0.8.",
        ),
        (
            top_k is None or top_k >= 1,
            f"top_k={top_k} must be at least 1. Set 40, for example, or leave it out.",
        ),
        (
            top_p is None or 0 < top_p <= 1,
            f"top_p={top_p} must be above 0 and at most 1. Set 0.95, or leave it out.",
        ),
        (0 <= seed < 1 << 32, f"seed={seed} must be in [0, 4294967295]. Set 0, for example."),
    ):
        if not good:
            raise UsageError(problem)


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    """UsageError: a prompt is empty or not of the model's vocabulary."""
    vocab = model.config.vocab_size or 0
    if not prompts or not all(map(len, prompts)):
        raise UsageError("a prompt is empty: there must be a token to go on from. Give some text.")
    if not all(0 <= i < vocab for prompt in prompts for i in prompt):
        raise UsageError(f"prompt: ids beyond model.vocab_size={vocab}. Use its tokenizer.")


def _segments(starts: Array, columns: int) -> Array:
    """1 from each prompt's first token on, also where nothing is yet: no query looks ahead of its
    own column."""
    return (jnp.arange(columns) >= starts[:, None]).astype(jnp.int32)


def _folded(keys: Array, steps: Array) -> Array:
    """The key of each row's token of this number."""
    return jax.vmap(jax.random.fold_in)(keys, steps)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    graphdef: nnx.GraphDef,
    choice: _Choice,
    max_tokens: int,
    params: nnx.State,
    tokens: Array,
    starts: Array,
    keys: Array,
    before: Array,
) -> _State:
    """The cache of all prompts, and each row's first new token."""
    model: Decoder = nnx.merge(graphdef, params)
    rows, width = tokens.shape
    columns = width + max_tokens - 1
    positions = jnp.maximum(jnp.arange(width, dtype=jnp.int32) - starts[:, None], 0)
    hidden, cache = model.extend(
        tokens, _segments(starts, columns), positions, 0, model.new_cache(rows, columns)
    )
    first = choice(model.logits(hidden[:, -1:])[:, 0], _folded(keys, before))
    out = jnp.zeros((rows, max_tokens), jnp.int32).at[:, 0].set(first)
    return _State(starts, keys, before, constrain(out, None, None), jnp.ones((), jnp.int32), cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _decode(
    graphdef: nnx.GraphDef,
    choice: _Choice,
    width: int,
    params: nnx.State,
    state: _State,
    limit: Any,
) -> _State:
    """Tokens one by one, until there are `limit` of each row."""
    model: Decoder = nnx.merge(graphdef, params)
    segments = _segments(state.starts, cache_columns(state.cache))

    def one(step: Array, s: _State) -> _State:
        last, column = jax.lax.dynamic_slice_in_dim(s.tokens, step - 1, 1, axis=1), width + step - 1
        hidden, cache = model.extend(last, segments, column - s.starts[:, None], column, s.cache)
        token = choice(model.logits(hidden)[:, 0], _folded(s.keys, s.before + step))
        tokens = jax.lax.dynamic_update_slice_in_dim(s.tokens, token[:, None], step, axis=1)
        return s._replace(tokens=constrain(tokens, None, None), step=step + 1, cache=cache)

    return jax.lax.fori_loop(state.step, limit, one, state)


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    begin: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Continuations of texts, without the prompts; each ends with its document.

    Args:
        model, tokenizer: that belong together.
        prompts: each the beginning of a document.
        begin: ids put before every prompt; None: the one that ends the document before, if the
            tokenizer has it.
        stop: a completion ends before any of these texts.
        options: of `generate`.

    Raises:
        UsageError: as `generate`; an empty prompt is one only where nothing marks the beginning of
            a document.
    """
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    ids = [
        [*(end if begin is None else begin), *tokenizer.encode(text).tolist()] or end
        for text in prompts
    ]

    def text(prompt: list[int], new: list[int]) -> str:
        head, whole = (
            tokenizer.decode(prompt),
            tokenizer.decode([*prompt, *new]),
        )  # alone, some tokens lose a first space
        whole = whole[len(head) :] if whole.startswith(head) else tokenizer.decode(new)
        return whole[: min((at for s in stop if (at := whole.find(s)) >= 0), default=len(whole))]

    def stopped(new: list[int]) -> bool:
        return any(s in tokenizer.decode(new) for s in stop)

    made = generate(model, ids, stop_ids=end, stop=stopped if stop else None, **options)
    return [text(prompt, new) for prompt, new in zip(ids, made)]


def show(console: Console, prompts: Sequence[str], completions: Sequence[str]) -> None:
    """Print each prompt, dim, with its completion, bright; a rule between two."""
    for i, (prompt, text) in enumerate(zip(prompts, completions)):
        if i:
            console.rule(style="dim")
        console.print(Text.assemble((prompt, "dim"), (text, "bold")), soft_wrap=True)


def describe_speed(speed: Speed) -> str:
    """A line about the time that a generation took."""
    first = f"{speed.first_seconds:.1f} s until the first token, compiling included"
    if not speed.tokens:
        return first
    return f"{first}; then {speed.tokens:,} tokens in {speed.seconds:.2f} s ({speed.tokens / speed.seconds:,.0f} tokens/s)"


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, description="Continue text with a trained model."
    )
    add = parser.add_argument
    add_model_arguments(parser)
    add(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help="beginning of a document; may be given several times",
    )
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        default=64,
        help="new tokens of each prompt, at most (default: %(default)s)",
    )
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="0: always the likeliest token (default: %(default)s)",
    )
    add("--top-k", metavar="K", type=int, help="choose among the K likeliest tokens")
    add(
        "--top-p",
        metavar="P",
        type=float,
        help="choose among the likeliest tokens that together have probability P",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="of the random choices (default: %(default)s)",
    )
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end a completion before this text",
    )
    arguments = parser.parse_args(argv)
    check_model_arguments(parser, arguments, "generates")
    if "" in arguments.stop:
        raise UsageError(
            "--stop '': every text begins with nothing, so nothing would come. Give some text, or leave it out."
        )
    for option, texts in (("--prompt", arguments.prompt), ("--stop", arguments.stop)):
        for text in texts:
            _check_text(option, text)
    _check_options(
        arguments.max_tokens,
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.seed,
    )
    return arguments


def _check_text(option: str, text: str) -> None:
    """UsageError: a text of the command line is none that a tokenizer could have seen."""
    if "\0" in text:
        raise UsageError(f"{option}: has a NUL character at {text.index(chr(0))}. Leave it out.")
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # Python keeps bytes of the command line that are not UTF-8 as lone surrogates
        code = ord(text[error.start])
        what = (
            f"the byte 0x{code - 0xDC00:02X}"
            if 0xDC80 <= code <= 0xDCFF
            else f"the lone surrogate U+{code:04X}"
        )
        raise UsageError(
            f"{option}: has {what} at character {error.start}, which is not UTF-8. Give text in UTF-8."
        ) from error


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """The ids that a Hugging Face tokenizer puts before every text."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.inner.encode("", add_special_tokens=True).ids
    return []


def main(argv: Sequence[str] | None = None, prog: str = "python -m maxtrain.generate") -> int:
    """Run the command `prog` with `argv` (None: the process's): completions to stdout, the rest to
    stderr; the exit code."""

    def job() -> None:
        asked = _parse(sys.argv[1:] if argv is None else argv, prog)
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        model, tokenizer = load_model(asked)
        begin = None
        if asked.hf is not None:
            begin = _beginning(tokenizer)
        options = {
            name: getattr(asked, name)
            for name in ("stop", "max_tokens", "temperature", "top_k", "top_p", "seed")
        }
        longest = max(len(begin or "1") + len(tokenizer.encode(prompt)) for prompt in asked.prompt)
        if longest + asked.max_tokens - 1 > model.config.max_length:
            limit = (
                f"the {model.config.max_length:,} tokens that it is meant for (model.max_length)"
            )
            print(
                f"The model reads at most {limit}: what is further back is forgotten.",
                file=sys.stderr,
            )
        speed: list[Speed] = []
        texts = complete(
            model, tokenizer, asked.prompt, begin=begin, report=speed.append, **options
        )
        show(Console(highlight=False), asked.prompt, texts)
        print(describe_speed(*speed), file=sys.stderr)

    return run_command(job, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
