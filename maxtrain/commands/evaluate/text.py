"""Bits per byte of files of text: every token counted once, sums first, one division at the end.

A file is a document. It is read after what every text begins with (the tokenizer's token for that,
or the end of another document); a tokenizer without such a token leaves the first token of each
file out, and its bytes.
"""

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.score import ROWS, ScoreRow, encode_text, read_text, score_long
from maxtrain.models.decoder import Decoder


class TextFile(NamedTuple):
    """A file to evaluate on: its name, its ids of which some are counted, and the bytes of
    these."""

    name: str
    row: ScoreRow
    num_bytes: int


class LikelihoodSums(NamedTuple):
    """Sums over the tokens that count: how many, their bytes, and their negative log-likelihood in
    nats."""

    tokens: int
    num_bytes: int
    nats: float
    seconds: float

    def record(self) -> dict[str, Any]:
        """The sums, and what is divided of them."""
        nll = self.nats / self.tokens
        return {
            "bits_per_byte": self.nats / math.log(2) / self.num_bytes,
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)),
            "nats": self.nats,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
        }


def read_files(names: Sequence[str], tokenizer: Tokenizer, begin: Sequence[int]) -> list[TextFile]:
    """Files of text as ids.

    Raises:
        UsageError: one is named twice, or can't be read.
        DataError: one is empty, not UTF-8, or has nothing that counts.
    """
    files = []
    for name in names:
        if any(file.name == name for file in files):
            raise UsageError(f"--text {name}: is named twice. Name each file once.")
        text = read_text("--text", name)
        try:
            row = encode_text(tokenizer, begin, text)
        except DataError as error:
            raise DataError(f"--text {name}: {error}") from error
        files.append(TextFile(name, row, _counted_bytes(tokenizer, begin, text)))
    return files


def _counted_bytes(tokenizer: Tokenizer, begin: Sequence[int], text: str) -> int:
    """The bytes of what counts of a text, in UTF-8."""
    num_bytes = len(text.encode())
    if begin:
        return num_bytes
    _, _, stops = tokenizer.locate_text(text, True)
    return num_bytes - len(text[: int(stops[0])].encode())


def evaluate_files(
    model: Decoder,
    files: Sequence[TextFile],
    *,
    longest: int | None = None,
    stride: int | None = None,
    batch_size: int = ROWS,
) -> dict[str, LikelihoodSums]:
    """Return what a model makes of each file, by its name; arguments as of `score_long`."""
    found = {}
    for file in files:
        begin = time.perf_counter()
        (scored,) = score_long(
            model, [file.row], longest=longest, stride=stride, batch_size=batch_size
        )
        seconds = time.perf_counter() - begin
        found[file.name] = LikelihoodSums(
            len(scored.logprobs), file.num_bytes, -scored.total(), seconds
        )
    return found


def together(measured: Iterable[LikelihoodSums]) -> LikelihoodSums:
    """The sums of several files."""
    parts = list(measured)
    return LikelihoodSums(
        sum(part.tokens for part in parts),
        sum(part.num_bytes for part in parts),
        math.fsum(part.nats for part in parts),
        sum(part.seconds for part in parts),
    )


def table_of(measured: dict[str, LikelihoodSums]) -> Table:
    """Return the output for the user, with a line for all, if there are several."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("text", overflow="fold")
    for head in ("bits/byte", "nats/token", "perplexity", "tokens", "bytes", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    shown = dict(measured)
    if len(shown) > 1:
        shown["all"] = together(measured.values())
    for name, part in shown.items():
        record = part.record()
        table.add_row(
            name,
            f"{record['bits_per_byte']:.4f}",
            f"{record['nll']:.4f}",
            f"{record['perplexity']:.4g}",
            f"{part.tokens:,}",
            f"{part.num_bytes:,}",
            f"{part.seconds:.1f}",
        )
    return table


def check_window(args: argparse.Namespace, longest: int) -> None:
    """UsageError: --seq-length or --stride is none that the model can be read with."""
    window = args.seq_length or longest
    if window > longest:
        raise UsageError(
            f"--seq-length {window}: the model reads at most {longest:,} tokens "
            "(model.max_length). Leave it out, or set less."
        )
    if args.stride is not None and args.stride > window:
        raise UsageError(
            f"--stride {args.stride}: must be at most the {window:,} tokens of a window, or some "
            "would not be read. Leave it out for half of a window."
        )
