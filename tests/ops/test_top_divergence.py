"""The divergence from a teacher's likeliest tokens against an oracle in numpy, forward and
backward; and against the whole divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.divergence import LogitFormats, divergence
from maxtrain.ops.top_divergence import (
    TopDivergenceStaticArgs,
    TopLogProbs,
    plain_top_divergence,
    top_divergence,
    top_of,
)
from tests.ops.test_divergence import BETA, example, log_softmax

TEMPERATURE = 2.5


def kept(teacher, k):
    """The likeliest k tokens of a teacher, at the temperature, as float32."""
    logits = np.asarray(teacher.hidden, np.float64) @ np.asarray(teacher.head, np.float64)
    return top_of(jnp.float32(log_softmax(logits / TEMPERATURE)), k)


def oracle(student, top, weights, mask, kind):
    """Loss, gradients of hidden states and head, and sums of rows, in float64: token by token."""
    x = np.asarray(student.hidden, np.float64)
    head = np.asarray(student.head, np.float64)
    log_s = log_softmax(x @ head / TEMPERATURE)
    s = np.exp(log_s)
    each = np.zeros(weights.shape)
    dlogits = np.zeros(s.shape)
    for place in np.ndindex(*weights.shape):
        ids = np.asarray(top.ids)[place]
        others = np.setdiff1d(np.arange(s.shape[-1]), ids)
        sets = [*([i] for i in ids), others] if others.size else [[i] for i in ids]
        t = np.exp(np.asarray(top.log_probs, np.float64)[place])
        if others.size:
            t = np.append(t, np.exp(np.float64(top.tail[place])))
        p = np.array([s[place][some].sum() for some in sets])
        if kind == "forward":
            each[place] = (t * np.log(t / p)).sum()
            by_p = -t / p
        elif kind == "reverse":
            each[place] = (p * np.log(p / t)).sum()
            by_p = np.log(p / t) + 1
        else:
            m = BETA * t + (1 - BETA) * p
            of_both = BETA * t * np.log(t / m) + (1 - BETA) * p * np.log(p / m)
            each[place] = of_both.sum()
            by_p = (1 - BETA) * (np.log(p / m) + 1 - (BETA * t + (1 - BETA) * p) / m)
        by_s = np.zeros(s.shape[-1])
        for some, slope in zip(sets, by_p):
            by_s[some] = slope
        dlogits[place] = s[place] * (by_s - (s[place] * by_s).sum())
    weights = np.asarray(weights, np.float64)
    mask = np.asarray(mask, np.float64)
    dlogits *= TEMPERATURE * weights[..., None]
    entropy = -(s * log_s).sum(-1)
    same = log_s.argmax(-1) == np.asarray(top.ids)[..., 0]
    rows = [(values * mask).sum(-1) for values in (each, same, entropy)]
    loss = TEMPERATURE**2 * (each * weights).sum()
    return loss, dlogits @ head.T, np.einsum("btd,btv->dv", x, dlogits), rows


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("form", ["plain", 3])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("k", [3, "all"])
def test_value_and_gradient_are_those_of_the_oracle(form, kind, k):
    student, teacher, weights, mask = example()
    if k == "all":
        k = teacher.head.shape[-1]
    top = kept(teacher, k)
    numbers = LogitFormats("float32")

    # A factor outside, so that a backward pass that forgets its incoming gradient is found.
    def loss(student):
        if form == "plain":
            of = TopDivergenceStaticArgs(1, numbers, TEMPERATURE, kind, BETA)
            found = plain_top_divergence(student, top, weights, mask, of)
        else:
            found = top_divergence(
                student,
                top,
                weights,
                mask,
                chunks=form,
                student_numbers=numbers,
                temperature=TEMPERATURE,
                kind=kind,
                beta=BETA,
            )
        return 3 * found.loss, found

    (value, found), (dx, dhead) = jax.jit(jax.value_and_grad(loss, has_aux=True))(student)
    expected, of_hidden, of_head, rows = oracle(student, top, weights, mask, kind)
    np.testing.assert_allclose(value, 3 * expected, rtol=1e-5)
    for ours, theirs in zip((found.divergence, found.agreement, found.entropy), rows):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(dx, 3 * of_hidden, atol=1e-5 * np.abs(3 * of_hidden).max())
    np.testing.assert_allclose(dhead, 3 * of_head, atol=1e-5 * np.abs(3 * of_head).max())


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_with_all_tokens_it_is_the_whole_divergence_and_with_fewer_it_is_less(kind):
    student, teacher, weights, mask = example()
    numbers = LogitFormats("float32")
    options = {"chunks": 1, "temperature": TEMPERATURE, "kind": kind, "beta": BETA}
    whole = divergence(
        student, teacher, weights, mask, student_numbers=numbers, teacher_numbers=numbers, **options
    )
    size = teacher.head.shape[-1]
    found = {}
    for k in (1, 5, size):
        top = kept(teacher, k)
        of_top = top_divergence(student, top, weights, mask, student_numbers=numbers, **options)
        found[k] = float(of_top.divergence.sum())
    np.testing.assert_allclose(found[size], whole.divergence.sum(), rtol=1e-6)
    assert 0 < found[1] < found[5] < found[size]


def test_the_tail_is_what_is_left_over():
    log_probs = jnp.log(jnp.float32([[[0.5, 0.1, 0.3, 0.1]]]))
    top = top_of(log_probs, 2)
    assert top.ids.tolist() == [[[0, 2]]]
    np.testing.assert_allclose(top.log_probs, np.log([[[0.5, 0.3]]]), rtol=1e-6)
    np.testing.assert_allclose(top.tail, np.log([[0.2]]), rtol=1e-6)
    assert top_of(log_probs, 4).tail.tolist() == [[-np.inf]]


def test_padding_of_zeros_has_no_gradient_and_no_number_that_is_not_finite():
    student, teacher, _, _ = example()
    rows, length = teacher.hidden.shape[:2]
    top = TopLogProbs(
        jnp.zeros((rows, length, 3), jnp.int32),
        jnp.zeros((rows, length, 3)),
        jnp.zeros((rows, length)),
    )
    nothing = jnp.zeros((rows, length))

    def loss(student):
        numbers = LogitFormats("float32")
        return top_divergence(student, top, nothing, nothing, chunks=1, student_numbers=numbers)[0]

    value, gradient = jax.value_and_grad(loss)(student)
    assert value == 0
    assert all((x == 0).all() for x in jax.tree.leaves(gradient))
