"""`prepare`: text in, directories of token shards out. The command line around `build`.

    python -m data_pipeline.prepare OUT --text 'GLOB' --tokenizer bpe:4096 --holdout 0.05

Contract: the same input and settings give the same bytes, for any number of workers and after any
    interruption; a directory
that is finished, or belongs to other input or settings, is never touched unless --overwrite says
so.
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from rich.console import Console
from rich.progress import Progress

from data_pipeline.build import (
    Unit,
    build_part,
    find_duplicates,
    make_units,
    train_tokenizer,
    unit_bytes,
)
from data_pipeline.cache import Cache
from data_pipeline.config import CACHE
from data_pipeline.dedupe import Digests
from data_pipeline.errors import DataError, StorageError, UsageError, run_command
from data_pipeline.remote import RemotePath, is_url, place
from data_pipeline.report import CLOSE, OPEN, describe_row, marked_text, row_arrays, summary
from data_pipeline.runner import RUNNERS, Run, open_runner
from data_pipeline.shards import (
    ATTEMPT,
    MANIFEST,
    PARTS,
    TOKENIZER,
    Manifest,
    TokenShards,
    write_atomic,
)
from data_pipeline.sources import FORMATS
from data_pipeline.sources.document import Options, Piece, held_out
from data_pipeline.strict_json import loads
from data_pipeline.tokenizer import Tokenizer, bpe_entries, load_tokenizer

_PROGRAM = "python -m data_pipeline.prepare"
_EXAMPLES = "examples:\n" + "".join(
    f"  {_PROGRAM} OUT {format.example}\n" for format in FORMATS.values()
)
_EXAMPLES += f"""  {_PROGRAM} OUT --text play.txt --tokenizer chars --holdout 0.1 --holdout-by tail
  {_PROGRAM} OUT --text 'books/**/*.txt' --runner ray --runner-options address=auto
  {_PROGRAM} s3://bucket/OUT --jsonl 's3://bucket/web/*.jsonl.gz'       or gs://, or any URL of fsspec
  {_PROGRAM} tokenizer OUT --text 'a/*.txt' 'b/*.txt' --tokenizer bpe:4096    one to be used for several
  {_PROGRAM} verify OUT            check every byte; exit code 65 if one differs
  {_PROGRAM} show OUT/train --document 3
  {_PROGRAM} show OUT/train --row 7 --seq-length 512    with segments and loss mask
Interrupted, the same command goes on where it was. Exit codes: 64 usage, 65 data, 74 files, 75 run it again."""
_OF = "of.json"  # in a scratch folder of this machine: which output it is of
_STATE, _WORK = (
    ".prepare.json",
    ".prepare",
)  # what OUT is made of and since when; what is only needed while it is made
_FILES = r"tokens-\d+\.(bin|idx|mask|crc)|bins-\d+(\.\w+)?\.plan|manifest\.json|tokenizer\.json|prepare\.json"
_OURS = re.compile(rf"\.*({_FILES})(\.tmp)?|train|eval|\.prepare")


class _Request(NamedTuple):
    """What is to be built: all that decides the output."""

    parts: dict[str, list[Piece]]  # by folder
    origin: dict[str, Any]  # fields of the manifest: sources, settings, command
    tokenizer: Tokenizer | None  # None: to be trained


class _Parser(argparse.ArgumentParser):
    """Without the usage of forty lines before an error of one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command (None: of this process); messages go to stderr, results to stdout; returns
    the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (
        (argv[0], argv[1:]) if argv[:1] in (["verify"], ["show"], ["tokenizer"]) else ("", argv)
    )
    if verb in ("verify", "show"):
        return run_command(lambda: _look(verb, rest))
    return run_command(lambda: _prepare(*_parse(rest), only_tokenizer=verb == "tokenizer"))


