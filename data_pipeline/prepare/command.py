"""`prepare`: text in, directories of token shards out. The command line around `build`.

    python -m data_pipeline.prepare OUT --text 'GLOB' --tokenizer bpe:4096 --holdout 0.05

Contract: the same input and settings give the same bytes, for any number of workers and after any
interruption. A directory that is finished, or belongs to other input or settings, is never touched
unless --overwrite says so.
"""

import argparse
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from rich.console import Console
from rich.progress import Progress

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DataError, StorageError, UsageError, run_command
from data_pipeline.base.masking import masked_values
from data_pipeline.base.new_files import TEMPORARY
from data_pipeline.base.remote import RemotePath, is_url, place
from data_pipeline.base.strict_json import loads
from data_pipeline.chat.chat import own_sources
from data_pipeline.config import CACHE
from data_pipeline.prepare.build import (
    Unit,
    build_part,
    find_duplicates,
    make_units,
    train_tokenizer,
    unit_bytes,
)
from data_pipeline.prepare.dedupe import Digests
from data_pipeline.prepare.report import (
    CLOSE,
    OPEN,
    coloured_text,
    describe_row,
    describe_value,
    group_arrays,
    marked_text,
    row_arrays,
    row_beginning,
    shown_tokens,
    summary,
    token_lines,
)
from data_pipeline.prepare.runner import RUNNERS, Run, open_runner
from data_pipeline.shards import (
    ATTEMPT,
    MANIFEST,
    PARTS,
    TOKENIZER,
    Manifest,
    TokenShards,
    write_atomic,
)
from data_pipeline.shards.cache import Cache
from data_pipeline.sources import FORMATS
from data_pipeline.sources.chat_map import NAMED, read_map, require_no_other_system
from data_pipeline.sources.document import InputOptions, InputRange, PreferenceForm, held_out
from data_pipeline.sources.preferences import NAMES
from data_pipeline.tokenizer import (
    BESIDE,
    CHAT_TEMPLATE,
    MORE_TEMPLATES,
    JsonTokenizer,
    Tokenizer,
    bpe_entries,
    load_tokenizer,
    read_settings,
    tokenizer_path,
    unused_tokenizers,
)

_PROGRAM = "python -m data_pipeline.prepare"
_EXAMPLES = "examples:\n" + "".join(
    f"  {_PROGRAM} OUT {format.example}\n" for format in FORMATS.values()
)
_EXAMPLES += f"""  {_PROGRAM} OUT --text play.txt --tokenizer chars --holdout 0.1 --holdout-by tail
  {_PROGRAM} OUT --text 'books/**/*.txt' --runner ray --runner-options address=auto
  {_PROGRAM} s3://bucket/OUT --jsonl 's3://bucket/web/*.jsonl.gz'    or any URL of fsspec
  {_PROGRAM} tokenizer OUT --text 'a/*.txt' 'b/*.txt' --tokenizer bpe:4096    for several corpora
  {_PROGRAM} verify OUT            check every byte; exit code 65 if one differs
  {_PROGRAM} show OUT/train --document 3
  {_PROGRAM} show OUT --pair 3      both documents of a pair
  {_PROGRAM} show OUT/train --row 7 --seq-length 512    with segments and loss mask
Interrupted, the same command goes on where it was.
Exit codes: 64 usage, 65 data, 74 files, 75 run it again."""
# In a scratch folder of this machine: which output it is of.
_OF = "of.json"
# What OUT is made of, and since when.
_STATE = ".prepare.json"
# What is only needed while OUT is made.
_WORK = ".prepare"
_FILES = (
    r"tokens-\d+\.(bin|idx|mask|val|cols|crc)|bins-\d+\.plan"
    r"|reference-\w+\.logprobs|manifest\.json|tokenizer\.json|prepare\.json"
)
_BESIDE = "|".join(map(re.escape, BESIDE))
_OURS = re.compile(rf"\.*({_FILES}|{_BESIDE})|{MORE_TEMPLATES}|{TEMPORARY}|train|eval|\.prepare")
# Options that say where and how the work is done, but not what comes out of it.
_NOT_IN_COMMAND = ("out", "workers", "runner", "runner_options", "cache", "overwrite")


class _Request(NamedTuple):
    """A build request: all settings that decide the output.

    `parts` are the pieces of each folder of the output; `origin` has fields of the manifest:
    sources, settings and command; `tokenizer` is None if it is to be trained.
    """

    parts: dict[str, list[InputRange]]
    origin: dict[str, Any]
    tokenizer: Tokenizer | None

    def pieces(self) -> list[InputRange]:
        """The pieces of all folders."""
        return list(itertools.chain(*self.parts.values()))


