"""Gradients of balanced batches are those of `pad`: the same documents, in fewer rows."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from data_pipeline.shards import Manifest, ShardWriter
from maxtrain.objectives.next_token import next_token
from maxtrain.parallel.batches import BatchLayout
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from

LENGTH = 48
NAMES = ("inputs", "targets", "segment_ids", "positions", "loss_mask")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Balanced and padded batches of ragged documents with loss masks: chats."""
    folder = tmp_path_factory.mktemp("ragged")
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, "tokens-00000", 96)
    lengths = rng.lognormal(2.3, 0.8, 96).astype(int).clip(2, LENGTH - 1)
    for length in lengths.tolist():
        mask = rng.integers(0, 3, length) > 0
        writer.append(rng.integers(2, 95, length), mask=mask, end=95)
    record = {"name": "ids", "sha256": "0" * 64, "vocab_size": 96, "special_ids": {"eod": 95}}
    Manifest(record, "uint16", "append", 0, (writer.close(),)).save(folder)
    balanced = DataConfig(
        sources={"chat": SourceConfig(str(folder))},
        seq_length=LENGTH,
        batch_size=32,
        packing="balanced",
        balance_rows=8,
        balance_quadratic=0.01,
        verify="off",
    )
    pad = dataclasses.replace(balanced, packing="pad")
    return open_training(balanced, 1, "auto"), open_training(pad, 1, "auto")


def gradients_of(tiny, host, accumulation, shape, normalize):
    """Loss and gradients of a batch, on the host."""
    parts = tiny.parts(shape)
    objective = next_token(normalize=normalize)
    arrays = {name: host.arrays[name] for name in NAMES}
    layout = BatchLayout(parts.mesh, *arrays["inputs"].shape)
    with jax.set_mesh(parts.mesh):

        def all_gradients(params, batch):
            scales = objective.scales(batch)
            models = models_from({"policy": parts.graphdef})
            return gradients(models, params, batch, objective, scales, accumulation)

        params = parts.new_state().trainable
        result, grads = jax.jit(all_gradients)(params, layout.to_global(arrays))
        return float(result.loss), [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]


@pytest.fixture(scope="module")
def gradients_of_pad(tiny, data):
    """The gradients by the unit that the loss is a mean of; computed once."""
    _, pad = data

    @functools.cache
    def compute(normalize):
        return gradients_of(tiny, pad.batch(1), 1, (1, 1, 1), normalize)

    return compute


@pytest.mark.long
@pytest.mark.parametrize(
    ("accumulation", "shape", "normalize"),
    [
        (4, (1, 1, 1), "sequences"),
        (1, (1, 1, 1), "tokens"),
        (2, (2, 2, 1), "tokens"),
    ],
)
def test_gradients_are_those_of_pad(tiny, data, gradients_of_pad, accumulation, shape, normalize):
    balanced, pad = data
    ours = balanced.batch(1)
    theirs = pad.batch(1)
    assert len(ours.arrays["inputs"]) <= len(theirs.arrays["inputs"]) / 2
    assert ours.num_targets == theirs.num_targets
    loss, grads = gradients_of(tiny, ours, accumulation, shape, normalize)
    expected_loss, expected = gradients_of_pad(normalize)
    # Sums of float32 in another order.
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    most = max(np.abs(leaf).max() for leaf in expected)
    for leaf, reference in zip(grads, expected, strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=0, atol=1e-6 * most)


@pytest.mark.long
def test_attention_of_documents_that_share_a_row_is_that_of_documents_alone(tiny, data):
    """Another document's tokens change nothing."""
    balanced, _ = data
    host = balanced.batch(0)
    arrays = {name: host.arrays[name].copy() for name in NAMES}
    row = int(np.argmax(arrays["segment_ids"].max(axis=1)))
    segments = arrays["segment_ids"][row]
    assert segments.max() >= 3
    others = (segments != 2) & (segments > 0)
    changed = {name: array.copy() for name, array in arrays.items()}
    for name in ("inputs", "targets"):
        changed[name][row, others] = (changed[name][row, others] + 7) % 95
    parts = tiny.parts()
    with jax.set_mesh(parts.mesh):
        from_arrays = _hidden_of(parts)
        first = np.asarray(from_arrays(arrays))[row, segments == 2]
        second = np.asarray(from_arrays(changed))[row, segments == 2]
    np.testing.assert_array_equal(first, second)


def _hidden_of(parts):
    params = parts.new_state().trainable

    @jax.jit
    def hidden(batch):
        model = nnx.merge(parts.graphdef, params)
        return model.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])

    return hidden