def _parse(argv: list[str]) -> tuple[argparse.Namespace, str]:
    """The options, and the command that gives this output, whatever its OUT."""
    parser = _Parser(
        prog=_PROGRAM, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description="Turn text into token shards for training.",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "out",
        metavar="OUT",
        type=place,
        help="directory or URL to make; with --holdout it gets the folders train and eval",
    )
    for format in FORMATS.values():
        many: dict[str, Any] = {"metavar": format.metavar, "nargs": "+", "action": "extend"}
        once = {"action": "store_const", "const": [""]}
        add(f"--{format.name}", default=[], help=format.help, **(many if format.metavar else once))
    add(
        "--key",
        default="text",
        help="key, column or field of records that holds the text (default: %(default)s)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        default="",
        help="of --chat: jinja, or chatml (default: the one beside the tokenizer)",
    )
    add(
        "--chat-date",
        metavar="YYYY-MM-DD",
        default="",
        help="the date that a chat template writes, if it writes one",
    )
    add(
        "--tokenizer",
        help="bytes, chars, bpe:ENTRIES (trained here), a tokenizer.json, .model or .tiktoken, or the OUT of another prepare "
        "(default: bytes)",
    )
    add(
        "--eod",
        choices=["append", "none"],
        help="end documents with a token of their own (default: append; none for chars)",
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
        help="leave out documents with the very text of an earlier one; those of train come first",
    )
    add(
        "--on-bad",
        choices=["raise", "skip", "replace"],
        default="raise",
        help="what to do about text that is not clean",
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
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
        help="ray: on all machines of a Ray cluster, or of one begun here",
    )
    many = {"metavar": "KEY=VALUE", "nargs": "+", "action": "extend", "default": []}
    add(
        "--runner-options",
        help="of --runner ray: arguments of ray.init, such as address=auto or num_cpus=8",
        **many,
    )
    add(
        "--cache",
        metavar="DIR",
        default=CACHE,
        help="of URLs: this host's folder for what is fetched (default: %(default)s)",
    )
    add("--overwrite", action="store_true", help="replace an output of other input or settings")
    arguments = parser.parse_args(argv)
    if arguments.holdout is not None and not 0 < arguments.holdout < 1:
        raise UsageError(f"--holdout {arguments.holdout}: must be between 0 and 1, such as 0.05.")
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: must be at least 1.")
    if arguments.runner == "local" and arguments.runner_options:
        raise UsageError(
            f"--runner-options {' '.join(arguments.runner_options)}: belong to --runner ray. Give that too."
        )
    if arguments.runner == "ray" and arguments.workers is not None:
        mend = "Leave it out; --runner-options num_cpus=N limits a cluster that is begun here."
        raise UsageError(
            f"--workers {arguments.workers}: --runner ray has one for each CPU of its cluster. {mend}"
        )
    arguments.workers = arguments.workers or cores
    if not any(_values(arguments, name) for name in FORMATS):
        options = [f"--{format.name} {format.metavar}".strip() for format in FORMATS.values()]
        raise UsageError(f"no input. Give {', '.join(options[:-1])} or {options[-1]}.")
    if re.match(r"bpe(:|$)", arguments.tokenizer or ""):
        bpe_entries(arguments.tokenizer)
    words = []
    for name, value in vars(arguments).items():
        if name not in (
            "out",
            "workers",
            "runner",
            "runner_options",
            "cache",
            "overwrite",
        ) and value != parser.get_default(name):
            values = [] if value is True else value if isinstance(value, list) else [str(value)]
            words += [f"--{name.replace('_', '-')}", *filter(None, values)]
    return arguments, f"{_PROGRAM} OUT {shlex.join(words)}"


def _values(arguments: argparse.Namespace, name: str) -> list[str]:
    """What was given to the option of a format."""
    return getattr(arguments, name.replace("-", "_"))


