"""The gradient of a batch is the same for every split into micro-batches and every number of
devices, term by term.

The batch is so ragged that a mean of means would be far off; one micro-batch has no target at all,
one document a single one; and beside the cross-entropy there are two terms with denominators of
their own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.config.schema import LossConfig
from maxtrain.objectives.next_token import next_token
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.batches import BatchLayout
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.state import abstract_model, abstract_state, create_state
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from

pytestmark = pytest.mark.usefixtures("optax_dtypes")
B, T, SPLITS = 64, 8, (1, 2, 4, 8)
NEXT_TOKEN = next_token(LossConfig(z_loss=0.01, label_smoothing=0.1))


def forward(models, batch, scales):
    """A third term: the mean square of hidden states over documents' positions, targets or not."""
    result = NEXT_TOKEN.forward(models, batch, scales)
    hidden = models["policy"].hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
    real = (batch["segment_ids"] > 0).astype(jnp.float32)
    size = WeightedSum((jnp.sin(hidden).sum(-1) * real).sum(), real.sum())
    loss = result.loss + scales["size"] * size.total
    return result._replace(loss=loss, sums=result.sums | {"size": size})


def denominators(batch):
    return NEXT_TOKEN.denominators(batch) | {
        "size": (batch["segment_ids"] > 0).astype(jnp.float32).sum()
    }


OBJECTIVE = NEXT_TOKEN._replace(
    factors={**NEXT_TOKEN.factors, "size": 0.003}, denominators=denominators, forward=forward
)
TERMS = ("nll", "z", "size", "all")


def ragged():
    """Row r: two documents; targets in one of 8 rows only but many there, and none in rows that are
    5 modulo 8."""
    rng = np.random.default_rng(0)
    rows, column = np.arange(B)[:, None], np.arange(T)[None]
    segments = np.where(column < 3, 1, np.where(column < 3 + rows % 5, 2, 0)).astype(np.int32)
    wanted = np.where(rows % 8 == 0, T, np.where(rows % 8 == 5, 0, 1))
    mask = ((segments > 0) & (column < wanted)).astype(np.float32)
    mask[7] = 0
    mask[7, 3] = 1.0  # the only target of its document
    return {
        "inputs": rng.integers(2, 96, (B, T)).astype(np.int32),
        "targets": np.where(rows % 8 == 0, 5, rng.integers(2, 96, (B, T))).astype(np.int32),
        "segment_ids": segments,
        "positions": np.broadcast_to(np.where(column < 3, column, column - 3), (B, T)).astype(
            np.int32
        ),
        "loss_mask": mask,
    }


@functools.cache
def compiled(tiny, devices, split):
    """A function from a batch to its loss and gradient, of some terms only."""
    mesh = tiny.mesh(devices, 1, 1)
    config = dataclasses.replace(tiny.model, num_layers=1)
    graphdef, params = abstract_model(config, tiny.precision, mesh)
    optimizer, layout = (
        make_optimizer(tiny.optimizer, tiny.schedule, 10, params),
        BatchLayout(mesh, B, T),
    )

    @jax.jit
    def gradient(params, batch, only):
        scales = {name: scale * only[name] for name, scale in OBJECTIVE.scales(batch).items()}
        return gradients(models_from({"policy": graphdef}), params, batch, OBJECTIVE, scales, split)

    with jax.set_mesh(mesh):
        params = create_state(
            abstract_state(params, optimizer, mesh), config, tiny.precision, optimizer, 5
        ).trainable

    def run(batch, only):
        with jax.set_mesh(mesh):
            return gradient(params, layout.to_global(batch), only)

    return run


def terms(tiny, devices, split, batch):
    """Return for each term its total, and its gradient alone, as one vector."""
    result = {}
    for term in TERMS:
        only = {name: jnp.float32(term in (name, "all")) for name in OBJECTIVE.factors}
        value, grads = compiled(tiny, devices, split)(batch, only)
        result[term] = (
            float(value.loss),
            np.concatenate([np.asarray(g).ravel() for g in jax.tree.leaves(grads)]),
        )
    return result


@pytest.fixture(scope="module")
def expected(tiny):
    return terms(tiny, 1, 1, ragged())


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_and_number_of_devices_gives_each_term_the_same_gradient(
    tiny, expected, devices, split
):
    for term, (loss, grad) in terms(tiny, devices, split, ragged()).items():
        assert loss == pytest.approx(expected[term][0], rel=1e-6), term
        assert np.linalg.norm(grad - expected[term][1]) <= 1e-6 * np.linalg.norm(
            expected[term][1]
        ), term


@pytest.mark.every_dose
@pytest.mark.long
def test_every_term_counts(expected):
    losses = [expected[term][0] for term in TERMS]
    assert sum(losses[:3]) == pytest.approx(losses[3], rel=1e-5) and min(np.abs(losses)) > 1e-4
    np.testing.assert_allclose(
        sum(expected[term][1] for term in TERMS[:3]), expected["all"][1], atol=1e-6
    )


@pytest.mark.long
@pytest.mark.parametrize("split", SPLITS[1:])
def test_a_mean_of_means_would_be_far_off(tiny, expected, split):
    """The mean of means uses the denominators of each micro-batch; it is off by more than 30 %,
    term by term."""
    batch, parts = ragged(), []
    for i in range(split):
        rows = np.arange(i, B, split)
        micro = {
            name: np.tile(x[rows], (split, 1)) for name, x in batch.items()
        }  # each row `split` times: the same mean
        parts.append(terms(tiny, 1, 1, micro))
    for term in ("nll", "z"):
        off = np.mean([part[term][1] for part in parts], axis=0) - expected[term][1]
        assert np.linalg.norm(off) > 0.3 * np.linalg.norm(expected[term][1]), term


@pytest.mark.long
def test_a_term_of_its_own_denominator_does_not_shrink_when_another_counts_more(tiny, expected):
    """There is one target less: the gradient of the third term is unchanged."""
    batch = ragged()
    batch["loss_mask"][:32] = 0
    fewer = terms(tiny, 1, 4, batch)
    assert fewer["nll"][0] != pytest.approx(expected["nll"][0], rel=1e-2)
    np.testing.assert_allclose(
        fewer["size"][1], expected["size"][1], atol=1e-6 * np.abs(expected["size"][1]).max()
    )
