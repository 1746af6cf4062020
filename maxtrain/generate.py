"""The job that continues text: prompts in, completions out, with a key/value cache.

Prompts of a batch end in the same column; shorter ones have padding on their left, of another
segment, so that no token sees it. Rows never see each other either, and a row's random numbers
depend on the seed, the row and the number of tokens before: a completion does not depend on the
other prompts of its batch.

A text that grows beyond model.max_length is read again from its middle: the last max_length / 2
tokens become the prompt of what follows, at positions from 0 on, which the model has been trained
on.
"""

import argparse
import functools
import math
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

# Prompts are padded to a multiple of this, so that a few compiled programs serve all lengths.
_PROMPT_UNIT = 64
# Positions are int32.
_MOST_TOKENS = 1 << 31
# Logits are divided by the temperature; a much lower one gives infinities in float32.
_LOWEST_TEMPERATURE = 1e-6
# Tokens between two checks of which rows have ended.
_CHECK_INTERVAL = 16


class _Choice(NamedTuple):
    """How tokens are chosen. Compiled into the program."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        size = logits.shape[-1]
        ids = jnp.arange(size)[None]
        logits = logits / self.temperature
        if self.top_k is not None or self.top_p is not None:
            logits, ids = jax.lax.top_k(logits, min(self.top_k or size, size))
        if self.top_p is not None:
            weights = jax.nn.softmax(logits, axis=-1)
            before = jnp.cumsum(weights, axis=-1) - weights
            kept = before < self.top_p
            # The likeliest token stays, also where top_p is rounded to 0 in the logits' dtype.
            kept = kept.at[:, 0].set(True)
            logits = jnp.where(kept, logits, -jnp.inf)
        picked = jax.vmap(jax.random.categorical)(keys, logits)
        return jnp.take_along_axis(ids, picked[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Speed(NamedTuple):
    """The time that generation took. The first token of a window comes from reading its prompt, the
    others one by one: `first_seconds` is for reading prompts and compiling, `seconds` for the
    `tokens` that came one by one."""

    first_seconds: float
    tokens: int
    seconds: float


class _State(NamedTuple):
    """The state of a window: the column of each prompt's first token, the key of each row, the
    tokens of each row that were made in earlier windows, the new tokens (`step` of each row), and
    the cache."""

    starts: Int[Array, " B"]
    keys: Key[Array, " B"]
    before: Int[Array, " B"]
    tokens: Int[Array, "B N"]
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
        top_k, top_p: choose among the top_k likeliest tokens, and of these among the likeliest
            that together have probability top_p.
        seed: of the random choices, in [0, 2**32).
        stop_ids: a row ends before any of these.
        stop: called with a row's new tokens every few tokens; the row ends when it returns True.
        report: called at the end with the time that it took.

    Returns:
        New ids for each prompt, in order.

    Raises:
        UsageError: an empty prompt, an id outside the vocabulary, or an option outside its range.
    """
    _check_options(max_tokens, temperature, top_k, top_p, seed)
    _check_prompts(model, prompts)
    choice = _Choice(temperature, top_k, top_p)
    length = model.config.max_length
    begin = time.perf_counter()
    made: list[list[int]] = [[] for _ in prompts]
    one_by_one = 0
    seconds = 0.0
    unfinished = list(range(len(prompts)))

    while unfinished:
        contexts = []
        rooms = []
        for row in unfinished:
            context = in_window([*prompts[row], *made[row]], length)
            contexts.append(context)
            rooms.append(min(length - len(context) + 1, max_tokens - len(made[row])))
        before = [len(made[row]) for row in unfinished]
        window = _Window(model, choice, contexts, max(rooms), seed, unfinished, before)
        started = time.perf_counter()
        ended: set[int] = set()
        new: list[list[int]] = [[] for _ in unfinished]
        for limit in range(_CHECK_INTERVAL, max(rooms) + _CHECK_INTERVAL, _CHECK_INTERVAL):
            for i, tokens in enumerate(window.tokens(limit)):
                row = unfinished[i]
                tokens = tokens[: rooms[i]]
                new[i] = _until_stop(tokens, stop_ids)
                has_ended = len(new[i]) < len(tokens)
                if not has_ended and stop is not None:
                    has_ended = stop([*made[row], *new[i]])
                if has_ended:
                    ended.add(row)
            if all(row in ended or limit >= room for row, room in zip(unfinished, rooms)):
                break
        one_by_one += sum(max(0, len(ids) - 1) for ids in new)
        seconds += time.perf_counter() - started
        for row, ids in zip(unfinished, new):
            made[row] += ids
        unfinished = [row for row in unfinished if row not in ended and len(made[row]) < max_tokens]
    if report:
        report(Speed(time.perf_counter() - begin - seconds, one_by_one, seconds))
    return made


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens before the first one of `stop_ids`."""
    for at, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:at]
    return tokens


def in_window(ids: Sequence[int], max_length: int) -> list[int]:
    """What the model reads of a text: all of it, or the last max_length / 2 tokens if it is longer
    than max_length."""
    if len(ids) <= max_length:
        return list(ids)
    return list(ids[-max(1, max_length // 2) :])


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
        self._count = len(contexts)
        self._room = room
        # Copies of the first row fill up the batch, so that it divides evenly over the mesh; their
        # tokens are dropped.
        extra = -len(contexts) % batch_shards()
        contexts = [*contexts, *[contexts[0]] * extra]
        rows = [*rows, *[rows[0]] * extra]
        before = [*before, *[before[0]] * extra]
        longest = max(map(len, contexts))
        self._width = math.ceil(longest / _PROMPT_UNIT) * _PROMPT_UNIT
        starts = [self._width - len(ids) for ids in contexts]
        tokens = [[0] * start + ids for start, ids in zip(starts, contexts)]
        self._choice = choice
        self._graphdef, self._params = nnx.split(model)
        row_key = functools.partial(jax.random.fold_in, jax.random.key(seed))
        keys = jax.vmap(row_key)(np.array(rows, np.uint32))
        state = _prefill(
            self._graphdef,
            choice,
            room,
            self._params,
            np.array(tokens, np.int32),
            np.array(starts, np.int32),
            keys,
            np.array(before, np.int32),
        )
        self._state = state
        # Compiles the decoding, and makes no token.
        self._state = jax.block_until_ready(self._decode(0))

    def tokens(self, limit: int) -> list[list[int]]:
        """The first `limit` new tokens of each row, or all there is room for."""
        self._state = self._decode(min(limit, self._room))
        tokens = np.asarray(self._state.tokens)
        return tokens[: self._count, : int(self._state.step)].tolist()

    def _decode(self, limit: int) -> _State:
        return _decode(self._graphdef, self._choice, self._width, self._params, self._state, limit)


def _check_options(
    max_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """The checks of options that need no model. UsageError: an option is outside its range."""
    if not max_tokens >= 1:
        raise UsageError(f"max_tokens={max_tokens} must be at least 1. Set 64, for example.")
    if not max_tokens < _MOST_TOKENS:
        rule = f"must be below {_MOST_TOKENS}"
        raise UsageError(f"max_tokens={max_tokens} {rule}. Set 64, for example.")
    # NaN fails the comparison, too.
    if temperature != 0 and not _LOWEST_TEMPERATURE <= temperature < float("inf"):
        rule = f"must be 0 or a number of at least {_LOWEST_TEMPERATURE}"
        mend = "Set 0 (the likeliest token) or 0.8"
        raise UsageError(f"temperature={temperature} {rule}. {mend}.")
    if top_k is not None and not top_k >= 1:
        mend = "Set 40, for example, or leave it out"
        raise UsageError(f"top_k={top_k} must be at least 1. {mend}.")
    if top_p is not None and not 0 < top_p <= 1:
        mend = "Set 0.95, or leave it out"
        raise UsageError(f"top_p={top_p} must be above 0 and at most 1. {mend}.")
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed={seed} must be in [0, 4294967295]. Set 0, for example.")


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    """UsageError: a prompt is empty or not of the model's vocabulary."""
    vocab = model.config.vocab_size or 0
    if not prompts or not all(map(len, prompts)):
        raise UsageError(
            "a prompt is empty, but there must be a token to continue. Give some text."
        )
    if not all(0 <= i < vocab for prompt in prompts for i in prompt):
        raise UsageError(f"prompt: ids beyond model.vocab_size={vocab}. Use its tokenizer.")


