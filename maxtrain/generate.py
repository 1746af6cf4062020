"""The job that continues text: prompts in, completions out, with a key/value cache.

Prompts of a batch end in the same column: shorter ones have padding on their left, of another segment, so that no token
sees it. Rows never see each other either; a row's random numbers depend on the seed, its index and the number of tokens
before, so a completion is the same in any company.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from rich.console import Console
from rich.text import Text

from data_pipeline.errors import StorageError, TryAgainError, UsageError, UserError
from data_pipeline.shards import TOKENIZER
from data_pipeline.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.load import load_config
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.models.decoder import Decoder
from maxtrain.models.layers import KVCache
from maxtrain.parallel.distributed import start
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import batch_shards, constrain
from maxtrain.training.state import abstract_model
from maxtrain.weights.hf import load_pretrained

_PROMPT_UNIT = 64  # prompts are padded to a multiple, so that a few compiled programs serve all lengths
_STOP_EVERY = 16  # tokens between looks at the text, when it is to stop at some


class Generated(NamedTuple):
    """New tokens of each prompt, and how long they took without the prompts and without compiling."""

    tokens: list[list[int]]
    seconds: float


class _State(NamedTuple):
    tokens: Int[Array, "B N"]  # new ones, up to `step`
    step: Int[Array, ""]
    done: Bool[Array, " B"]
    cache: KVCache


class _Choice(NamedTuple):
    """How a token is chosen; compiled in, but for the random key."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def __call__(self, logits: Float[Array, "B V"], key: Array, step: Int[Array, ""] | int) -> Int[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        ids, logits = None, logits / self.temperature
        if self.top_k is not None or self.top_p is not None:
            logits, ids = jax.lax.top_k(logits, min(self.top_k or logits.shape[-1], logits.shape[-1]))
        if self.top_p is not None and self.top_p < 1:
            weights = jax.nn.softmax(logits, axis=-1)
            logits = jnp.where(jnp.cumsum(weights, axis=-1) - weights < self.top_p, logits, -jnp.inf)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(jnp.arange(len(logits)))
        picked = jax.vmap(jax.random.categorical)(keys, logits)
        return (picked if ids is None else jnp.take_along_axis(ids, picked[:, None], axis=-1)[:, 0]).astype(jnp.int32)


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
) -> Generated:
    """Continue prompts of token ids.

    Args:
        model: on one device, or on the current mesh.
        prompts: ids, at least one each; lengths may differ.
        max_tokens: new tokens of each prompt, at most.
        temperature: that logits are divided by; 0: always the likeliest token.
        top_k: choose among so many likeliest tokens; None: all.
        top_p: then among the likeliest that together have this probability; None: all.
        seed: of the random choices.
        stop_ids: a row ends before any of these.
        stop: called with a row's new tokens every few tokens; the row ends when it says True.

    Raises:
        UsageError: an empty prompt, an id outside the vocabulary, more tokens than the model's max_length, or an option
            outside its range.
    """
    _check(model, prompts, max_tokens, temperature, top_k, top_p)
    rows = -(-len(prompts) // batch_shards()) * batch_shards()
    padded = [*prompts, *[[0]] * (rows - len(prompts))]
    width = -(-max(map(len, padded)) // _PROMPT_UNIT) * _PROMPT_UNIT
    starts = np.array([width - len(prompt) for prompt in padded], np.int32)
    tokens = np.array([[0] * (width - len(prompt)) + list(prompt) for prompt in padded], np.int32)
    graphdef, params = nnx.split(model)
    key, ends = jax.random.key(seed), np.array(stop_ids, np.int32)
    choice = _Choice(temperature, top_k, top_p)
    state = _prefill(graphdef, choice, max_tokens, params, tokens, starts, key)
    go_on = functools.partial(_decode, graphdef, choice, width, params, starts, key, ends)
    state = jax.block_until_ready(go_on(state, 0))  # compiles, and does nothing else
    begin, state = time.perf_counter(), state._replace(done=state.done | (np.arange(rows) >= len(prompts)))
    while True:
        state = go_on(state, max_tokens if stop is None else min(max_tokens, int(state.step) + _STOP_EVERY))
        made = [_until(row[: int(state.step)], stop_ids) for row in np.asarray(state.tokens)[: len(prompts)].tolist()]
        done = np.asarray(state.done) | [stop is not None and row < len(made) and stop(made[row]) for row in range(rows)]
        if int(state.step) >= max_tokens or done.all():
            return Generated(made, time.perf_counter() - begin)
        state = state._replace(done=jnp.asarray(done))


def _check(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    vocab, length, longest = model.config.vocab_size, model.config.max_length, max(map(len, prompts), default=0)
    assert vocab is not None
    for good, problem in (
        (longest and all(map(len, prompts)), "an empty prompt: the model must have a token to start from. Give some text."),
        (all(0 <= i < vocab for p in prompts for i in p), f"a prompt has ids outside model.vocab_size={vocab}. Use its tokenizer."),
        (max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1. Set it to 64, for example."),
        (
            longest + max_tokens <= length,
            f"a prompt of {longest} tokens and max_tokens={max_tokens} are more than model.max_length={length}. "
            f"Set max_tokens to {length - longest} or less." if longest < length else "Shorten the prompt.",
        ),
        (0 <= temperature < float("inf"), f"temperature={temperature} must be at least 0. Set 0 for the likeliest token, or 0.8."),
        (top_k is None or top_k >= 1, f"top_k={top_k} must be at least 1. Set 40, for example, or leave it out."),
        (top_p is None or 0 < top_p <= 1, f"top_p={top_p} must be above 0 and at most 1. Set 0.95, for example, or leave it out."),
    ):  # fmt: skip
        if not good:
            raise UsageError(problem)


def _until(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    graphdef: nnx.GraphDef, choice: _Choice, max_tokens: int, params: nnx.State, tokens: Array, starts: Array, key: Array
) -> _State:
    """The cache of all prompts, and each row's first new token."""
    model: Decoder = nnx.merge(graphdef, params)
    rows, width = tokens.shape
    columns = width + max_tokens - 1
    positions = jnp.maximum(jnp.arange(width, dtype=jnp.int32) - starts[:, None], 0)
    cache = model.new_cache(rows, columns)
    hidden, cache = model.extend(tokens, _segments(starts, columns), positions, 0, cache)
    first = choice(model.logits(hidden[:, -1:])[:, 0], key, 0)
    out = jnp.zeros((rows, max_tokens), jnp.int32).at[:, 0].set(first)
    return _State(constrain(out, None, None), jnp.ones((), jnp.int32), jnp.zeros(rows, bool), cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=7)
def _decode(
    graphdef: nnx.GraphDef,
    choice: _Choice,
    width: int,
    params: nnx.State,
    starts: Array,
    key: Array,
    stop_ids: Array,
    state: _State,
    limit: Array | int,
) -> _State:
    """Tokens one by one until all rows are done or have `limit` of them."""
    model: Decoder = nnx.merge(graphdef, params)
    segments = _segments(starts, state.cache.k.shape[2])

    def ended(state: _State) -> Array:
        last = jax.lax.dynamic_slice_in_dim(state.tokens, state.step - 1, 1, axis=1)
        return state.done | (last == stop_ids).any(axis=-1)

    def one(state: _State) -> _State:
        last, column = jax.lax.dynamic_slice_in_dim(state.tokens, state.step - 1, 1, axis=1), width + state.step - 1
        hidden, cache = model.extend(last, segments, column - starts[:, None], column, state.cache)
        token = choice(model.logits(hidden)[:, 0], key, state.step)
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, axis=1)
        return _State(constrain(tokens, None, None), state.step + 1, ended(state), cache)

    state = jax.lax.while_loop(lambda s: (s.step < limit) & ~ended(s).all(), one, state)
    return state._replace(done=constrain(ended(state), None))


def _segments(starts: Array, columns: int) -> Array:
    """1 from each prompt's first token on, also where nothing is yet: no query looks ahead of its own column."""
    return (jnp.arange(columns) >= starts[:, None]).astype(jnp.int32)


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    begin: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Continuations of texts, without the prompts.

    Args:
        model: as for `generate`.
        tokenizer: the model's.
        prompts: each the beginning of a document.
        begin: ids put before every prompt; None: what ends the document before, if the tokenizer has it.
        stop: a completion ends before any of these texts; it always ends with its document.
        options: of `generate`.

    Raises:
        UsageError: as `generate`; or an empty prompt, where nothing marks the beginning of a document.
    """
    return _complete(model, tokenizer, prompts, begin, stop, options)[0]


def _complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    begin: Sequence[int] | None,
    stop: Sequence[str],
    options: dict,
) -> tuple[list[str], Generated]:
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    ids = [[*(end if begin is None else begin), *tokenizer.encode(text).tolist()] or end for text in prompts]

    def text(prompt: list[int], new: list[int]) -> str:
        head, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])  # some tokenizers drop a first space
        whole = whole[len(head) :] if whole.startswith(head) else tokenizer.decode(new)
        return whole[: min((at for s in stop if (at := whole.find(s)) >= 0), default=len(whole))]

    def stopped(new: list[int]) -> bool:
        return any(s in tokenizer.decode(new) for s in stop)

    result = generate(model, ids, stop_ids=end, stop=stopped if stop else None, **options)
    return [text(prompt, new) for prompt, new in zip(ids, result.tokens)], result


def load_run(directory: str | Path, step: int | None = None) -> tuple[Decoder, Tokenizer]:
    """The model of a training run, on this process's first device, and the tokenizer of its data.

    Args:
        directory: of the run, with config.yaml and checkpoints.
        step: of the checkpoint; None: the newest.

    Raises:
        UsageError: not the directory of a run.
        UserError: of its config, its checkpoints or its data.
    """
    run = Path(directory).expanduser()
    if not (run / "config.yaml").exists():
        known = ", ".join(str(path.parent) for path in sorted(run.parent.glob("*/config.yaml"))[:5])
        raise UsageError(f"RUN={run}: has no config.yaml. Name the directory of a run{known and f', such as {known}'}.")
    config = load_config([f"config={run / 'config.yaml'}"])
    tokenizer = load_tokenizer(next(iter(config.data.sources.values())).path)
    graphdef, params = abstract_model(config.model, config.precision, make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1]))
    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint)
    try:
        state, _ = checkpoints.restore({"params": params}, step, partial=True)
    finally:
        checkpoints.close()
    return nnx.merge(graphdef, state["params"]), tokenizer


def load_hf(directory: str | Path, dtype: str) -> tuple[Decoder, Tokenizer, list[int]]:
    """Model and tokenizer of a Hugging Face directory, and the ids that its texts begin with; raises DataError."""
    tokenizer = load_tokenizer(Path(directory).expanduser())
    begin = tokenizer.inner.encode("", add_special_tokens=True).ids if isinstance(tokenizer, JsonTokenizer) else []
    return load_pretrained(directory, dtype)[0], tokenizer, begin


def show(console: Console, prompts: Sequence[str], completions: Sequence[str]) -> None:
    """Print each prompt, dim, with its completion, bright, and a rule between two."""
    for i, (prompt, text) in enumerate(zip(prompts, completions)):
        if i:
            console.rule(style="dim")
        console.print(Text.assemble((prompt, "dim"), (text, "bold")), soft_wrap=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = _Parser(prog=prog, allow_abbrev=False, description="Continue text with a trained model.")
    add = parser.add_argument
    add("run", metavar="RUN", nargs="?", help="directory of a training run")
    add("--hf", metavar="DIR", help="instead of RUN: a Hugging Face directory with weights and tokenizer.json")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="number format for --hf (default: %(default)s)")
    add("--prompt", metavar="TEXT", action="append", help="beginning of a document; may be given several times")
    add("--max-tokens", metavar="N", type=int, default=64, help="new tokens of each prompt, at most (default: %(default)s)")
    add("--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token (default: %(default)s)")
    add("--top-k", metavar="K", type=int, help="choose among the K likeliest tokens")
    add("--top-p", metavar="P", type=float, help="choose among the likeliest tokens that together have probability P")
    add("--seed", metavar="N", type=int, default=0, help="of the random choices (default: %(default)s)")
    add("--stop", metavar="TEXT", action="append", default=[], help="end a completion before this text")
    add("--step", metavar="N", type=int, help="checkpoint of RUN (default: the newest)")
    arguments = parser.parse_args(argv)
    if (arguments.run is None) == (arguments.hf is None):
        raise UsageError("name what generates: either RUN or --hf DIR.")
    if not arguments.prompt:
        raise UsageError('no prompt. Add --prompt TEXT; --prompt "" begins a new document.')
    return arguments


def main(argv: Sequence[str] | None = None, prog: str = "python -m maxtrain.generate") -> int:
    """Run the command; completions go to stdout, messages to stderr.

    Args:
        argv: arguments; None: those of the process.
        prog: how the command is called.

    Returns:
        The exit code: 0, or a UserError's.
    """
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv, prog)
        start(MeshConfig(), ObserveConfig().compilation_cache)
        begin = None
        if arguments.hf is None:
            model, tokenizer = load_run(arguments.run, arguments.step)
        else:
            model, tokenizer, begin = load_hf(arguments.hf, arguments.dtype)
        options = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
        texts, result = _complete(model, tokenizer, arguments.prompt, begin, arguments.stop, options)
        show(Console(highlight=False, soft_wrap=True), arguments.prompt, texts)
        count = sum(map(len, result.tokens))
        rate = (count - len(texts)) / result.seconds
        print(f"{count:,} tokens, {rate:,.0f} tokens/s", file=sys.stderr)
        return 0
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        error: UserError = TryAgainError("interrupted. Run the same command again.")
    except UserError as problem:
        error = problem
    print(f"{prog}: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
