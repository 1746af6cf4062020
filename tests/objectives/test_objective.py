"""The next-token objective: sums over targets, whatever their places, chunks and devices."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.keys import all_keys
from maxtrain.config.schema import (
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    LossConfig,
    PpoConfig,
    RegularizationConfig,
    RewardConfig,
)
from maxtrain.objectives.distill import TEACHER
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.objectives.registry import OBJECTIVES, ObjectiveSettings, make_objective
from maxtrain.ops.cross_entropy import token_nll
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from


@pytest.mark.every_dose
@pytest.mark.long
def test_total_and_weight_are_sums_over_targets(tiny):
    """Against the logits of the model, token by token."""
    parts, batch = tiny.parts(), tiny.batch()

    @jax.jit
    def both(params, batch):
        model = nnx.merge(parts.graphdef, params)
        logits = model(batch["inputs"], batch["segment_ids"], batch["positions"])
        return next_token().evaluate({POLICY: model}, batch)["nll"], token_nll(
            logits, batch["targets"]
        )

    with jax.set_mesh(parts.mesh):
        (total, weight), nll = both(parts.new_state().trainable, batch)
    assert total.dtype == weight.dtype == jnp.float32
    assert weight == batch["loss_mask"].sum()
    np.testing.assert_allclose(total, (np.float64(nll) * batch["loss_mask"]).sum(), rtol=1e-6)


def test_fractional_weights_count_as_much_as_they_say(tiny):
    parts, batch = tiny.parts(), tiny.batch()
    with jax.set_mesh(parts.mesh):
        params = parts.new_state().trainable
        whole = jax.jit(
            lambda batch: next_token().evaluate({POLICY: nnx.merge(parts.graphdef, params)}, batch)[
                "nll"
            ]
        )
        full, quarter = whole(batch), whole(batch | {"loss_mask": batch["loss_mask"] / 4})
        nothing = whole(batch | {"loss_mask": np.zeros_like(batch["loss_mask"])})
    np.testing.assert_allclose(quarter, np.float32(full) / 4, rtol=1e-6)
    assert nothing.total == nothing.weight == 0


@pytest.mark.long
@pytest.mark.parametrize("chunk", [0, 1, 24, 10_000])
def test_the_size_of_chunks_changes_nothing(tiny, chunk):
    batch, results = tiny.batch(), []
    for parts in (tiny.parts(), tiny.parts(loss_chunk=chunk)):
        with jax.set_mesh(parts.mesh):
            params = parts.new_state().trainable
            results.append(
                jax.jit(
                    lambda p, b, g=parts.graphdef: next_token().evaluate(
                        {POLICY: nnx.merge(g, p)}, b
                    )["nll"]
                )(params, batch)
            )
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


@pytest.mark.long
def test_logits_of_at_most_loss_chunk_tokens_exist_on_a_device(tiny):
    """8 rows of 24: on one device 64 tokens are 8 columns of all rows, on 8 devices (one row each)
    they are the whole row."""
    batch, model = tiny.batch(), dataclasses.replace(tiny.model)
    for shape, length in (((1, 1, 1), 8), ((2, 4, 1), 24), ((1, 2, 4), 12)):
        parts = tiny.parts(shape)
        with jax.set_mesh(parts.mesh):
            jaxpr = jax.make_jaxpr(
                lambda p, b, g=parts.graphdef: next_token().evaluate({POLICY: nnx.merge(g, p)}, b)[
                    "nll"
                ]
            )(parts.abstract.trainable, batch)
        assert f"f32[{tiny.rows},{length},{model.vocab_size}]" in str(jaxpr), shape
        assert (
            length == tiny.length
            or f"f32[{tiny.rows},{tiny.length},{model.vocab_size}]" not in str(jaxpr)
        )


@pytest.mark.long
def test_every_way_to_normalize_is_its_formula(tiny):
    """Tokens: the mean over targets; sequences: the mean over documents of each one's mean;
    constant: over positions.

    The gradient is that of each token's loss times a weight that numpy has counted.
    """
    parts, batch = tiny.parts(), tiny.batch()
    with jax.set_mesh(parts.mesh):
        params = parts.new_state().trainable
        logits = jax.jit(
            lambda p, b: nnx.merge(parts.graphdef, p)(b["inputs"], b["segment_ids"], b["positions"])
        )(params, batch)
        nll, mask = np.float64(token_nll(logits, jnp.asarray(batch["targets"]))), batch["loss_mask"]
        documents, of_documents = [], np.zeros_like(mask)
        for row in range(tiny.rows):
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                inside = (batch["segment_ids"][row] == segment) & (mask[row] > 0)
                documents += [nll[row][inside].mean()] if inside.any() else []
                of_documents[row, inside] = 1 / max(1, inside.sum())
        weights = {
            "tokens": mask / mask.sum(),
            "sequences": of_documents / len(documents),
            "constant": mask / mask.size,
        }

        @jax.jit
        def by_hand(params, batch, weights):
            logits = nnx.merge(parts.graphdef, params)(
                batch["inputs"], batch["segment_ids"], batch["positions"]
            )
            return (token_nll(logits, batch["targets"]) * weights).sum()

        expected = {
            "tokens": (nll * mask).sum() / mask.sum(),
            "sequences": np.mean(documents),
            "constant": (nll * mask).sum() / mask.size,
        }
        assert len(documents) > tiny.rows and len({round(x, 3) for x in expected.values()}) == 3
        for normalize, value in expected.items():
            objective, wanted = (
                next_token(normalize=normalize),
                jax.grad(by_hand)(params, batch, weights[normalize]),
            )
            for accumulation in (1, 4):
                whole = jax.jit(
                    lambda p, b, o=objective, a=accumulation: gradients(
                        models_from({"policy": parts.graphdef}), p, b, o, o.scales(b), a
                    )
                )
                result, grads = whole(params, batch)
                for ours, theirs in zip(
                    jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True
                ):
                    np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())
                np.testing.assert_allclose(result.loss, value, rtol=1e-6)
                np.testing.assert_allclose(
                    result.sums["nll"].mean(), expected["tokens"], rtol=1e-6
                )  # what is reported


@pytest.mark.long
def test_the_loss_of_each_source_sums_up_to_the_loss(tiny):
    parts, source = tiny.parts(), np.array([0, 2, 2, 0, 0, 2, 2, 0], np.int32)
    batch = tiny.batch() | {"source": source}
    with jax.set_mesh(parts.mesh):
        params, objective = parts.new_state().trainable, next_token(num_sources=4)
        forward = jax.jit(
            lambda p, b: (
                objective.forward({POLICY: nnx.merge(parts.graphdef, p)}, b, {"nll": 1.0}).sums
            )
        )
        sums = forward(params, batch)
        assert sums["sources"].total.shape == (4,) and not sums["sources"].weight[1::2].any()
        np.testing.assert_allclose(sums["sources"].total.sum(), sums["nll"].total, rtol=1e-6)
        for i in (0, 2):
            mask = batch["loss_mask"] * (source == i)[:, None]
            alone = forward(params, batch | {"loss_mask": mask})["nll"]
            np.testing.assert_allclose(
                np.array([x[i] for x in sums["sources"]]), np.array(alone), rtol=1e-5
            )


def test_a_batch_with_nothing_has_scales_that_are_finite(tiny):
    batch = {k: jnp.asarray(v) for k, v in tiny.batch().items()} | {
        "loss_mask": jnp.zeros((tiny.rows, tiny.length))
    }
    for normalize in ("tokens", "sequences", "constant"):
        scales = next_token(LossConfig(z_loss=0.5), normalize).scales(batch)
        assert scales["z"] == 0.5 and scales["nll"] == (
            1 / batch["loss_mask"].size if normalize == "constant" else 1
        )


def test_every_name_that_a_config_can_choose_is_an_objective():
    (kind,) = [key.kind for key in all_keys() if key.path == "objective"]
    assert set(typing.get_args(kind)) == set(OBJECTIVES)
    settings = ObjectiveSettings(
        LossConfig(),
        DistillConfig(),
        DpoConfig(),
        RewardConfig(),
        GrpoConfig(),
        PpoConfig(),
        RegularizationConfig(),
        "tokens",
        0,
    )
    assert make_objective("next_token", settings).models == (POLICY,)
    assert make_objective("distill", settings).models == (POLICY, TEACHER)
    attacked = settings._replace(loss=LossConfig(adversarial=1.0))
    names = [quantity.name for quantity in make_objective("distill", attacked).recorded]
    assert names == ["distill", "agreement", "adversarial"]


def test_a_number_is_a_mean_or_a_total_as_its_reduction_says():
    found = WeightedSum(jnp.float32(6), jnp.float32(4))
    assert found.reduced("mean") == 1.5
    assert found.reduced("sum") == 6
    nothing = WeightedSum(jnp.float32(0), jnp.float32(0))
    assert nothing.reduced("mean") == 0


@pytest.mark.long
@pytest.mark.usefixtures("optax_dtypes")
def test_what_an_objective_records_is_among_the_metrics_of_a_step_however_it_is_split(tiny):
    plain = next_token()

    def forward(models, batch, scales):
        made = plain.forward(models, batch, scales)
        counted = {"long": WeightedSum((batch["positions"] > 3).sum() * 1.0, jnp.float32(1))}
        return made._replace(sums=made.sums | counted)

    recorded = (Metric("long", "tokens", "sum"), Metric("nll", "nats per target"))
    objective = plain._replace(forward=forward, recorded=recorded)
    batch = tiny.batch()
    for accumulation in (1, 4):
        parts = tiny.parts(accumulation=accumulation, objective=objective)
        with jax.set_mesh(parts.mesh):
            _, metrics = parts.step(parts.new_state(), parts.put(batch))
        assert metrics["long"] == (batch["positions"] > 3).sum()
        np.testing.assert_allclose(metrics["nll"], metrics["loss"], rtol=1e-6)
