"""Preview of what a step reads: the rows of each source, their documents, and the beginning of
their text.
"""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data_pipeline.loader.loader import TrainingData
from data_pipeline.prepare.report import marked_text, one_line, shown_tokens, spell

# Tokens of a row that are decoded for a preview.
_MOST_TOKENS = 1024
# The arrays of a row that its text is made of.
_SHOWN = ("inputs", "targets", "segment_ids", "loss_mask")
# Documents of a row that are listed.
_MOST_DOCUMENTS = 6


class RowPreview(NamedTuple):
    """A row of a step, for people.

    Attributes:
        origin: its source, epoch, and, unless its documents share it in this step
            alone, which row of the epoch it is.
        documents: int64 [documents], by their numbers in their sources, in order.
        num_targets: positions that are targets.
        num_tokens: positions that are not padding.
        text: of the first targets, in one line; with marks around targets, if not all of them are.
    """

    origin: str
    documents: np.ndarray
    num_targets: int
    num_tokens: int
    text: str


def describe_step(data: TrainingData, step: int, most: int, width: int) -> Iterator[str]:
    """Yield lines about the batch of a step, counted from 0: totals, sources, and `most` of its
    rows, `width` columns wide.

    DataError: a shard is damaged.
    """
    batch = data.batch(step)
    num_rows, length = data.shape_at(step)
    shape = f"{num_rows:,} rows of {length:,} tokens"
    positions = num_rows * length
    targets_of = f"{batch.num_targets:,} targets in {positions:,} positions"
    yield f"step {step + 1:,} of {data.plan.num_steps:,}: {shape}, {targets_of}"
    yield f"  batch {batch.digest}"
    targets = np.count_nonzero(batch.arrays["loss_mask"], axis=1)
    sources = data.rows_at(step).source
    what = "rows"
    of_each = targets
    if data.is_balanced:
        what = f"{data.unit}s"
        of_each = _targets_of_documents(data, step, batch.arrays)
    for number in np.unique(sources).tolist():
        mine = sources == number
        shards = data.shards[number]
        counts = f"{np.count_nonzero(mine):,} {what}, {of_each[mine].sum():,} targets"
        line = f"  {data.plan.names[number]}: {counts}, of {shards.path}"
        if shards.manifest.command:
            line += f"; made by: {shards.manifest.command}"
        yield line
    for number, preview in enumerate(preview_rows(data, step, batch.arrays, most, width - 4)):
        listed = _list_documents(preview.documents)
        share = f"{preview.num_targets:,} of {preview.num_tokens:,} tokens are targets"
        yield f"row {number:,}: {preview.origin}, {listed}; {share}"
        yield f"    {preview.text}"
    if (more := len(targets) - most) > 0:
        yield f"and {more:,} rows more; --rows {len(targets)} shows all"
    source = data.shards[int(data.rows_at(step).source[0])]
    show = f"python -m data_pipeline.prepare show {shlex.quote(str(source.path))}"
    option = "document"
    first = int(_documents(data, step, 0)[0])
    if data.group > 1:
        option = "pair"
        first //= data.group
    yield f"A whole {data.unit}: {show} --{option} {first}"
    yield f"A whole row: {data.show_command(step)}"


def preview_rows(
    data: TrainingData, step: int, arrays: dict[str, np.ndarray], most: int, width: int
) -> Iterator[RowPreview]:
    """Yield the first `most` rows of a step with these arrays, each with `width` characters of
    text.
    """
    rows = data.rows_at(step)
    places = data.places_at(step)
    for i in range(min(most, len(arrays["targets"]))):
        (mine,) = np.nonzero(places.row == i)
        mine = mine[np.argsort(places.column[mine])].tolist()
        origins = []
        for place in mine:
            origin = f"{data.plan.names[rows.source[place]]}, epoch {rows.epoch[place]:,}"
            if not data.is_balanced:
                origin += f", row {rows.row[place]:,} of it"
            if origin not in origins:
                origins.append(origin)
        real = arrays["segment_ids"][i] > 0
        learnt = arrays["loss_mask"][i] > 0
        documents = np.array([], np.int64)
        for place in mine:
            documents = np.append(documents, _documents(data, step, place))
        eod = "append"
        if mine:
            eod = data.shards[int(rows.source[mine[0]])].manifest.eod
        shown = shown_tokens({name: arrays[name][i] for name in _SHOWN}, eod)
        ids = shown["targets"][real][:_MOST_TOKENS]
        mask = shown["loss_mask"][real][:_MOST_TOKENS] > 0
        if learnt[real].all():
            text = spell(data.tokenizer, ids)
        else:
            text = marked_text(data.tokenizer, ids, mask)
        yield RowPreview(
            origin=" and ".join(origins) or "empty",
            documents=documents,
            num_targets=int(np.count_nonzero(learnt)),
            num_tokens=int(np.count_nonzero(real)),
            text=one_line(text, width),
        )


def _targets_of_documents(
    data: TrainingData, step: int, arrays: dict[str, np.ndarray]
) -> np.ndarray:
    """Targets of each document, or group of them, of a balanced batch, in the order of
    `rows_at`."""
    places = data.places_at(step)
    counts = np.zeros(len(places.row), np.int64)
    for row in np.unique(places.row).tolist():
        (mine,) = np.nonzero(places.row == row)
        mine = mine[np.argsort(places.column[mine])]
        # Each document reaches to where the next one begins.
        learnt = arrays["loss_mask"][row] > 0
        counts[mine] = np.add.reduceat(learnt.astype(np.int64), places.column[mine])
    return counts


def _documents(data: TrainingData, step: int, place: int) -> np.ndarray:
    """The documents that a row of the plan has targets of, by their numbers in its source."""
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
