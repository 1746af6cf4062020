"""`prepare`: text in, directories of token shards out. The command line around `build`.

    python -m data_pipeline.prepare OUT --text 'GLOB' --tokenizer bpe:4096 --holdout 0.05

Contract: the same input and settings give the same bytes, for any number of workers and after any interruption; a directory
that is finished, or belongs to other input or settings, is never touched unless --overwrite says so.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from data_pipeline.build import Rules, build_part, describe_problems, input_digest, make_units, train_tokenizer, unit_bytes
from data_pipeline.errors import DataError, StorageError, TryAgainError, UsageError, UserError
from data_pipeline.shards import MANIFEST, TOKENIZER, Manifest, TokenShards, write_atomic
from data_pipeline.sources.document import Piece, find_files, held_out
from data_pipeline.sources.text import python_stdlib
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

_PROGRAM = "python -m data_pipeline.prepare"
_EXAMPLES = f"""examples:
  {_PROGRAM} data/code --python-stdlib --tokenizer bpe:4096 --holdout 0.05
  {_PROGRAM} data/books --text 'books/**/*.txt' --exclude '*/draft/*'
  {_PROGRAM} data/chat --jsonl 'chat/*.jsonl.gz' --key content --tokenizer path/to/tokenizer.json
  {_PROGRAM} data/play --text play.txt --tokenizer chars --holdout 0.1 --holdout-by tail
  {_PROGRAM} verify data/code            check every byte; exit code 65 if one differs
  {_PROGRAM} show data/code/train --document 3
