"""`maxtrain score RUN|DIR`: the log-probability of each token of texts, by the model of a run or of
a Hugging Face directory.

A row is computed in a program of one shape, which its own length alone decides, beside a fixed
number of other rows that it can't see: its numbers do not depend on them. A text that is longer
than what the model reads is read in windows that overlap, and each of its tokens is scored in one
of them.
"""

import argparse
import functools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from rich.table import Table

from data_pipeline.base import strict_json
from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DataError, DivergedError, UsageError, run_command
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.inference.generation import foreign_id
from maxtrain.models.decoder import Decoder
from maxtrain.parallel.distributed import start
from maxtrain.parallel.sharding import batch_shards
from maxtrain.trainer.saved_run import (
    add_model_arguments,
    check_model_arguments,
    load_model,
    text_beginning,
)

# Rows of a batch, and tokens of a row at least.
ROWS = 8
_SHORTEST = 32
# Tokens of each row whose logits are there at a time: of all, they would be the largest array.
_LOGITS = 128


class ScoreRow(NamedTuple):
    """Token ids, of which those from number `first` on, at least 1, are scored."""

    ids: Sequence[int]
    first: int = 1


class TokenScores(NamedTuple):
    """Scores of each token: its natural log-probability, float32 [T], and whether it is the
    likeliest one, bool [T].
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray

    def total(self) -> float:
        """The sum of the log-probabilities."""
        return math.fsum(self.logprobs.tolist())


def score(model: Decoder, rows: Sequence[ScoreRow], batch_size: int = ROWS) -> list[TokenScores]:
    """Return what the model says of each row's tokens, given those before them.

    Args:
        model: on one device, or split over the current mesh.
        rows: at most max_length + 1 ids each, since the last one is not read.
        batch_size: rows that are computed together.

    Returns:
        For each row, in order.

    Raises:
        UsageError: a row is too long, has no token that is scored, or an id outside the vocabulary.
    """
    _check_rows(model, rows)
    graphdef, params = nnx.split(model)
    count = math.ceil(batch_size / batch_shards()) * batch_shards()
    by_width = defaultdict[int, list[int]](list)
    for number, row in enumerate(rows):
        by_width[_width(len(row.ids) - 1, model.config.max_length)].append(number)
    found: dict[int, TokenScores] = {}
    for width, numbers in sorted(by_width.items()):
        for begin in range(0, len(numbers), count):
            together = numbers[begin : begin + count]
            tokens = _padded([rows[number].ids for number in together], width, count)
            lengths = [len(rows[number].ids) - 1 for number in together]
            lengths += [lengths[0]] * (count - len(lengths))
            out = jax.device_get(_score(graphdef, params, tokens, np.array(lengths, np.int32)))
            for place, number in enumerate(together):
                wanted = slice(rows[number].first - 1, lengths[place])
                found[number] = TokenScores(out[0][place, wanted], out[1][place, wanted])
    return [found[number] for number in range(len(rows))]


def _check_rows(model: Decoder, rows: Sequence[ScoreRow]) -> None:
    """UsageError: see `score`."""
    longest = model.config.max_length
    vocabulary = model.config.vocab_size or 0
    for row in rows:
        if not 1 <= row.first < len(row.ids):
            raise UsageError(
                f"a row of {len(row.ids):,} tokens has none to score from number {row.first} on: "
                "the first is given. Give more text."
            )
        if len(row.ids) > longest + 1:
            raise UsageError(
                f"a row has {len(row.ids):,} tokens, and the model reads at most {longest:,} "
                "(model.max_length). Divide it into windows."
            )
        place = foreign_id(row.ids, vocabulary)
        if place is not None:
            raise UsageError(
                f"a row has the id {row.ids[place]} at token {place}, which must be in "
                f"[0, {vocabulary}) (model.vocab_size={vocabulary}). Use ids of the model's own "
                "tokenizer."
            )


def _width(length: int, longest: int) -> int:
    """Return the columns of the program that reads `length` tokens: few programs serve all
    lengths.
    """
    return min(longest, max(_SHORTEST, 1 << (length - 1).bit_length()))


def _padded(rows: Sequence[Sequence[int]], width: int, count: int) -> np.ndarray:
    """Ids [count, width + 1], with padding on the right; copies of the first row fill up."""
    tokens = np.zeros((count, width + 1), np.int32)
    for number in range(count):
        ids = rows[0]
        if number < len(rows):
            ids = rows[number]
        tokens[number, : len(ids)] = ids
    return tokens


@functools.partial(jax.jit, static_argnums=0)
def _score(
    graphdef: nnx.GraphDef, params: nnx.State, tokens: Array, lengths: Array
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probabilities of the tokens after the first of each row, and whether they are the
    likeliest; without meaning from `lengths` on."""
    model: Decoder = nnx.merge(graphdef, params)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    width = inputs.shape[1]
    segments = (jnp.arange(width) < lengths[:, None]).astype(jnp.int32)
    hidden = model.hidden(inputs, segments)

    logprobs = []
    is_greedy = []
    for begin in range(0, width, _LOGITS):
        some = slice(begin, begin + _LOGITS)
        of_some, greedy = _of_targets(model, hidden[:, some], targets[:, some])
        logprobs.append(of_some)
        is_greedy.append(greedy)
    return jnp.concatenate(logprobs, axis=1), jnp.concatenate(is_greedy, axis=1)


