"""The job that continues text: prompts in, completions out.

A text that grows beyond model.max_length is read again from its middle: the last max_length / 2
tokens become the prompt of what follows, at positions from 0 on, which the model has been trained
on.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from data_pipeline.console import SafeConsole
from data_pipeline.errors import DivergedError, UsageError, run_command
from data_pipeline.tokenizer import Tokenizer
from maxtrain.chat_source import add_chat_arguments, find_chat
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.model_source import (
    add_model_arguments,
    check_model_arguments,
    comes_from_elsewhere,
    load_model,
    special_beginning,
)
from maxtrain.models.decoder import Decoder
from maxtrain.models.unstack import for_generation
from maxtrain.parallel.distributed import start
from maxtrain.serve.engine import Engine
from maxtrain.serve.generation import Generation, check_ids
from maxtrain.serve.sampling import Sampling, check_length
from maxtrain.serve.text import TextStream

# Whether new tokens are the last of their row.
Stop = Callable[[list[int]], bool]
# Texts that are continued at a time.
_MOST_SLOTS = 32


class Speed(NamedTuple):
    """The time that generation took: until the first tokens were there, with reading prompts and
    compiling, and for the `tokens` that came after them."""

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
    """New token ids that follow each prompt.

    Args:
        model: on one device, or split over the current mesh.
        prompts: ids, at least one each; lengths may differ. Of one beyond the model's max_length,
            the end is read.
        max_tokens: new tokens of each prompt, at most.
        temperature, top_k, top_p, min_p, repetition_penalty: as of `Sampling`.
        seed: of the random choices, in [0, 2**32). Those of a prompt depend on its number, too.
        stop_ids: a row ends before any of these.
        stop: called with a row's new tokens every few tokens; the row ends when it returns True.
            One for all prompts, or one for each.
        report: called at the end with the time that it took.
        stream: called with the number of a prompt and its new ids, as they come.

    Returns:
        New ids for each prompt, in order.

    Raises:
        UsageError: an empty prompt, an id outside the vocabulary, or an option outside its range.
        DivergedError: the model gives numbers that are not finite.
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
    """That of one prompt, as of `generate`."""
    if stop is None or callable(stop):
        return stop
    return stop[row]


def in_window(ids: Sequence[int], max_length: int) -> list[int]:
    """What the model reads of a text: all of it, or the last max_length / 2 tokens if it is longer
    than max_length."""
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
    """Continuations of texts, without the prompts; each ends with its document.

    Args:
        model: on one device, or split over the current mesh.
        tokenizer: the model's own.
        prompts: each the beginning of a document.
        begin: ids put before every prompt; None: the tokenizer's end-of-document id, if it has one,
            which ends the document before.
        options: of `complete_ids`.

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
    """Texts that follow ids.

    Args:
        model, tokenizer, prompts: as of `complete`, the prompts as ids.
        stop: a text ends before any of these.
        stream: called with the number of a prompt and the next part of its text, as it comes.
        options: of `generate`.
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
    """The text of one row, whose ids are looked at for stop texts before they are handed out."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self.stream = TextStream(tokenizer, prompt, stop)
        self._ids: list[int] = []
        self._text = ""

    def has_stopped(self, ids: list[int]) -> bool:
        """Whether these, all that the row has, contain a stop text."""
        self._text += self.stream.add(ids[self.stream.num_read :])
        return self.stream.has_stopped

    def take(self, new: list[int]) -> str:
        """What can be said now that the row has these ids, too."""
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
    """A line about the time that a generation took."""
    first = f"{speed.first_seconds:.1f} s until the first tokens, compiling included"
    if not speed.tokens:
        return first
    rate = f"{speed.tokens / speed.seconds:,.0f} tokens/s"
    return f"{first}; then {speed.tokens:,} more in {speed.seconds:.2f} s ({rate})"


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how tokens are chosen."""
    add = parser.add_argument
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
        "--min-p",
        metavar="P",
        type=float,
        help="choose among tokens with at least P times the probability of the most likely one",
    )
    add(
        "--repetition-penalty",
        metavar="X",
        type=float,
        default=1.0,
        help="above 1: tokens that the text already has become less likely (default: 1)",
    )


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
        default=[],
        help="beginning of a document, or with --chat a message; may be given several times",
    )
    add(
        "--chat",
        action="store_true",
        help="answer messages by the model's chat template; without --prompt, those that are typed",
    )
    add_chat_arguments(parser, "with --chat: ")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        default=64,
        help="most new tokens for each prompt (default: %(default)s)",
    )
    add_sampling_arguments(parser)
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
    if not arguments.prompt and not arguments.chat:
        parser.error("name a text to continue with --prompt, or talk to the model with --chat")
    for option in ("system", "chat_template"):
        if getattr(arguments, option) and not arguments.chat:
            raise UsageError(f"--{option.replace('_', '-')} belongs to --chat. Add it.")
    if "" in arguments.stop:
        raise UsageError(
            "--stop '': must not be empty, since that would end every completion at once. Give "
            "some text, or leave it out."
        )
    for option, texts in (("--prompt", arguments.prompt), ("--stop", arguments.stop)):
        for text in texts:
            _check_text(option, text)
    check_length(arguments.max_tokens, arguments.seed)
    sampling_of(arguments)
    return arguments


