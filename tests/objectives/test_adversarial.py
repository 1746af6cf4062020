"""The loss at the worst embeddings nearby: found as the papers say, the same for every split, and
never in evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import LossConfig
from maxtrain.objectives.adversarial import adversarial, worst_offset
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from

pytestmark = pytest.mark.usefixtures("optax_dtypes")
RADIUS, PLAIN = 0.5, next_token()
FGM = LossConfig(adversarial=0.7, adversarial_radius=RADIUS)
PGD = LossConfig(adversarial=0.7, adversarial_radius=RADIUS, adversarial_steps=4)


@pytest.fixture(scope="module")
def attacked(tiny):
    """Return for both kinds of attack: parameters, batch, its scales, and the result of
    `worst_offset`; row 4 has no target."""
    parts, batch = tiny.parts(), {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    batch["loss_mask"] = batch["loss_mask"].at[4].set(0)
    scales = PLAIN.scales(batch)

    def offset(config, params):
        return worst_offset(
            PLAIN, {POLICY: nnx.merge(parts.graphdef, params)}, batch, scales, config
        )

    with jax.set_mesh(parts.mesh):
        params = parts.new_state().trainable
        offsets = [jax.jit(functools.partial(offset, config))(params) for config in (FGM, PGD)]
    return parts, params, batch, scales, offsets


def loss(attacked, offset):
    """The batch's loss with these offsets, [B, T, D], of its embeddings; and its slope there."""
    parts, params, batch, scales, _ = attacked
    with jax.set_mesh(parts.mesh):
        model = nnx.merge(parts.graphdef, params)
        value = jax.value_and_grad(
            lambda o: PLAIN.forward({POLICY: model}, batch | {"embedding_offset": o}, scales).loss
        )
        return jax.jit(value)(offset)


@pytest.mark.long
def test_fgm_goes_along_the_gradient_of_each_row(attacked):
    """The oracle: one gradient of the whole batch, divided by its length row by row in numpy."""
    slope = np.float64(loss(attacked, jnp.zeros_like(attacked[4][0]))[1])
    size = np.sqrt((slope**2).sum((1, 2), keepdims=True))
    expected = RADIUS * slope / np.where(size > 0, size, 1)
    np.testing.assert_allclose(attacked[4][0], expected, atol=1e-5)
    assert (
        not attacked[4][0][4].any()
        and (np.sqrt((expected**2).sum((1, 2))) > 0.99 * RADIUS).sum() == 7
    )


@pytest.mark.long
def test_both_attacks_stay_in_the_ball_and_pgd_finds_worse(attacked):
    fgm, pgd = attacked[4]
    for offset in (fgm, pgd):
        assert (np.sqrt((np.float64(offset) ** 2).sum((1, 2))) <= RADIUS * (1 + 1e-5)).all()
    noise = np.random.default_rng(0).standard_normal(fgm.shape)
    noise *= RADIUS / np.sqrt((noise**2).sum((1, 2), keepdims=True))
    nothing, random, first, last = (
        float(loss(attacked, jnp.float32(o))[0]) for o in (np.zeros_like(fgm), noise, fgm, pgd)
    )
    assert first > nothing + 5 * abs(random - nothing) and last > first


@pytest.mark.long
@pytest.mark.parametrize("config", [FGM, PGD], ids=["fgm", "pgd"])
def test_the_gradient_is_that_of_both_losses_with_the_offset_held_still(attacked, config):
    parts, params, batch, scales, offsets = attacked
    offset = offsets[config is PGD]

    def by_hand(params):
        model = nnx.merge(parts.graphdef, params)
        return (
            PLAIN.forward({POLICY: model}, batch, scales).loss
            + 0.7
            * PLAIN.forward({POLICY: model}, batch | {"embedding_offset": offset}, scales).loss
        )

    with jax.set_mesh(parts.mesh):
        value, expected = jax.jit(jax.value_and_grad(by_hand))(params)
        objective, split = adversarial(PLAIN, config), 4 if config is PGD else 1
        result, grads = jax.jit(
            lambda p: gradients(
                models_from({"policy": parts.graphdef}), p, batch, objective, scales, split
            )
        )(params)
    np.testing.assert_allclose(result.loss, value, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())
    assert result.sums["adversarial"].mean() > result.sums["nll"].mean()


@pytest.mark.long
def test_evaluation_does_without(attacked):
    """Nothing of the attack is left in the compiled program."""
    parts, params, batch, _, _ = attacked
    with jax.set_mesh(parts.mesh):
        costs = []
        for objective in (PLAIN, adversarial(PLAIN, FGM)):
            compiled = (
                jax.jit(
                    lambda p, o=objective: o.evaluate(
                        {POLICY: nnx.merge(parts.graphdef, p)}, batch
                    )["nll"]
                )
                .lower(params)
                .compile()
            )
            costs.append(compiled.cost_analysis()["flops"])
    assert costs[0] == costs[1]


@pytest.mark.long
def test_a_step_trains_with_it(tiny):
    parts = tiny.parts((2, 2, 2), accumulation=2, objective=adversarial(PLAIN, FGM))
    with jax.set_mesh(parts.mesh):
        state, losses = parts.new_state(), []
        for _ in range(6):
            state, metrics = parts.step(state, parts.put(tiny.batch()))
            losses.append(
                (float(metrics["adversarial"]), float(metrics["loss"]), float(metrics["objective"]))
            )
    assert losses[-1][0] < losses[0][0] and all(worse > plain for worse, plain, _ in losses)
    np.testing.assert_allclose(
        [o for *_, o in losses], [p + 0.7 * w for w, p, _ in losses], rtol=1e-5
    )
