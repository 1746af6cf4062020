"""dpo.reference_logprobs=stored: what the reference gives each document is computed once, before
the first step, and kept beside the data; batches have it from then on.

The reference is read at the beginning of each launch, before the model that trains, since a digest
of its weights says which numbers are its own; then its memory is free again. All processes compute
together, on the mesh of the run, and process 0 alone reads and writes files. A pass that was
stopped goes on where it was last saved.

The rows of the pass are those of an evaluation, as large as micro-batches of the run. With
data.packing of bins or pad these are the rows that the run reads, so that numbers differ from those
of a step by the rounding of another program at most; with balanced, documents have other
neighbours in a row, which changes roundings, too.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from data_pipeline.base.errors import ConfigError, DataError, UserError
from data_pipeline.loader.loader import EvaluationData, carry_errors
from data_pipeline.plan.document_packing import Bins
from data_pipeline.shards import TokenShards
from maxtrain.config.across.rows import rows_of_step
from maxtrain.config.schema import ModelConfig
from maxtrain.models.adapt import split_adapters
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.next_token import document_log_probs
from maxtrain.objectives.objective import POLICY, REFERENCE, REFERENCE_SUM, Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel.agreement import from_first, gather, raise_together
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.hardware import compiler_options
from maxtrain.parallel.sharding import constrain, stored_rules
from maxtrain.train_step.state import TrainState, policy_variables
from maxtrain.train_step.trainable import merged_models
from maxtrain.trainer.job import Job
from maxtrain.trainer.reference_file import ReferenceFile
from maxtrain.trainer.reference_model import digest_of, function_of

# In the folder of a run: for data that can't be written to.
FOLDER = "reference"
# Seconds between saves of a pass, and between what is said of it.
_SAVE_SECONDS = 30.0
_TELL_SECONDS = 10.0
# Batches after which processes look whether one of them has an error, and that are under way.
_BATCHES_AT_A_TIME = 32
_AHEAD = 4
# Of words about a file, and bytes in which they are told to others.
_MOST_WORDS = 600
_MOST_BYTES = 4096

# From a batch to the sums of log-probabilities of its documents, [B, S], the same on all devices.
type Measure = Callable[[Batch], Float[Array, "B S"]]


class _Part(NamedTuple):
    """Data that the reference is to read: a source, or an evaluation set; its rows of the most
    tokens, and which documents these are."""

    key: str
    shards: TokenShards
    length: int
    bins: Bins


class StoredReference:
    """What the reference of a run gives the documents that the run reads.

    Args:
        job: a run whose batches have REFERENCE_SUM.
        folder: of the run.
        progress: what is told of the pass.
        clock: gets signs of life.
        writes: False: nothing is written; what is missing is computed all the same.
    """

    def __init__(
        self, job: Job, folder: Path, progress: Progress, clock: Stopwatch, writes: bool = True
    ):
        self._job = job
        self._folder = folder
        self._progress = progress
        self._clock = clock
        self._writes = writes

    def attach(self) -> dict[str, str]:
        """Gives the batches of the run their numbers, of a reference that is no part of the policy.

        Returns:
            A digest of the reference by its role, as of `frozen_digests`.

        Raises:
            ConfigError: see `require_one_number`.
            UserError: the reference or a file can't be read or written, or does not fit.
        """
        reference = self._job.stored_reference
        assert reference is not None
        require_one_number(reference.model)
        self._progress.phase(f"reading the reference from {reference.describe()}")
        with self._clock.during("restore"):
            rules = stored_rules(self._job.config.mesh.rules)
            graphdef, abstract = reference.abstract(self._job.mesh, rules)
            params = reference.load(abstract)
            digest = digest_of(params, reference.function())
        program = _program(lambda params: nnx.merge(graphdef, params))
        self._attach(digest, lambda batch: program(params, batch))
        jax.tree.map(lambda x: x.delete(), params)
        return {reference.role: digest}

    def attach_of(self, state: TrainState) -> None:
        """Likewise, where the reference is the policy of this state without its adapters.

        Raises:
            ConfigError: its buffers change while it trains, or see `require_one_number`.
            UserError: a file can't be read or written, or does not fit.
        """
        require_one_number(self._job.config.model)
        if state.buffers:
            raise ConfigError(
                "dpo.reference_logprobs=stored needs a reference that stays as it is, and the "
                "model has buffers, such as the biases of its routers, that change while its "
                "adapters train. Set dpo.reference to the model that the run begins with, or "
                "dpo.reference_logprobs=computed."
            )
        config = self._job.config
        model = config.model
        # Without a base of its own, the form of adapters says nothing about the weights.
        if model.lora.base == "full":
            model = dataclasses.replace(model, lora=type(model.lora)())
        graphdefs = {POLICY: self._job.policy_graphdef, REFERENCE: None}
        params = policy_variables(state)
        base, _ = split_adapters(params)
        digest = digest_of(base, function_of(model, config.precision))
        program = _program(lambda params: merged_models(graphdefs, {POLICY: params})[REFERENCE])
        self._attach(digest, lambda batch: program(params, batch))

    def _attach(self, reference: str, measure: Measure) -> None:
        job = self._job
        of_sources = [self._numbers(part, reference, measure) for part in self._sources()]
        job.data.attach(REFERENCE_SUM, of_sources)
        for name, data in job.sets.items():
            length = data.config.seq_length
            (bins,) = data.bins[length]
            part = _Part(f"eval.sets.{name}", data.shards, length, bins)
            data.attach(REFERENCE_SUM, [self._numbers(part, reference, measure)])
        self._progress.phase("")

    def _sources(self) -> Iterator[_Part]:
        """The sources of the run, in the order of its plan.

        ConfigError: documents are cut in several places.
        """
        data = self._job.data
        longest = max(data.bins)
        for number, (name, shards) in enumerate(zip(data.plan.names, data.shards, strict=True)):
            is_cut = any(of_length[number].truncated for of_length in data.bins.values())
            if is_cut and len(data.bins) > 1:
                raise ConfigError(
                    "dpo.reference_logprobs=stored has one number of each document, and "
                    f"data.on_long=truncate cuts those of data.sources.{name} in other places "
                    "where data.stages change data.seq_length. Set data.on_long=skip, or "
                    "dpo.reference_logprobs=computed."
                )
            yield _Part(f"data.sources.{name}", shards, longest, data.bins[longest][number])

    def _numbers(
        self, part: _Part, reference: str, measure: Measure
    ) -> Float[np.ndarray, " documents"]:
        """What the reference gives the documents of a part, read or computed; NaN: of one that is
        in no row."""
        about = {"data": part.shards.uid, "reference": reference, "cut_at": None}
        if part.bins.truncated:
            about["cut_at"] = part.length
        folders = [self._folder / FOLDER]
        if isinstance(part.shards.path, Path):
            folders.insert(0, part.shards.path)
        count = part.shards.num_documents
        file = ReferenceFile(about, count, folders)
        numbers = self._read(file, count)
        missing = np.isnan(numbers)
        missing[np.setdiff1d(np.arange(count), part.bins.numbers)] = False
        if missing.any():
            self._compute(part, measure, numbers, missing, file)
        return numbers

    def _read(self, file: ReferenceFile, count: int) -> Float[np.ndarray, " documents"]:
        """What process 0 reads; all NaN: there is no file. DataError: it does not fit."""
        numbers = np.full(count, np.nan, np.float32)
        where = ""
        error = None
        if jax.process_index() == 0:
            path = file.found()
            if path is not None:
                try:
                    numbers = file.parsed(path, path.read_bytes())
                    where = str(path)
                except (UserError, OSError) as problem:
                    error = problem
        raise_together(error)
        if jax.process_count() > 1:
            where = gather({"where": where[-_MOST_WORDS:]}, _MOST_BYTES)[0]["where"]
            numbers = from_first(numbers.view(np.uint8)).view(np.float32).copy()
        if where:
            known = np.count_nonzero(~np.isnan(numbers))
            self._progress.message(f"reference: {known:,} log-probabilities from {where}")
        return numbers

    def _compute(
        self,
        part: _Part,
        measure: Measure,
        numbers: Float[np.ndarray, " documents"],
        missing: np.ndarray,
        file: ReferenceFile,
    ) -> None:
        """Fills in the numbers of documents that are missing, and writes them.

        DataError: the reference gives some that are not finite.
        """
        config = dataclasses.replace(self._job.data.config, seq_length=part.length)
        rows = _rows(self._job)
        data = EvaluationData(config, rows, part.shards)
        layout = BatchLayout(self._job.mesh, rows, part.length)
        start = next(
            step for step in range(data.num_batches) if missing[data.documents_of(step)[1]].any()
        )
        total = int(np.count_nonzero(missing))
        begun = time.perf_counter()
        saved = begun
        told = -np.inf
        waiting: collections.deque[tuple[int, Array]] = collections.deque()

        def take() -> None:
            step, sums = waiting.popleft()
            self._take(part, data.documents_of(step), np.asarray(sums), numbers)

        for step, batch in self._batches(data, layout, start):
            with self._clock.during("eval"):
                waiting.append((step, measure(batch)))
                if len(waiting) > _AHEAD:
                    take()
            now = time.perf_counter()
            if now - told > _TELL_SECONDS:
                done = total - int(np.count_nonzero(np.isnan(numbers) & missing))
                self._progress.phase(
                    f"reference: log-probabilities of {part.key}, {done:,} of {total:,} documents"
                )
                told = now
            if now - saved > _SAVE_SECONDS and not (step + 1) % _BATCHES_AT_A_TIME:
                self._save(file, numbers)
                saved = now
        with self._clock.during("eval"):
            while waiting:
                take()
        left = int(np.count_nonzero(np.isnan(numbers) & missing))
        assert not left, f"{left} documents of {part.key} are in no batch of the pass"
        where = self._save(file, numbers, last=True)
        seconds = time.perf_counter() - begun
        self._progress.message(
            f"reference: log-probabilities of {total:,} documents of {part.key} computed in "
            f"{seconds:,.1f} s{where}"
        )

    def _batches(
        self, data: EvaluationData, layout: BatchLayout, start: int
    ) -> Iterator[tuple[int, Batch]]:
        """The batches from this number on, on the devices. Raises in all processes what one of
        them could not read, before anything of it is saved."""
        host = data.iterate(layout.part, start=start)
        if jax.process_count() > 1:
            steps = range(start, data.num_batches)
            host = carry_errors(host, steps, lambda _: layout.part, data.numbers)
        error = None
        for batch in host:
            error = error or batch.error
            is_last = batch.step + 1 == data.num_batches
            if is_last or not (batch.step + 1) % _BATCHES_AT_A_TIME:
                raise_together(error)
            yield batch.step, layout.to_global(batch.arrays)

    def _take(
        self,
        part: _Part,
        documents: tuple[np.ndarray, np.ndarray],
        sums: Float[np.ndarray, "B S"],
        numbers: Float[np.ndarray, " documents"],
    ) -> None:
        """Puts the sums of a batch to the numbers of its documents that are not there yet."""
        offsets, found = documents
        counts = np.diff(offsets)
        row = np.repeat(np.arange(len(counts)), counts)
        segment = 1 + np.arange(len(found)) - np.repeat(offsets[:-1], counts)
        values = sums[row, segment]
        wrong = found[~np.isfinite(values)]
        if wrong.size:
            raise DataError(
                f"the reference gives document {wrong[0]} of {part.shards.path} a "
                "log-probability that is not finite. Look at it with `prepare show`, or take "
                "another reference or precision."
            )
        is_new = np.isnan(numbers[found])
        numbers[found[is_new]] = values[is_new]

    def _save(
        self, file: ReferenceFile, numbers: Float[np.ndarray, " documents"], last: bool = False
    ) -> str:
        """Writes the file on process 0, and says where; `last`: all processes come here, and raise
        together."""
        where = ""
        error = None
        if self._writes and jax.process_index() == 0:
            try:
                where = f", kept in {file.save(numbers)}"
            except (UserError, OSError) as problem:
                error = problem
        if last:
            raise_together(error)
        elif error is not None:
            self._progress.message(
                f"The pass goes on, but can't be saved now: {error}", style="yellow"
            )
        return where


def with_reference(
    job: Job,
    folder: Path,
    start: Callable[[], TrainState],
    progress: Progress,
    clock: Stopwatch,
    writes: bool = True,
) -> tuple[TrainState, dict[str, str]]:
    """The state to begin with, by `start`, and what `attach` gives; batches have their numbers, if
    they need some. Other arguments are those of `StoredReference`."""
    if not job.reads_reference:
        return start(), {}
    stored = StoredReference(job, folder, progress, clock, writes)
    if job.stored_reference is not None:
        # Before the state is in memory.
        found = stored.attach()
        return start(), found
    state = start()
    stored.attach_of(state)
    return state, {}


def require_one_number(model: ModelConfig) -> None:
    """ConfigError: what a reference gives an answer depends on the others in its row, so that it is
    no number of the answer alone."""
    factor = model.routing.capacity_factor
    if factor is None:
        return
    raise ConfigError(
        "dpo.reference_logprobs=stored has one number of each answer, and experts of the reference "
        f"with model.routing.capacity_factor={factor} drop what other answers of a row leave no "
        "room for, so that it is another number in another row. Set "
        "dpo.reference_logprobs=computed, or take a reference without a capacity."
    )


def _program(model: Callable[[nnx.State], Decoder]) -> Callable[[nnx.State, Batch], Array]:
    """The jitted function from the parameters of a model and a batch to what `Measure` gives."""

    def measure(params: nnx.State, batch: Batch) -> Float[Array, "B S"]:
        return constrain(document_log_probs(model(params), batch), None, None)

    return jax.jit(measure, compiler_options=compiler_options(jax.default_backend()))


def _rows(job: Job) -> int:
    """Rows of a batch of the pass: those of a micro-batch, which the mesh divides."""
    return rows_of_step(job.config) // job.config.optimizer.micro_batches