def sampling_of(asked: argparse.Namespace) -> Sampling:
    """How the options of `add_sampling_arguments` choose tokens; UsageError: one is outside its
    range."""
    return Sampling(
        asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty
    )


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
        model = for_generation(model)
        if asked.chat:
            _chat(asked, model, tokenizer)
        else:
            _continue(asked, model, tokenizer)

    return run_command(job, resumes=False)


def _continue(asked: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> None:
    """The texts that --prompt begins."""
    begin = None
    if comes_from_elsewhere(asked):
        begin = special_beginning(tokenizer)
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
    console = SafeConsole()
    speed: list[Speed] = []
    options = {"begin": begin, "report": speed.append, "stop": asked.stop, **_options_of(asked)}
    if len(asked.prompt) == 1:
        console.write_text(asked.prompt[0], "dim")
        complete(model, tokenizer, asked.prompt, stream=_printer(console), **options)
        console.write_text("\n")
    else:
        texts = complete(model, tokenizer, asked.prompt, **options)
        show(console, asked.prompt, texts)
    print(describe_speed(speed[0]), file=sys.stderr)


def _chat(asked: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> None:
    """Answers to --prompt, each the first message of a conversation; or to what is typed, in one
    conversation, until the input ends."""
    chat = find_chat(asked, tokenizer)
    console = SafeConsole()

    def answer(messages: list[dict[str, str]]) -> str:
        ids = chat.ids(messages)
        room = _room_for_answer(len(ids), model.config.max_length)
        options = _options_of(asked)
        if asked.max_tokens > room:
            print(f"There is room for {room:,} more tokens in this conversation.", file=sys.stderr)
            options["max_tokens"] = room
        speed: list[Speed] = []
        (text,) = complete_ids(
            model,
            tokenizer,
            [ids],
            stop_ids=chat.stop_ids,
            stop=asked.stop,
            stream=_printer(console),
            report=speed.append,
            **options,
        )
        console.write_text("\n")
        print(describe_speed(speed[0]), file=sys.stderr)
        return text

    for number, prompt in enumerate(asked.prompt):
        if number > 0:
            console.rule(style="dim")
        console.write_text(f"{prompt}\n", "dim")
        answer([{"role": "user", "content": prompt}])
    if asked.prompt:
        return
    if sys.stdin.isatty():
        print("Write a message and press Enter; Ctrl-D ends the conversation.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    for line in sys.stdin:
        if not line.strip():
            continue
        _check_text("a message", line)
        messages.append({"role": "user", "content": line.rstrip("\n")})
        messages.append({"role": "assistant", "content": answer(messages)})


def _room_for_answer(length: int, max_length: int) -> int:
    """Tokens that fit behind a conversation of so many; UsageError: it is too long itself.

    Its beginning is never forgotten, as that of other text is: there stands what the system says.
    """
    if length > max_length:
        raise UsageError(
            f"the conversation has {length:,} tokens, and the model reads at most {max_length:,} "
            "(model.max_length). Begin a new one, or write less."
        )
    # The last token needs no place of its own.
    return max_length - length + 1


def _options_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate` that the command line has."""
    return {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "seed": asked.seed,
    }


def _printer(console: SafeConsole) -> Callable[[int, str], object]:
    """What prints parts of one text as they come."""
    return lambda _, part: console.write_text(part, "bold")


if __name__ == "__main__":
    sys.exit(main())