class _PrepareParser(argparse.ArgumentParser):
    """Parser that reports an error in one line, without forty lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command (None: of this process); messages go to stderr, results to stdout; returns
    the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    argv = list(argv)

    def run() -> None:
        verb = argv[0] if argv else ""
        if verb == "verify":
            _verify(argv[1:])
        elif verb == "show":
            _show(argv[1:])
        elif verb == "tokenizer":
            arguments, command = _parse(argv[1:])
            _prepare(arguments, command, only_tokenizer=True)
        else:
            arguments, command = _parse(argv)
            _prepare(arguments, command)

    return run_command(run)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, str]:
    """The options, and the command that gives this output, whatever its OUT."""
    parser = _PrepareParser(
        prog=_PROGRAM,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Turn text into token shards for training.",
    )
    cores = _num_cores()
    _add_input_options(parser)
    _add_output_options(parser)
    _add_machine_options(parser, cores)
    arguments = parser.parse_args(argv)
    _check_options(arguments)
    arguments.workers = arguments.workers or cores
    words = []
    for name, value in vars(arguments).items():
        if name not in _NOT_IN_COMMAND and value != parser.get_default(name):
            words += _option_words(name, value)
    return arguments, f"{_PROGRAM} OUT {shlex.join(words)}"


def _place(text: str) -> Path | RemotePath:
    """Convert the value of an option to a place; argparse reports no other error than its own."""
    try:
        return place(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _option_words(name: str, value: Any) -> list[str]:
    """Return the words of an option and its value in a command."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    if not isinstance(value, list):
        return [option, str(value)]
    return [option, *filter(None, value)]