def _of_targets(
    model: Decoder, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    logits = model.logits(hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return logprobs, jnp.argmax(logits, axis=-1) == targets


def windows(
    num_ids: int, longest: int, stride: int, first: int = 1
) -> Iterator[tuple[int, ScoreRow]]:
    """Yield the windows of a text of `num_ids` ids: slices of it, with each token from `first` on
    scored in one.

    The first window has `longest + 1` ids, of which the last is only scored; every later one ends
    `stride` tokens further, and scores these, with as much before them as there is room for.

    Args:
        num_ids: of the whole text, at least `first + 1`.
        longest: tokens that the model reads.
        stride: between 1 and `longest`.
        first: number of the first token that is scored.

    Yields:
        Where a window begins, and a row whose ids are the numbers of the text's.
    """
    done = first
    while done < num_ids:
        # What is given has no need to be read before what is scored, but for the context.
        stop = min(num_ids, done + stride)
        if done == first:
            stop = min(num_ids, max(longest + 1, done + stride))
        begin = max(0, stop - longest - 1)
        yield begin, ScoreRow(range(begin, stop), done - begin)
        done = stop


def score_long(
    model: Decoder,
    texts: Sequence[ScoreRow],
    *,
    longest: int | None = None,
    stride: int | None = None,
    batch_size: int = ROWS,
) -> list[TokenScores]:
    """Score texts of any length, in windows; see `score`.

    Args:
        model, batch_size: as for `score`.
        texts: each a whole text.
        longest: tokens of a window; None: the model's max_length.
        stride: new tokens of each window but the first; None: half of a window.
    """
    longest = longest or model.config.max_length
    stride = stride or max(1, longest // 2)
    rows = []
    owners = []
    for number, text in enumerate(texts):
        for _, window in windows(len(text.ids), longest, stride, text.first):
            rows.append(ScoreRow([text.ids[i] for i in window.ids], window.first))
            owners.append(number)
    parts: list[list[TokenScores]] = [[] for _ in texts]
    for owner, scored in zip(owners, score(model, rows, batch_size), strict=True):
        parts[owner].append(scored)
    return [_joined(of_text) for of_text in parts]


def _joined(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.is_greedy for part in parts]),
    )


def encode_pair(
    tokenizer: Tokenizer, begin: Sequence[int], prompt: str, completion: str
) -> ScoreRow:
    """The ids of a prompt and of what follows it, which is scored.

    Encoded as one text, and cut where the prompt ends: a space between them belongs to what
    follows, as tokens do that begin with it.

    Args:
        tokenizer: of the model.
        begin: ids before every text.
        prompt: may be empty if `begin` is not.
        completion: what is scored.

    Raises:
        DataError: nothing is left to score, or nothing stands before it.
    """
    stripped = prompt.rstrip()
    moved = prompt[len(stripped) :] + completion
    before = tokenizer.encode(stripped).tolist()
    whole = tokenizer.encode(stripped + moved).tolist()
    first = len(begin) + len(before)
    ids = [*begin, *whole]
    if first == 0:
        raise DataError(
            "a prompt is empty, and the tokenizer has no token that a text begins with, so that "
            "nothing is known of its first token. Give a prompt."
        )
    if first >= len(ids):
        raise DataError(
            f"the completion {completion[:40]!r} has no token of its own after its prompt. Give "
            "more text."
        )
    return ScoreRow(ids, first)


def encode_text(tokenizer: Tokenizer, begin: Sequence[int], text: str) -> ScoreRow:
    """The ids of a text, all of which are scored; but for the first one, of which nothing is known,
    if there is no id before every text.

    DataError: there is none to score.
    """
    ids = [*begin, *tokenizer.encode(text).tolist()]
    first = max(1, len(begin))
    if first >= len(ids):
        raise DataError(f"the text {text[:40]!r} has no token to score. Give more text.")
    return ScoreRow(ids, first)


class ScoreRequest(NamedTuple):
    """A text to score: what to call it, and its ids."""

    name: str
    row: ScoreRow


def _read_asked(
    args: argparse.Namespace, tokenizer: Tokenizer, begin: Sequence[int]
) -> list[ScoreRequest]:
    """Return the texts to score, in the order of the command line.

    Raises:
        UsageError, DataError: a file can't be read, or a line is not as it should be.
    """
    found = []
    for number, text in enumerate(args.text, 1):
        found.append(ScoreRequest(f"text {number}", encode_text(tokenizer, begin, text)))
    for file in args.file:
        found.append(ScoreRequest(file, encode_text(tokenizer, begin, read_text("--file", file))))
    for file in args.pairs:
        for number, line in enumerate(read_text("--pairs", file).splitlines(), 1):
            if line.strip():
                where = f"{file}:{number}"
                prompt, completion = _pair_of(where, line)
                try:
                    row = encode_pair(tokenizer, begin, prompt, completion)
                except DataError as error:
                    raise DataError(f"{where}: {error}") from error
                found.append(ScoreRequest(where, row))
    return found


def read_text(option: str, file: str) -> str:
    """The content of a file of text.

    Raises:
        UsageError: it can't be read.
        DataError: it is empty, or not UTF-8.
    """
    try:
        content = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(
            f"{option} {file}: can't be read ({error.strerror}). Name a file of text."
        ) from error
    if not content:
        raise DataError(f"{option} {file}: is empty. Name a file that has text.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{option} {file}: has the byte 0x{content[error.start]:02X} at {error.start:,}, which "
            "is not UTF-8. Convert it, for example with `iconv -t UTF-8`."
        ) from error


def _pair_of(where: str, line: str) -> tuple[str, str]:
    """The prompt and the completion of a line of JSON; DataError: it is something else."""
    fix = 'Write {"prompt": TEXT, "completion": TEXT}.'
    try:
        values = strict_json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error}). {fix}") from error
    if not isinstance(values, dict) or values.keys() != {"prompt", "completion"}:
        raise DataError(f"{where}: must be an object with prompt and completion. {fix}")
    if not all(isinstance(text, str) for text in values.values()):
        raise DataError(f"{where}: prompt and completion must be text. {fix}")
    return values["prompt"], values["completion"]


