"""optimizer.accumulation=auto: the fewest micro-batches whose step fits into a device's memory.

Sums over another number of micro-batches round differently, so the number is chosen once for a run,
before its first step. It is recorded in RUN/run.json and in the checkpoints. Later launches use the
recorded number, whatever memory their devices have.
"""

import dataclasses
from typing import NamedTuple

import jax

from data_pipeline.base.errors import ConfigError
from data_pipeline.plan.plan import BatchShape
from maxtrain.config import RunConfig, accumulations, with_accumulation
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel.agreement import gather
from maxtrain.parallel.memory import (
    FITTING_MEND,
    FewestParts,
    bytes_on_device,
    fewest,
    is_out_of_memory,
    memory_limit,
    program_bytes,
    size,
)
from maxtrain.trainer.compile_step import Programs
from maxtrain.trainer.job import ACCUMULATION, Job, as_decided


class AccumulationChoice(NamedTuple):
    """A run whose accumulation is a number, and the steps compiled while choosing it.

    Attributes:
        job: the job with the chosen number in its configs.
        programs: the steps that were compiled while the number was chosen.
        line: a line for the log; empty: nothing to log.
    """

    job: Job
    programs: Programs
    line: str


def decide(
    job: Job, recorded: int | None, progress: Progress, clock: Stopwatch
) -> AccumulationChoice:
    """Choose the number of micro-batches, if the config says `auto` and no earlier launch chose it.
    All processes call this, inside `jax.set_mesh(job.mesh)`.

    Args:
        recorded: the number that an earlier launch chose, as process 0 read it; None: there is
            none. The value of other processes is ignored.

    Raises:
        ConfigError: no number of micro-batches makes the step fit, or the recorded number does not
            divide the batch on this mesh.
    """
    if job.config.optimizer.accumulation != "auto":
        programs = Programs(job.make_step(), progress, clock)
        return AccumulationChoice(job, programs, "")
    recorded = gather({"recorded": recorded})[0]["recorded"]
    choices = accumulations(job.config, jax.device_count())
    if recorded is not None:
        return _as_recorded(job, recorded, choices, progress, clock)
    limit = min(map(memory_limit, jax.local_devices()))
    limit = min(report["limit"] for report in gather({"limit": limit}))
    compiled: dict[int, Programs] = {}

    def measure(count: int) -> int | None:
        compiled.clear()
        programs = Programs(_with_count(job, count).make_step(), progress, clock)
        compiled[count] = programs
        needs = [_needed(job, programs, shape) for shape in job.largest_shapes(0)]
        # Processes may have different devices, so the largest need counts.
        return _most([_most(report["needs"]) for report in gather({"needs": needs})])

    found = fewest(choices, measure, bytes_on_device(job.abstract), limit)
    if found.count is None:
        raise ConfigError(_refusal(job.config, choices, found, limit))
    decided = _with_count(job, found.count)
    return AccumulationChoice(decided, compiled[found.count], describe(found, limit))


def _as_recorded(
    job: Job, recorded: int, choices: list[int], progress: Progress, clock: Stopwatch
) -> AccumulationChoice:
    """Use the number of an earlier launch."""
    if recorded not in choices:
        raise ConfigError(
            f"optimizer.accumulation=auto is {recorded} since the run began, and that does not "
            f"divide its batch and mesh as they are now. Set optimizer.accumulation to one of "
            f"{', '.join(map(str, choices))}, or the mesh as it was."
        )
    decided = _with_count(job, recorded)
    programs = Programs(decided.make_step(), progress, clock)
    return AccumulationChoice(decided, programs, as_decided(recorded))


def _with_count(job: Job, count: int) -> Job:
    """Return the job with the chosen number of micro-batches in its configs."""
    return dataclasses.replace(
        job,
        config=with_accumulation(job.config, count),
        requested=with_accumulation(job.requested, count),
        kept=job.kept | {ACCUMULATION: count},
    )


def _needed(job: Job, programs: Programs, shape: BatchShape) -> int | None:
    """Return the bytes on each device for a step, its state and the prefetched batches.

    Returns None if the compiler finds that the step needs more memory than the device has.
    """
    batch = job.abstract_batch(shape)
    try:
        compiled = programs.compile(job.abstract, batch)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return program_bytes(compiled) + job.config.data.prefetch * bytes_on_device(batch)


def _most(needs: list[int | None]) -> int | None:
    """Return the largest of some needs; None (does not compile) counts as larger than any
    number."""
    known = [need for need in needs if need is not None]
    if len(known) < len(needs):
        return None
    return max(known)


def describe(found: FewestParts, limit: int) -> str:
    """Describe the chosen number and the memory that decided it, in one line."""
    assert found.needed is not None
    line = (
        f"optimizer.accumulation={found.count}: a step needs {size(found.needed)} of the "
        f"{size(limit)} of each device"
    )
    if found.before is not None:
        line += f"; with {found.before.count} it would be {found.before.words()}"
    return f"{line}."


def _refusal(config: RunConfig, choices: list[int], found: FewestParts, limit: int) -> str:
    """Return the error message for a step that does not fit with any number of micro-batches."""
    assert found.before is not None
    return (
        f"optimizer.accumulation=auto: even with {choices[-1]}, the most that "
        f"data.batch_size={config.data.batch_size} and the mesh allow, a step needs "
        f"{found.before.words()} on each device, where programs may use {size(limit)}. "
        f"{FITTING_MEND}."
    )
