"""Loading: the host's batch of step s, by number or as a stream read ahead by grain.

One grain element is this host's whole batch of one step, so the number of workers and threads can't
change the order, and grain's own iterator state is never needed: `iterate(start_step)` begins
anywhere. Training goes by the plan; evaluation reads a set exactly once, in order, with rows of
zero weight to fill its last batch.
"""

import dataclasses
import functools
import gc
import hashlib
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
from absl import flags
from grain import experimental

from data_pipeline.base.errors import ConfigError, DataError
from data_pipeline.base.limited_files import MAX_TOKENIZER_BYTES, read_limited
from data_pipeline.config import DataConfig
from data_pipeline.loader.balance import RowPlaces, balance_rows, count_batch_rows, row_counts
from data_pipeline.loader.batch_checks import check_batch, checksum
from data_pipeline.loader.corruption import corrupt, row_seed
from data_pipeline.loader.one_tokenizer import require_one_tokenizer
from data_pipeline.loader.packing import (
    VALUE,
    HostSlice,
    Windows,
    count_rows,
    fold_documents,
    pack,
    pack_documents,
    phase,
)
from data_pipeline.loader.workers import watched
from data_pipeline.plan.document_packing import Bins, document_sizes, open_bins
from data_pipeline.plan.plan import BatchShape, Cursor, DataRead, Plan, PlanRows, PlanSource, Steps
from data_pipeline.shards import TOKENIZER, TokenShards
from data_pipeline.shards.cache import Cache
from data_pipeline.shards.teacher_logits import TeacherFiles, empty_arrays
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

# Rows of the plan that are looked up at once: small batches share one look-up.
_BLOCK_ROWS = 4096
# Steps whose batches are looked at to describe them before a run.
_STEPS_DESCRIBED = 32
# Steps whose rows are counted ahead of them, of each stage of the data, and documents of these, so
# that it takes seconds.
_STEPS_COUNTED = 2_000
_DOCUMENTS_COUNTED = 250_000

# What a host holds of a batch: alike for all batches, or by their shape; None: the whole batch.
Parts = HostSlice | dict[tuple[int, int], HostSlice] | None


class DerivedBatch(NamedTuple):
    """A batch that is not what the plan reads, but made of it.

    Attributes:
        shape: rows and length.
        unused_rows: rows without a target that nobody is to blame for.
        numbers: to be recorded of the step.
    """

    shape: BatchShape
    unused_rows: int
    numbers: dict[str, float]


class HostBatch(NamedTuple):
    """One host's batch of one step, and the number of its targets.

    `arrays`: inputs, targets, segment_ids, positions (int32 [b, T]) and loss_mask (float32 [b, T])
    of this host's b rows, and source (int32 [b]): the number of each row's source among the plan's
    names, or that of its first document; 0 where the batch is of an evaluation set, or the row is
    empty. Of data in pairs, segments 2k - 1 and 2k of a row are the chosen and the rejected
    document of its k-th pair. Of data whose documents have a number each, there is also value
    (float32 [b, T]): that of each position's document, 0 in padding. So is what was attached
    (`_Dataset.attach`), by its name. A teacher's stored logits have the arrays of
    teacher_logits.py.

    `digest` identifies the rows of the whole global batch, `place` where their tokens lie in their
    sources, whatever the epoch, so both are the same on every host. `content` is the `checksum` of
    this host's targets. `error`: why the batch is empty. `made`: of what was read, this was made.
    """

    step: int
    arrays: dict[str, np.ndarray]
    num_targets: int
    digest: str
    content: int
    place: str
    error: Exception | None = None
    made: DerivedBatch | None = None


