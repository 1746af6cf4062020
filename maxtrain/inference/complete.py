"""Completions: prompts in, new tokens or new text out.

A text that grows beyond model.max_length is read again from its middle: the last max_length / 2
tokens become the prompt of the continuation, at positions from 0 on, which the model was trained
on.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DivergedError, UsageError
from data_pipeline.tokenizer import Tokenizer
from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Generation, check_ids
from maxtrain.inference.sampling import Sampling, check_length
from maxtrain.inference.text import TextStream
from maxtrain.models.decoder import Decoder

# A function that returns whether a row ends with its new tokens.
Stop = Callable[[list[int]], bool]


# Most texts that are continued at a time.
_MOST_SLOTS = 32


class Speed(NamedTuple):
    """The time that a generation took.

    Attributes:
        first_seconds: until the first tokens, with reading prompts and compilation.
        tokens: tokens after the first ones.
        seconds: time for these `tokens`.
    """

    first_seconds: float
    tokens: int
    seconds: float


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop: Stop | Sequence[Stop] | None = None,
    report: Callable[[Speed], object] | None = None,
    stream: Callable[[int, list[int]], object] | None = None,
) -> list[list[int]]:
    """Return new token ids that follow each prompt.

    Args:
        model: on one device, or sharded over the current mesh.
        prompts: ids, at least one each; lengths may differ. Of a prompt beyond the model's
            max_length, only the end is read.
        max_tokens: most new tokens for each prompt.
        temperature, top_k, top_p, min_p, repetition_penalty: as for `Sampling`.
        seed: random seed in [0, 2**32). Random choices for a prompt also depend on its number.
        stop_ids: a row ends before any of these.
        stop: called with a row's new tokens every few tokens; the row ends when it returns True.
            One function for all prompts, or one for each.
        report: called at the end with the time that the generation took.
        stream: called with the number of a prompt and its new ids, as they come.

    Returns:
        New ids for each prompt, in order.

    Raises:
        UsageError: an empty prompt, an id outside the vocabulary, or an option outside its range.
        DivergedError: the model's log-probabilities are not finite.
    """
    check_length(max_tokens, seed)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if not prompts:
        raise UsageError(
            "there is no prompt, but there must be something to continue. Give some text."
        )
    for prompt in prompts:
        check_ids(prompt, model.config.vocab_size or 0)
    begin = time.perf_counter()
    engine = Engine(model, min(len(prompts), _MOST_SLOTS))
    made: list[list[int]] = [[] for _ in prompts]

    def submit(row: int) -> Generation:
        earlier = list(made[row])
        stop_of_row = _stop_of(stop, row)

        def is_over(ids: list[int]) -> bool:
            return stop_of_row is not None and stop_of_row([*earlier, *ids])

        return engine.submit(
            in_window([*prompts[row], *earlier], engine.max_length),
            max_tokens - len(earlier),
            sampling,
            seed=seed,
            row=row,
            before=len(earlier),
            earlier=[*prompts[row], *earlier],
            stop_ids=stop_ids,
            stop=is_over if stop_of_row else None,
        )

    for row in range(len(prompts)):
        submit(row)
    given: dict[int, int] = {}
    first = 0
    first_seconds = None
    while changed := engine.step():
        for generation in changed:
            row = generation.row
            if generation.reason == "failed":
                raise DivergedError(
                    "the model's log-probabilities are not finite. Take another checkpoint of it."
                )
            new = generation.ids[given.get(row, 0) :]
            given[row] = given.get(row, 0) + len(new)
            made[row] += new
            if stream is not None and new:
                stream(row, new)
            if generation.reason == "window" and len(made[row]) < max_tokens:
                given[row] = 0
                submit(row)
        if first_seconds is None:
            first_seconds = time.perf_counter() - begin
            first = sum(map(len, made))
    if report:
        seconds = time.perf_counter() - begin - (first_seconds or 0.0)
        report(Speed(first_seconds or 0.0, sum(map(len, made)) - first, seconds))
    return made


def _stop_of(stop: Stop | Sequence[Stop] | None, row: int) -> Stop | None:
    """Return the stop function of one prompt of `generate`."""
    if stop is None or callable(stop):
        return stop
    return stop[row]


def in_window(ids: Sequence[int], max_length: int) -> list[int]:
    """Return the ids that the model reads of a text: all, or the last max_length / 2 if the text is
    longer than max_length."""
    if len(ids) <= max_length:
        return list(ids)
    return list(ids[-max(1, max_length // 2) :])


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    begin: Sequence[int] | None = None,
    **options: Any,
) -> list[str]:
    """Continue texts, and return the continuations without the prompts; each ends with its
    document.

    Args:
        model: on one device, or sharded over the current mesh.
        tokenizer: the model's own.
        prompts: each the beginning of a document.
        begin: ids put before every prompt; None: the tokenizer's end-of-document id, if it has one,
            which ends the document before.
        options: keyword arguments of `complete_ids`.

    Raises:
        UsageError: as for `generate`. An empty prompt is allowed if the tokenizer has an
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
    return complete_ids(model, tokenizer, ids, stop_ids=end, **options)


def complete_ids(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    stop: Sequence[str] = (),
    stream: Callable[[int, str], object] | None = None,
    **options: Any,
) -> list[str]:
    """Return the texts that follow prompts of ids.

    Args:
        model, tokenizer, prompts: as for `complete`, with the prompts as ids.
        stop: a text ends before any of these.
        stream: called with the number of a prompt and the next part of its text, as it comes.
        options: keyword arguments of `generate`.
    """
    rows = [_RowText(tokenizer, prompt, stop) for prompt in prompts]

    def add(row: int, new: list[int]) -> None:
        part = rows[row].take(new)
        if stream is not None and part:
            stream(row, part)

    stop_checks = None
    if stop:
        stop_checks = [row.has_stopped for row in rows]
    generate(model, prompts, stop=stop_checks, stream=add, **options)
    for number, row in enumerate(rows):
        part = row.stream.finish()
        if stream is not None and part:
            stream(number, part)
    return [row.stream.text for row in rows]


class _RowText:
    """The text of one row, which is searched for stop texts before it is handed out."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self.stream = TextStream(tokenizer, prompt, stop)
        self._ids: list[int] = []
        self._text = ""

    def has_stopped(self, ids: list[int]) -> bool:
        """Return whether all ids of the row contain a stop text."""
        self._text += self.stream.add(ids[self.stream.num_read :])
        return self.stream.has_stopped

    def take(self, new: list[int]) -> str:
        """Add ids, and return the text that is certain now."""
        self._ids += new
        self.has_stopped(self._ids)
        part = self._text
        self._text = ""
        return part


def show(console: SafeConsole, prompts: Sequence[str], completions: Sequence[str]) -> None:
    """Print each prompt, dim, with its completion, bold, and a line between two."""
    for i, (prompt, text) in enumerate(zip(prompts, completions)):
        if i > 0:
            console.rule(style="dim")
        console.write_text(prompt, "dim")
        console.write_text(text, "bold")
        console.write_text("\n")


def describe_speed(speed: Speed) -> str:
    """Describe the time that a generation took, in one line."""
    first = f"{speed.first_seconds:.1f} s until the first tokens, compiling included"
    if not speed.tokens:
        return first
    rate = f"{speed.tokens / speed.seconds:,.0f} tokens/s"
    return f"{first}; then {speed.tokens:,} more in {speed.seconds:.2f} s ({rate})"
