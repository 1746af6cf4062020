"""A stack of unlike layers trains, is saved, goes on, and generates the same, scanned or not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import (
    CheckpointConfig,
    InitConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RegularizationConfig,
    ScheduleConfig,
    TrainConfig,
)
from maxtrain.models.context import Noise
from maxtrain.models.cost import stack_flops
from maxtrain.models.decoder import Decoder
from maxtrain.models.init import learning_rate_factors
from maxtrain.models.specs import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    StackSpec,
)
from maxtrain.training.norms import norm_names
from maxtrain.training.optimizer import make_optimizer, paths
from maxtrain.training.partition import frozen_paths, split

MODEL = ModelConfig(
    vocab_size=40, num_layers=6, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2
)
ROPE = RopeSpec(head_dim=4, theta=10_000.0)
GLOBAL = LayerSpec(
    mixer=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4),
    mlp=MlpSpec(24),
    rope=ROPE,
    biases=("q", "k", "v", "o", "gate", "down"),
)
LOCAL = dataclasses.replace(
    GLOBAL,
    window=3,
    mlp=MlpSpec(32),
    rope=dataclasses.replace(ROPE, theta=100.0),
    norms=("attention", "mlp", "query", "key"),
    biases=(),
)
WIDE = dataclasses.replace(GLOBAL, mlp=MlpSpec(48), rope=None)
SPEC = StackSpec(prefix=(WIDE,), period=(LOCAL, GLOBAL), repeats=2, rest=(LOCAL,))
EXACT = PrecisionConfig(params="float32", compute="float32")
ROWS = 2
LENGTH = 9
STEPS = 3


def build(scan=True, remat="none", init=None):
    config = dataclasses.replace(MODEL, scan_layers=scan, remat=remat)
    return Decoder(config, DecoderSpec(SPEC), EXACT, init or InitConfig(), nnx.Rngs(params=3))


def tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 40, (ROWS, LENGTH)), jnp.int32)


def optimizer_of(params):
    config = OptimizerConfig(learning_rate=1e-2)
    return make_optimizer(config, ScheduleConfig(warmup_steps=1), 10, params)


def train(model, steps=STEPS, start=0, params=None, opt_state=None):
    """Losses, parameters and the optimizer's state."""
    graphdef, fresh = nnx.split(model)
    rule = optimizer_of(fresh)
    if params is None:
        params = fresh
        opt_state = rule.init(params)

    @jax.jit
    def step(params, opt_state, ids):
        def loss_of(params):
            logits = nnx.merge(graphdef, params)(ids)
            chosen = jax.nn.log_softmax(logits[:, :-1])
            picked = jnp.take_along_axis(chosen, ids[:, 1:, None], axis=-1)
            return -picked.mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = rule.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    losses = []
    for number in range(start, start + steps):
        loss, params, opt_state = step(params, opt_state, tokens(number % 2))
        losses.append(float(loss))
    return losses, params, opt_state


