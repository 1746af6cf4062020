"""Cost of checks and records in a training step, those that are on by default and others: taking
turns step by step.

    python -m benchmarks.checks [--write] [--steps 12]

The step is that of benchmarks.train_step in bfloat16. The bare one has the watch on anomalies
replaced by constants; digests of parameters and batch are taken once per record, of which there is
one in LOG_INTERVAL steps; the invariants of a batch are checked on the host while the device is at
work, so that they cost a step nothing unless the host is the slower one. The checks of `integrity`
are made once in INTEGRITY_INTERVAL steps; what copies between devices cost to compare is their
digests. Norms of layers are measured in a step that is due and in one that is not, as those of
observe.layer_norms_interval=100 are; the bare step has no norm of the weights either.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.train_step import LENGTH, MODEL, ROWS, Variant, processor
from data_pipeline.loader.batch_checks import check_batch
from maxtrain.config.schema import ANOMALIES, IntegrityConfig, RunConfig
from maxtrain.ops.digest import digests
from maxtrain.parallel.distributed import accelerator_present, keep_host_memory
from maxtrain.parallel.memory import memory_in_use
from maxtrain.train_step.anomaly_state import StepVerdict
from maxtrain.train_step.integrity import Integrity

RESULTS = Path(__file__).parent / "results" / "checks.md"
LOG_INTERVAL = RunConfig().log_interval
INTEGRITY_INTERVAL = 100
NORMS_INTERVAL = 100
# What times itself.
STEPS = ("bare", "finite", "watched", "recorded", "norms_due", "norms_not_due")


def _no_judge(watch: Any, *_: Any) -> StepVerdict:
    """A verdict that nothing has to be computed for."""
    no = jnp.zeros((), bool)
    zeros = jnp.zeros(3)
    found = jnp.zeros(len(ANOMALIES), bool)
    metrics = {
        "found": found,
        "anomalies": watch.found,
        "halted": no,
        "median": zeros,
        "deviation": zeros,
    }
    return StepVerdict(no, no, watch, metrics)


def _no_norm(params: Any) -> jax.Array:
    """Replace the norm of the weights by 0."""
    return jnp.zeros(())


def _no_look(tree: Any) -> Any:
    """Report that all leaves are finite, without reading one."""
    return jnp.ones(len(jax.tree.leaves(tree)), bool)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measure(steps: int) -> list[tuple[str, float, float]]:
    """Return the name of each check, its seconds, and the share that it adds to a bare step on
    average.
    """
    with mock.patch("maxtrain.train_step.step.norm_of", _no_norm):
        with mock.patch("maxtrain.train_step.step.judge", _no_judge):
            finite = Variant("bfloat16", "float32", "none")
            with mock.patch("maxtrain.train_step.step.finite_leaves", _no_look):
                bare = Variant("bfloat16", "float32", "none")
        watched = Variant("bfloat16", "float32", "none")
    recorded = Variant("bfloat16", "float32", "none")
    norms_due = Variant("bfloat16", "float32", "none", norms_interval=1)
    norms_not_due = Variant("bfloat16", "float32", "none", norms_interval=1_000_000)
    devices = jax.local_devices()
    mesh = watched.batch["inputs"].sharding.mesh
    integrity = Integrity(
        IntegrityConfig(replicas_interval=INTEGRITY_INTERVAL, repeat_interval=INTEGRITY_INTERVAL),
        mesh,
    )
    host = {name: np.asarray(x) for name, x in watched.batch.items()}
    calls: dict[str, Callable[[], Any]] = {
        "bare": bare.run,
        "finite": finite.run,
        "watched": watched.run,
        "recorded": recorded.run,
        "norms_due": norms_due.run,
        "norms_not_due": norms_not_due.run,
        "memory": lambda: memory_in_use(devices),
        "digests": lambda: (digests(watched.state.trainable), digests(watched.batch)),
        "guard": lambda: check_batch(host, MODEL.vocab_size or 0, str),
        "copies": lambda: integrity.check(INTEGRITY_INTERVAL, watched.state),
        "again": lambda: integrity.repeat(
            INTEGRITY_INTERVAL, watched.compiled, watched.state, watched.batch
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(steps + 2):
        for name, call in calls.items():
            is_step = name in STEPS
            seconds[name].append(call() if is_step else _seconds(call))
        print(f"step {step + 1} of {steps + 2}", file=sys.stderr)
    # The first two of each warm up.
    counted = {name: np.array(found[2:]) for name, found in seconds.items()}
    step = counted["bare"]
    looked = counted["finite"]
    watch = counted["watched"]
    recorded_step = counted["recorded"]
    due = counted["norms_due"]
    not_due = counted["norms_not_due"]
    base = float(np.median(step))
    memory = float(np.median(counted["memory"]))
    digest = float(np.median(counted["digests"]))
    guard = float(np.median(counted["guard"]))
    copies = float(np.median(counted["copies"]))
    again = float(np.median(counted["again"]))
    waits = float(np.median(not_due / recorded_step)) - 1
    takes = float(np.median(due / recorded_step)) - 1
    return [
        ("bare step", base, 0.0),
        (
            "step that looks whether its result is finite",
            float(np.median(looked)),
            float(np.median(looked / step)) - 1,
        ),
        (
            "and with the watch on anomalies",
            float(np.median(watch)),
            float(np.median(watch / step)) - 1,
        ),
        (
            "and with the norm of the weights",
            float(np.median(recorded_step)),
            float(np.median(recorded_step / step)) - 1,
        ),
        (
            "that norm alone, against the step before this line",
            float(np.median(recorded_step - watch)),
            float(np.median(recorded_step / watch)) - 1,
        ),
        (
            f"memory in use, once in {LOG_INTERVAL} steps",
            memory,
            memory / base / LOG_INTERVAL,
        ),
        (
            "norms of layers, in a step where they are not due",
            float(np.median(not_due)),
            waits,
        ),
        (
            f"observe.layer_norms_interval={NORMS_INTERVAL}, with those that are due",
            float(np.median(due)),
            (takes + waits * (NORMS_INTERVAL - 1)) / NORMS_INTERVAL,
        ),
        (
            f"digests of parameters and batch, once in {LOG_INTERVAL} steps",
            digest,
            digest / base / LOG_INTERVAL,
        ),
        ("invariants of a batch, on the host meanwhile", guard, guard / base),
        (
            f"integrity.replicas_interval={INTEGRITY_INTERVAL}: copies compared",
            copies,
            copies / base / INTEGRITY_INTERVAL,
        ),
        (
            f"integrity.repeat_interval={INTEGRITY_INTERVAL}: a step made again and compared",
            again + copies,
            (again + copies) / base / INTEGRITY_INTERVAL,
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checks", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {RESULTS.name} in benchmarks/results"
    )
    parser.add_argument(
        "--steps", type=int, default=12, help="counted steps of each kind, after two that are not"
    )
    options = parser.parse_args(argv)
    if not accelerator_present():
        keep_host_memory()
    rows = [
        f"| {what} | {1e3 * seconds:,.1f} | {share:+.2%} |"
        for what, seconds, share in measure(options.steps)
    ]
    text = "\n".join(
        [
            "# What the checks cost",
            "",
            f"`python -m benchmarks.checks --steps {options.steps} --write` on {processor()}; "
            f"Python {platform.python_version()}, jax {jax.__version__}. "
            "Medians; steps took turns. The step of [train_step](train_step.md) in bfloat16, "
            f"{ROWS} x {LENGTH} tokens.",
            "",
            "| what | ms | of a bare step, on average |",
            "|---|--:|--:|",
            *rows,
            "",
        ]
    )
    print(text)
    if options.write:
        RESULTS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