class _Dataset:
    """Base class of training and evaluation data. Picklable: Grain's workers open the files
    themselves.
    """

    def __init__(self, config: DataConfig, sources: list[TokenShards], bins: dict[int, list[Bins]]):
        self.config = config
        self.sources = sources
        self.bins = bins
        self.vocab_size = sources[0].vocab_size
        # Documents that belong together.
        self.group = sources[0].group
        # What batches have of each position's document beside what the shards hold.
        self._attached: dict[str, list[np.ndarray]] = {}
        # The stored logits of a teacher, if batches are to have them.
        self.teacher: TeacherFiles | None = None
        self._sizes = np.array([source.num_tokens for source in sources])

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the arrays of a batch that have a number of each position's document."""
        names = tuple(self._attached)
        if self.sources[0].valued:
            names = (*names, VALUE)
        return names

    def attach(self, name: str, numbers: Sequence[np.ndarray]) -> None:
        """Add an array to all later batches, float32 [b, T], with the number of each position's
        document, 0 in padding.

        Args:
            name: of the array.
            numbers: for each source, of each of its documents, float32 [num_documents]. Those of
                documents that are in no row are never looked at.
        """
        assert self.bins, "a window of a stream may hold a part of a document"
        for source, of_source in zip(self.sources, numbers, strict=True):
            assert of_source.shape == (source.num_documents,), (name, of_source.shape)
        self._attached[name] = list(numbers)

    def limit_vocabulary(self, entries: int) -> None:
        """Refuses ids from `entries` on where they occur, if only special tokens have such, as in
        tokenizers of models that also see; else the vocabulary stays what it is.

        ConfigError: inputs are to be replaced with such an id.
        """
        if entries >= self.vocab_size or not load_tokenizer(self.sources[0].path).fits(entries):
            return
        self.vocab_size = entries
        _check_corruption(self.config, entries)

    @property
    def _begins_of_sources(self) -> np.ndarray | None:
        """Return the first token number of each source if batches need the numbers of their tokens;
        else None.
        """
        if self.teacher is None:
            return None
        return self.teacher.begins

    def _add_teacher(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the token numbers in a batch by the teacher's stored logits."""
        if self.teacher is not None:
            arrays |= self.teacher.arrays(arrays.pop("place"))

    def _read(
        self,
        step: int,
        batch: PlanRows,
        phases: np.ndarray,
        part: HostSlice | None,
        names: Sequence[str],
        length: int,
    ) -> HostBatch:
        """The batch of a step: this host's part of the global batch, whose epochs begin at `phases`
        of their streams."""
        all_starts = phases + batch.row * length
        if self.bins:
            place = _digest(batch.source, batch.row)
        else:
            place = _digest(batch.source, all_starts % self._sizes[batch.source])

        rows, columns = part or HostSlice(np.arange(len(all_starts)))
        first_column, _, _ = columns.indices(length)
        source = batch.source[rows]
        epoch = batch.epoch[rows]
        row = batch.row[rows]
        restart = self.config.restart_positions
        across = self.config.attend_across_documents
        if self.bins:
            bins = self.bins[length]
            arrays = pack_documents(
                self.sources,
                bins,
                source,
                row,
                length,
                restart,
                across,
                columns,
                self._attached,
                self._begins_of_sources,
            )
        else:
            num_targets = (self._sizes[source] - row * length).clip(0, length)
            windows = Windows(source, all_starts[rows], num_targets)
            arrays = pack(self.sources, windows, length, restart, across, columns)

        def describe(i: int) -> str:
            place = f"source '{names[source[i]]}' in {self.sources[source[i]].path}"
            return f"step {step}, {place}, epoch {epoch[i]}, row {row[i]}"

        check_batch(arrays, self.vocab_size, describe, first_column)
        self._add_teacher(arrays)
        arrays["source"] = source.astype(np.int32)
        return _batch(step, arrays, batch, place, rows, first_column)

    def _iterate(
        self, start: int, stop: int, read: Callable[[int], HostBatch]
    ) -> Iterator[HostBatch]:
        """The batches that `read` gives for these steps, in order, read ahead by grain."""
        if self.config.workers:
            return self._iterate_workers(start, stop, read)
        return self._iterate_threads(start, stop, read)

    def _iterate_threads(
        self, start: int, stop: int, read: Callable[[int], HostBatch]
    ) -> Iterator[HostBatch]:
        """Read ahead by two threads of this process."""
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=self.config.prefetch)
        stream = grain.MapDataset.range(start, stop).map(read).to_iter_dataset(options)
        iterator = iter(stream)
        try:
            yield from iterator
        finally:
            iterator.close()

    def _iterate_workers(
        self, start: int, stop: int, read: Callable[[int], HostBatch]
    ) -> Iterator[HostBatch]:
        """Read ahead by processes."""
        workers = self.config.workers
        # grain's workers read its flags, and our programs do not parse those of absl.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        stream = grain.MapDataset.range(start, stop).map(read).to_iter_dataset(options)
        each = -(-self.config.prefetch // workers)
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(workers, per_worker_buffer_size=each),
            worker_init_fn=_ignore_hangup,
        )
        # Through pipes: shared memory is slower for such arrays, 64 MB in many containers, and
        # leaks when interrupted.
        pipes = experimental.DatasetOptions(min_shm_size=1 << 62)
        stream = experimental.WithOptionsIterDataset(stream, options=pipes)
        iterator = iter(stream)
        try:
            yield from watched(iterator, workers)
        finally:
            iterator.close()
            # The queues sit in reference cycles. Where those are freed while the next queues are
            # made, Python 3.12 warns of leaks.
            del iterator, stream
            gc.collect()