def _request(arguments: argparse.Namespace, command: str) -> _Request:
    """Look at input and tokenizer; nothing is written."""
    spec = arguments.tokenizer or "bytes"
    trained = spec == "chars" or spec.startswith("bpe:")
    eod = arguments.eod or ("none" if spec == "chars" else "append")
    tokenizer = None if trained else load_tokenizer(spec)
    if tokenizer and tokenizer.eod_id is None and eod == "append":
        raise DataError(
            f"--tokenizer {spec}: has no end-of-document token by a usual name. Name it as eos_token in a "
            "tokenizer_config.json beside it, or give --eod none to join documents without a mark."
        )
    given = (
        tokenizer if arguments.tokenizer else None
    )  # ids belong to a tokenizer that somebody named
    options = Options(arguments.key, given and given.vocab_size, given and given.eod_id)
    special = tuple(given.special) if given else ()
    options = options._replace(
        tokenizer=spec,
        special=special,
        chat_template=arguments.chat_template,
        chat_date=arguments.chat_date,
    )
    found = [
        (name, format.find(value, options))
        for name, format in FORMATS.items()
        for value in _values(arguments, name)
    ]
    own = f"{_absolute(str(arguments.out))}/"  # a glob may find the output of an earlier run
    sources, pieces = [], {}
    for kind, candidates in found:
        paths = {_absolute(piece.path): piece for piece in candidates}
        fresh = {
            path: piece
            for path, piece in paths.items()
            if path not in pieces and not path.startswith(own)
        }
        names = "".join(f"{piece.name}\0{piece.size}\0" for piece in fresh.values()).encode(
            errors="surrogateescape"
        )
        size, digest = unit_bytes(list(fresh.values())), hashlib.sha256(names).hexdigest()
        sources.append({"kind": kind, "files": len(fresh), "bytes": size, "names_sha256": digest})
        pieces |= fresh
    settings = {
        name: getattr(arguments, name) for name in ("key", "holdout", "holdout_by", "on_bad")
    }
    settings |= {"eod": eod, "eod_id": tokenizer.eod_id if tokenizer else None}
    settings["tokenizer"] = tokenizer.sha256 if tokenizer else spec
    settings |= {"dedupe": True} if arguments.dedupe else {}
    for template in {piece.options.template for piece in pieces.values() if piece.options.template}:
        settings["chat_template"] = template.sha256
        settings["chat_targets"] = "marked" if template.marked else "compared"
    parts = _divide(list(pieces.values()), arguments.holdout, arguments.holdout_by)
    return _Request(
        parts, {"sources": sources, "settings": settings, "command": command}, tokenizer
    )


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def _divide(pieces: list[Piece], share: float | None, by: str) -> dict[str, list[Piece]]:
    """Which pieces go to which folder of the output."""
    if share is None:
        return {"": pieces}
    parts: dict[str, list[Piece]] = {"train": [], "eval": []}
    for piece in pieces:
        format = FORMATS[piece.format]
        if by == "tail":
            if (at := format.cut(piece, int(piece.stop * (1 - share)))) is None:
                raise UsageError(
                    f"--holdout-by tail: {piece.path} is compressed. Unpack it, or hold out by document."
                )
            parts["train"] += [piece._replace(stop=at)]
            parts["eval"] += [piece._replace(start=at)] if at < piece.stop else []
        elif format.many:
            for part in ("train", "eval"):
                parts[part].append(piece._replace(part=part, share=share))
        else:
            parts["eval" if held_out(piece.name, share) else "train"].append(piece)
    for part, held in parts.items():
        if not held:
            raise DataError(
                f"--holdout {share}: nothing is left for {part}, out of {len(pieces)} files. "
                "Give another share, or --holdout-by tail to hold out the end of every file."
            )
    return parts


