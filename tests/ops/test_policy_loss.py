"""Losses of policies against those of TRL, in float64, with their gradients."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.policy_loss import (
    RatioClip,
    importance_weights,
    mean_of_each,
    policy_loss,
    reference_divergence,
)

FOLDER = Path(__file__).parents[1] / "data" / "losses"
GOLDEN = np.load(FOLDER / "golden.npz")
CASES = {
    name.removeprefix("grpo/"): options
    for name, options in json.loads((FOLDER / "cases.json").read_text())["cases"].items()
    if name.startswith("grpo/")
}


def averaged(loss, mask, loss_type):
    """Average a loss over tokens with TRL's divisor."""
    if loss_type == "grpo":
        return ((loss * mask).sum(-1) / mask.sum(-1)).mean()
    if loss_type == "dr_grpo":
        return (loss * mask).sum() / mask.size
    return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_trl(case):
    options = CASES[case]
    loss_type = options.get("loss_type", case)
    clip = RatioClip(
        low=0.2,
        high=options.get("epsilon_high", 0.28),
        delta=options.get("delta"),
        level=options.get("importance_sampling_level", "token"),
        cispo=loss_type == "cispo",
    )
    with jax.enable_x64(True):
        arrays = {}
        for name in ("logps", "old", "ref", "mask", "advantages"):
            arrays[name] = jnp.asarray(GOLDEN[f"grpo/{case}/{name}"], jnp.float64)
        mask = arrays["mask"]
        completions = mask.astype(jnp.int32)
        advantages = jnp.broadcast_to(arrays["advantages"][:, None], mask.shape)

        def loss(log_probs):
            found = policy_loss(log_probs, arrays["old"], advantages, mask, completions, clip)
            each = found.loss
            if options.get("beta"):
                apart = reference_divergence(log_probs, arrays["ref"])
                if options.get("use_bias_correction_kl"):
                    apart = apart * found.ratio
                each = each + options["beta"] * apart
            return averaged(each, mask, loss_type)

        found, gradient = jax.value_and_grad(loss)(arrays["logps"])
        np.testing.assert_allclose(found, GOLDEN[f"grpo/{case}/loss"], rtol=1e-9)
        np.testing.assert_allclose(gradient, GOLDEN[f"grpo/{case}/grad"], atol=1e-9)


def example():
    rng = np.random.default_rng(0)
    log_probs = jnp.float32(-rng.gamma(2.0, 0.7, (3, 8)))
    advantages = jnp.float32(np.repeat(rng.normal(size=(3, 1)), 8, axis=1))
    mask = jnp.float32(np.arange(8) < np.array([[8], [5], [3]]))
    return log_probs, advantages, mask, mask.astype(jnp.int32)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    "clip", [RatioClip(), RatioClip(level="sequence"), RatioClip(high=2.0, cispo=True)]
)
def test_where_the_policy_is_still_the_old_one_the_gradient_is_that_of_reinforce(clip):
    log_probs, advantages, mask, completions = example()

    def ours(x):
        found = policy_loss(x, log_probs, advantages, mask, completions, clip)
        return (found.loss * mask).sum()

    def reinforce(x):
        return -(advantages * x * mask).sum()

    found = jax.grad(ours)(log_probs)
    np.testing.assert_allclose(found, jax.grad(reinforce)(log_probs), rtol=1e-5, atol=1e-7)
    first = policy_loss(log_probs, log_probs, advantages, mask, completions, clip)
    assert (first.ratio == 1).all()
    assert not first.clipped_low.any()
    assert not first.clipped_high.any()


@pytest.mark.parametrize("apart", [-300.0, 300.0])
def test_a_policy_far_from_the_old_one_has_finite_losses_and_gradients(apart):
    log_probs, advantages, mask, completions = example()
    old = log_probs + apart

    def loss(x):
        found = policy_loss(x, old, advantages, mask, completions, RatioClip(delta=None))
        return ((found.loss + reference_divergence(x, old)) * mask).sum()

    value, gradient = jax.value_and_grad(loss)(log_probs)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_no_advantage_is_no_gradient():
    log_probs, _, mask, completions = example()

    def loss(x):
        nothing = jnp.zeros_like(mask)
        return policy_loss(x, log_probs - 0.1, nothing, mask, completions, RatioClip()).loss.sum()

    assert not np.asarray(jax.grad(loss)(log_probs)).any()


def test_the_estimate_is_the_divergence_in_expectation():
    """Over all tokens of a distribution, weighted by the policy that samples them."""
    rng = np.random.default_rng(1)
    policy = jax.nn.log_softmax(jnp.float32(rng.normal(size=(1, 7))))
    reference = jax.nn.log_softmax(jnp.float32(rng.normal(size=(1, 7))))
    found = (jnp.exp(policy) * reference_divergence(policy, reference)).sum()
    exact = (jnp.exp(policy) * (policy - reference)).sum()
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_the_mean_of_each_completion_is_at_all_of_its_tokens():
    values = jnp.float32([[1, 2, 3, 4, 5, 9]])
    mask = jnp.float32([[1, 1, 0, 1, 1, 0]])
    completions = jnp.int32([[1, 1, 1, 2, 2, 0]])
    found = mean_of_each(values, mask, completions)
    np.testing.assert_allclose(found, [[1.5, 1.5, 1.5, 4.5, 4.5, 0]])


def test_what_another_policy_has_sampled_counts_as_the_policys_own_in_expectation():
    """Over all tokens of a distribution, weighted by the one that samples them; up to the bound."""
    rng = np.random.default_rng(2)
    sampler = jax.nn.log_softmax(jnp.float32(rng.normal(size=(1, 7))))
    policy = jax.nn.log_softmax(jnp.float32(rng.normal(size=(1, 7))))
    gains = rng.normal(size=7)
    mask = jnp.ones((1, 7))
    each = mask.astype(jnp.int32)
    found = importance_weights(policy, sampler, mask, each, "token", 100.0)
    exact = (np.exp(policy) * gains).sum()
    np.testing.assert_allclose((np.exp(sampler) * found * gains).sum(), exact, rtol=1e-5)
    capped = importance_weights(policy, sampler, mask, each, "token", 1.5)
    np.testing.assert_array_equal(capped, np.minimum(found, np.float32(1.5)))
    assert (capped < found).any()


def test_a_weight_of_a_completion_is_the_geometric_mean_of_its_tokens():
    apart = jnp.float32([[0.1, 0.3, 9.0, -0.4, -0.2, 300.0]])
    mask = jnp.float32([[1, 1, 0, 1, 1, 0]])
    completions = jnp.int32([[1, 1, 1, 2, 2, 0]])

    def total(old):
        zero = jnp.zeros_like(old)
        found = importance_weights(old, zero, mask, completions, "sequence", 2.0)
        return (found * mask).sum(), found

    (_, found), gradient = jax.value_and_grad(total, has_aux=True)(apart)
    expected = np.exp([[0.2, 0.2, 0.2, -0.3, -0.3, 0.0]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not np.asarray(gradient).any()
