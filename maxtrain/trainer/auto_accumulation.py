"""optimizer.accumulation=auto: the fewest micro-batches whose step fits into a device's memory.

Sums of another number of micro-batches round differently, so the number is chosen once for a run:
before its first step, where it is written into RUN/run.json, and from there into its checkpoints.
A launch that finds it there takes it, whatever memory its devices have.
"""

import dataclasses
from typing import NamedTuple

import jax

from data_pipeline.base.errors import ConfigError
from data_pipeline.plan.plan import Shape
from maxtrain.config import RunConfig, accumulations, with_accumulation
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel.agreement import gather
from maxtrain.parallel.memory import (
    FITTING_MEND,
    Fewest,
    bytes_on_device,
    fewest,
    is_out_of_memory,
    memory_limit,
    program_bytes,
    size,
)
from maxtrain.trainer.compile_step import Programs
from maxtrain.trainer.job import ACCUMULATION, Job, as_decided


class Decided(NamedTuple):
    """A run whose accumulation is a number.

    Attributes:
        job: with the number in its configs.
        programs: those of its steps that have been compiled on the way.
        line: what to tell of it; empty: nothing.
    """

    job: Job
    programs: Programs
    line: str


def decide(job: Job, recorded: int | None, progress: Progress, clock: Stopwatch) -> Decided:
    """Chooses the number, if the config leaves it open and no launch has chosen it. All processes
    call this, inside `jax.set_mesh(job.mesh)`.

    Args:
        recorded: what process 0 finds that an earlier launch has chosen; None: none has. Other
            processes need not know.

    Raises:
        ConfigError: no number of micro-batches makes the step fit, or the recorded one does not
            divide batch and mesh.
    """
    asked = job.config.optimizer.accumulation
    if asked != "auto":
        programs = Programs(job.make_step(), progress, clock)
        return Decided(job, programs, "")
    recorded = gather({"recorded": recorded})[0]["recorded"]
    choices = accumulations(job.config, jax.device_count())
    if recorded is not None:
        return _as_recorded(job, recorded, choices, progress, clock)
    limit = min(map(memory_limit, jax.local_devices()))
    limit = min(said["limit"] for said in gather({"limit": limit}))
    compiled: dict[int, Programs] = {}

    def measure(count: int) -> int | None:
        compiled.clear()
        programs = Programs(_with_count(job, count).make_step(), progress, clock)
        compiled[count] = programs
        needs = [_needed(job, programs, shape) for shape in job.largest_shapes(0)]
        # A process may have other devices than this one.
        return _most([_most(said["needs"]) for said in gather({"needs": needs})])

    found = fewest(choices, measure, bytes_on_device(job.abstract), limit)
    if found.count is None:
        raise ConfigError(_refusal(job.config, choices, found, limit))
    decided = _with_count(job, found.count)
    return Decided(decided, compiled[found.count], describe(found, limit))


def _as_recorded(
    job: Job, recorded: int, choices: list[int], progress: Progress, clock: Stopwatch
) -> Decided:
    if recorded not in choices:
        raise ConfigError(
            f"optimizer.accumulation=auto is {recorded} since the run began, and that does not "
            f"divide its batch and mesh as they are now. Set optimizer.accumulation to one of "
            f"{', '.join(map(str, choices))}, or the mesh as it was."
        )
    decided = _with_count(job, recorded)
    programs = Programs(decided.make_step(), progress, clock)
    return Decided(decided, programs, as_decided(recorded))


def _with_count(job: Job, count: int) -> Job:
    """The job with a number that was chosen for it."""
    return dataclasses.replace(
        job,
        config=with_accumulation(job.config, count),
        asked=with_accumulation(job.asked, count),
        kept=job.kept | {ACCUMULATION: count},
    )


def _needed(job: Job, programs: Programs, shape: Shape) -> int | None:
    """Bytes on each device for a step, its state and the batches that wait for it.

    None: more than the compiler allows.
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
    """The most of some needs; None, if that is one of them, is more than all others."""
    known = [need for need in needs if need is not None]
    if len(known) < len(needs):
        return None
    return max(known)


def describe(found: Fewest, limit: int) -> str:
    """A line about what was chosen, and why."""
    assert found.needed is not None
    line = (
        f"optimizer.accumulation={found.count}: a step needs {size(found.needed)} of the "
        f"{size(limit)} of each device"
    )
    if found.before is not None:
        line += f"; with {found.before.count} it would be {found.before.words()}"
    return f"{line}."


def _refusal(config: RunConfig, choices: list[int], found: Fewest, limit: int) -> str:
    """Why no number will do."""
    assert found.before is not None
    return (
        f"optimizer.accumulation=auto: even with {choices[-1]}, the most that "
        f"data.batch_size={config.data.batch_size} and the mesh allow, a step needs "
        f"{found.before.words()} on each device, where programs may use {size(limit)}. "
        f"{FITTING_MEND}."
    )