Interrupted, the same command goes on where it was. Exit codes: 64 usage, 65 data, 74 files, 75 run it again."""
_WORK = ".prepare"
_PARTS = ("train", "eval")  # folders of the output, if something is held out
_NOT_GIVEN = re.compile(r"(bytes|chars|bpe:\d+)$")
_OURS = re.compile(r"\.?(tokens-\d+-\d+\.(bin|idx|crc)|manifest\.json|tokenizer\.json)(\.tmp)?")


class _Request(NamedTuple):
    """What is to be built: all that decides the output."""

    parts: dict[str, list[Piece]]  # by folder
    settings: dict[str, Any]
    sources: list[dict[str, Any]]
    command: str
    rules: Rules
    tokenizer: Tokenizer | None  # None: to be trained


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{_PROGRAM} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; messages go to stderr, results to stdout.

    Args:
        argv: arguments; None: those of the process.

    Returns:
        the exit code: 0, or a UserError's.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["verify"]:
            _verify(_parse_verb("verify", argv[1:]).directory)
        elif argv[:1] == ["show"]:
            _show(_parse_verb("show", argv[1:]))
        else:
            _prepare(_parse(argv))
        return 0
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        error: UserError = TryAgainError("interrupted. Run the same command again: it goes on where it was.")
    except UserError as problem:
        error = problem
    except OSError as problem:
        what = f"{problem.filename}: {problem.strerror}" if problem.filename else f"{problem.strerror or problem}"
        error = StorageError(f"{what}. Free space or mend access, then run the same command again: it goes on where it was.")
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=_PROGRAM, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description="Turn text into token shards for training.",
    )  # fmt: skip
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="directory to make; with --holdout it gets the folders train and eval")
    add("--text", metavar="GLOB", nargs="+", action="extend", default=[], help="text files, each one document")
    add("--jsonl", metavar="GLOB", nargs="+", action="extend", default=[], help="JSON lines, plain or .gz, each one document")
    add("--key", default="text", help="key of the JSON lines that holds the text (default: %(default)s)")
    add("--python-stdlib", action="store_true", help="the running Python's own standard library, without tests")
    add("--exclude", metavar="GLOB", nargs="+", action="extend", default=[], help="leave out files whose name matches")
    add("--tokenizer", default="bytes", help="bytes, chars, bpe:ENTRIES (trained here), or a tokenizer.json (default: bytes)")
    add("--eod", choices=["append", "none"], help="end documents with a token of their own (default: append; none for chars)")
    add("--eod-token", metavar="TOKEN", help="that token, for a given tokenizer.json (default: found by its usual names)")
    add("--holdout", metavar="SHARE", type=float, help="hold out this share of the documents, chosen by hash, for evaluation")
    add("--holdout-by", choices=["document", "tail"], default="document", help="tail: the last share of every file instead")
    add("--on-bad", choices=["raise", "skip", "replace"], default="raise", help="what to do about text that is not clean")
    add("--shard-tokens", metavar="N", type=int, default=1 << 26, help="most tokens in a shard (default: %(default)s)")
    add(
        "--workers", metavar="N", type=int, default=_cores(), help="processes (default: %(default)s, the cores of this machine)"
    )
    add("--overwrite", action="store_true", help="replace an output of other input or settings")
    arguments = parser.parse_args(argv)
    for name, good, rule in (
        ("holdout", arguments.holdout is None or 0 < arguments.holdout < 1, "must be between 0 and 1, such as 0.05"),
        ("shard_tokens", arguments.shard_tokens >= 1, "must be at least 1"),
        ("workers", arguments.workers >= 1, "must be at least 1"),
        ("eod_token", not arguments.eod_token or not _NOT_GIVEN.match(arguments.tokenizer), "is for a given tokenizer.json"),
    ):
        if not good:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: {rule}.")
    if not (arguments.text or arguments.jsonl or arguments.python_stdlib):
        raise UsageError("no input. Give --text GLOB, --jsonl GLOB or --python-stdlib.")
    if re.match(r"bpe(:|$)", arguments.tokenizer) and not re.fullmatch(r"bpe:\d+", arguments.tokenizer):
        raise UsageError(f"--tokenizer {arguments.tokenizer}: bpe takes its number of entries, such as bpe:4096.")
    return arguments


def _parse_verb(verb: str, argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"{_PROGRAM} {verb}", allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR", type=Path, help="what prepare made")
    if verb == "show":
        parser.add_argument("--document", metavar="N", type=int, default=0, help="which, from 0")
    return parser.parse_args(argv)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _request(arguments: argparse.Namespace) -> _Request:
    """Look at input and tokenizer; nothing is written."""
    found = [("text", pattern, find_files(pattern, "text", arguments.exclude)) for pattern in arguments.text]
    found += [("jsonl", p, find_files(p, "jsonl", arguments.exclude, arguments.key)) for p in arguments.jsonl]
    found += [("python-stdlib", "", python_stdlib())] if arguments.python_stdlib else []
    sources, pieces, seen = [], [], set()
    for kind, pattern, candidates in found:
        own = os.path.join(os.path.abspath(arguments.out), "")  # a glob may find the output of an earlier run
        paths = {piece: os.path.abspath(piece.path) for piece in candidates}
        fresh = [piece for piece, path in paths.items() if path not in seen and not path.startswith(own)]
        seen |= set(paths.values())
        names = hashlib.sha256("".join(f"{piece.name}\0{piece.stop}\0" for piece in fresh).encode(errors="surrogateescape"))
        size = unit_bytes(fresh)
        source = {"kind": kind, "files": len(fresh), "bytes": size, "names_sha256": names.hexdigest(), "pattern": pattern}
        sources.append(source | ({"key": arguments.key} if kind == "jsonl" else {}))
        pieces += fresh
    trained = arguments.tokenizer == "chars" or arguments.tokenizer.startswith("bpe:")
    eod = arguments.eod or ("none" if arguments.tokenizer == "chars" else "append")
    tokenizer = None if trained else load_tokenizer(arguments.tokenizer, arguments.eod_token)
    if tokenizer and tokenizer.eod_id is None and eod == "append":
        raise DataError(
            f"--tokenizer {arguments.tokenizer}: has no end-of-document token by a usual name. "
            "Give --eod-token TOKEN, or --eod none to join documents without a mark."
        )
    settings = {
        "tokenizer": arguments.tokenizer if tokenizer is None else tokenizer.sha256,
        "eod": eod,
        "eod_id": tokenizer.eod_id if tokenizer else None,
        "holdout": arguments.holdout,
        "holdout_by": arguments.holdout_by,
        "on_bad": arguments.on_bad,
        "shard_tokens": arguments.shard_tokens,
    }
    command = f"{_PROGRAM} OUT " + " ".join(_spell(name, value) for name, value in _deciding(arguments).items())
    rules = Rules(eod, arguments.on_bad, arguments.shard_tokens)
    return _Request(_divide(pieces, arguments.holdout, arguments.holdout_by), settings, sources, command, rules, tokenizer)


def _deciding(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if name not in ("out", "workers", "overwrite")}
    defaults = vars(_parse(["OUT", "--python-stdlib"])) | {"python_stdlib": False}
    return {name: value for name, value in given.items() if value != defaults[name]}


def _spell(name: str, value: Any) -> str:
    words = value if isinstance(value, list) else [] if value is True else [str(value)]
    return shlex.join([f"--{name.replace('_', '-')}", *words])


def _divide(pieces: list[Piece], share: float | None, by: str) -> dict[str, list[Piece]]:
    """Which pieces go to which folder of the output."""
    if share is None:
        return {"": pieces}
    parts: dict[str, list[Piece]] = {"train": [], "eval": []}
    for piece in pieces:
        if by == "tail":
            if piece.path.endswith(".gz"):
                raise UsageError(f"--holdout-by tail: {piece.path} is compressed. Unpack it, or hold out by document.")
            with open(piece.path, "rb") as file:
                file.seek(int(piece.stop * (1 - share)))
                file.readline()
                at = min(file.tell(), piece.stop)
            parts["train"] += [piece._replace(stop=at)]
            parts["eval"] += [piece._replace(start=at)] if at < piece.stop else []
        elif piece.kind == "jsonl":
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


def _prepare(arguments: argparse.Namespace) -> None:
    request, out = _request(arguments), arguments.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file. Name a directory for the output.")
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(f"{out}: another prepare is at work here. Wait for it, or choose another directory.") from error
        manifests = _go_on(out, request, arguments.overwrite)
        already = len(manifests) == len(request.parts)
        if not already:
            try:
                manifests = _build(out, request, arguments.workers)
            except (DataError, UsageError):  # input or settings have to change: what there is can't be gone on with
                _remove(out)
                raise
        shutil.rmtree(out / _WORK, ignore_errors=True)
    finally:
        os.close(lock)
    _summarize(out, manifests, "already complete and unchanged: nothing to do" if already else "complete")


def _go_on(out: Path, request: _Request, overwrite: bool) -> dict[str, Manifest]:
    """Look at what is in the way: refuse it, remove it, or keep it to go on with.

    Returns:
        the manifests of finished parts.
    """
    folders = _folders(out)
    foreign = [
        p for folder in folders for p in folder.iterdir() if not _OURS.fullmatch(p.name) and p not in (*folders, out / _WORK)
    ]
    if foreign:
        raise UsageError(f"{out}: holds {foreign[0].name}, which prepare did not make. Choose a new or empty directory.")
    found = {} if overwrite else {p.parent: Manifest.load(p.parent) for f in folders if (p := f / MANIFEST).exists()}
    state_path = out / _WORK / "state.json"
    wanted = _identity(request.settings, request.sources)
    state = json.loads(state_path.read_bytes()) if state_path.exists() and not overwrite else None
    records = [(_identity(manifest.settings, manifest.sources), folder / MANIFEST) for folder, manifest in found.items()]
    for there, path in records + ([(state, state_path)] if state else []):
        names = [name for name in wanted if there.get(name) != wanted[name]]
        if names:
            table = "".join(f"\n  {name}: there {there.get(name)}, asked for {wanted[name]}" for name in names)
            raise UsageError(f"{out}: was made from other input or settings:{table}\nChoose another OUT, or give --overwrite.")
        newest = max(
            max(s.st_mtime_ns, s.st_ctime_ns) for part in request.parts.values() for p in part for s in [os.stat(p.path)]
        )
        if newest < path.stat().st_mtime_ns:
            continue
        if path == state_path:
            state = None  # input changed since the build began: begin again
            continue
        if input_digest(_units(request, "" if path.parent == out else path.parent.name)) != found[path.parent].input_sha256:
            raise UsageError(
                f"{out}: the content of the input files has changed since. Choose another OUT, or give --overwrite."
            )
    complete = len(found) == len(request.parts)
    if complete:
        for folder in found:
            TokenShards.open(folder, "size")
    elif not state:
        _remove(out)
        found = {}
        state_path.parent.mkdir()
        write_atomic(state_path, json.dumps(wanted).encode())
    return {"" if folder == out else folder.name: manifest for folder, manifest in found.items()}


def _identity(settings: dict[str, Any], sources: list[dict[str, Any]]) -> dict[str, Any]:
    """What must be equal for an output to be the one asked for; patterns may differ if they find the same files."""
    names = hashlib.sha256("".join(source["names_sha256"] for source in sources).encode()).hexdigest()
    return settings | {
        "input": [source["kind"] + (f" {source['key']}" if "key" in source else "") for source in sources],
        "input files": sum(source["files"] for source in sources),
        "input bytes": sum(source["bytes"] for source in sources),
        "input names and sizes": names[:12],
    }


def _remove(out: Path) -> None:
    """Remove an output; manifests first, so that what is left is never taken for whole."""
    folders = _folders(out)
    paths = [path for folder in folders for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    for path in sorted(paths, key=lambda path: path.name != MANIFEST):
        path.unlink()
    for folder in folders[1:]:
        folder.rmdir()
    if (out / _WORK).exists():
        shutil.rmtree(out / _WORK)


def _folders(out: Path) -> list[Path]:
    return [out, *(out / part for part in _PARTS if (out / part).is_dir())]


def _units(request: _Request, part: str) -> list[list[Piece]]:
    return make_units(request.parts[part], request.rules.shard_tokens)


def _build(out: Path, request: _Request, workers: int) -> dict[str, Manifest]:
    """Train the tokenizer, if there is none yet, and build all parts."""
    columns = [
        TextColumn("{task.description:<12}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    units = {part: _units(request, part) for part in request.parts}
    sizes = {part: sum(map(unit_bytes, part_units)) for part, part_units in units.items()}
    work, first = out / _WORK, next(iter(units))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tokenizer = request.tokenizer
        if tokenizer is None and (work / TOKENIZER).exists():
            tokenizer = load_tokenizer(work)
        elif tokenizer is None:
            task = progress.add_task("tokenizer", total=sizes[first])
            seen = lambda size: progress.advance(task, size)  # noqa: E731
            tokenizer = train_tokenizer(request.settings["tokenizer"], units[first], request.rules, seen)
            tokenizer.save(work)
        tokenizer.name = request.settings["tokenizer"] if request.tokenizer is None else tokenizer.name
        manifests = {}
        for part, part_units in units.items():
            task = progress.add_task(part or "tokens", total=sizes[part])
            manifests[part] = build_part(
                out / part, work / (part or "all"), part_units, tokenizer, request.rules, workers,
                lambda size, task=task: progress.advance(task, size),
                sources=request.sources, settings=request.settings, command=request.command,
            )  # fmt: skip
    return manifests


def _summarize(out: Path, manifests: dict[str, Manifest], verdict: str) -> None:
    parts = [(part or "all", manifest) for part, manifest in manifests.items()]
    table = Table("", *(name for name, _ in parts))
    for label, value in (
        ("documents", lambda m: f"{m.num_documents:,}"),
        ("tokens", lambda m: f"{m.num_tokens:,}"),
        ("bytes of text", lambda m: f"{m.text_bytes:,}"),
        ("bytes per token", lambda m: f"{m.text_bytes / m.num_tokens:.3f}"),
        ("shards", lambda m: f"{len(m.shards):,}"),
        ("vocabulary", lambda m: f"{m.tokenizer['vocab_size']:,} ({m.tokenizer['name']})"),
    ):
        table.add_row(label, *(Text(value(m), justify="right") for _, m in parts))
    Console().print(table)
    for name, m in parts:
        if m.problems:
            lines = describe_problems(m.problems).encode(errors="backslashreplace").decode()
            print(f"left out or mended in {name}:\n{lines}")
    print(f"{out}: {verdict}. Check it: {_PROGRAM} verify {shlex.quote(str(out))}")


def _verify(directory: Path) -> None:
    parts = [folder for part in ("", *_PARTS) if ((folder := directory / part) / MANIFEST).exists()]
    problems = []
    for folder in parts or [directory]:
        shards = TokenShards(folder, Manifest.load(folder), "full")
        found = list(shards.problems())
        problems += found
        state = f"{len(found)} differences" if found else "every byte is as it was built"
        print(f"{folder}: {shards.num_tokens:,} tokens in {len(shards.manifest.shards):,} shards: {state}")
    if problems:
        raise DataError("\n".join(problems))


def _show(arguments: argparse.Namespace) -> None:
    shards = TokenShards.open(arguments.directory)
    first, stop = shards.document(arguments.document)
    ids = shards.read(first, stop - first)
    print(f"document {arguments.document} of {shards.num_documents:,}: {len(ids):,} tokens from {first:,}", file=sys.stderr)
    sys.stdout.write(load_tokenizer(arguments.directory).decode(ids))


if __name__ == "__main__":
    sys.exit(main())