def _record(args: ScoreRequest, scored: TokenScores, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the scores of a text as JSON."""
    ids = list(args.row.ids[args.row.first :])
    return {
        "name": args.name,
        "ids": ids,
        "tokens": [tokenizer.decode([i]) for i in ids],
        "logprobs": [float(number) for number in scored.logprobs],
        "is_greedy": scored.is_greedy.tolist(),
        "sum": scored.total(),
    }


def _summary(record: Mapping[str, Any]) -> str:
    """A line about a text."""
    count = len(record["ids"])
    mean = record["sum"] / count
    return f"{record['name']}: {record['sum']:.4f} nats, {count:,} tokens, {mean:.4f} each"


def _table(record: Mapping[str, Any]) -> Table:
    """A line for each token."""
    table = Table(box=None, pad_edge=False)
    table.add_column("token")
    table.add_column("log-probability", justify="right")
    table.add_column("greedy")
    columns = (record["tokens"], record["logprobs"], record["is_greedy"])
    for token, logprob, is_greedy in zip(*columns, strict=True):
        mark = ""
        if is_greedy:
            mark = "yes"
        table.add_row(repr(token), f"{logprob:.4f}", mark)
    return table


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_model_arguments(parser)
    add("--text", metavar="TEXT", action="append", default=[], help="may be given several times")
    add(
        "--file",
        metavar="FILE",
        action="append",
        default=[],
        help="a file of text; may be repeated",
    )
    add(
        "--pairs",
        metavar="FILE",
        action="append",
        default=[],
        help='a file with a line of JSON for each text: {"prompt": TEXT, "completion": TEXT}, of '
        "which the completion is scored",
    )
    add("--json", action="store_true", help="print a line of JSON for each text")
    args = parser.parse_args(argv)
    check_model_arguments(parser, args, "scores")
    if not (args.text or args.file or args.pairs):
        parser.error("name what is scored: --text TEXT, --file FILE or --pairs FILE")
    return args


def main(argv: Sequence[str], prog: str = "maxtrain score") -> int:
    """Runs the command; the exit code."""

    def job() -> None:
        args = _parse(argv, prog)
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        model, tokenizer = load_model(args)
        begin = text_beginning(args, tokenizer)
        texts = _read_asked(args, tokenizer, begin)
        if not begin and (args.text or args.file):
            print(
                "The tokenizer has no token that a text begins with: the first token of each text "
                "is not scored.",
                file=sys.stderr,
            )
        console = SafeConsole()
        for text, scored in zip(texts, score_long(model, [text.row for text in texts])):
            if not np.isfinite(scored.logprobs).all():
                raise DivergedError(
                    f"{text.name}: a log-probability is not finite. Take another checkpoint with "
                    "--step."
                )
            record = _record(text, scored, tokenizer)
            if args.json:
                print(json.dumps(record, allow_nan=False))
            else:
                console.print(_summary(record), markup=False, soft_wrap=True)
                console.print(_table(record))

    return run_command(job, resumes=False)
