"""Cost of padding: `pad`, `bins` and `balanced` on documents of lognormal lengths, side by side.

    python -m benchmarks.packing [--write]

Counts come first, for they are the same on any machine: positions of a step, the share of them
that is padding, FLOPs of a small model for each target, attention over whole rows as its kernel
computes it, and how unlike the rows of a step are in the cost n + b n^2 of their documents. Then
targets per second of the loader, and of training.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from benchmarks import one_core
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import TrainingData, open_training
from data_pipeline.shards import Manifest, ShardWriter
from maxtrain.config.schema import MeshConfig, ModelConfig, RunConfig
from maxtrain.models.cost import sequence_cost, token_flops
from maxtrain.parallel.batches import BatchLayout
from maxtrain.trainer.job import make_parts

LENGTH = 512
DOCUMENTS = 64
# Rows of `bins`: about as many targets in a step as the documents of the others have.
BIN_ROWS = 16
STEPS_COUNTED = 50
STEPS_TRAINED = 8
MODEL = ModelConfig(
    vocab_size=512, num_layers=2, embed_dim=128, mlp_dim=384, num_heads=4, num_kv_heads=4
)


def make_source(directory: Path) -> str:
    """Documents of lognormal lengths, of 81 tokens in the mean, up to a row."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4.0, 1.0, 12_000).astype(np.int64).clip(1, LENGTH - 1)
    writer = ShardWriter(directory, "tokens-00000", MODEL.vocab_size or 0)
    writer.append(rng.integers(0, 511, lengths.sum()), lengths)
    tokenizer = {
        "name": "random",
        "sha256": "0" * 64,
        "vocab_size": MODEL.vocab_size,
        "special_ids": {"eod": 511},
    }
    Manifest(tokenizer, "uint16", "append", 0, (writer.close(),)).save(directory)
    return str(directory)


def open_packing(path: str, packing: str) -> TrainingData:
    """The source in rows of this packing."""
    linear, quadratic = sequence_cost(MODEL)
    config = DataConfig(
        sources={"lognormal": SourceConfig(path, epochs=None)},
        seq_length=LENGTH,
        batch_size=DOCUMENTS,
        packing=packing,  # type: ignore[arg-type]
        balance_rows=4,
        balance_quadratic=quadratic / linear,
        verify="off",
    )
    if packing == "bins":
        config = dataclasses.replace(config, batch_size=BIN_ROWS)
    return open_training(config, 0, STEPS_COUNTED)


def counts_of(data: TrainingData) -> list[str]:
    """Cells of the table of counts."""
    targets = 0
    positions = 0
    worst = []
    linear, quadratic = sequence_cost(MODEL)
    for step in range(STEPS_COUNTED):
        segments = data.batch(step).arrays["segment_ids"]
        targets += np.count_nonzero(segments)
        positions += segments.size
        costs = np.zeros(len(segments))
        for row, of_row in enumerate(segments):
            sizes = np.bincount(of_row)[1:].astype(float)
            costs[row] = (linear * sizes + quadratic * sizes**2).sum()
        worst.append(costs.max() / costs.mean())
    flops = token_flops(MODEL, LENGTH).full * positions / targets
    return [
        f"{positions / STEPS_COUNTED:,.0f}",
        f"{targets / STEPS_COUNTED:,.0f}",
        f"{1 - targets / positions:.1%}",
        f"{flops / 1e6:.1f}",
        f"{statistics.median(worst):.2f}",
        str(len({data.shape_at(step) for step in range(STEPS_COUNTED)})),
    ]


def loader_rate(data: TrainingData) -> float:
    """Targets per second of `.batch` in a loop, by processor time."""
    start = time.process_time()
    targets = sum(data.batch(step).num_targets for step in range(STEPS_COUNTED))
    return targets / (time.process_time() - start)


def training_rates(data: Mapping[str, TrainingData]) -> dict[str, float]:
    """Targets per second of training steps, whose batches are made before; the packings take
    turns, and every shape has been compiled."""
    config = RunConfig(model=MODEL, mesh=MeshConfig(fsdp=1))
    parts = make_parts(config, jax.devices()[:1], STEPS_COUNTED, 1)
    targets = dict.fromkeys(data, 0)
    seconds = dict.fromkeys(data, 0.0)
    with jax.set_mesh(parts.mesh):
        step = parts.make_step()
        state = parts.initial_state()
        for is_timed in (False, True):
            for number in range(STEPS_TRAINED):
                for packing, training in data.items():
                    made = training.batch(number)
                    layout = BatchLayout(parts.mesh, *training.shape_at(number))
                    batch = layout.to_global(made.arrays)
                    start = time.perf_counter()
                    state, _ = jax.block_until_ready(step(state, batch))
                    if is_timed:
                        seconds[packing] += time.perf_counter() - start
                        targets[packing] += made.num_targets
    return {packing: targets[packing] / seconds[packing] for packing in data}


def report() -> str:
    """The tables, Markdown."""
    lines = [
        f"Lognormal(4, 1) lengths up to {LENGTH - 1} tokens and an end mark, rows of {LENGTH}. "
        f"`pad` and `balanced` have the same {DOCUMENTS} documents a step, `bins` {BIN_ROWS} rows.",
        f"Model: {MODEL.num_layers} layers of {MODEL.embed_dim}. FLOPs count attention "
        "over whole rows. Rates are for comparison inside one run.",
        "",
        "| packing | positions a step | targets a step | padding | MFLOPs for each target "
        "| dearest row / mean | shapes | loader, k targets/s of processor time "
        "| training, targets/s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = make_source(Path(folder))
        packings = ("pad", "bins", "balanced")
        data = {packing: open_packing(path, packing) for packing in packings}
        rates = training_rates(data)
        for packing in packings:
            cells = [
                packing,
                *counts_of(data[packing]),
                f"{loader_rate(data[packing]) / 1e3:,.0f}",
                f"{rates[packing]:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    one_core.run(
        "packing",
        "Padding of ragged documents",
        __doc__ or "",
        report,
        ("numpy", "grain"),
        f"the dearest rows of {STEPS_COUNTED} batches, and means of the rest,",
    )