def _prepare(arguments: argparse.Namespace, command: str, only_tokenizer: bool = False) -> None:
    request, out = _request(arguments, command), arguments.out
    if only_tokenizer and request.tokenizer:
        spec = arguments.tokenizer or "bytes"
        raise UsageError(
            f"tokenizer --tokenizer {spec}: there is nothing to train. Give --tokenizer bpe:ENTRIES or chars."
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file. Name a directory for the output.")
    if str(out).startswith("memory://"):
        raise UsageError(
            f"{out}: is the memory of one process, and gone with it. Name a directory, or an s3:// or gs:// URL."
        )
    wanted = _wanted(out, request) | ({"makes": "tokenizer"} if only_tokenizer else {})
    products = (
        [TOKENIZER] if only_tokenizer else [os.path.join(part, MANIFEST) for part in request.parts]
    )
    scratch = _scratch(out, wanted, arguments.cache)
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(out if isinstance(out, Path) else scratch, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if isinstance(out, RemotePath):
            write_atomic(scratch / _OF, json.dumps({"out": str(out), "wanted": wanted}).encode())
            _tidy(scratch)
        _make_way(out, wanted, request, arguments.overwrite)
        made, started = 0, time.perf_counter()
        already = all((out / product).exists() for product in products)
        if not already:
            with open_runner(arguments.runner, arguments.workers, arguments.runner_options) as run:
                try:
                    made = _build(out, scratch, request, run, only_tokenizer)
                except (
                    DataError,
                    UsageError,
                ):  # input or settings have to change: what there is can't be gone on with
                    _remove(out)
                    raise
        seconds = time.perf_counter() - started
        for part in () if only_tokenizer else request.parts:
            print("\n".join(summary(TokenShards.open(out / part, "size", Cache(arguments.cache)))))
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
        workers = f"{arguments.workers} workers" if arguments.workers > 1 else "1 worker"
        where = workers if arguments.runner == "local" else f"on {arguments.runner}"
        print(f"{made:,} tokens made in {seconds:,.1f} s: {made / seconds:,.0f} tokens/s, {where}")
    verdict = "already complete and unchanged: nothing to do" if already else "complete"
    if only_tokenizer:
        entries = load_tokenizer(out).vocab_size
        print(
            f"{out}: {verdict}, {entries:,} entries. Use it: {_PROGRAM} OUT ... --tokenizer {shlex.quote(str(out))}"
        )
    else:
        print(f"{out}: {verdict}. Check it: {_PROGRAM} verify {shlex.quote(str(out))}")


def _scratch(out: Path | RemotePath, wanted: dict[str, Any], cache: str) -> Path:
    """The folder of this machine for what is needed while OUT is made; of a URL only what can be
    made again elsewhere."""
    if isinstance(out, Path):
        return out / _WORK
    build = f"{out} {json.dumps(wanted, sort_keys=True)}"  # another machine may have begun something else there since
    return Path(cache).expanduser() / "prepare" / hashlib.sha256(build.encode()).hexdigest()[:16]


def _tidy(own: Path) -> None:
    """Remove scratch folders, beside our own, of outputs that were finished elsewhere, or given up;
    name the others."""
    for folder in sorted(path for path in own.parent.iterdir() if path != own and path.is_dir()):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            of = loads((folder / _OF).read_bytes())
            out, wanted = RemotePath(of["out"]), of["wanted"]
            begun = (out / _STATE).exists() and loads((out / _STATE).read_bytes()) == wanted
            if begun and not all(
                (out / part / MANIFEST).exists() for part in (PARTS if wanted["holdout"] else ("",))
            ):
                raise StorageError("it is not finished")
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # a prepare is at work there
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # the last two: JSON of another shape
            mend = "Run its command again, or remove the folder"
            print(
                f"{folder}: is kept of a prepare that was interrupted ({error}). {mend}.",
                file=sys.stderr,
            )
        finally:
            os.close(lock)


def _wanted(out: Path | RemotePath, request: _Request) -> dict[str, Any]:
    """All that must be the same for a build to be gone on with."""
    wanted = request.origin["settings"] | {"input": request.origin["sources"]}
    if (
        wanted.get("chat_targets") == "marked"
    ):  # outputs of older versions do not say it, and have the same targets
        del wanted["chat_targets"]
    pieces = list(itertools.chain(*request.parts.values()))
    if isinstance(out, RemotePath) or any(
        is_url(piece.path) for piece in pieces
    ):  # whose clocks say nothing
        wanted |= {"stamps": _stamps(pieces)}
    return wanted


def _stamps(pieces: Iterable[Piece]) -> str:
    """Changes if an input file was written to."""
    stamps = {piece.path: piece.stamp for piece in pieces if piece.stamp}
    for path in {path for piece in pieces for path in (piece.path, *piece.beside)} - stamps.keys():
        stamps[path] = (
            RemotePath(path).found().stamp if is_url(path) else str(os.stat(path).st_ctime_ns)
        )
    return hashlib.sha256(repr(sorted(stamps.items())).encode()).hexdigest()


def _make_way(
    out: Path | RemotePath, wanted: dict[str, Any], request: _Request, overwrite: bool
) -> None:
    """Keep what is there to go on with, if it is of this request; else refuse it, or remove it if
    that is asked for."""
    state, mend = out / _STATE, "Choose another OUT, or give --overwrite."
    if foreign := [path.name for path in _files(out) if not _OURS.fullmatch(path.name)]:
        raise UsageError(
            f"{out}: holds {foreign[0]}, which prepare did not make. Choose a new or empty directory."
        )
    if not overwrite and (state.exists() or any(path.name == MANIFEST for path in _files(out))):
        there = _begun(state) if state.exists() else {}
        names = [name for name in there | wanted if there.get(name) != wanted.get(name)]
        if names == ["stamps"]:
            raise UsageError(f"{out}: input files were written to since it was begun. {mend}")
        if names:
            table = "".join(
                f"\n  {name}: there {there.get(name)}, asked for {wanted.get(name)}"
                for name in names
            )
            raise UsageError(f"{out}: was made from other input or settings:{table}\n{mend}")
        pieces = itertools.chain(*request.parts.values())
        paths = {path for piece in pieces for path in (piece.path, *piece.beside)}
        if (
            isinstance(state, Path)
            and max(  # nothing can set a ctime back
                (os.stat(path).st_ctime_ns for path in paths if not is_url(path)), default=0
            )
            > state.stat().st_mtime_ns
        ):
            raise UsageError(f"{out}: input files were written to since it was begun. {mend}")
    else:
        _remove(out)
        write_atomic(state, json.dumps(wanted).encode())


def _begun(state: Path | RemotePath) -> dict[str, Any]:
    """What an output was begun from. DataError: the file that says so is damaged."""
    try:
        begun = loads(state.read_bytes())
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        raise DataError(
            f"{state}: is not what prepare wrote: damaged. Choose another OUT, or give --overwrite."
        )
    return begun


def _files(out: Path | RemotePath) -> list[Path | RemotePath]:
    return [
        path
        for folder in (out, *(out / part for part in PARTS))
        if folder.is_dir()
        for path in folder.iterdir()
    ]


def _remove(out: Path | RemotePath) -> None:
    """Remove an output; manifests and records first, so that what is left is never taken for whole,
    and the state last."""
    order = {MANIFEST: 0, _WORK: 1, **dict.fromkeys(PARTS, 3), _STATE: 4}
    for path in sorted(_files(out), key=lambda path: order.get(path.name, 2)):
        _remove_one(path)


def _remove_one(path: Path | RemotePath) -> None:
    if isinstance(path, RemotePath):
        path.remove()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _build(
    out: Path | RemotePath, work: Path, request: _Request, run: Run, only_tokenizer: bool
) -> int:
    """Find duplicates, train the tokenizer, if there is none yet, and build all parts; returns the
    tokens made now."""
    first, settings = next(iter(request.parts)), request.origin["settings"]
    eod, on_bad = settings["eod"], settings["on_bad"]
    units = {part: make_units(pieces) for part, pieces in request.parts.items()}
    for left in [*work.rglob(f"{ATTEMPT}*")]:
        shutil.rmtree(left, ignore_errors=True)
    with Progress(console=Console(stderr=True)) as progress:

        def task(name: str, units: Iterable[Unit]) -> Callable[[int], None]:
            return functools.partial(
                progress.advance, progress.add_task(name, total=sum(map(unit_bytes, units)))
            )

        digests = None
        if settings.get("dedupe"):
            digests, everything = out / _WORK / "duplicates", [*itertools.chain(*units.values())]
            find_duplicates(
                digests,
                work / "duplicates",
                everything,
                on_bad,
                run,
                task("duplicates", everything),
            )
        tokenizer = request.tokenizer
        if tokenizer is None:
            if not (work / TOKENIZER).exists():
                seen = task("tokenizer", units[first])
                trained = train_tokenizer(
                    settings["tokenizer"], eod, units[first], on_bad, seen, digests
                )
                work.mkdir(exist_ok=True)
                trained.save(work)
            tokenizer = load_tokenizer(work)
            tokenizer.name = settings["tokenizer"]
        if only_tokenizer:
            tokenizer.save(out)
            return 0
        before = made = 0  # units of the parts before this one
        for part, mine in units.items():
            seen, start = task(part or "tokens", mine), digests and Digests(digests, before)
            records = out / _WORK / (part or "all")
            made += build_part(
                out / part,
                records,
                mine,
                tokenizer,
                eod,
                on_bad,
                run,
                seen,
                start,
                work,
                **request.origin,
            )
            before += len(mine)
    return made


def _look(verb: str, argv: list[str]) -> None:
    """The verbs verify and show."""
    parser = _Parser(prog=f"{_PROGRAM} {verb}", allow_abbrev=False)
    parser.add_argument(
        "directory", metavar="DIR", type=place, help="what prepare made: a directory or a URL"
    )
    parser.add_argument(
        "--cache",
        default=CACHE,
        help="of URLs: this host's folder for what is fetched (default: %(default)s)",
    )
    if verb == "show":
        return _show(parser, argv)
    directory, problems = parser.parse_args(argv).directory, []
    parts = [directory / part for part in PARTS]  # both or neither
    for folder in parts if any((folder / MANIFEST).exists() for folder in parts) else [directory]:
        shards = TokenShards(folder, Manifest.load(folder), "full")
        found = list(shards.problems())
        problems += found
        state = f"{len(found)} differences" if found else "every byte is as it was built"
        print(
            f"{folder}: {shards.num_tokens:,} tokens in {len(shards.manifest.shards):,} shards: {state}"
        )
    if problems:
        raise DataError("\n".join(problems))


def _show(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """A document, as text; or a row, as training reads it."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--document", metavar="N", type=int, default=0, help="which document, from 0 (default: 0)"
    )
    which.add_argument(
        "--row",
        metavar="N",
        type=int,
        help=f"instead: this row of an epoch; dim, or outside of {OPEN}{CLOSE}: no target",
    )
    parser.add_argument(
        "--epoch",
        metavar="E",
        type=int,
        default=0,
        help="of --row: which epoch, from 0 (default: 0)",
    )
    parser.add_argument("--seq-length", metavar="L", type=int, help="of --row: data.seq_length")
    parser.add_argument(
        "--packing",
        choices=["stream", "bins", "pad"],
        default="stream",
        help="of --row: data.packing",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of --row: the run's seed, which says where a stream is cut",
    )
    arguments = parser.parse_args(argv)
    shards = TokenShards.open(arguments.directory, cache=Cache(arguments.cache))
    tokenizer = load_tokenizer(arguments.directory)
    if arguments.row is None:
        first, length = shards.document(arguments.document)
        print(
            f"document {arguments.document} of {shards.num_documents:,}: {length:,} tokens from {first:,}",
            file=sys.stderr,
        )
        _show_document(
            tokenizer, shards.read(first, length), shards.mask(np.array([first]), length)[0]
        )
        return
    length = arguments.seq_length or 0
    if length < 1:
        raise UsageError(
            f"--seq-length {arguments.seq_length}: a row has at least 1 token. Give the run's data.seq_length."
        )
    arrays = row_arrays(
        shards, arguments.row, length, arguments.packing, arguments.seed, arguments.epoch
    )
    console = Console(highlight=False)
    for text in describe_row(arrays, tokenizer, marks=not _has_colours(console)):
        console.print(text, soft_wrap=True)


def _show_document(tokenizer: Tokenizer, ids: np.ndarray, learnt: np.ndarray) -> None:
    """Write the text of a document; where not all of it is a target, with marks around what is."""
    if learnt.all():
        sys.stdout.write(tokenizer.decode(ids))
        return
    print(f"{np.count_nonzero(learnt):,} of them are targets, in {OPEN}{CLOSE}", file=sys.stderr)
    sys.stdout.write(marked_text(tokenizer, ids, learnt))


def _has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color


if __name__ == "__main__":
    sys.exit(main())
