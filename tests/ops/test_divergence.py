"""Divergence from a teacher, in chunks, against a float64 one: forward, backward and in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.ops.divergence import (
    DivergenceStaticArgs,
    LogitFormats,
    Predictor,
    divergence,
    plain_divergence,
)

B, T, D, E, V = 3, 12, 16, 24, 50
# Of the teacher, in the mixture of `jsd`.
BETA = 0.3


def example(seed=0):
    """A student, a wider teacher, weights of which a third are 0, and their mask."""
    rng = np.random.default_rng(seed)
    student = Predictor(
        jnp.float32(rng.standard_normal((B, T, D))), jnp.float32(rng.standard_normal((D, V)))
    )
    teacher = Predictor(
        jnp.float32(rng.standard_normal((B, T, E))), jnp.float32(rng.standard_normal((E, V)))
    )
    mask = rng.uniform(size=(B, T)) > 0.33
    weights = rng.uniform(0.1, 2, (B, T)) * mask / T
    return student, teacher, jnp.float32(weights), jnp.float32(mask)


def log_softmax(logits):
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def oracle(student, teacher, weights, mask, dtype, temperature, kind):
    """Loss, gradients of the student's hidden states and head, and sums of rows, in float64, of
    inputs rounded to `dtype`."""
    rounded = []
    for x in (*student, *teacher):
        rounded.append(np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64))
    x, head, y, head_of_teacher = rounded
    weights = np.asarray(weights, np.float64)
    mask = np.asarray(mask, np.float64)
    logits = x @ head
    logits_of_teacher = y @ head_of_teacher
    log_s = log_softmax(logits / temperature)
    log_t = log_softmax(logits_of_teacher / temperature)
    s = np.exp(log_s)
    t = np.exp(log_t)
    if kind == "forward":
        each = (t * (log_t - log_s)).sum(-1)
        dlogits = s - t
    elif kind == "jsd":
        m = BETA * t + (1 - BETA) * s
        of_teacher = (t * (log_t - np.log(m))).sum(-1)
        of_student = (s * (log_s - np.log(m))).sum(-1)
        each = BETA * of_teacher + (1 - BETA) * of_student
        # By p = softmax(z): dp_i/dz_j = p_i (1[i = j] - p_j).
        by_p = (1 - BETA) * (log_s - np.log(m) + 1 - (BETA * t + (1 - BETA) * s) / m)
        dlogits = s * (by_p - (s * by_p).sum(-1, keepdims=True))
    else:
        each = (s * (log_s - log_t)).sum(-1)
        dlogits = s * (log_s - log_t - each[..., None])
    dlogits = dlogits * temperature * weights[..., None]
    same = logits.argmax(-1) == logits_of_teacher.argmax(-1)
    loss = temperature**2 * (each * weights).sum()
    dhead = np.einsum("btd,btv->dv", x, dlogits)
    entropy = -(s * log_s).sum(-1)
    rows = ((each * mask).sum(-1), (same * mask).sum(-1), (entropy * mask).sum(-1))
    return loss, dlogits @ head.T, dhead, rows


def of_form(chunks, args, dtype, temperature, kind):
    """Return the divergence computed in this number of chunks, or by the plain function."""
    numbers = LogitFormats(dtype)
    if chunks == "plain":
        return plain_divergence(
            *args, DivergenceStaticArgs(1, numbers, numbers, temperature, kind, BETA)
        )
    return divergence(
        *args,
        chunks=chunks,
        student_numbers=numbers,
        teacher_numbers=numbers,
        temperature=temperature,
        kind=kind,
        beta=BETA,
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 1e-5),
        ("bfloat16", 2.0**-8),
        pytest.param("float16", 2.0**-11, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.long), 2.5])
@pytest.mark.parametrize("form", ["plain", pytest.param(1, marks=pytest.mark.long), 3])
def test_every_form_equals_the_oracle(form, temperature, kind, dtype, tolerance):
    student, teacher, weights, mask = example()

    # A factor outside, so that a backward pass that forgets its incoming gradient is found.
    def loss(student):
        found = of_form(form, (student, teacher, weights, mask), dtype, temperature, kind)
        return 3 * found.loss, found

    (value, found), (dx, dhead) = jax.jit(jax.value_and_grad(loss, has_aux=True))(student)
    expected, expected_dx, expected_dhead, (kl, agreement, entropy) = oracle(
        student, teacher, weights, mask, dtype, temperature, kind
    )
    np.testing.assert_allclose(value, 3 * expected, rtol=1e-5)
    np.testing.assert_allclose(found.divergence, kl, rtol=1e-5)
    np.testing.assert_allclose(found.agreement, agreement, rtol=1e-6)
    np.testing.assert_allclose(found.entropy, entropy, rtol=1e-5)
    dx_tolerance = tolerance * np.abs(3 * expected_dx).max()
    dhead_tolerance = tolerance * np.abs(3 * expected_dhead).max()
    np.testing.assert_allclose(dx, 3 * expected_dx, atol=dx_tolerance)
    np.testing.assert_allclose(dhead, 3 * expected_dhead, atol=dhead_tolerance)


@pytest.mark.parametrize("form", ["plain", 3])
def test_neither_the_teacher_nor_what_is_recorded_has_a_gradient(form):
    student, teacher, weights, mask = example()

    def of_teacher(teacher):
        args = (student, teacher, weights, mask)
        return of_form(form, args, "float32", 2.0, "forward").loss

    def recorded(student):
        args = (student, teacher, weights, mask)
        found = of_form(form, args, "float32", 2.0, "forward")
        return found.divergence.sum() + found.agreement.sum()

    for gradient in (jax.grad(of_teacher)(teacher), jax.grad(recorded)(student)):
        assert all((x == 0).all() for x in gradient)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_model_does_not_diverge_from_itself(kind):
    student, _, weights, mask = example()
    found = of_form(3, (student, student, weights, mask), "float32", 2.0, kind)
    np.testing.assert_allclose(found.divergence, 0, atol=1e-5)
    np.testing.assert_array_equal(found.agreement, mask.sum(-1))


@pytest.mark.parametrize(("beta", "end"), [(1e-3, "forward"), (1 - 1e-3, "reverse")])
def test_a_mixture_that_is_almost_one_of_both_gives_their_divergence(beta, end):
    """Divided by beta (1 - beta); also where that is a small difference of rounded numbers."""
    student, teacher, weights, mask = example()
    student = student._replace(hidden=student.hidden / 8)
    teacher = teacher._replace(hidden=teacher.hidden / 8)
    exact = LogitFormats("float32")
    numbers = {"student_numbers": exact, "teacher_numbers": exact}
    args = (student, teacher, weights, mask)
    mixed = divergence(*args, chunks=3, **numbers, kind="jsd", beta=beta)
    pure = divergence(*args, chunks=3, **numbers, kind=end)
    np.testing.assert_allclose(mixed.divergence / (beta * (1 - beta)), pure.divergence, rtol=1e-2)


def test_logits_are_rounded_to_each_models_own_type():
    student, teacher, weights, mask = example()
    exact = LogitFormats("float32")
    rough = LogitFormats("float32", "bfloat16")
    losses = set()
    for of_student in (exact, rough):
        for of_teacher in (exact, rough):
            form = DivergenceStaticArgs(3, of_student, of_teacher, 1.0, "forward")
            plain = plain_divergence(student, teacher, weights, mask, form)
            chunked = divergence(
                student,
                teacher,
                weights,
                mask,
                chunks=3,
                student_numbers=of_student,
                teacher_numbers=of_teacher,
            )
            np.testing.assert_allclose(chunked.loss, plain.loss, rtol=1e-6)
            losses.add(float(chunked.loss))
    assert len(losses) == 4


def test_logits_are_never_held_whole():
    """64 chunks need no more than a fraction of the memory that one needs."""
    rows, length, width, entries = 2, 512, 8, 4096
    shape = jax.ShapeDtypeStruct
    model = Predictor(
        shape((rows, length, width), jnp.float32), shape((width, entries), jnp.float32)
    )
    mask = shape((rows, length), jnp.float32)

    def bytes_needed(chunks):
        def loss(student, teacher, weights, mask):
            args = (student, teacher, weights, mask)
            return of_form(chunks, args, "float32", 2.0, "forward").loss

        compiled = jax.jit(jax.grad(loss)).lower(model, model, mask, mask).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_needed(64) < bytes_needed(1) / 10
