"""Distillation: the loss that its parts say, a teacher that stays as it is, and the same gradient
for every split of the batch and on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtrain.models.registry import build_model
from maxtrain.objectives.distill import TEACHER, distill
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.train_step.evaluate import evaluate, make_eval_step
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import abstract_model, shardings, with_frozen
from maxtrain.train_step.step import make_train_step

pytestmark = pytest.mark.usefixtures("optax_dtypes")
TEMPERATURE, WEIGHT = 2.0, 0.7


@pytest.fixture(scope="module")
def models(tiny):
    """A policy, and a wider teacher, as (structure, parameters)."""
    wide = dataclasses.replace(tiny.model, embed_dim=48, num_layers=1)
    teacher = build_model(wide, tiny.precision, 2)
    # A random one has hardly an opinion.
    teacher.head.kernel[...] = 5 * teacher.head.kernel[...]
    return {
        POLICY: nnx.split(build_model(tiny.model, tiny.precision, 1)),
        TEACHER: nnx.split(teacher),
    }


def merged(models, policy=None, teacher=None):
    """Modules of these parameters, or of those of the models."""
    replaced = {POLICY: policy, TEACHER: teacher}
    result = {}
    for name, (graphdef, params) in models.items():
        if replaced[name] is not None:
            params = replaced[name]
        result[name] = nnx.merge(graphdef, params)
    return result


def value_and_gradients(models, objective, batch, scales):
    """The result of a batch, and the gradients of policy and teacher."""

    def loss(policy, teacher):
        result = objective.forward(merged(models, policy, teacher), batch, scales)
        return result.loss, result

    params = [models[name][1] for name in (POLICY, TEACHER)]
    (_, result), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*params)
    return result, gradients


def by_hand(models, batch, kind):
    """The loss and its parts from whole logits, in float64."""
    logits = {}
    for name, model in merged(models).items():
        found = model(batch["inputs"], batch["segment_ids"], batch["positions"])
        logits[name] = np.asarray(found, np.float64)
    mask = np.asarray(batch["loss_mask"], np.float64)

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    s = log_softmax(logits[POLICY] / TEMPERATURE)
    t = log_softmax(logits[TEACHER] / TEMPERATURE)
    each = (np.exp(t) * (t - s)).sum(-1)
    if kind == "reverse":
        each = (np.exp(s) * (s - t)).sum(-1)
    if kind == "jsd":
        m = np.log(0.5 * np.exp(s) + 0.5 * np.exp(t))
        each = 0.5 * (np.exp(t) * (t - m) + np.exp(s) * (s - m)).sum(-1)
    targets = np.asarray(batch["targets"])[..., None]
    nll = -np.take_along_axis(log_softmax(logits[POLICY]), targets, -1)[..., 0]
    same = logits[POLICY].argmax(-1) == logits[TEACHER].argmax(-1)
    means = {
        "nll": (nll * mask).sum() / mask.sum(),
        "distill": (each * mask).sum() / mask.sum(),
        "agreement": (same * mask).sum() / mask.sum(),
    }
    loss = WEIGHT * TEMPERATURE**2 * means["distill"] + (1 - WEIGHT) * means["nll"]
    return loss, means


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_the_loss_is_what_its_parts_say_and_the_teacher_has_no_gradient(tiny, models, kind):
    batch = {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    objective = distill(TEMPERATURE, WEIGHT, kind)
    result, (of_policy, of_teacher) = value_and_gradients(
        models, objective, batch, objective.scales(batch)
    )
    loss, means = by_hand(models, batch, kind)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    for name, mean in means.items():
        np.testing.assert_allclose(result.sums[name].mean(), mean, rtol=1e-5)
    assert all((x == 0).all() for x in jax.tree.leaves(of_teacher))
    assert float(optax.tree.norm(of_policy)) > 0
    assert [quantity.name for quantity in objective.recorded] == ["distill", "agreement"]
    assert objective.models == (POLICY, TEACHER)


@pytest.mark.long
def test_without_weight_it_is_the_next_token_objective_to_the_bit(tiny, models):
    batch = {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    plain = next_token()
    mixed = distill(TEMPERATURE, 0.0)
    expected, (gradient, _) = value_and_gradients(models, plain, batch, plain.scales(batch))
    result, (found, _) = value_and_gradients(models, mixed, batch, mixed.scales(batch))
    assert float(result.loss) == float(expected.loss)
    assert float(result.sums["nll"].total) == float(expected.sums["nll"].total)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("normalize", ["tokens", pytest.param("sequences", marks=pytest.mark.long)])
def test_a_split_of_the_batch_gives_the_same_gradient(tiny, models, normalize):
    batch = {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    objective = distill(TEMPERATURE, WEIGHT, normalize=normalize)
    scales = objective.scales(batch)
    _, (whole, _) = value_and_gradients(models, objective, batch, scales)
    parts = []
    for first in range(4):
        micro = {name: x[first::4] for name, x in batch.items()}
        parts.append(value_and_gradients(models, objective, micro, scales)[1][0])
    total = jax.tree.map(lambda *gradients: sum(gradients), *parts)
    difference = jax.tree.map(jnp.subtract, total, whole)
    assert float(optax.tree.norm(difference)) <= 1e-6 * float(optax.tree.norm(whole))


@pytest.mark.long
def test_a_student_comes_closer_to_its_teacher_than_one_that_learns_from_the_data(tiny, models):
    batch = {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    objective = distill(1.0, 1.0)
    rule = optax.adam(1e-2)

    def trained(minimised):
        scales = minimised.scales(batch)

        @jax.jit
        def step(params, moments):
            def loss(params):
                return minimised.forward(merged(models, params), batch, scales).loss

            updates, moments = rule.update(jax.grad(loss)(params), moments)
            return optax.apply_updates(params, updates), moments

        params = models[POLICY][1]
        moments = rule.init(params)
        for _ in range(30):
            params, moments = step(params, moments)
        return params

    graphdefs = {name: graphdef for name, (graphdef, _) in models.items()}
    measure = make_eval_step(graphdefs, objective)

    def measured(policy):
        params = {POLICY: policy, TEACHER: models[TEACHER][1]}
        return evaluate(measure, params, [batch], None, 0)

    before = measured(models[POLICY][1])
    distilled = measured(trained(objective))
    taught_by_data = measured(trained(next_token()))
    assert list(before) == ["nll", "perplexity", "tokens", "agreement", "distill"]
    assert distilled["distill"] < 0.7 * before["distill"]
    assert distilled["distill"] < 0.7 * taught_by_data["distill"]
    assert taught_by_data["nll"] < distilled["nll"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"temperature": 0.0, "weight": 0.5}, "temperature=0.0 must be above 0.*Set it to 1"),
        ({"temperature": 1.0, "weight": 1.5}, "weight=1.5 must be from 0 to 1.*Set it to 0.5"),
        ({"temperature": 1.0, "weight": 1.0, "kind": "both"}, "kind=both .*Set it to forward"),
        ({"temperature": 1.0, "weight": 1.0, "beta": 1.0}, "beta=1.0 must be between 0 and 1.*0.5"),
    ],
)
def test_what_is_no_distillation_is_refused(options, advice):
    with pytest.raises(ValueError, match=advice):
        distill(**options)


@pytest.fixture(scope="module")
def trained(tiny, models):
    """Function that trains three steps of distillation on a mesh of this shape. It returns the
    losses and divergences of each, and the teacher before and after."""
    _, weights = models[TEACHER]
    objective = distill(TEMPERATURE, WEIGHT)

    def train(shape):
        parts = tiny.parts(shape)
        wide = dataclasses.replace(tiny.model, embed_dim=48, num_layers=1)
        rule = make_optimizer(tiny.optimizer, tiny.schedule, tiny.steps, parts.abstract.trainable)
        graphdef, shapes = abstract_model(wide, tiny.precision, parts.mesh)
        abstract = with_frozen(parts.abstract, {TEACHER: shapes})
        step = make_train_step(
            abstract,
            {POLICY: parts.graphdef, TEACHER: graphdef},
            objective,
            rule,
            make_schedule(tiny.schedule, tiny.optimizer.learning_rate, tiny.steps),
            2,
        )
        found = []
        with jax.set_mesh(parts.mesh):
            copied = jax.device_put(jax.tree.map(np.array, weights), shardings(shapes))
            before = jax.tree.map(np.array, copied)
            state = with_frozen(parts.new_state(), {TEACHER: copied})
            for _ in range(3):
                state, metrics = step(state, parts.put(tiny.batch()))
                found.append([float(metrics[name]) for name in ("loss", "distill", "agreement")])
        return np.array(found), before, jax.tree.map(np.array, state.frozen[TEACHER])

    return train


@pytest.mark.long
def test_a_step_changes_no_bit_of_the_teacher_and_the_student_comes_closer(trained):
    found, before, after = trained((1, 1, 1))
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[-1, 1] < found[0, 1]


@pytest.mark.long
def test_several_devices_give_the_same_steps(trained):
    one, _, _ = trained((1, 1, 1))
    four, _, _ = trained((2, 2, 1))
    np.testing.assert_allclose(four, one, rtol=1e-5)