@pytest.fixture(scope="module", autouse=True)
def optax_dtypes():
    """Optax promotes counts to floats silently."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def trained():
    return train(build())


@pytest.mark.long
def test_places_of_the_period_are_stacked_and_other_layers_have_their_own_names():
    found = paths(nnx.state(build()))
    assert found["layers.0.mlp.up.kernel"].shape == (2, 16, 32)
    assert found["layers.1.mlp.up.kernel"].shape == (2, 16, 24)
    assert found["layers.1.attention.q.bias"].shape == (2, 4, 4)
    assert found["layers.prefix_0.mlp.up.kernel"].shape == (16, 48)
    assert found["layers.rest_0.mlp.up.kernel"].shape == (16, 32)
    assert "layers.0.attention.q.bias" not in found
    assert "layers.1.attention.q_norm.scale" not in found
    assert "layers.rest_0.attention.q_norm.scale" in found


@pytest.mark.long
def test_norms_of_a_part_have_the_names_that_they_have_in_the_whole():
    """Layers are counted by all parameters, although some have none that train."""
    params = nnx.state(build())
    names = norm_names(params)
    assert "layers.0.mlp.up.kernel" in names and len(names) == len(set(names))
    for pattern in ("prefix", "rest", r"layers\.1\."):
        part, _ = split(params, frozen_paths(TrainConfig(only=(pattern,)), params))
        of_part = norm_names(part, params)
        assert of_part and set(of_part) < set(names)
    of_second, _ = split(params, frozen_paths(TrainConfig(only=(r"layers\.1\.",)), params))
    assert norm_names(of_second) != norm_names(of_second, params)


@pytest.mark.parametrize(
    ("scan", "remat"),
    [
        pytest.param(False, "none", marks=pytest.mark.long),
        pytest.param(True, "full", marks=pytest.mark.long),
        pytest.param(False, "dots", marks=pytest.mark.long),
    ],
)
def test_scanned_and_unrolled_train_to_the_same(trained, scan, remat):
    losses, params, _ = train(build(scan, remat))
    assert trained[0][-1] < trained[0][0]
    np.testing.assert_allclose(losses, trained[0], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(trained[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.long
def test_a_saved_stack_goes_on_to_the_same_bits(tmp_path, trained):
    _, params, opt_state = train(build(), steps=2)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    state = {"params": params, "opt_state": opt_state}
    checkpoints.save(2, state, {"step": 2})
    restored, _ = checkpoints.restore(state)
    checkpoints.close()
    losses, params, _ = train(
        build(), 1, 2, params=restored["params"], opt_state=restored["opt_state"]
    )
    assert losses == trained[0][2:]
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(trained[1]), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_generation_with_a_cache_is_that_without(trained, scan):
    graphdef, _ = nnx.split(build(scan))
    model = nnx.merge(graphdef, trained[1])
    ids = tokens()
    whole = model.hidden(ids)
    cache = model.new_caches(ROWS, LENGTH, 5)
    # A window of three tokens, and the five of the first pass.
    assert cache["0"].k.shape == (2, ROWS, 2, 8, 4)
    assert cache["prefix_0"].v.shape == (ROWS, 2, LENGTH, 4)
    for start, stop in [(0, 5), (5, 6), (6, 9)]:
        counts = jnp.full(ROWS, stop - start)
        out, cache = model.extend(
            ids[:, start:stop], counts, jnp.full(ROWS, start), cache, from_start=start == 0
        )
        np.testing.assert_allclose(out, whole[:, start:stop], atol=2e-5)


@pytest.mark.long
def test_windows_and_global_attention_take_turns():
    """A far token reaches the last position through global layers only."""
    ids = tokens()
    changed = ids.at[:, 0].set((ids[:, 0] + 1) % 40)
    local = dataclasses.replace(SPEC, prefix=(), period=(LOCAL,), repeats=2, rest=())
    config = dataclasses.replace(MODEL, num_layers=2)
    model = Decoder(config, DecoderSpec(local), EXACT, InitConfig(), nnx.Rngs(params=3))
    np.testing.assert_array_equal(model.hidden(ids)[:, -1], model.hidden(changed)[:, -1])
    whole = build()
    assert not np.array_equal(whole.hidden(ids)[:, -1], whole.hidden(changed)[:, -1])


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_each_layer_draws_its_own_noise_by_its_number(scan):
    keys = jax.random.split(jax.random.key(1), ROWS)
    noise = Noise(RegularizationConfig(residual_dropout=0.5, stochastic_depth=0.3), keys)
    noisy = build(scan).hidden(tokens(), noise=noise)
    np.testing.assert_allclose(noisy, build().hidden(tokens(), noise=noise), atol=2e-5)
    assert not np.allclose(noisy, build().hidden(tokens()), atol=1e-2)


@pytest.mark.long
def test_biases_are_vectors_without_weight_decay():
    params = nnx.state(build())
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.5, clip_norm=None)
    rule = make_optimizer(config, ScheduleConfig(name="constant", warmup_steps=0), 10, params)
    ones = jax.tree.map(jnp.ones_like, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = rule.update(zeros, rule.init(ones), ones)
    for path, variable in paths(updates).items():
        is_matrix = path.endswith("kernel") or path == "embedding"
        assert (np.asarray(variable[...]) != 0).all() == is_matrix, path


@pytest.mark.long
def test_biases_learn_as_mup_says():
    init = InitConfig(mup_base_width=4, mup_base_head_dim=1, mup_base_depth=3)
    factors = learning_rate_factors(nnx.state(build(init=init)), init, MODEL)
    attention = factors["layers"]["1"]["attention"]
    assert attention["k"]["bias"] == 1.0
    assert attention["q"]["bias"] == 0.5
    assert attention["o"]["bias"] == factors["layers"]["1"]["mlp"]["down"]["bias"] == 0.5


REFUSED = [
    ({"norms": ("attention", "post")}, "'post' is unknown. Use some of attention, attention_out"),
    ({"norms": ("query", "all_queries")}, "must not have both 'query' and 'all_queries'"),
    ({"biases": ("q", "q")}, "must have no name twice. Leave out the second"),
    ({"window": 0}, "window=0 must be at least 1.* Set it to 1024"),
    ({"rope": dataclasses.replace(ROPE, head_dim=8)}, "Set it to mixer.head_dim=4"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_specs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GLOBAL, **change)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Set num_kv_heads to a divisor of 4"):
        AttentionSpec(num_heads=4, num_kv_heads=3, head_dim=4)
    with pytest.raises(ValueError, match="or leave out rope"):
        RopeSpec(head_dim=5, theta=1.0)
    with pytest.raises(ValueError, match="with repeats=1 they occur once"):
        StackSpec(period=(), repeats=2)
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        StackSpec(period=(GLOBAL,), repeats=0)
    with pytest.raises(ValueError, match="width=0 must be at least 1"):
        MlpSpec(0)
    with pytest.raises(ValueError, match="softcap=0 must be above 0"):
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, softcap=0)
    with pytest.raises(ValueError, match="eps=0 must be above 0"):
        NormSpec(eps=0)
    with pytest.raises(ValueError, match="learned_positions=-1 must be at least 0"):
        DecoderSpec(SPEC, learned_positions=-1)
    with pytest.raises(ValueError, match="embedding_scale=0 must be above 0"):
        DecoderSpec(SPEC, embedding_scale=0)


def test_windows_and_widths_are_counted():
    """LOCAL has a window of 3 among 9 columns: 1 + 2 + 7 * 3 pairs."""
    one = StackSpec(period=(LOCAL,), repeats=1)
    weights = 16 * 40 + 16 * 4 * (4 + 2 * 2) + 4 * 4 * 16 + 3 * 16 * 32
    found = stack_flops(one, 16, 40, 9)
    assert found.full == 6 * (weights + 2 * 16 * 3)
    np.testing.assert_allclose(found.causal, 6 * (weights + 2 * 16 * 24 / 9))
