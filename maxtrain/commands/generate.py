"""The job that continues text: prompts in, completions out.

A text that grows beyond model.max_length is read again from its middle: the last max_length / 2
tokens become the prompt of what follows, at positions from 0 on, which the model has been trained
on.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import UsageError, run_command
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.load_chat import add_chat_arguments, find_chat
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.inference.complete import Speed, complete, complete_ids, describe_speed, show
from maxtrain.inference.sampling import Sampling, check_length
from maxtrain.models.decoder import Decoder
from maxtrain.models.unstack import for_generation
from maxtrain.parallel.distributed import start
from maxtrain.trainer.saved_run import (
    add_model_arguments,
    check_model_arguments,
    comes_from_elsewhere,
    load_model,
    special_beginning,
)


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


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return how the options of `add_sampling_arguments` choose tokens; UsageError: one is outside
    its range.
    """
    return Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)


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


def main(argv: Sequence[str], prog: str = "maxtrain generate") -> int:
    """Run the command `prog` with `argv` (None: the process's own). Completions go to stdout,
    everything else to stderr.

    Returns:
        The exit code.
    """
    if argv is None:
        argv = sys.argv[1:]

    def job() -> None:
        args = _parse(argv, prog)
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        model, tokenizer = load_model(args)
        model = for_generation(model)
        if args.chat:
            _chat(args, model, tokenizer)
        else:
            _continue(args, model, tokenizer)

    return run_command(job, resumes=False)


def _continue(args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> None:
    """The texts that --prompt begins."""
    begin = None
    if comes_from_elsewhere(args):
        begin = special_beginning(tokenizer)
    # At least one id stands before a prompt.
    num_begin = 1
    if begin:
        num_begin = len(begin)
    longest = max(num_begin + len(tokenizer.encode(prompt)) for prompt in args.prompt)
    most = model.config.max_length
    if longest + args.max_tokens - 1 > most:
        print(
            f"The model reads at most {most:,} tokens (model.max_length): what is further back "
            "is forgotten.",
            file=sys.stderr,
        )
    console = SafeConsole()
    speed: list[Speed] = []
    options = {"begin": begin, "report": speed.append, "stop": args.stop, **_options_of(args)}
    if len(args.prompt) == 1:
        console.write_text(args.prompt[0], "dim")
        complete(model, tokenizer, args.prompt, stream=_printer(console), **options)
        console.write_text("\n")
    else:
        texts = complete(model, tokenizer, args.prompt, **options)
        show(console, args.prompt, texts)
    print(describe_speed(speed[0]), file=sys.stderr)


def _chat(args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> None:
    """Answers to --prompt, each the first message of a conversation; or to what is typed, in one
    conversation, until the input ends."""
    chat = find_chat(args, tokenizer)
    console = SafeConsole()

    def answer(messages: list[dict[str, str]]) -> str:
        ids = chat.ids(messages)
        room = _room_for_answer(len(ids), model.config.max_length)
        options = _options_of(args)
        if args.max_tokens > room:
            print(f"There is room for {room:,} more tokens in this conversation.", file=sys.stderr)
            options["max_tokens"] = room
        speed: list[Speed] = []
        (text,) = complete_ids(
            model,
            tokenizer,
            [ids],
            stop_ids=chat.stop_ids,
            stop=args.stop,
            stream=_printer(console),
            report=speed.append,
            **options,
        )
        console.write_text("\n")
        print(describe_speed(speed[0]), file=sys.stderr)
        return text

    for number, prompt in enumerate(args.prompt):
        if number > 0:
            console.rule(style="dim")
        console.write_text(f"{prompt}\n", "dim")
        answer([{"role": "user", "content": prompt}])
    if args.prompt:
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
    """Return the tokens that fit behind a conversation of `length` tokens; UsageError: it is too
    long itself.

    Its beginning is never dropped, unlike that of other text, since it has the system message.
    """
    if length > max_length:
        raise UsageError(
            f"the conversation has {length:,} tokens, and the model reads at most {max_length:,} "
            "(model.max_length). Begin a new one, or write less."
        )
    # The last token needs no place of its own.
    return max_length - length + 1


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate` that the command line has."""
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "seed": args.seed,
    }


def _printer(console: SafeConsole) -> Callable[[int, str], object]:
    """Return what prints parts of one text as they come."""
    return lambda _, part: console.write_text(part, "bold")
