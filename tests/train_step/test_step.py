"""The whole step: however the batch is split, over micro-batches or devices, it is the same step; a
bad step is none.

The first moment of a first step is (1 - beta1) times the clipped gradient, so comparing states
compares every gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import GroupConfig, LossScaleConfig, PrecisionConfig
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import ObjectiveOutput
from maxtrain.ops.sums import WeightedSum
from maxtrain.train_step.norms import norm_names
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from

pytestmark = pytest.mark.usefixtures("optax_dtypes")
NAN, INF = 0, 1  # ids that no real text of these tests has: as first token they make a step bad


def run(parts, *batches):
    """State and metrics after steps on these batches, on the host."""
    with jax.set_mesh(parts.mesh):
        state, metrics = parts.new_state(), []
        for batch in batches:
            state, values = parts.step(state, parts.put(batch))
            metrics.append(values)
    return jax.device_get((state, metrics))


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def bits(tree):
    return {name: np.asarray(x).tobytes() for name, x in named(tree).items()}


def assert_same(ours, theirs, tolerance=1e-5):
    """Every array relative to its largest number, every metric relative to itself."""
    ours, theirs = named(ours), named(theirs)
    assert ours.keys() == theirs.keys() and len(ours) > 30
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        np.testing.assert_allclose(
            ours[name], expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=name
        )


@pytest.fixture(scope="module")
def expected(tiny):
    """Two steps on one device, without accumulation."""
    return run(tiny.parts(), tiny.batch(), tiny.batch(1))


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_accumulation_changes_nothing(tiny, expected, accumulation):
    result = run(tiny.parts(accumulation=accumulation), tiny.batch(), tiny.batch(1))
    assert_same(result, expected)


@pytest.mark.long
def test_the_masks_are_so_ragged_that_means_of_means_would_be_far_off(tiny):
    """Loss and gradients, by more than 30 %, for each of the splits: otherwise the test above would
    show nothing."""
    parts, batch, objective = tiny.parts(), tiny.batch(), next_token()
    with jax.set_mesh(parts.mesh):
        params = parts.new_state().trainable
        whole = jax.jit(
            lambda p, b: gradients(
                models_from({"policy": parts.graphdef}), p, b, objective, objective.scales(b), 1
            )
        )
        per_row = [
            jax.device_get(whole(params, {k: x[row : row + 1] for k, x in batch.items()}))
            for row in range(tiny.rows)
        ]
    totals, weights = (
        np.array([getattr(r.sums["nll"], name) for r, _ in per_row]) for name in ("total", "weight")
    )
    grads = (
        np.array([g["layers"]["0"]["mlp"]["up"]["kernel"][...] for _, g in per_row])
        * weights[:, None, None, None]
    )

    def mean(x, rows=slice(None)):
        return x[rows].sum(0) / weights[rows].sum()

    for parts_ in (2, 4, 8):
        micro = [np.arange(i, tiny.rows, parts_) for i in range(parts_)]
        assert np.mean([mean(totals, m) for m in micro]) > 1.3 * mean(totals)
        off = np.mean([mean(grads, m) for m in micro], axis=0) - mean(grads)
        assert np.linalg.norm(off) > 0.3 * np.linalg.norm(mean(grads))


@pytest.mark.every_dose
@pytest.mark.long
def test_the_loss_is_the_mean_over_targets_and_the_norm_that_of_its_gradient(tiny, expected):
    """Our own part of the step never promotes a dtype silently."""
    parts, batch = tiny.parts(), tiny.batch()
    with jax.set_mesh(parts.mesh), jax.numpy_dtype_promotion("strict"):
        objective = next_token()
        whole = jax.jit(
            lambda p, b: gradients(
                models_from({"policy": parts.graphdef}), p, b, objective, objective.scales(b), 4
            )
        )
        result, grads = whole(parts.new_state().trainable, batch)
    state, (metrics, _) = expected
    np.testing.assert_allclose(metrics["loss"], result.sums["nll"].mean(), rtol=1e-6)
    norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > tiny.optimizer.clip_norm  # so clipping was part of what was compared
    assert metrics["targets"] == batch["loss_mask"].sum() and state.step == 2


@pytest.mark.long
@pytest.mark.parametrize("rows", [[1], [1, 3, 5, 7]], ids=str)
def test_a_micro_batch_without_targets_is_like_any_other(tiny, rows):
    batch = dict(tiny.batch(), loss_mask=tiny.batch()["loss_mask"].copy())
    batch["loss_mask"][rows] = 0
    one = run(tiny.parts(), batch)
    assert one[1][0]["skipped"] == 0 and np.isfinite(one[1][0]["loss"])
    for accumulation in {2, 8} if len(rows) > 1 else {8}:
        assert_same(run(tiny.parts(accumulation=accumulation), batch), one)


@pytest.mark.long
@pytest.mark.parametrize(
    "shape, accumulation",
    [((8, 1, 1), 1), ((1, 8, 1), 1), ((1, 1, 8), 2), ((2, 2, 2), 2), ((1, 2, 4), 4)],
    ids=str,
)
def test_every_mesh_makes_the_same_step(tiny, expected, shape, accumulation):
    assert_same(run(tiny.parts(shape, accumulation), tiny.batch(), tiny.batch(1)), expected)


@pytest.mark.long
def test_unrolled_layers_make_the_same_step(tiny, expected):
    assert_same(run(tiny.parts(scan_layers=False), tiny.batch(), tiny.batch(1)), expected)


def poisoned(models, batch, scales):
    """next_token, but a batch that begins with NAN has a loss that is none, and one with INF only
    such a gradient."""
    result, first = next_token().forward(models, batch, scales), batch["inputs"][0, 0]
    scale = models["policy"].final_norm.scale[...].sum()
    inner = jnp.where(
        first == INF, scale - jax.lax.stop_gradient(scale), 1.0
    )  # the root of 0 has no slope
    extra = jnp.where(first == INF, jnp.sqrt(inner), 0.0)
    spoilt = jnp.where(first == NAN, jnp.nan, 1.0)
    total, weight = result.sums["nll"]
    loss = (result.loss + extra) * spoilt
    return result._replace(loss=loss, sums={"nll": WeightedSum(total * spoilt, weight)})


def bad(batch, kind):
    """The batch, spoilt."""
    if kind == "all masked":
        return batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}
    if kind == "nan weight":
        mask = batch["loss_mask"].copy()
        mask[0, 0] = np.nan
        return batch | {"loss_mask": mask}
    inputs = batch["inputs"].copy()
    inputs[0, 0] = {"nan": NAN, "inf": INF}[kind]
    return batch | {"inputs": inputs}


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=["one device", "mesh"])
def test_an_update_whose_result_is_not_finite_is_rejected(tiny, shape):
    """Loss and gradient are fine; a rate beyond float32 makes weights that are not."""
    huge = {"all": GroupConfig(pattern=".", lr_factor=1e38)}
    parts = tiny.parts(
        shape, optimizer=dataclasses.replace(tiny.optimizer, learning_rate=1e10, groups=huge)
    )
    with jax.set_mesh(parts.mesh):
        before = jax.device_get(parts.new_state())
    state, metrics = run(parts, tiny.batch(), tiny.batch(1))
    assert bits(state.trainable) == bits(before.trainable) and bits(state.opt_state) == bits(
        before.opt_state
    )
    assert [m["skipped_in_row"] for m in metrics] == [1, 2] and all(m["found"][0] for m in metrics)
    assert all(
        np.isfinite(m["grad_norm"]) and m["bad_leaf"] == -1 and m["bad_update"] >= 0
        for m in metrics
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "shape, accumulation", [((1, 1, 1), 2), ((2, 2, 2), 1)], ids=["one device", "mesh"]
)
def test_a_bad_step_changes_nothing_and_is_counted(tiny, shape, accumulation):
    """Bit for bit: parameters, optimizer state and schedule, and so every step after it."""
    parts = tiny.parts(shape, accumulation, next_token()._replace(forward=poisoned))
    first, second = tiny.batch(), tiny.batch(1)
    plain, plain_metrics = run(parts, first, second)
    before, _ = run(parts, first)
    kinds = ["nan", "inf", "all masked", "nan weight"]
    state, metrics = run(parts, first, *(bad(second, kind) for kind in kinds))
    assert bits(state.trainable) == bits(before.trainable) and bits(state.opt_state) == bits(
        before.opt_state
    )
    assert (state.step, state.control.skipped) == (5, 4)
    # A step without targets is not one more in a row, but it does not end the row either.
    assert [m["skipped"] for m in metrics] == [0, 1, 2, 3, 4]
    assert [m["skipped_in_row"] for m in metrics] == [0, 1, 2, 2, 3]
    assert np.isnan(metrics[1]["loss"]) and not np.isfinite(metrics[1]["grad_norm"])
    assert np.isfinite(metrics[2]["loss"]) and not np.isfinite(metrics[2]["grad_norm"])
    assert np.isnan(metrics[4]["loss"]) and np.isnan(metrics[4]["targets"]), (
        "no step without targets"
    )
    assert metrics[3]["loss"] == metrics[3]["targets"] == metrics[3]["grad_norm"] == 0
    assert all(m["learning_rate"] == plain_metrics[1]["learning_rate"] for m in metrics[1:])

    state, metrics = run(parts, first, *(bad(second, kind) for kind in kinds), second)
    assert bits(state.trainable) == bits(plain.trainable) and bits(state.opt_state) == bits(
        plain.opt_state
    )
    counters = ("skipped", "anomalies")
    after, without = (
        {k: v for k, v in m[-1].items() if k not in counters} for m in (metrics, plain_metrics)
    )
    assert bits(after) == bits(without) and metrics[-1]["anomalies"].tolist() == [3, 0, 0, 0, 0, 0]
    assert (state.step, state.control.skipped, state.control.skipped_in_row) == (6, 4, 0)


@pytest.mark.long
@pytest.mark.every_dose
def test_the_learning_rate_is_that_of_the_update(tiny, expected):
    """Without gradients only weight decay acts: a matrix shrinks by (1 - rate * decay)."""
    optimizer = tiny.optimizer
    _, metrics = expected
    np.testing.assert_allclose(
        [m["learning_rate"] for m in metrics],
        [optimizer.learning_rate / 2, optimizer.learning_rate],
    )

    def nothing(models, batch, scales):
        zero = 0.0 * models["policy"].head.kernel[...].sum()
        return ObjectiveOutput(zero, {"nll": WeightedSum(zero, batch["loss_mask"].sum())}, {}, {})

    parts = tiny.parts(objective=next_token()._replace(forward=nothing))
    before, (state, metrics) = jax.device_get(parts.new_state()), run(parts, tiny.batch())
    shrunk = before.trainable["head"]["kernel"][...] * (
        1 - metrics[0]["learning_rate"] * optimizer.weight_decay
    )
    np.testing.assert_allclose(state.trainable["head"]["kernel"][...], shrunk, rtol=1e-6)
    np.testing.assert_array_equal(
        state.trainable["final_norm"]["scale"][...], before.trainable["final_norm"]["scale"][...]
    )


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_step_donates_stays_on_the_device_and_compiles_once(tiny, shape):
    parts = tiny.parts(shape)
    with jax.set_mesh(parts.mesh):
        state, batches = parts.new_state(), [parts.put(tiny.batch(i)) for i in range(3)]
        compiled = parts.step.lower(state, batches[0]).compile()
        with jax.transfer_guard("disallow"):
            for batch in batches:
                old, (state, metrics) = state, compiled(state, batch)
                assert all(x.is_deleted() for x in jax.tree.leaves(old))
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                jax.jit(jnp.sum)(tiny.batch()["inputs"])  # so the guard guards
        for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(parts.abstract), strict=True):
            assert (x.shape, x.dtype) == (place.shape, place.dtype) and x.sharding == place.sharding
        assert metrics["loss"].sharding.is_fully_replicated
        for batch in batches:
            state, _ = parts.step(state, batch)
        assert parts.step._cache_size() == 1
        memory = compiled.memory_analysis()
        size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes >= 0.99 * size  # the state is updated in place


@pytest.mark.long
def test_bfloat16_masters_step_and_stay_bfloat16(tiny):
    low = PrecisionConfig(params="bfloat16", compute="bfloat16")
    parts = tiny.parts(precision=low, accumulation=2)
    state, metrics = run(parts, tiny.batch(), tiny.batch(1))
    assert [x.dtype for x in jax.tree.leaves(state)] == [
        x.dtype for x in jax.tree.leaves(parts.abstract)
    ]
    assert metrics[0]["loss"].dtype == np.float32 and state.control.skipped == 0


@pytest.mark.long
def test_bfloat16_compute_is_near(tiny, expected):
    """Inputs of products are rounded to 2 ** -8; the masters and their moments stay float32."""
    low = PrecisionConfig(params="float32", compute="bfloat16")
    state, metrics = run(tiny.parts(precision=low), tiny.batch(), tiny.batch(1))
    np.testing.assert_allclose(
        [m["loss"] for m in metrics], [m["loss"] for m in expected[1]], rtol=1e-2
    )
    assert {x.dtype for x in jax.tree.leaves(state.trainable)} == {np.dtype("float32")}


@pytest.mark.long
@pytest.mark.every_dose
def test_the_loss_goes_down_on_one_batch(tiny):
    parts = tiny.parts()
    _, metrics = run(parts, *[tiny.batch()] * tiny.steps)
    losses = [m["loss"] for m in metrics]
    assert losses[-1] < 0.7 * losses[0], losses


@pytest.mark.long
@pytest.mark.every_dose
def test_gradients_are_float32_and_named_like_parameters(tiny):
    low = PrecisionConfig(params="bfloat16", compute="bfloat16")
    for accumulation in (1, 2):
        parts = tiny.parts(precision=low)
        with jax.set_mesh(parts.mesh):
            objective = next_token()
            own = functools.partial(
                gradients,
                models_from({"policy": parts.graphdef}),
                objective=objective,
                accumulation=accumulation,
            )
            _, grads = jax.eval_shape(
                lambda p, b, own=own: own(p, b, scales={"nll": 1.0}),
                parts.abstract.trainable,
                tiny.batch(),
            )
        assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        assert [path for path, _ in nnx.to_flat_state(grads)] == [
            path for path, _ in nnx.to_flat_state(parts.abstract.trainable)
        ]


# (mesh, accumulation, zero, whether there is a loss scale)
MEASURED = [
    ((1, 1, 1), 1, 0, False),
    pytest.param((2, 2, 2), 2, 3, True, marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize(("shape", "accumulation", "zero", "is_scaled"), MEASURED, ids=str)
def test_norms_of_layers_are_those_of_the_states_before_and_after(
    tiny, shape, accumulation, zero, is_scaled
):
    """The gradient's, from Adam's first moment after the first step, which clips nothing here."""
    optimizer = dataclasses.replace(tiny.optimizer, clip_norm=None, zero=zero, beta1=0.9)
    options = {"norms_interval": 2}
    if is_scaled:
        options["loss_scale"] = LossScaleConfig("static", 1024.0)
    parts = tiny.parts(shape, accumulation, optimizer=optimizer, step=options)
    states = []
    metrics = []
    with jax.set_mesh(parts.mesh):
        state = parts.new_state()
        for number in range(2):
            states.append(jax.device_get(state))
            state, values = parts.step(state, parts.put(tiny.batch(number)))
            metrics.append(jax.device_get(values))
        states.append(jax.device_get(state))
    assert not metrics[0]["norms"].any(), "not due"
    names = norm_names(parts.abstract.trainable)
    assert len(names) == len(set(names)) == metrics[1]["norms"].shape[1]
    _, before, after = states

    def expected(tree):
        norms = {}
        for name, x in named(tree).items():
            name = name.removesuffix(".value")
            if name.startswith("layers.0."):
                for layer in range(2):
                    norms[f"layers.{layer}{name.removeprefix('layers.0')}"] = np.linalg.norm(
                        x[layer]
                    )
            else:
                norms[name] = np.linalg.norm(x)
        return [norms[name] for name in names]

    def moments(state):
        (found,) = [x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)]
        return found

    def is_adam(x):
        return hasattr(x, "mu")

    gradient = jax.tree.map(
        lambda new, old: (new - 0.9 * old) / 0.1, moments(after), moments(before)
    )
    update = jax.tree.map(np.subtract, after.trainable, before.trainable)
    for row, tree in zip(metrics[1]["norms"], (gradient, before.trainable, update), strict=True):
        np.testing.assert_allclose(row, expected(tree), rtol=1e-3)
        assert (row > 0).all()
