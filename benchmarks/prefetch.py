"""Gain of reading ahead and copying ahead if a step takes the device as long as its batch takes the
host.

    python -m benchmarks.prefetch DIRECTORY...

prints a table of benchmarks/results/data.md, for token shards as `benchmarks.data` makes them,
which calls this. The step waits in a callback, so that it needs time but no processor, like a step
on an accelerator.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import HostBatch, TrainingData, open_training
from maxtrain.parallel.batches import BatchLayout, prefetch

ROWS = 64
LENGTH = 4096
STEPS = 100
REPEATS = 5
Arrays = dict[str, jax.Array]


def run(batches: Iterable[Arrays], seconds: float, behind: int) -> float:
    """Return the seconds for a step on each of the batches, where each waits for the step `behind`
    steps before it.
    """

    def wait(before: np.ndarray, token: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return before + token

    @jax.jit
    def step(carry: jax.Array, batch: Arrays) -> jax.Array:
        return jax.pure_callback(wait, carry, carry, batch["inputs"][0, 0])

    results = [
        step(
            jnp.zeros((), jnp.int32), {"inputs": jnp.zeros((ROWS, LENGTH), jnp.int32)}
        ).block_until_ready()
    ]
    started = time.perf_counter()
    for batch in batches:
        results.append(step(results[-1], {"inputs": batch["inputs"]}))
        results[-1 - behind].block_until_ready()
    results[-1].block_until_ready()
    return time.perf_counter() - started


def rows(data: TrainingData) -> Iterator[str]:
    """A line for each way: milliseconds of a batch, of a step, and of both together."""
    layout = BatchLayout(jax.make_mesh((1,), ("data",)), ROWS, LENGTH)
    ahead = data.config.prefetch

    def place(batch: HostBatch) -> Arrays:
        return layout.to_global(batch.arrays)

    def one_by_one() -> Iterator[Arrays]:
        return map(place, map(data.batch, range(STEPS)))

    def read_ahead() -> Iterator[Arrays]:
        return map(place, data.iterate(0, stop_step=STEPS))

    def copied_ahead() -> Iterator[Arrays]:
        return prefetch(read_ahead(), ahead)

    def seconds_of_batches() -> float:
        started = time.perf_counter()
        for arrays in one_by_one():
            jax.block_until_ready(arrays)
        return (time.perf_counter() - started) / STEPS

    batch = statistics.median(seconds_of_batches() for _ in range(REPEATS))
    ways = {
        "one after the other: batch, copy, step": (one_by_one, 0),
        "the batch while the step before runs, as dispatch allows it": (one_by_one, 1),
        "batches read ahead by grain": (read_ahead, 1),
        f"and copied ahead, as in training (data.prefetch={ahead})": (copied_ahead, 1),
    }
    for name, (batches, behind) in ways.items():
        seconds = statistics.median(run(batches(), batch, behind) for _ in range(REPEATS)) / STEPS
        batch_ms = f"{1e3 * batch:.2f}"
        together_ms = f"{1e3 * seconds:.2f}"
        yield f"| {name} | {batch_ms} | {batch_ms} | {together_ms} | {seconds / batch:.2f} |"


def main(directories: list[str]) -> None:
    """The command."""
    sources = {os.path.basename(name): SourceConfig(name, 1.0, None) for name in directories}
    data = open_training(DataConfig(sources, batch_size=ROWS, seq_length=LENGTH), 0, 10_000)
    for shards in data.shards:
        shards.read(0, shards.num_tokens)
    print(
        "A device whose step takes as long as the host takes for a batch of "
        f"{ROWS} x {LENGTH:,}, medians of {REPEATS}.\n"
    )
    print("| what is done ahead | batch and copy, ms | step, ms | together, ms | of a step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for line in rows(data):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
