"""What a step reads, for people: which rows of which sources, which documents these are of, and the
beginning of their text."""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data_pipeline.loader import TrainingData
from data_pipeline.report import marked_text, one_line, spell

# Tokens of a row that are decoded for a preview.
_MOST_TOKENS = 1024
# Documents of a row that are listed.
_MOST_DOCUMENTS = 6


class RowPreview(NamedTuple):
    """One row of a step.

    Attributes:
        source, epoch, row: where it is from; the row counts in the epoch.
        documents: int64 [documents], by their numbers in the source, in order.
        num_targets: positions that are targets.
        num_tokens: positions that are not padding.
        text: of the first targets, in one line; with marks around targets, if not all of them are.
    """

    source: str
    epoch: int
    row: int
    documents: np.ndarray
    num_targets: int
    num_tokens: int
    text: str


def describe_step(data: TrainingData, step: int, most: int, width: int) -> Iterator[str]:
    """Lines about the batch of a step, counted from 0: totals, sources, and `most` of its rows in
    so many columns.

    DataError: a shard is damaged.
    """
    batch = data.batch(step)
    span = data.plan.span(step)
    shape = f"{span.batch_size:,} rows of {span.seq_length:,} tokens"
    positions = span.batch_size * span.seq_length
    targets_of = f"{batch.num_targets:,} targets in {positions:,} positions"
    yield f"step {step + 1:,} of {data.plan.num_steps:,}: {shape}, {targets_of}"
    yield f"  batch {batch.digest}"
    targets = np.count_nonzero(batch.arrays["loss_mask"], axis=1)
    sources = batch.arrays["source"]
    for number in np.unique(sources).tolist():
        mine = sources == number
        shards = data.shards[number]
        counts = f"{np.count_nonzero(mine):,} rows, {targets[mine].sum():,} targets"
        line = f"  {data.plan.names[number]}: {counts}, of {shards.path}"
        if shards.manifest.command:
            line += f"; made by: {shards.manifest.command}"
        yield line
    for number, preview in enumerate(preview_rows(data, step, batch.arrays, most, width - 4)):
        listed = _list_documents(preview.documents)
        share = f"{preview.num_targets:,} of {preview.num_tokens:,} tokens are targets"
        origin = f"{preview.source}, epoch {preview.epoch:,}, row {preview.row:,} of it"
        yield f"row {number:,}: {origin}, {listed}; {share}"
        yield f"    {preview.text}"
    if (more := len(targets) - most) > 0:
        yield f"and {more:,} rows more; --rows {len(targets)} shows all"
    source = data.shards[int(sources[0])]
    show = f"python -m data_pipeline.prepare show {shlex.quote(str(source.path))}"
    yield f"A whole document: {show} --document {_documents(data, step, 0)[0]}"
    yield f"A whole row: {data.show_command(step)}"


def preview_rows(
    data: TrainingData, step: int, arrays: dict[str, np.ndarray], most: int, width: int
) -> Iterator[RowPreview]:
    """The first `most` rows of a step, whose arrays these are, with so many characters of their
    text."""
    rows = data.rows_at(step)
    for i in range(min(most, len(rows.row))):
        source = int(rows.source[i])
        real = arrays["segment_ids"][i] > 0
        learnt = arrays["loss_mask"][i] > 0
        documents = _documents(data, step, i)
        ids = arrays["targets"][i][real][:_MOST_TOKENS]
        mask = learnt[real][:_MOST_TOKENS]
        if learnt[real].all():
            text = spell(data.tokenizer, ids)
        else:
            text = marked_text(data.tokenizer, ids, mask)
        yield RowPreview(
            source=data.plan.names[source],
            epoch=int(rows.epoch[i]),
            row=int(rows.row[i]),
            documents=documents,
            num_targets=int(np.count_nonzero(learnt)),
            num_tokens=int(np.count_nonzero(real)),
            text=one_line(text, width),
        )


def _documents(data: TrainingData, step: int, place: int) -> np.ndarray:
    """The documents that a row of a step has targets of, by their numbers in its source."""
    source = int(data.rows_at(step).source[place])
    shards = data.shards[source]
    bins = data.bins_of(step, source)
    start, length, row = data.window_at(step, place)
    if bins is not None:
        return bins.documents(np.array([row]))[1]
    count = min(length, shards.num_tokens - row * length)
    ends = (start + np.array([1, count])) % shards.num_tokens
    first, last = shards.documents_at(ends).tolist()
    if ends[0] <= ends[1] and count < shards.num_tokens:
        return np.arange(first, last + 1)
    # The row goes round the end of the stream.
    return np.concatenate([np.arange(first, shards.num_documents), np.arange(last + 1)])


def _list_documents(documents: np.ndarray) -> str:
    if len(documents) == 1:
        return f"document {documents[0]}"
    listed = ", ".join(map(str, documents[:_MOST_DOCUMENTS].tolist()))
    more = len(documents) - _MOST_DOCUMENTS
    if more > 0:
        listed += f" and {more:,} more"
    return f"documents {listed}"
