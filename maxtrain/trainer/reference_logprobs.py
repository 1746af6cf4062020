"""dpo.reference_logprobs=stored: reference log-probabilities, computed once before the first step.

The log-probability of each document under the reference is kept beside the data, and batches carry
it from then on.

Each launch reads the reference before the model that trains, because a digest of its weights
identifies the stored numbers; then its memory is freed. All processes compute together, on the mesh
of the run, and only process 0 reads and writes files. A pass that was stopped resumes where it was
last saved.

The rows of the pass are those of an evaluation, as large as micro-batches of the run. With
data.packing of bins or pad they equal the rows of the run, so numbers differ from those of a step
at most by the rounding of another program. With balanced packing, documents have other neighbours
in a row, which also changes roundings.
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

# Subfolder of the run, for data in a read-only place.
FOLDER = "reference"
# Seconds between saves of a pass, and between its log lines.
_SAVE_SECONDS = 30.0
_TELL_SECONDS = 10.0
# Number of batches between checks for errors of other processes, and number of batches in flight.
_BATCHES_AT_A_TIME = 32
_AHEAD = 4
# Longest text about a file in letters, and the bytes of the message that carries it.
_MOST_WORDS = 600
_MOST_BYTES = 4096

# Maps a batch to the log-probability of each of its documents, [B, S], replicated on all devices.
type Measure = Callable[[Batch], Float[Array, "B S"]]


class _ReferenceData(NamedTuple):
    """Data that the reference reads: a source or an evaluation set, its longest rows, and the
    documents in them."""

    key: str
    shards: TokenShards
    length: int
    bins: Bins


class StoredReference:
    """The reference log-probabilities of the documents that a run reads.

    Args:
        job: a run whose batches have REFERENCE_SUM.
        folder: the folder of the run.
        progress: receives the log lines of the pass.
        clock: receives the heartbeat for the watchdog.
        writes: whether files are written. Missing numbers are computed in any case.
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
        """Attach the numbers of a reference that is not part of the policy to the batches of the
        run.

        Returns:
            The digest of the reference by its role, as `frozen_digests` returns it.

        Raises:
            ConfigError: see `require_one_number`.
            UserError: the reference or a file cannot be read or written, or does not fit.
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
        """Attach the numbers of a reference that is the policy in this state without its adapters.

        Raises:
            ConfigError: the model has buffers that change during training, or see
                `require_one_number`.
            UserError: a file cannot be read or written, or does not fit.
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
        # With a full-precision base, the form of the adapters does not affect the weights.
        if model.lora.base == "full":
            model = dataclasses.replace(model, lora=type(model.lora)())
        graphdefs = {POLICY: self._job.policy_graphdef, REFERENCE: None}
        params = policy_variables(state)
        base, _ = split_adapters(params)
        digest = digest_of(base, function_of(model, config.precision))
        program = _program(lambda params: merged_models(graphdefs, {POLICY: params})[REFERENCE])
        self._attach(digest, lambda batch: program(params, batch))

    def _attach(self, reference: str, measure: Measure) -> None:
        """Attach the numbers of all sources and sets."""
        job = self._job
        of_sources = [self._numbers(part, reference, measure) for part in self._sources()]
        job.data.attach(REFERENCE_SUM, of_sources)
        for name, data in job.sets.items():
            length = data.config.seq_length
            (bins,) = data.bins[length]
            part = _ReferenceData(f"eval.sets.{name}", data.shards, length, bins)
            data.attach(REFERENCE_SUM, [self._numbers(part, reference, measure)])
        self._progress.phase("")

    def _sources(self) -> Iterator[_ReferenceData]:
        """Iterate over the sources of the run, in the order of its plan.

        Raises a ConfigError if documents are cut at several lengths.
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
            yield _ReferenceData(
                f"data.sources.{name}", shards, longest, data.bins[longest][number]
            )

    def _numbers(
        self, part: _ReferenceData, reference: str, measure: Measure
    ) -> Float[np.ndarray, " documents"]:
        """Return the log-probabilities of the documents of a part, read or computed; NaN for
        documents in no row."""
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
        """Return the numbers that process 0 reads, on all processes; all NaN: there is no file.
        Raises a DataError if it does not fit."""
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
        part: _ReferenceData,
        measure: Measure,
        numbers: Float[np.ndarray, " documents"],
        missing: np.ndarray,
        file: ReferenceFile,
    ) -> None:
        """Compute the missing numbers, fill them in, and write the file.

        Raises a DataError if a number is not finite.
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
        logged = -np.inf
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
            if now - logged > _TELL_SECONDS:
                done = total - int(np.count_nonzero(np.isnan(numbers) & missing))
                self._progress.phase(
                    f"reference: log-probabilities of {part.key}, {done:,} of {total:,} documents"
                )
                logged = now
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
        """Iterate over the batches from this number on, on the devices. A read error of one process
        is raised in all, before results of that batch are saved."""
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
        part: _ReferenceData,
        documents: tuple[np.ndarray, np.ndarray],
        sums: Float[np.ndarray, "B S"],
        numbers: Float[np.ndarray, " documents"],
    ) -> None:
        """Store the sums of a batch as the numbers of its documents that have none yet."""
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
        """Write the file on process 0, and return a text with its place. `last`: all processes call
        this, and raise errors together."""
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
    """Return the state from `start` and the digests from `attach`, after attaching the reference
    log-probabilities that the batches need. Other arguments are those of `StoredReference`."""
    if not job.reads_reference:
        return start(), {}
    stored = StoredReference(job, folder, progress, clock, writes)
    if job.stored_reference is not None:
        # The pass runs before the state takes memory.
        found = stored.attach()
        return start(), found
    state = start()
    stored.attach_of(state)
    return state, {}


def require_one_number(model: ModelConfig) -> None:
    """Raise a ConfigError if the reference log-probability of an answer depends on other answers in
    its row."""
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
    """Return the jitted `Measure` of a model, as a function of its parameters and a batch."""

    def measure(params: nnx.State, batch: Batch) -> Float[Array, "B S"]:
        return constrain(document_log_probs(model(params), batch), None, None)

    return jax.jit(measure, compiler_options=compiler_options(jax.default_backend()))


def _rows(job: Job) -> int:
    """Return the rows of a batch of the pass: those of a micro-batch, which the mesh divides."""
    return rows_of_step(job.config) // job.config.optimizer.micro_batches
