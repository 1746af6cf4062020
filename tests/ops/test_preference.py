"""Losses of preferences against those of TRL, in float64, with their gradients."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.preference import (
    FREE_OF_REFERENCE,
    LOSSES,
    AnswerLogProbs,
    PreferenceCoefficients,
    bradley_terry,
    of_label,
    off_centre,
)

FOLDER = Path(__file__).parents[1] / "data" / "losses"
GOLDEN = np.load(FOLDER / "golden.npz")
CASES = {
    name.removeprefix("dpo/"): options
    for name, options in json.loads((FOLDER / "cases.json").read_text())["cases"].items()
    if name.startswith("dpo/")
}
# The cross-entropy of the chosen answers is a term of the objective, and tested there.
ALIKE = [name for name in CASES if name != "sft"]
BETA = 0.3
OF_ANSWERS = np.load(FOLDER / "answers.npz")
CASES_OF_ANSWERS = json.loads((FOLDER / "answers.json").read_text())["cases"]


def answers(log_probs, reference, mask):
    return AnswerLogProbs((log_probs * mask).sum(-1), reference.sum(-1), mask.sum(-1))


@pytest.mark.parametrize("case", ALIKE)
def test_losses_and_gradients_are_those_of_trl(case):
    options = CASES[case]
    name = options.get("loss_types", [case])[0]
    strength = PreferenceCoefficients(BETA, options.get("label_smoothing", 0.0))
    tolerance = 1e-9
    if case == "exo_pair":
        tolerance = 1e-6  # TRL takes logarithms of the label smoothing in float32.
    with jax.enable_x64(True):
        arrays = {}
        for key in ("chosen", "rejected", "ref_chosen", "ref_rejected"):
            arrays[key] = jnp.asarray(GOLDEN[f"dpo/{case}/{key}"])
        masks = [
            jnp.asarray(GOLDEN[f"dpo/{case}/mask_{key}"], jnp.float64)
            for key in ("chosen", "rejected")
        ]

        def loss(chosen, rejected):
            of_chosen = answers(chosen, arrays["ref_chosen"], masks[0])
            of_rejected = answers(rejected, arrays["ref_rejected"], masks[1])
            return LOSSES[name](of_chosen, of_rejected, strength).mean()

        program = jax.value_and_grad(loss, (0, 1))
        found, (of_chosen, of_rejected) = program(arrays["chosen"], arrays["rejected"])
        np.testing.assert_allclose(found, GOLDEN[f"dpo/{case}/loss"], rtol=tolerance)
        # Theirs sums all positions, of which those without a target are 0.
        for ours, mask, key in (
            (of_chosen, masks[0], "chosen"),
            (of_rejected, masks[1], "rejected"),
        ):
            theirs = GOLDEN[f"dpo/{case}/grad_{key}"]
            np.testing.assert_allclose(ours, theirs * mask, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("case", [name for name in CASES_OF_ANSWERS if name.startswith("kto/")])
def test_losses_of_labels_are_those_of_trl(case):
    """This holds where the mean log-ratio of mismatched answers is below 0, too."""
    options = CASES_OF_ANSWERS[case]
    with jax.enable_x64(True):
        given = {}
        for key in ("log_probs", "reference", "mask", "mismatched", "mismatched_reference"):
            given[key] = jnp.asarray(OF_ANSWERS[f"{case}/{key}"], jnp.float64)
        labels = jnp.where(jnp.asarray(OF_ANSWERS[f"{case}/labels"]), 1.0, -1.0)
        mean = (given["mismatched"] - given["mismatched_reference"]).sum(-1).mean()
        assert (mean < 0) == (case == "kto/kto_negative")
        zero = jnp.zeros_like(labels)
        if options.get("loss_type", case) != "kto/apo_zero_unpaired":
            zero += jax.nn.relu(mean)
        weights = jnp.where(
            labels > 0, options.get("desirable_weight", 1.0), options.get("undesirable_weight", 1.0)
        )

        def loss(log_probs):
            log_ratio = ((log_probs - given["reference"]) * given["mask"]).sum(-1)
            return (weights * of_label(log_ratio, labels, zero, BETA)).mean()

        found, gradient = jax.value_and_grad(loss)(given["log_probs"])
        np.testing.assert_allclose(found, OF_ANSWERS[f"{case}/loss"], rtol=1e-9)
        theirs = OF_ANSWERS[f"{case}/grad"] * OF_ANSWERS[f"{case}/mask"]
        np.testing.assert_allclose(gradient, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", [name for name in CASES_OF_ANSWERS if name.startswith("reward/")])
def test_losses_of_rewards_are_those_of_trl(case):
    options = CASES_OF_ANSWERS[case]
    with jax.enable_x64(True):
        rewards = jnp.asarray(OF_ANSWERS[f"{case}/rewards"])
        margin = jnp.zeros(len(rewards) // 2)
        if options.get("margin"):
            margin = jnp.asarray(OF_ANSWERS[f"{case}/margins"])

        def loss(rewards):
            chosen, rejected = jnp.split(rewards, 2)
            centre = options.get("center_rewards_coefficient", 0.0)
            each = bradley_terry(chosen, rejected, margin) + centre * off_centre(chosen, rejected)
            return each.mean()

        found, gradient = jax.value_and_grad(loss)(rewards)
        np.testing.assert_allclose(found, OF_ANSWERS[f"{case}/loss"], rtol=1e-9)
        np.testing.assert_allclose(gradient, OF_ANSWERS[f"{case}/grad"], rtol=1e-9, atol=1e-12)


def pair(chosen, rejected, reference=-5.0):
    return [
        AnswerLogProbs(jnp.float32(x), jnp.float32(reference), jnp.float32(4))
        for x in (chosen, rejected)
    ]


def test_label_smoothing_of_sigmoid_is_a_mixture_of_both_labels():
    right = LOSSES["sigmoid"](*pair(-3, -6), PreferenceCoefficients(0.5))
    wrong = LOSSES["sigmoid"](*pair(-6, -3), PreferenceCoefficients(0.5))
    mixed = LOSSES["sigmoid"](*pair(-3, -6), PreferenceCoefficients(0.5, 0.2))
    np.testing.assert_allclose(mixed, 0.8 * right + 0.2 * wrong, rtol=1e-6)


def test_simpo_is_its_equation():
    found = LOSSES["simpo"](*pair(-3, -6), PreferenceCoefficients(2.0, margin=0.5))
    difference = 2.0 * (-3 / 4 + 6 / 4) - 0.5
    np.testing.assert_allclose(found, np.log1p(np.exp(-difference)), rtol=1e-6)


def test_orpo_is_its_equation():
    found = LOSSES["orpo"](*pair(-3, -6), PreferenceCoefficients(0.1))
    chosen, rejected = np.exp(-3 / 4), np.exp(-6 / 4)
    odds_ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    np.testing.assert_allclose(found, 0.1 * np.log1p(1 / odds_ratio), rtol=1e-5)


def test_orpo_of_a_sure_answer_is_finite():
    value, slope = jax.value_and_grad(
        lambda x: LOSSES["orpo"](*pair(x, -6.0), PreferenceCoefficients(0.1))
    )(jnp.float32(0.0))
    assert np.isfinite(value)
    assert np.isfinite(slope)


@pytest.mark.parametrize("name", LOSSES)
def test_the_reference_counts_unless_the_loss_is_free_of_it(name):
    strength = PreferenceCoefficients(0.5, 0.1)
    chosen, rejected = pair(-3, -4)
    other = chosen._replace(reference=jnp.float32(-4.0))
    before = LOSSES[name](chosen, rejected, strength)
    after = LOSSES[name](other, rejected, strength)
    assert (before == after) == (name in FREE_OF_REFERENCE)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "apo_down"])
def test_a_more_likely_chosen_answer_and_a_less_likely_rejected_one_lower_the_loss(name):
    """The policy is still the reference, as at the beginning of training."""

    def loss(chosen, rejected):
        return LOSSES[name](*pair(chosen, rejected), PreferenceCoefficients(0.5, 0.1))

    of_chosen, of_rejected = jax.grad(loss, (0, 1))(jnp.float32(-5), jnp.float32(-5))
    assert of_chosen < 0
    assert of_rejected > 0