def _segments(starts: Array, columns: int) -> Array:
    """1 from each prompt's first token on, also in columns that are still empty: causal attention
    never looks ahead of a query's own column."""
    return (jnp.arange(columns) >= starts[:, None]).astype(jnp.int32)


def _folded(keys: Array, steps: Array) -> Array:
    """The key of each row's token with this number."""
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
        last = jax.lax.dynamic_slice_in_dim(s.tokens, step - 1, 1, axis=1)
        column = width + step - 1
        positions = column - s.starts[:, None]
        hidden, cache = model.extend(last, segments, positions, column, s.cache)
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
        model: on one device, or split over the current mesh.
        tokenizer: the model's own.
        prompts: each the beginning of a document.
        begin: ids put before every prompt; None: the tokenizer's end-of-document id, if it has one,
            which ends the document before.
        stop: a completion ends before any of these texts.
        options: of `generate`.

    Raises:
        UsageError: as `generate`. An empty prompt is allowed if the tokenizer has an
            end-of-document id or `begin` is not empty.
    """
    end = []
    if tokenizer.eod_id is not None:
        end = [tokenizer.eod_id]
    if begin is None:
        begin = end
    ids = []
    for prompt in prompts:
        prompt_ids = [*begin, *tokenizer.encode(prompt).tolist()]
        ids.append(prompt_ids or end)

    def contains_stop(new: list[int]) -> bool:
        return any(text in tokenizer.decode(new) for text in stop)

    stop_check = None
    if stop:
        stop_check = contains_stop
    made = generate(model, ids, stop_ids=end, stop=stop_check, **options)
    texts = []
    for prompt_ids, new in zip(ids, made):
        text = _decode_new(tokenizer, prompt_ids, new)
        texts.append(_before_stop(text, stop))
    return texts


def _decode_new(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of new ids after a prompt."""
    # Decoded without the prompt, some tokens lose their first space.
    head = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *new])
    if whole.startswith(head):
        return whole[len(head) :]
    return tokenizer.decode(new)


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """A text up to the first place where one of the texts of `stop` begins."""
    end = len(text)
    for stop_text in stop:
        at = text.find(stop_text)
        if at >= 0:
            end = min(end, at)
    return text[:end]