def _ignore_hangup(worker: int, workers: int) -> None:
    """Leave SIGHUP to the process that reads from this worker: a terminal sends it to both."""
    del worker, workers
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class TrainingData(_Dataset):
    """The training stream. Build it with `open_training`.

    `plan` says what is read when, `shards` are in its order of names, `start` is the cursor that
    the plan goes on from. With `data.packing=balanced` a row of the plan is a document, and the
    rows of a batch are made of a step's documents: see balance.py. Where documents belong together,
    as in pairs, that is a group of them.
    """

    def __init__(
        self,
        config: DataConfig,
        plan: Plan,
        shards: list[TokenShards],
        bins: dict[int, list[Bins]],
        start: dict[str, Any] | None,
        attached: dict[str, list[np.ndarray]] | None = None,
    ):
        super().__init__(config, shards, bins)
        for name, numbers in (attached or {}).items():
            self.attach(name, numbers)
        self.plan = plan
        self.shards = shards
        self.start = start
        self.is_balanced = config.packing == "balanced"
        self._block = functools.lru_cache(maxsize=8)(self._read_block)
        # Shapes of balanced batches, which are needed several times.
        self._num_rows = functools.lru_cache(maxsize=4096)(self._count_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self.config, self.plan, self.shards, self.bins, self.start, self._attached)
        return TrainingData, given, {"teacher": self.teacher}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all sources, read when first used."""
        return load_tokenizer(self.shards[0].path)

    def describe(self) -> str:
        """Describe what a run reads and why it ends, with a line for the rows of each source that
        packs whole documents.
        """
        lines = [self.plan.describe()]
        if self.is_balanced:
            lines.append(self._describe_balanced())
            return "\n".join(lines)
        for of_length in self.bins.values():
            for name, bins in zip(self.plan.names, of_length):
                lines.append(f"{name}: {bins.describe()}")
        return "\n".join(lines)

    def _describe_balanced(self) -> str:
        """Describe how many rows the first batches have, and how full they are."""
        first = self.plan.spans[0].step
        steps = range(first, min(first + _STEPS_DESCRIBED, self.plan.num_steps))
        if not steps:
            return "balanced: no step"
        shapes = [self.shape_at(step) for step in steps]
        counts = [shape.batch_size for shape in shapes]
        num_tokens = sum(int(self._sizes_at(step).sum()) for step in steps)
        fill = num_tokens / sum(shape.batch_size * shape.seq_length for shape in shapes)
        documents = self.plan.span(first).batch_size
        line = f"balanced: {documents:,} {self.unit}s of a step in {min(counts):,} to "
        line += f"{max(counts):,} rows, {fill:.2%} full in the first {len(steps):,} steps"
        of_lengths = [bins for of_length in self.bins.values() for bins in of_length]
        skipped = sum(bins.skipped for bins in of_lengths)
        truncated = sum(bins.truncated for bins in of_lengths)
        if skipped or truncated:
            line += f"; longer than a row: {skipped:,} left out, {truncated:,} cut"
        return line

    def fingerprint_at(self, step: int) -> str:
        """Identity of all batches before `step`, hex: what a checkpoint of that step must agree on
        to go on from it."""
        config = self.config
        across = config.attend_across_documents
        # Where attention crosses documents, a row has one segment, and positions restart only
        # there.
        restart = config.restart_positions or across
        # What is done to long documents counts only if there are any. Checkpoints of earlier
        # versions hold digests of False in its place.
        on_long: str | bool = False
        if any(bins.skipped or bins.truncated for bins in self._all_bins()):
            on_long = config.on_long
        content = [self.plan.fingerprint_at(step), config.packing, on_long, restart, across]
        if self.is_balanced:
            content += [config.balance_rows, self._quadratic]
        if config.corruption.rate:
            content += dataclasses.astuple(config.corruption)
        return hashlib.blake2b(repr(tuple(content)).encode(), digest_size=16).hexdigest()

    def _all_bins(self) -> Iterator[Bins]:
        """The rows of whole documents of every source, for every row length."""
        for of_length in self.bins.values():
            yield from of_length

    def read_until(self, step: int) -> DataRead:
        """Return what is read before a step, for its checkpoint."""
        return DataRead(step, self.fingerprint_at(step), self.cursor_at(step), self.start)

    def cursor_at(self, step: int) -> dict[str, Any]:
        """Return the position in the data before `step`, as JSON: a checkpoint of that step needs
        it to resume with other settings.
        """
        return self.plan.cursor_at(step)._asdict()

    def _read_block(self, block: int) -> np.ndarray:
        """int64 [4, rows]: source, epoch and row of the rows of a block, and where in its stream
        the epoch of each begins."""
        first = self.plan.first_row + block * _BLOCK_ROWS
        rows = self.plan.rows(first, first + _BLOCK_ROWS)
        begins = []
        for source, epoch in zip(rows.source.tolist(), rows.epoch.tolist()):
            shards = self.shards[source]
            begins.append(phase(self.plan.seed, shards.uid, epoch, shards.num_tokens))
        return np.stack([*rows, np.array(begins)])

    def _rows(self, step: int) -> np.ndarray:
        """Source, epoch, row and beginning of the epoch of each row of a step, int64 [4, rows]."""
        assert 0 <= step < self.plan.num_steps, f"step {step} is not in [0, {self.plan.num_steps})"
        first, end = (row - self.plan.first_row for row in self.plan.row_range(step))
        parts = []
        for block in range(first // _BLOCK_ROWS, (end - 1) // _BLOCK_ROWS + 1):
            before = block * _BLOCK_ROWS
            parts.append(self._block(block)[:, max(0, first - before) : end - before])
        return np.concatenate(parts, axis=1)

    def describe_rows(self, step: int, most: int = 8) -> str:
        """Describe the rows that a step reads, by source and epoch and at most `most` of each, with
        a command that shows one of them.
        """
        sources, epochs, rows, _ = self._rows(step)
        parts = []
        for source, epoch in np.unique([sources, epochs], axis=1).T.tolist():
            found = rows[(sources == source) & (epochs == epoch)].tolist()
            listed = ", ".join(map(str, found[:most]))
            if len(found) > most:
                listed += f" and {len(found) - most:,} more"
            parts.append(f"{self.plan.names[source]}, epoch {epoch}: rows {listed}")
        return f"It reads {'; '.join(parts)}. To look at the first: {self.show_command(step)}"

    def show_command(self, step: int) -> str:
        """The command that shows the first row of a step."""
        source, epoch, row, _ = self._rows(step)[:, 0].tolist()
        packing = self.config.packing
        if self.is_balanced:
            packing = "pad"
        options = {
            "row": row,
            "epoch": epoch,
            "seq-length": self.plan.span(step).seq_length,
            "packing": packing,
            "seed": self.plan.seed,
        }
        words = " ".join(f"--{name} {value}" for name, value in options.items())
        directory = shlex.quote(str(self.shards[source].path))
        return f"python -m data_pipeline.prepare show {directory} {words}"

    def rows_at(self, step: int) -> PlanRows:
        """Source, epoch and row of each row of a step."""
        return PlanRows(*self._rows(step)[:3])

    def digest_at(self, step: int) -> str:
        """The `digest` of the batch of a step, without reading it."""
        return _digest(*self.rows_at(step))

    def window_at(self, step: int, place: int) -> tuple[int, int, int]:
        """Return the place of one row of a step: the start of its first input in the stream of its
        source, its length, and its number in the epoch.
        """
        length = self.plan.span(step).seq_length
        _, _, row, begin = self._rows(step)[:, place].tolist()
        return begin + row * length, length, row

    def bins_of(self, step: int, source: int) -> Bins | None:
        """The rows of whole documents of a source, at a step; None: its rows are windows of a
        stream."""
        if not self.bins:
            return None
        return self.bins[self.plan.span(step).seq_length][source]

    @property
    def unit(self) -> str:
        """The name of what is never divided: document, pair or group."""
        return self.shards[0].manifest.unit

    @property
    def _quadratic(self) -> float:
        """b of the cost n + b n^2 of a document."""
        return self.config.balance_quadratic or 0.0

    def shape_at(self, step: int) -> BatchShape:
        """The shape of the batch of a step."""
        span = self.plan.span(step)
        if self.is_balanced:
            return BatchShape(self._num_rows(step), span.seq_length)
        return span.shape

    def shapes(self) -> set[BatchShape]:
        """Every shape that a batch may have."""
        if not self.is_balanced:
            return {span.shape for span in self.plan.spans}
        unit = self.config.balance_rows
        shapes = set()
        for span in self.plan.spans:
            for count in row_counts(span.batch_size, unit):
                shapes.add(BatchShape(count, span.seq_length))
        return shapes

    def largest_shapes(self, start: int) -> list[BatchShape]:
        """Return the shapes of the batches from step `start` on that no other shape exceeds in rows
        and length.

        Balanced batches are made of their documents: their rows are counted in steps evenly over
        each stage of the data, so that a long one may have a larger batch; see `_counted_steps`.
        """
        spans = self.plan.spans
        ends = [*(span.step for span in spans[1:]), self.plan.num_steps]
        shapes = set()
        for span, end in zip(spans, ends, strict=True):
            if end <= start:
                continue
            if self.is_balanced:
                steps = _counted_steps(max(start, span.step), end, span.batch_size)
                shapes |= {self.shape_at(step) for step in steps}
            else:
                shapes.add(span.shape)
        return [shape for shape in sorted(shapes) if not _is_exceeded(shape, shapes)]

    def _sizes_at(self, step: int) -> np.ndarray:
        """The positions that each document, or each group of them, of a step takes, int64, at most
        a row of them."""
        length = self.plan.span(step).seq_length
        source, _, row, _ = self._rows(step)
        sizes = np.empty(len(row), np.int64)
        for number in np.unique(source).tolist():
            mine = source == number
            _, documents = self.bins[length][number].documents(row[mine])
            of_documents = document_sizes(self.shards[number], documents)
            sizes[mine] = of_documents.reshape(-1, self.group).sum(axis=1)
        return np.minimum(sizes, length)

    def _count_rows(self, step: int) -> int:
        """Rows of the balanced batch of a step."""
        length = self.plan.span(step).seq_length
        return count_batch_rows(self._sizes_at(step), length, self.config.balance_rows)

    def places_at(self, step: int) -> RowPlaces:
        """Return where the documents of a step lie in its batch, in the order of `rows_at`."""
        span = self.plan.span(step)
        if self.is_balanced:
            num_rows = self._num_rows(step)
            # The documents of a group are about as long: G of n / G tokens cost n + b / G n^2.
            quadratic = self._quadratic / self.group
            return balance_rows(self._sizes_at(step), span.seq_length, num_rows, quadratic)
        return RowPlaces(np.arange(span.batch_size), np.zeros(span.batch_size, np.int64))

    def num_unused_rows(self, step: int) -> int:
        """Rows of a balanced batch that hold no document."""
        if not self.is_balanced:
            return 0
        used = np.unique(self.places_at(step).row)
        return self.shape_at(step).batch_size - len(used)

    def batch(self, step: int, part: Parts = None) -> HostBatch:
        """Return this part of the batch of a step, its rows in this order: a pure function of
        (config, manifests, seed, step).

        DataError: a shard is damaged, or a batch breaks an invariant.
        """
        span = self.plan.span(step)
        source, epoch, row, phases = self._rows(step)
        rows = PlanRows(source, epoch, row)
        if isinstance(part, dict):
            part = part[self.shape_at(step)]
        if self.is_balanced:
            return self._read_balanced(step, rows, part)
        result = self._read(step, rows, phases, part, self.plan.names, span.seq_length)
        if self.config.corruption.rate:
            held = part or HostSlice(np.arange(span.batch_size))
            self._corrupt(result.arrays, rows, held, span.seq_length)
        return result

    def _read_balanced(self, step: int, batch: PlanRows, part: HostSlice | None) -> HostBatch:
        """Return this part of a balanced batch, which is made of the step's rows of one document or
        group each.
        """
        shape = self.shape_at(step)
        length = shape.seq_length
        held, columns = part or HostSlice(np.arange(shape.batch_size))
        places = self.places_at(step)
        sizes = self._sizes_at(step)
        # The documents in rows of this part, and their rows in it.
        row_in_part = np.full(shape.batch_size, -1)
        row_in_part[held] = np.arange(len(held))
        mine = np.flatnonzero(row_in_part[places.row] >= 0)
        row = row_in_part[places.row[mine]]
        column = places.column[mine]

        # First each has a row of its own, as with `pad`.
        width = int(sizes[mine].max(initial=1))
        first_columns = slice(0, width)
        source = batch.source[mine]
        restart = self.config.restart_positions
        across = self.config.attend_across_documents
        documents = pack_documents(
            self.sources,
            self.bins[length],
            source,
            batch.row[mine],
            length,
            restart,
            across,
            first_columns,
            self._attached,
            self._begins_of_sources,
        )
        if self.config.corruption.rate:
            self._corrupt(documents, batch, HostSlice(mine, first_columns), length)
        held_shape = (len(held), length)
        arrays = fold_documents(
            documents, sizes[mine], row, column, held_shape, restart, across, columns
        )

        def describe(i: int) -> str:
            listed = []
            for number in np.flatnonzero(row == i).tolist():
                at = source[number]
                listed.append(
                    f"row {batch.row[mine[number]]} of source '{self.plan.names[at]}' "
                    f"in {self.sources[at].path}, epoch {batch.epoch[mine[number]]}"
                )
            return f"step {step}, documents that are with data.packing=pad {'; '.join(listed)}"

        first_column, _, _ = columns.indices(length)
        check_batch(arrays, self.vocab_size, describe, first_column)
        self._add_teacher(arrays)
        begins_row = column == 0
        of_row = np.zeros(len(held), np.int32)
        of_row[row[begins_row]] = source[begins_row]
        arrays["source"] = of_row
        # Where the documents lie depends on their sizes: drawn in another order, the same ones give
        # the same rows.
        order = np.lexsort((places.column, places.row))
        place = _digest(batch.source[order], batch.row[order])
        return _batch(step, arrays, batch, place, held, first_column)

    def _corrupt(
        self, arrays: dict[str, np.ndarray], batch: PlanRows, part: HostSlice, length: int
    ) -> None:
        """Replaces inputs of this part of the batch, in place; padding and the marks between
        documents stay."""
        source = batch.source[part.rows]
        epoch = batch.epoch[part.rows]
        row = batch.row[part.rows]
        seeds = []
        for of_source, of_epoch in zip(source.tolist(), epoch.tolist()):
            seeds.append(row_seed(self.plan.seed, self.shards[of_source].uid, of_epoch))
        eod = np.array([_eod_id(shards) for shards in self.shards])[source, None]
        keep = (arrays["segment_ids"] == 0) | (arrays["inputs"] == eod)
        corrupt(
            arrays["inputs"],
            np.array(seeds, np.uint64),
            row,
            length,
            part.columns,
            self.config.corruption,
            self.vocab_size,
            keep,
        )

    def iterate(
        self, start_step: int, part: Parts = None, stop_step: int | None = None
    ) -> Iterator[HostBatch]:
        """Batches from `start_step` to before `stop_step` (None: the plan's end) in order, read
        ahead by grain."""
        if stop_step is None:
            stop_step = self.plan.num_steps
        return self._iterate(start_step, stop_step, functools.partial(self.batch, part=part))


class EvaluationData(_Dataset):
    """A held-out set, every token a target exactly once, in order. Build it with `open_evaluation`.

    With `data.packing=balanced` its rows are those of `bins`.

    `num_tokens` counts all targets, `text_bytes` their text (0: some of it is no target); they and
    `num_batches` come from the manifest, not from hosts.
    """

    def __init__(self, config: DataConfig, batch_size: int, shards: TokenShards):
        _check_documents(config, {str(shards.path): shards})
        # Rows that are made for each step are for training: here, all documents are at hand.
        packing = config.packing
        if packing == "balanced":
            packing = "bins"
        bins = _open_bins(config, packing, [shards], {config.seq_length})
        super().__init__(config, [shards], bins)
        self.batch_size = batch_size
        self.shards = shards
        self.manifest = shards.manifest
        if bins:
            rows = bins[config.seq_length][0]
            num_rows = rows.num_rows
            self.num_tokens = rows.num_targets
        else:
            num_rows = count_rows(shards.num_tokens, config.seq_length)
            self.num_tokens = self.manifest.num_targets
        self.num_batches = -(-num_rows // batch_size)
        # The manifest counts the bytes of all text: no number for a part of it.
        self.text_bytes = 0
        if not shards.masked and self.num_tokens == self.manifest.num_targets:
            self.text_bytes = shards.text_bytes

    def batch(self, step: int, part: HostSlice | None = None) -> HostBatch:
        """Batch number `step`; rows past the end of the set are padding of zero weight. See
        `TrainingData.batch`."""
        assert 0 <= step < self.num_batches, f"batch {step} is not in [0, {self.num_batches})"
        row = step * self.batch_size + np.arange(self.batch_size)
        batch = PlanRows(np.zeros_like(row), np.zeros_like(row), row)
        # The first input of the set is the token before its first, so that the first is a target.
        phases = np.full_like(row, -1)
        return self._read(step, batch, phases, part, ["held out"], self.config.seq_length)

    def iterate(
        self, part: HostSlice | None = None, num_batches: int | None = None, start: int = 0
    ) -> Iterator[HostBatch]:
        """The first `num_batches` batches (None: all), from number `start` on, in order, read ahead
        by grain."""
        stop = self.num_batches
        if num_batches is not None:
            stop = min(num_batches, stop)
        return self._iterate(start, stop, functools.partial(self.batch, part=part))

    def documents_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of each row of batch `step`, back to back: offsets into them, int64
        [batch_size + 1], and their numbers, int64; document k of a row is its segment k + 1. Only
        where rows are of whole documents."""
        rows = step * self.batch_size + np.arange(self.batch_size)
        (bins,) = self.bins[self.config.seq_length]
        return bins.documents(rows)


def _eod_id(shards: TokenShards) -> int:
    """The end-of-document id that was named when a source was prepared; -1: none, which no token
    equals."""
    eod_id = shards.manifest.tokenizer["special_ids"]["eod"]
    if eod_id is None:
        return -1
    return eod_id


def carry_errors(
    stream: Iterator[HostBatch],
    steps: range,
    part: Callable[[int], HostSlice],
    numbers: Iterable[str] = (),
    teacher: TeacherFiles | None = None,
) -> Iterator[HostBatch]:
    """Yield the batches of a stream for these steps; after a read error, yield empty batches that
    carry the error, to the end.

    One of several hosts that raised alone would leave the others waiting for it: it takes part
    until all can agree to stop. `part` is what this host holds of the batch of a step, its columns
    with both ends; `numbers`: names of its arrays with a number of each position's document;
    `teacher`: and its stored logits.
    """
    read = 0
    try:
        for batch in stream:
            yield batch
            read += 1
    except Exception as error:
        for step in steps[read:]:
            rows, columns = part(step)
            zeros = np.zeros((len(rows), columns.stop - columns.start), np.int32)
            arrays = {
                "inputs": zeros,
                "targets": zeros,
                "segment_ids": zeros,
                "positions": zeros,
                "loss_mask": zeros.astype(np.float32),
                "source": np.zeros(len(rows), np.int32),
            }
            for name in numbers:
                arrays[name] = zeros.astype(np.float32)
            if teacher is not None:
                arrays |= empty_arrays(zeros.shape, teacher.top)
            yield HostBatch(step, arrays, 0, "", 0, "", error)


def _batch(
    step: int,
    arrays: dict[str, np.ndarray],
    read: PlanRows,
    place: str,
    rows: np.ndarray,
    first_column: int,
) -> HostBatch:
    """The batch of a step with these arrays, which hold `rows` of it from `first_column` on; `read`
    is what the plan says of all of it."""
    return HostBatch(
        step=step,
        arrays=arrays,
        num_targets=int(np.count_nonzero(arrays["loss_mask"] != 0)),
        digest=_digest(*read),
        content=checksum(arrays["targets"], rows, first_column),
        place=place,
    )


def _digest(*arrays: np.ndarray) -> str:
    content = np.concatenate(arrays).astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def open_training(
    config: DataConfig, seed: int, steps: Steps, cursor: dict[str, Any] | None = None
) -> TrainingData:
    """Open all sources and solve the plan for `steps` optimizer steps, or "auto"; `seed` is of the
    order of rows.

    With the `cursor` of a checkpoint, the plan goes on from there, whatever the settings were
    before.

    Raises:
        ConfigError: sources, weights, stages or steps do not fit together; tokenizers differ.
        DataError: a directory is not whole.
    """
    shards = {
        name: _open(f"data.sources.{name}.path", source.path, config)
        for name, source in config.sources.items()
    }
    if shards:
        require_one_tokenizer({f"data.sources.{name}": source for name, source in shards.items()})
        _check_corruption(config, next(iter(shards.values())).vocab_size)
    names = sorted(shards)
    ordered = [shards[name] for name in names]
    _check_documents(config, {f"data.sources.{name}": shards[name] for name in names})
    lengths = {config.seq_length}
    lengths.update(stage.seq_length or config.seq_length for stage in config.stages)
    packing = config.packing
    if packing == "balanced":
        packing = "pad"
    bins = _open_bins(config, packing, ordered, lengths)
    sources = {}
    for i, name in enumerate(names):
        num_tokens = ordered[i].num_tokens
        if bins:
            num_rows = {length: bins[length][i].num_rows for length in lengths}
        else:
            num_rows = {length: count_rows(num_tokens, length) for length in lengths}
        sources[name] = PlanSource(ordered[i].uid, num_tokens, num_rows)
    start = None
    if cursor:
        start = Cursor(**cursor)
    unit = "document"
    if ordered:
        unit = ordered[0].manifest.unit
    plan = Plan.solve(seed, sources, config, steps, start, unit)
    return TrainingData(config, plan, ordered, bins, cursor)


def _check_documents(config: DataConfig, data: dict[str, TokenShards]) -> None:
    """ConfigError: documents that belong together would be torn apart or joined, or are mixed with
    others; or numbers of documents would be of parts of them, or are mixed with none."""
    if not data:
        return
    (first, ours), *others = data.items()
    for where, theirs in others:
        if theirs.group != ours.group:
            what = f"{where} holds {_units(theirs)}, but {first} {_units(ours)}"
            rule = "and a batch is read in one way"
            raise ConfigError(f"{what}, {rule}. Leave one of them out.")
        if theirs.valued != ours.valued:
            valued, other = first, where
            if theirs.valued:
                valued, other = where, first
            what = f"{valued} has a number for each document (label or margin), but {other} none"
            fix = "Prepare both with or both without, or leave one of them out"
            raise ConfigError(f"{what}, and a batch is read in one way. {fix}.")
    if ours.valued and config.packing == "stream":
        rule = "which belongs to the whole document and not to a window of a stream"
        fix = "Set data.packing=bins, pad or balanced"
        what = f"{first} has a number for each document"
        raise ConfigError(f"data.packing=stream, but {what}, {rule}. {fix}.")
    if ours.group == 1:
        return
    what = f"{first} holds {_units(ours)}"
    if config.packing == "stream":
        rule = "which windows of a stream would tear apart"
        fix = "Set data.packing=bins, pad or balanced"
        raise ConfigError(f"data.packing=stream, but {what}, {rule}. {fix}.")
    if config.attend_across_documents:
        rule = "of which no document may see another"
        fix = "Set data.attend_across_documents=false"
        raise ConfigError(f"data.attend_across_documents=true, but {what}, {rule}. {fix}.")
    if not config.restart_positions:
        rule = "which are compared, so that each must begin at position 0"
        fix = "Set data.restart_positions=true"
        raise ConfigError(f"data.restart_positions=false, but {what}, {rule}. {fix}.")


def _units(shards: TokenShards) -> str:
    """Describe what a directory holds."""
    unit = shards.manifest.unit
    if shards.group == 1:
        return "single documents"
    return f"{unit}s of {shards.group} documents"


def _check_corruption(config: DataConfig, vocab_size: int) -> None:
    """ConfigError: the id to replace tokens with is none of the tokenizer's."""
    token = config.corruption.token_id
    if token is not None and token >= vocab_size:
        rule = f"must be below {vocab_size}, the entries of the data's tokenizer"
        fix = "Set it to an id of the tokenizer, or to null"
        raise ConfigError(f"data.corruption.token_id={token} {rule}. {fix}.")


def resume_training(
    config: DataConfig,
    seed: int,
    steps: Steps,
    saved: DataRead | None,
    changes: Sequence[str] = (),
    owner: str = "this run",
    way_out: str = "set run_name to a new name to start afresh",
) -> TrainingData:
    """The training data to go on with from a checkpoint, before which `saved` was read (None: from
    the start of a run).

    What it has before the checkpoint is what was read: since the start, or since the last accepted
    change. If it is not, the data goes on from the checkpoint's cursor, provided the config accepts
    that; ConfigError if not. It names the `changes`: settings that are not what they were, in
    words. `owner` is what it calls the run of the checkpoint, and `way_out` what it advises to
    begin without the checkpoint.
    """
    if saved is None:
        return open_training(config, seed, steps)
    starts: list[dict[str, Any] | None] = [None]
    if saved.start:
        starts.append(saved.start)
    refused = None
    data = None
    for start in starts:
        try:
            data = open_training(config, seed, steps, start)
        except ConfigError as error:
            # It may be a plan from the next start on, or from the checkpoint on.
            refused = refused or error
        else:
            if saved.fingerprint == data.fingerprint_at(saved.step):
                return data
    if config.accept_changes:
        return open_training(config, seed, steps, saved.cursor)
    if refused:
        raise refused
    assert data is not None, "no plan and no error"
    step = saved.step
    causes = [*changes, *_other_tokens(data, saved.cursor)] or ["no key says why"]
    raise ConfigError(
        f"before step {step:,} {owner} has read other data than this config describes: "
        f"{'; '.join(causes)}. Set these keys back to go on as before (config.yaml has their "
        f"values), {way_out}, or set data.accept_changes=true "
        f"to go on from step {step:,} in the order, mixture and sizes of this config."
    )


def _other_tokens(data: TrainingData, cursor: dict[str, Any]) -> list[str]:
    """List the sources whose tokens the run has not read, if a checkpoint's cursor knows of
    others.
    """
    known = cursor["sources"]
    uids = {shards.uid for shards in data.shards}
    gone = [uid for uid in known if uid not in uids]
    new = []
    for name, shards in zip(data.plan.names, data.shards):
        if shards.uid not in known:
            new.append(f"data.sources.{name}.path={shards.path} (digest {shards.uid})")
    if gone and new:
        known = f"digest {', '.join(gone)}"
        return [f"{path} holds other tokens than the run has read ({known})" for path in new]
    return [f"{path} is a source that the run has not read" for path in new]


def open_evaluation(
    path: str | Path, config: DataConfig, batch_size: int, name: str = "NAME"
) -> EvaluationData:
    """Open a held-out set for batches of `batch_size` rows over all hosts; DataError if it is not
    whole, or has no target."""
    data = EvaluationData(config, batch_size, _open(f"eval.sets.{name}.path", path, config))
    if data.num_tokens < 1:
        fix = "Prepare it from longer documents, or leave it out"
        raise DataError(f"eval.sets.{name}: {path} has no target tokens. {fix}.")
    return data


def _open_bins(
    config: DataConfig,
    packing: Literal["stream", "bins", "pad"],
    shards: list[TokenShards],
    lengths: set[int],
) -> dict[int, list[Bins]]:
    """The rows of each source by row length; empty where rows are windows of a stream. DataError: a
    source has none."""
    if packing == "stream":
        return {}
    bins = {
        length: [open_bins(s, length, packing, config.on_long) for s in shards]
        for length in sorted(lengths)
    }
    for length, of_length in bins.items():
        for source, rows in zip(shards, of_length):
            if not rows.num_targets:
                rule = f"no document has a target in a row of data.seq_length={length:,}"
                fix = "Set data.seq_length higher, data.on_long=truncate, or leave the source out"
                raise DataError(f"{source.path}: {rule}. {fix}.")
    return bins


def _open(key: str, path: str | Path, config: DataConfig) -> TokenShards:
    """The shards that a config's key names, with their tokenizer compared: now, not when the end of
    the run needs it."""
    if not str(path):
        rule = "it must name a directory with manifest.json"
        raise ConfigError(f"{key} is empty; {rule}. Set it to one made by `prepare`.")
    try:
        shards = TokenShards.open(path, config.verify, Cache(config.cache, config.cache_bytes))
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if config.verify == "off":
        return shards
    file = shards.path / TOKENIZER
    expected = shards.manifest.tokenizer["sha256"]
    found = "no file"
    if file.exists():
        found = hashlib.sha256(read_limited(file, MAX_TOKENIZER_BYTES)).hexdigest()
    if found != expected:
        what = f"expected sha256 {expected}, found {found}: not the data's tokenizer"
        fix = "Restore it, or build the data again with `prepare --overwrite`"
        raise DataError(f"{key}: {file}: {what}. {fix}.")
    return shards


def _is_exceeded(shape: BatchShape, shapes: Iterable[BatchShape]) -> bool:
    """Return whether one of the shapes has more rows or longer ones, and not fewer or shorter
    ones.
    """
    rows, length = shape
    others = [other for other in shapes if other != shape]
    return any(other.batch_size >= rows and other.seq_length >= length for other in others)


def _counted_steps(start: int, stop: int, documents: int) -> list[int]:
    """Return steps in [start, stop), with both ends: at most _STEPS_COUNTED, and no more than have
    _DOCUMENTS_COUNTED documents, with `documents` in each step.
    """
    most = max(2, min(_STEPS_COUNTED, _DOCUMENTS_COUNTED // documents))
    if stop - start <= most:
        return list(range(start, stop))
    return np.linspace(start, stop - 1, most).astype(np.int64).tolist()