def _num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _add_input_options(parser: argparse.ArgumentParser) -> None:
    """OUT, and where the text comes from."""
    add = parser.add_argument
    add(
        "out",
        metavar="OUT",
        type=_place,
        help="directory or URL to make; with --holdout it gets the folders train and eval",
    )
    for format in FORMATS.values():
        option = f"--{format.name}"
        if format.metavar:
            add(
                option,
                metavar=format.metavar,
                nargs="+",
                action="extend",
                default=[],
                help=format.help,
            )
        else:
            add(option, action="store_const", const=[""], default=[], help=format.help)
    add(
        "--key",
        default="text",
        help="key, column or field of records that holds the text (default: %(default)s)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        default="",
        help="chat template for --chat, --preferences and --prompts: a jinja file, or chatml "
        "(default: the one beside the tokenizer; text of --preferences and --prompts is then left "
        "as it is)",
    )
    add(
        "--chat-date",
        metavar="YYYY-MM-DD",
        default="",
        help="the date that a chat template writes, if it writes one",
    )
    add(
        "--map",
        metavar="ROLE=TEMPLATE",
        nargs="+",
        action="extend",
        default=[],
        help="for --chat, --prompts and --preferences: the messages that columns become, such as "
        "user='{question}' assistant='{answer}', or for preferences user='{question}' "
        "chosen='{better}' rejected='{worse}'; or a name "
        f"({', '.join(NAMED)}), or a .json file",
    )
    add(
        "--system",
        metavar="TEXT",
        help="for --chat, --prompts and --preferences: the system message of conversations that "
        "have none",
    )
    add(
        "--columns",
        metavar="NAME=COLUMN,...",
        default="",
        help=f"for --preferences: which columns hold what; names are {', '.join(NAMES)}",
    )
    add(
        "--margin",
        action="store_true",
        help="for --preferences: keep how much better the chosen answer is: margin, or "
        "score_chosen - score_rejected",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for tokenization and output."""
    add = parser.add_argument
    add(
        "--tokenizer",
        help="bytes (the default: a token for each byte), chars, bpe:ENTRIES (trained here), "
        "a tokenizer.json, .model or .tiktoken, or the OUT of another prepare",
    )
    add(
        "--eod",
        choices=["append", "none"],
        help="append: end each document with the end-of-document token, after which the next one "
        "begins; none: documents are as they are (default: append; none for chars and for what a "
        "chat template writes, which begins with the template's first token)",
    )
    add(
        "--holdout",
        metavar="SHARE",
        type=float,
        help="hold out this share of the documents, chosen by hash, for evaluation",
    )
    add(
        "--holdout-by",
        choices=["document", "tail"],
        default="document",
        help="tail: the last share of every file instead",
    )
    add(
        "--dedupe",
        action="store_true",
        help="leave out documents with the same text as an earlier one; those of train come first",
    )
    add(
        "--on-bad",
        choices=["raise", "skip", "replace"],
        default="raise",
        help="what to do about text that is not clean",
    )


def _add_machine_options(parser: argparse.ArgumentParser, cores: int) -> None:
    """Add the options for where and how the work is done."""
    add = parser.add_argument
    add(
        "--workers",
        metavar="N",
        type=int,
        help=f"processes (default: {cores}, the cores of this machine)",
    )
    add(
        "--runner",
        choices=RUNNERS,
        default="local",
        help="ray: on all machines of a Ray cluster, or of one that is started here",
    )
    add(
        "--runner-options",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="for --runner ray: arguments of ray.init, such as address=auto or num_cpus=8",
    )
    add(
        "--cache",
        metavar="DIR",
        default=CACHE,
        help="this host's folder for files behind URLs (default: %(default)s)",
    )
    add("--overwrite", action="store_true", help="replace an output of other input or settings")


def _check_options(arguments: argparse.Namespace) -> None:
    """UsageError: an option has a value that can't be, or does not go with another."""
    if arguments.holdout is not None and not 0 < arguments.holdout < 1:
        raise UsageError(f"--holdout {arguments.holdout}: must be between 0 and 1, such as 0.05.")
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: must be at least 1.")
    if arguments.runner == "local" and arguments.runner_options:
        given = " ".join(arguments.runner_options)
        raise UsageError(f"--runner-options {given}: belong to --runner ray. Give that too.")
    if arguments.runner == "ray" and arguments.workers is not None:
        rule = "--runner ray has one for each CPU of its cluster"
        fix = "Leave it out; --runner-options num_cpus=N limits a cluster that is begun here"
        raise UsageError(f"--workers {arguments.workers}: {rule}. {fix}.")
    if (arguments.columns or arguments.margin) and not arguments.preferences:
        given = "--margin" if arguments.margin else f"--columns {arguments.columns}"
        raise UsageError(f"{given}: belongs to --preferences. Give that too, or leave it out.")
    makes_messages = arguments.map or arguments.system is not None
    has_messages = arguments.chat or arguments.prompts or arguments.preferences
    if makes_messages and not has_messages:
        option = "--map" if arguments.map else "--system"
        rule = "belongs to --chat, --prompts and --preferences"
        raise UsageError(f"{option}: {rule}. Give one of them, too.")
    if not any(_values(arguments, name) for name in FORMATS):
        options = [f"--{format.name} {format.metavar}".strip() for format in FORMATS.values()]
        raise UsageError(f"no input. Give {', '.join(options[:-1])} or {options[-1]}.")
    if re.match(r"bpe(:|$)", arguments.tokenizer or ""):
        bpe_entries(arguments.tokenizer)


def _values(arguments: argparse.Namespace, name: str) -> list[str]:
    """Return the values of a format's option."""
    return getattr(arguments, name.replace("-", "_"))


def _request(arguments: argparse.Namespace, command: str) -> _Request:
    """Look at input and tokenizer; nothing is written."""
    spec = arguments.tokenizer or "bytes"
    tokenizer = None
    if spec != "chars" and not spec.startswith("bpe:"):
        tokenizer = load_tokenizer(spec)
        if others := unused_tokenizers(spec):
            used = tokenizer_path(spec)
            print(f"tokenizer: {used} is used, not {', '.join(others)} beside it", file=sys.stderr)
    options = _reading_options(arguments, spec, tokenizer)
    pieces, sources = _find_input(arguments, options)
    eod = arguments.eod or _default_eod(spec, pieces)
    if tokenizer and tokenizer.eod_id is None and eod == "append":
        fix = "Name it as eos_token in a tokenizer_config.json beside it"
        if not arguments.prompts:
            fix += ", or give --eod none to join documents without a mark"
        raise DataError(f"--tokenizer {spec}: has no end-of-document token by a usual name. {fix}.")
    settings = {
        "key": arguments.key,
        "holdout": arguments.holdout,
        "holdout_by": arguments.holdout_by,
        "on_bad": arguments.on_bad,
        "eod": eod,
        "eod_id": None,
        "tokenizer": spec,
    }
    if tokenizer:
        settings["eod_id"] = tokenizer.eod_id
        settings["tokenizer"] = tokenizer.sha256
    if arguments.dedupe:
        settings["dedupe"] = True
    forms = _forms(pieces, arguments.margin)
    if forms:
        settings["preferences"] = "; ".join(sorted({form.describe() for form in forms}))
        settings["columns"] = arguments.columns
        settings["margin"] = arguments.margin
    if arguments.prompts:
        _check_prompts(pieces, eod, tokenizer)
        settings["prompts"] = True
    if options.chat_map:
        settings["map"] = options.chat_map.text
    if options.system:
        settings["system"] = options.system
    for template in {piece.options.template for piece in pieces if piece.options.template}:
        settings["chat_template"] = template.sha256
        settings["chat_targets"] = template.targets
        if isinstance(tokenizer, JsonTokenizer):
            chosen = template.source if arguments.chat_template else None
            tokenizer.beside = _beside_with_templates(tokenizer.beside, spec, chosen)
    parts = _divide(pieces, arguments.holdout, arguments.holdout_by)
    origin = masked_values({"sources": sources, "settings": settings, "command": command})
    if forms:
        origin["group"] = forms[0].group
    return _Request(parts, origin, tokenizer)


def _beside_with_templates(
    beside: Mapping[str, bytes], spec: str, chosen: str | None
) -> dict[str, bytes]:
    """The files that go with a tokenizer, with its chat templates as files of their own.

    Args:
        beside: the files that are there.
        spec: of the tokenizer.
        chosen: the template that replaces the tokenizer's own; None: those are used.
    """
    found = {name: data for name, data in beside.items() if not name.startswith(MORE_TEMPLATES)}
    if chosen is not None:
        return {**found, CHAT_TEMPLATE: chosen.encode()}
    path = tokenizer_path(spec)
    own, _ = own_sources(path, read_settings(path))
    for name, source in own.items():
        file = f"{MORE_TEMPLATES}/{name}.jinja"
        if name == "default":
            file = CHAT_TEMPLATE
        # Other names are of no file.
        if re.fullmatch(r"[\w-][\w. -]*", name):
            found[file] = source.encode()
    return found


def _default_eod(spec: str, pieces: list[InputRange]) -> str:
    """Return whether documents end with an end-of-document token, where no option says so.

    Where a chat template wrote the documents, nothing is added: they begin with the template's
    first token and end as the template ends them, as at inference. Text for a tokenizer of
    characters has no such token either.

    Raises:
        UsageError: a template wrote some of the documents and not the others.
    """
    rendered = sorted({piece.format for piece in pieces if piece.options.template})
    others = sorted({piece.format for piece in pieces if not piece.options.template})
    if rendered and others:
        raise UsageError(
            f"--{rendered[0]} is written by a chat template and begins with its first token, and "
            f"--{others[0]} begins after an end-of-document token. Prepare each into a directory "
            "of its own, or give --eod append to have that token in both, or --eod none."
        )
    if rendered or spec == "chars":
        return "none"
    return "append"


def _check_prompts(pieces: list[InputRange], eod: str, tokenizer: Tokenizer | None) -> None:
    """UsageError: prompts do not go together with other documents, or their completions could not
    end."""
    others = sorted({piece.format for piece in pieces} - {"prompts"})
    if others:
        rule = "has documents that are no prompts"
        raise UsageError(f"--{others[0]}: {rule}. Prepare it into a directory of its own.")
    is_rendered = any(piece.options.template for piece in pieces)
    has_end = tokenizer is not None and tokenizer.eod_id is not None
    if eod == "none" and not is_rendered and not has_end:
        rule = "a completion ends with an end-of-document token, and the tokenizer has none"
        raise UsageError(f"--prompts: {rule}. Give --eod append.")


def _forms(pieces: list[InputRange], margin: bool) -> list[PreferenceForm]:
    """The forms of preferences that pieces have, each once; UsageError: they do not go together, or
    with the options."""
    forms = list(dict.fromkeys(p.options.preferences for p in pieces if p.options.preferences))
    if not forms:
        return []
    others = sorted({piece.format for piece in pieces} - {"preferences"})
    if others:
        rule = "has documents in another form than --preferences"
        raise UsageError(f"--{others[0]}: {rule}. Prepare it into a directory of its own.")
    if len({form.group for form in forms}) > 1:
        listed = " and ".join(form.describe() for form in forms)
        rule = "which are stored differently. Prepare them into directories of their own"
        raise UsageError(f"--preferences: there are {listed}, {rule}.")
    if forms[0].group == 1 and margin:
        fix = "Leave it out"
        raise UsageError(f"--margin: is of pairs, and these are answers with a label. {fix}.")
    return forms


def _reading_options(
    arguments: argparse.Namespace, spec: str, tokenizer: Tokenizer | None
) -> InputOptions:
    """Return the options that the formats use for all input."""
    chat_map = None
    system = arguments.system
    if arguments.map:
        chat_map = read_map(arguments.map)
        if system is None:
            system = chat_map.system
        require_no_other_system(chat_map, system)
    options = InputOptions(
        key=arguments.key,
        tokenizer=spec,
        chat_template=arguments.chat_template,
        chat_date=arguments.chat_date,
        columns=arguments.columns,
        margin=arguments.margin,
        chat_map=chat_map,
        system=system or "",
    )
    # Ids and special tokens belong to a tokenizer that somebody named, not to the default.
    if tokenizer is None or not arguments.tokenizer:
        return options
    return options._replace(
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        special=tuple(tokenizer.special),
    )


def _find_input(
    arguments: argparse.Namespace, options: InputOptions
) -> tuple[list[InputRange], list[dict[str, Any]]]:
    """Every input file once, as a piece, and the manifest's entry for each option that names
    some."""
    found = []
    for name, format in FORMATS.items():
        for value in _values(arguments, name):
            found.append((name, format.find(value, options)))
    # A glob may find the output of an earlier run.
    own = f"{_absolute(str(arguments.out))}/"
    sources = []
    pieces: dict[str, InputRange] = {}
    for kind, candidates in found:
        fresh = {}
        for piece in candidates:
            path = _absolute(piece.path)
            if path not in pieces and not path.startswith(own):
                fresh[path] = piece
        names = "".join(f"{piece.name}\0{piece.size}\0" for piece in fresh.values())
        sources.append(
            {
                "kind": kind,
                "files": len(fresh),
                "bytes": unit_bytes(list(fresh.values())),
                "names_sha256": hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest(),
            }
        )
        pieces |= fresh
    return list(pieces.values()), sources


def _absolute(path: str) -> str:
    if is_url(path):
        return path
    return os.path.abspath(path)


def _divide(pieces: list[InputRange], share: float | None, by: str) -> dict[str, list[InputRange]]:
    """Return the pieces of each folder of the output."""
    if share is None:
        return {"": pieces}
    parts: dict[str, list[InputRange]] = {"train": [], "eval": []}
    for piece in pieces:
        format = FORMATS[piece.format]
        if by == "tail":
            at = format.cut(piece, int(piece.stop * (1 - share)))
            if at is None:
                fix = "Unpack it, or hold out by document"
                raise UsageError(f"--holdout-by tail: {piece.path} is compressed. {fix}.")
            parts["train"].append(piece._replace(stop=at))
            if at < piece.stop:
                parts["eval"].append(piece._replace(start=at))
        elif format.many:
            for part in ("train", "eval"):
                parts[part].append(piece._replace(part=part, share=share))
        elif held_out(piece.name, share):
            parts["eval"].append(piece)
        else:
            parts["train"].append(piece)
    for part, held in parts.items():
        if not held:
            raise DataError(
                f"--holdout {share}: nothing is left for {part}, out of {len(pieces)} files. "
                "Give another share, or --holdout-by tail to hold out the end of every file."
            )
    return parts


def _prepare(arguments: argparse.Namespace, command: str, only_tokenizer: bool = False) -> None:
    """Make the output, or go on with it, and say what was done."""
    out = arguments.out
    request = _request(arguments, command)
    _check_request(arguments, request, only_tokenizer)
    wanted = _wanted(out, request)
    products = [os.path.join(part, MANIFEST) for part in request.parts]
    if only_tokenizer:
        wanted["makes"] = "tokenizer"
        products = [TOKENIZER]
    scratch = _scratch(out, wanted, arguments.cache)
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    # A URL can't be locked: only another prepare of this machine is kept out there.
    locked = out if isinstance(out, Path) else scratch
    lock = os.open(locked, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if isinstance(out, RemotePath):
            write_atomic(scratch / _OF, json.dumps({"out": str(out), "wanted": wanted}).encode())
            _tidy(scratch)
        _make_way(out, wanted, request, arguments.overwrite)
        made = 0
        started = time.perf_counter()
        already = all((out / product).exists() for product in products)
        if not already:
            with open_runner(arguments.runner, arguments.workers, arguments.runner_options) as run:
                made = _build_or_remove(out, scratch, request, run, only_tokenizer)
        seconds = time.perf_counter() - started
        if only_tokenizer:
            entries = load_tokenizer(out).vocab_size
        else:
            entries = _summarise([out / part for part in request.parts], Cache(arguments.cache))
        if isinstance(out, RemotePath):
            (out / _WORK).remove()
        shutil.rmtree(scratch, ignore_errors=True)
    except BlockingIOError as error:
        raise StorageError(
            f"{out}: another prepare is at work here. Wait for it, or choose another directory."
        ) from error
    finally:
        os.close(lock)
    if made:
        where = _where(arguments)
        print(f"{made:,} tokens made in {seconds:,.1f} s: {made / seconds:,.0f} tokens/s, {where}")
    if (arguments.tokenizer or "").startswith("bpe:"):
        _report_entries(arguments.tokenizer, entries)
    verdict = "complete"
    if already:
        verdict = "already complete and unchanged: nothing to do"
    quoted = shlex.quote(str(out))
    if only_tokenizer:
        use = f"Use it: {_PROGRAM} OUT ... --tokenizer {quoted}"
        print(f"{out}: {verdict}, {entries:,} entries. {use}")
    else:
        print(f"{out}: {verdict}. Check it: {_PROGRAM} verify {quoted}")


def _summarise(parts: Sequence[Path | RemotePath], cache: Cache) -> int:
    """Says what each directory holds; the entries of the vocabulary that all of them have."""
    entries = 0
    for part in parts:
        shards = TokenShards.open(part, "size", cache)
        print("\n".join(summary(shards)))
        entries = shards.vocab_size
    return entries


def _report_entries(spec: str, entries: int) -> None:
    """Report that a text was too short for all vocabulary entries that were requested."""
    requested = bpe_entries(spec)
    if entries < requested:
        print(
            f"--tokenizer {spec}: requested {requested:,} entries, and the text gives {entries:,}: "
            f"each of its words is one entry then. Train on more text for more, or give "
            f"bpe:{entries}."
        )


def _check_request(arguments: argparse.Namespace, request: _Request, only_tokenizer: bool) -> None:
    """UsageError: there is nothing to train, or OUT is no place for an output."""
    out = arguments.out
    if only_tokenizer and request.tokenizer:
        spec = arguments.tokenizer or "bytes"
        fix = "Give --tokenizer bpe:ENTRIES or chars"
        raise UsageError(f"tokenizer --tokenizer {spec}: there is nothing to train. {fix}.")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file. Name a directory for the output.")


def _where(arguments: argparse.Namespace) -> str:
    """Describe who did the work."""
    if arguments.runner != "local":
        return f"on {arguments.runner}"
    if arguments.workers > 1:
        return f"{arguments.workers} workers"
    return "1 worker"


def _scratch(out: Path | RemotePath, wanted: dict[str, Any], cache: str) -> Path:
    """The folder of this machine for what is needed while OUT is made; of a URL only what can be
    made again elsewhere."""
    if isinstance(out, Path):
        return out / _WORK
    # Named after what is wanted, too: another machine may have begun something else there since.
    build = f"{out} {json.dumps(wanted, sort_keys=True)}"
    return Path(cache).expanduser() / "prepare" / hashlib.sha256(build.encode()).hexdigest()[:16]


def _tidy(own: Path) -> None:
    """Remove scratch folders, beside our own, of outputs that were finished elsewhere, or given up;
    name the others."""
    for folder in sorted(path for path in own.parent.iterdir() if path != own and path.is_dir()):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            of = loads((folder / _OF).read_bytes())
            if _is_unfinished(RemotePath(of["out"]), of["wanted"]):
                raise StorageError("it is not finished")
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            # A prepare is at work there.
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            # The last two: JSON of another shape.
            fix = "Run its command again, or remove the folder"
            what = f"{folder}: is kept of a prepare that was interrupted ({error})"
            print(f"{what}. {fix}.", file=sys.stderr)
        finally:
            os.close(lock)


def _is_unfinished(out: RemotePath, wanted: dict[str, Any]) -> bool:
    """Return whether an output was started by the same request, and is not complete."""
    state = out / _STATE
    if not state.exists() or loads(state.read_bytes()) != wanted:
        return False
    parts = PARTS if wanted["holdout"] else ("",)
    return not all((out / part / MANIFEST).exists() for part in parts)


def _wanted(out: Path | RemotePath, request: _Request) -> dict[str, Any]:
    """All that must be the same for a build to be gone on with."""
    wanted = request.origin["settings"] | {"input": request.origin["sources"]}
    # Outputs of older versions do not say "marked", and have the same targets.
    if wanted.get("chat_targets") == "marked":
        del wanted["chat_targets"]
    # The clock of a URL says nothing about when this machine began.
    pieces = request.pieces()
    if isinstance(out, RemotePath) or any(is_url(piece.path) for piece in pieces):
        wanted["stamps"] = _stamps(pieces)
    return wanted


def _stamps(pieces: Iterable[InputRange]) -> str:
    """Changes if an input file was written to."""
    stamps = {piece.path: piece.stamp for piece in pieces if piece.stamp}
    for path in _input_paths(pieces) - stamps.keys():
        if is_url(path):
            stamps[path] = RemotePath(path).found().stamp
        else:
            stamps[path] = str(os.stat(path).st_ctime_ns)
    return hashlib.sha256(repr(sorted(stamps.items())).encode()).hexdigest()


def _input_paths(pieces: Iterable[InputRange]) -> set[str]:
    """All files that pieces are read from, or with."""
    paths = set()
    for piece in pieces:
        paths.update((piece.path, *piece.beside))
    return paths


def _make_way(
    out: Path | RemotePath, wanted: dict[str, Any], request: _Request, overwrite: bool
) -> None:
    """Keep an existing output of this request, to continue it. Any other output is refused, or
    removed if the user wants that.
    """
    state = out / _STATE
    foreign = [path.name for path in _files(out) if not _OURS.fullmatch(path.name)]
    if foreign:
        fix = "Choose a new or empty directory"
        raise UsageError(f"{out}: holds {foreign[0]}, which prepare did not make. {fix}.")
    is_there = state.exists() or any(path.name == MANIFEST for path in _files(out))
    if is_there and not overwrite:
        _require_same(out, wanted, request)
        return
    _remove(out)
    write_atomic(state, json.dumps(wanted).encode())


def _require_same(out: Path | RemotePath, wanted: dict[str, Any], request: _Request) -> None:
    """UsageError: an output is of other input or settings, or of files that were written to since
    it was begun."""
    fix = "Choose another OUT, or give --overwrite."
    state = out / _STATE
    there = {}
    if state.exists():
        there = _begun(state)
    names = [name for name in there | wanted if there.get(name) != wanted.get(name)]
    if names == ["stamps"]:
        raise UsageError(f"{out}: input files were written to since it was begun. {fix}")
    if names:
        table = ""
        for name in names:
            table += f"\n  {name}: there {there.get(name)}, requested {wanted.get(name)}"
        raise UsageError(f"{out}: was made from other input or settings:{table}\n{fix}")
    if not isinstance(state, Path):
        return
    # By ctime, which nothing can set back.
    begun = state.stat().st_mtime_ns
    for path in _input_paths(request.pieces()):
        if not is_url(path) and os.stat(path).st_ctime_ns > begun:
            raise UsageError(f"{out}: input files were written to since it was begun. {fix}")


def _begun(state: Path | RemotePath) -> dict[str, Any]:
    """Return the request that an output was started by. DataError: its file is damaged."""
    try:
        begun = loads(state.read_bytes())
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        fix = "Choose another OUT, or give --overwrite"
        raise DataError(f"{state}: is damaged: it is not what prepare wrote. {fix}.")
    return begun


def _files(out: Path | RemotePath) -> list[Path | RemotePath]:
    """Return the files of an output and of the folders of its parts."""
    files = []
    for folder in (out, *(out / part for part in PARTS)):
        if folder.is_dir():
            files += folder.iterdir()
    return files


def _remove(out: Path | RemotePath) -> None:
    """Remove an output; manifests and records first, so that what is left is never taken for whole,
    and the state last."""
    order = {MANIFEST: 0, _WORK: 1, **dict.fromkeys(PARTS, 3), _STATE: 4}

    def place(path: Path | RemotePath) -> int:
        return order.get(path.name, 2)

    for path in sorted(_files(out), key=place):
        _remove_one(path)


def _remove_one(path: Path | RemotePath) -> None:
    if isinstance(path, RemotePath):
        path.remove()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _build_or_remove(
    out: Path | RemotePath, work: Path, request: _Request, run: Run, only_tokenizer: bool
) -> int:
    """See `_build`. Where input or settings have to change, what there is can't be gone on with: it
    is removed."""
    try:
        return _build(out, work, request, run, only_tokenizer)
    except (DataError, UsageError):
        _remove(out)
        raise


def _build(
    out: Path | RemotePath, work: Path, request: _Request, run: Run, only_tokenizer: bool
) -> int:
    """Find duplicates, train the tokenizer, if there is none yet, and build all parts; returns the
    tokens made now."""
    settings = request.origin["settings"]
    eod = settings["eod"]
    on_bad = settings["on_bad"]
    units = {part: make_units(pieces) for part, pieces in request.parts.items()}
    for left in list(work.rglob(f"{ATTEMPT}*")):
        shutil.rmtree(left, ignore_errors=True)
    with Progress(console=SafeConsole(stderr=True)) as progress:

        def task(name: str, units: list[Unit]) -> Callable[[int], None]:
            total = sum(unit_bytes(unit) for unit in units)
            return functools.partial(progress.advance, progress.add_task(name, total=total))

        digests = None
        if settings.get("dedupe"):
            digests = out / _WORK / "duplicates"
            everything = list(itertools.chain(*units.values()))
            seen = task("duplicates", everything)
            find_duplicates(digests, work / "duplicates", everything, on_bad, run, seen)
        tokenizer = request.tokenizer
        if tokenizer is None:
            if not (work / TOKENIZER).exists():
                first = next(iter(units.values()))
                seen = task("tokenizer", first)
                spec = settings["tokenizer"]
                trained = train_tokenizer(spec, eod, first, on_bad, seen, digests)
                work.mkdir(exist_ok=True)
                trained.save(work)
            tokenizer = load_tokenizer(work)
            tokenizer.name = settings["tokenizer"]
        if only_tokenizer:
            tokenizer.save(out)
            return 0
        made = 0
        units_before = 0
        for part, mine in units.items():
            start = None
            if digests is not None:
                start = Digests(digests, units_before)
            made += build_part(
                out / part,
                out / _WORK / (part or "all"),
                mine,
                tokenizer,
                eod,
                on_bad,
                run,
                task(part or "tokens", mine),
                digests=start,
                here=work,
                **request.origin,
            )
            units_before += len(mine)
    return made


def _reading_parser(verb: str) -> _PrepareParser:
    """The options that verify and show have both."""
    parser = _PrepareParser(prog=f"{_PROGRAM} {verb}", allow_abbrev=False)
    parser.add_argument(
        "directory", metavar="DIR", type=_place, help="what prepare made: a directory or a URL"
    )
    parser.add_argument(
        "--cache",
        default=CACHE,
        help="this host's folder for files behind URLs (default: %(default)s)",
    )
    return parser


def _verify(argv: list[str]) -> None:
    """Compare every byte of an output with its manifest. DataError: one differs."""
    directory = _reading_parser("verify").parse_args(argv).directory
    folders = [directory]
    # There are both parts, or neither; if one is missing, that is an error.
    parts = [directory / part for part in PARTS]
    if any((part / MANIFEST).exists() for part in parts):
        folders = parts
    problems = []
    for folder in folders:
        shards = TokenShards(folder, Manifest.load(folder), "full")
        found = list(shards.problems())
        problems += found
        state = "every byte is as it was built"
        if found:
            state = f"{len(found)} differences"
        size = f"{shards.num_tokens:,} tokens in {len(shards.manifest.shards):,} shards"
        print(f"{folder}: {size}: {state}")
    if problems:
        raise DataError("\n".join(problems))


def _show(argv: list[str]) -> None:
    """A document, as text; or a row, as training reads it."""
    parser = _reading_parser("show")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--document", metavar="N", type=int, help="which document, from 0 (default: 0)"
    )
    which.add_argument(
        "--pair",
        metavar="N",
        type=int,
        help="of pairs, which one, from 0: both of its documents (default: 0)",
    )
    which.add_argument(
        "--row",
        metavar="N",
        type=int,
        help=f"show this row of an epoch instead; dim, or outside of {OPEN}{CLOSE}: no target",
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="for --document: a line for each token, with its id and whether it is a target",
    )
    parser.add_argument(
        "--epoch",
        metavar="E",
        type=int,
        default=0,
        help="for --row: which epoch, from 0 (default: 0)",
    )
    parser.add_argument("--seq-length", metavar="L", type=int, help="for --row: data.seq_length")
    parser.add_argument(
        "--packing",
        choices=["stream", "bins", "pad"],
        help="for --row: data.packing (default: stream, or bins for pairs)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="for --row: the run's seed, which says where a stream is cut",
    )
    arguments = parser.parse_args(argv)
    shards = TokenShards.open(arguments.directory, cache=Cache(arguments.cache))
    tokenizer = load_tokenizer(arguments.directory)
    if arguments.pair is not None and shards.group == 1:
        rule = f"{arguments.directory} holds single documents, not pairs"
        raise UsageError(f"--pair {arguments.pair}: {rule}. Give --document N.")
    is_pair = arguments.document is None and shards.group > 1
    if arguments.tokens and (arguments.row is not None or is_pair):
        raise UsageError("--tokens: is of one document. Give --document N, too.")
    if is_pair and arguments.row is None:
        _show_group(shards, tokenizer, arguments.pair or 0)
        return
    if arguments.row is None:
        _show_document(shards, tokenizer, arguments.document or 0, arguments.tokens)
        return
    length = arguments.seq_length or 0
    if length < 1:
        rule = "a row has at least 1 token"
        fix = "Give the run's data.seq_length"
        raise UsageError(f"--seq-length {arguments.seq_length}: {rule}. {fix}.")
    packing = arguments.packing
    if packing is None:
        packing = "bins" if shards.group > 1 else "stream"
    arrays = row_arrays(shards, arguments.row, length, packing, arguments.seed, arguments.epoch)
    print(f"row {arguments.row:,}: {row_beginning(shards, tokenizer)}", file=sys.stderr)
    _print_row(shown_tokens(arrays, shards.manifest.eod), tokenizer, shards.group)


def _show_group(shards: TokenShards, tokenizer: Tokenizer, number: int) -> None:
    """Write the documents of a group, as a row that holds nothing else."""
    arrays = group_arrays(shards, number)
    size = f"{len(arrays['targets']):,} tokens in {shards.group} documents"
    unit = shards.manifest.unit
    begins = row_beginning(shards, tokenizer, number * shards.group)
    print(f"{unit} {number} of {shards.num_groups:,}: {size}; {begins}", file=sys.stderr)
    _print_row(arrays, tokenizer, shards.group)


def _print_row(arrays: dict[str, np.ndarray], tokenizer: Tokenizer, group: int) -> None:
    console = SafeConsole()
    for text in describe_row(arrays, tokenizer, not _has_colours(console), group):
        console.print(text, soft_wrap=True)


def _show_document(
    shards: TokenShards, tokenizer: Tokenizer, number: int, by_token: bool = False
) -> None:
    """Write the text of a document; where not all of it is a target, in bright colours what is, or
    with marks around it. `by_token`: a line for each token instead."""
    first, length = shards.document(number)
    size = f"{length:,} tokens from {first:,}"
    if shards.valued:
        value = float(shards.values(np.array([number]))[0])
        size += f", {describe_value(value, shards.group)}"
    begins = row_beginning(shards, tokenizer, number)
    print(f"document {number} of {shards.num_documents:,}: {size}; {begins}", file=sys.stderr)
    (is_target,) = shards.mask(np.array([first]), length)
    ids = shards.read(first, length)
    console = SafeConsole()
    count = np.count_nonzero(is_target)
    if by_token:
        print(f"{count:,} of them are targets", file=sys.stderr)
        for line in token_lines(tokenizer, ids, is_target):
            console.print(line, soft_wrap=True)
    elif is_target.all():
        sys.stdout.write(tokenizer.decode(ids))
    elif _has_colours(console):
        print(f"{count:,} of them are targets, the others dim", file=sys.stderr)
        console.print(coloured_text(tokenizer, ids, is_target), soft_wrap=True, end="")
    else:
        print(f"{count:,} of them are targets, in {OPEN}{CLOSE}", file=sys.stderr)
        sys.stdout.write(marked_text(tokenizer, ids, is_target))


def _has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color