def show(console: Console, prompts: Sequence[str], completions: Sequence[str]) -> None:
    """Print each prompt, dim, with its completion, bold, and a line between two."""
    for i, (prompt, text) in enumerate(zip(prompts, completions)):
        if i > 0:
            console.rule(style="dim")
        console.print(Text.assemble((prompt, "dim"), (text, "bold")), soft_wrap=True)


def describe_speed(speed: Speed) -> str:
    """A line about the time that a generation took."""
    first = f"{speed.first_seconds:.1f} s until the first token, compiling included"
    if not speed.tokens:
        return first
    rate = f"{speed.tokens / speed.seconds:,.0f} tokens/s"
    return f"{first}; then {speed.tokens:,} tokens in {speed.seconds:.2f} s ({rate})"


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
        help="most new tokens for each prompt (default: %(default)s)",
    )
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="of sampling; 0: always the most likely token (default: %(default)s)",
    )
    add("--top-k", metavar="K", type=int, help="choose among the K most likely tokens")
    add(
        "--top-p",
        metavar="P",
        type=float,
        help="choose among the most likely tokens that together have probability P",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="seed of the random choices (default: %(default)s)",
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
            "--stop '': must not be empty, since that would end every completion at once. Give "
            "some text, or leave it out."
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
    """UsageError: a text of the command line has a NUL character or is not UTF-8; no tokenizer has
    been trained on such text."""
    if "\0" in text:
        raise UsageError(f"{option}: has a NUL character at {text.index(chr(0))}. Leave it out.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"the lone surrogate U+{code:04X}"
        # Python keeps bytes of the command line that are not UTF-8 as lone surrogates.
        if 0xDC80 <= code <= 0xDCFF:
            what = f"the byte 0x{code - 0xDC00:02X}"
        where = f"at character {error.start}"
        raise UsageError(
            f"{option}: has {what} {where}, which is not UTF-8. Give text in UTF-8."
        ) from error


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """The ids that a Hugging Face tokenizer puts before every text."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.inner.encode("", add_special_tokens=True).ids
    return []


def main(argv: Sequence[str] | None = None, prog: str = "python -m maxtrain.generate") -> int:
    """Run the command `prog` with `argv` (None: the process's own). Completions go to stdout,
    everything else to stderr.

    Returns:
        The exit code.
    """
    if argv is None:
        argv = sys.argv[1:]

    def job() -> None:
        asked = _parse(argv, prog)
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        model, tokenizer = load_model(asked)
        begin = None
        if asked.hf is not None:
            begin = _beginning(tokenizer)
        # At least one id stands before a prompt.
        num_begin = 1
        if begin:
            num_begin = len(begin)
        longest = max(num_begin + len(tokenizer.encode(prompt)) for prompt in asked.prompt)
        most = model.config.max_length
        if longest + asked.max_tokens - 1 > most:
            print(
                f"The model reads at most {most:,} tokens (model.max_length): what is further back "
                "is forgotten.",
                file=sys.stderr,
            )
        speed: list[Speed] = []
        texts = complete(
            model,
            tokenizer,
            asked.prompt,
            begin=begin,
            report=speed.append,
            stop=asked.stop,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed,
        )
        show(Console(highlight=False), asked.prompt, texts)
        print(describe_speed(speed[0]), file=sys.stderr)

    return run_command(job, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
