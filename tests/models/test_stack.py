"""A family of unlike layers trains by the step of every run, is saved, goes on, and generates by
the engine, scanned or not, and from one to the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import (
    CheckpointConfig,
    InitConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RegularizationConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.context import TrainNoise
from maxtrain.models.cost import stack_flops
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
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
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.batches import BatchLayout
from maxtrain.train_step.norms import norm_names
from maxtrain.train_step.optimizer import make_optimizer, paths
from maxtrain.train_step.state import changing_part, constant_part, policy_variables, saved_part
from maxtrain.train_step.trainable import frozen_paths, split
from maxtrain.trainer.job import make_parts

MODEL = ModelConfig(
    vocab_size=40,
    num_layers=6,
    embed_dim=16,
    mlp_dim=24,
    num_heads=4,
    num_kv_heads=2,
    max_length=32,
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


def batch_of(number):
    ids = np.asarray(tokens(number % 2))
    ones = np.ones((ROWS, LENGTH - 1), np.int32)
    return {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": ones,
        "positions": np.arange(LENGTH - 1, dtype=np.int32) * ones,
        "loss_mask": ones.astype(np.float32),
        "source": np.zeros(ROWS, np.int32),
    }


@functools.cache
def job_of(scan=True, remat="none"):
    """Return the parts of a run of this family, and its compiled step."""
    config = RunConfig(
        steps=10,
        model=dataclasses.replace(MODEL, scan_layers=scan, remat=remat),
        precision=EXACT,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(warmup_steps=1),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
    )
    parts = make_parts(config, jax.devices()[:1], 10, 0)
    with jax.set_mesh(parts.mesh):
        return parts, parts.make_step()


def go_on(state, start, steps, scan=True, remat="none"):
    """Losses, and the state after them; `state`: that after `start` steps, None: a new one."""
    parts, step = job_of(scan, remat)
    layout = BatchLayout(parts.mesh, ROWS, LENGTH - 1)
    losses = []
    with jax.set_mesh(parts.mesh):
        if state is None:
            state = parts.initial_state()
        for number in range(start, start + steps):
            state, metrics = step(state, layout.to_global(batch_of(number)))
            losses.append(metrics["loss"].item())
    return losses, state


@functools.cache
def train(scan=True, remat="none", steps=STEPS):
    """Return the losses, and the state after this number of steps."""
    return go_on(None, 0, steps, scan, remat)


@pytest.fixture(scope="module", autouse=True)
def of_unlike_layers():
    """While a test runs, models of the family llama are of this one. Optax promotes counts to
    floats silently."""
    family = FAMILIES["llama"]._replace(spec=lambda config: DecoderSpec(SPEC))
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setitem(FAMILIES, "llama", family)
        yield
    job_of.cache_clear()
    train.cache_clear()


@pytest.fixture(scope="module")
def trained():
    return train()


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
        pytest.param(False, "dots", marks=pytest.mark.slow),
    ],
)
def test_scanned_and_unrolled_train_to_the_same(trained, scan, remat):
    expected, whole = trained
    losses, state = train(scan, remat)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    params = jax.tree.leaves(state.trainable)
    for ours, theirs in zip(params, jax.tree.leaves(whole.trainable), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("saved_by", [True, False], ids=["by scanned", "by unrolled"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["to scanned", "to unrolled"])
def test_a_saved_stack_goes_on_scanned_or_not(tmp_path, saved_by, goes_on):
    whole, after = train(goes_on)
    _, state = train(saved_by, steps=2)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    checkpoints.save(2, changing_part(state), {"step": 2}, constant_part(state))
    parts, _ = job_of(goes_on)
    restored, _ = checkpoints.restore(saved_part(parts.abstract))
    checkpoints.close()
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.array_equal(ours, theirs)
    losses, state = go_on(restored, 2, 1, goes_on)
    pairs = zip(jax.tree.leaves(state.trainable), jax.tree.leaves(after.trainable), strict=True)
    if saved_by == goes_on:
        assert losses == whole[2:]
        assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)
    else:
        np.testing.assert_allclose(losses, whole[2:], rtol=1e-5)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def model_with(state, scan):
    """The trained weights in a model that is scanned or not."""
    parts, _ = job_of(scan)
    return nnx.merge(parts.graphdefs[POLICY], jax.tree.map(jnp.asarray, policy_variables(state)))


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_the_engine_generates_what_the_model_says_without_a_cache(trained, scan):
    """Windows are three tokens, so that their rings turn round."""
    model = model_with(trained[1], scan)
    engine = Engine(model, slots=2, chunk=4, piece=16)
    prompts = [[3, 7, 1, 30, 12, 5, 9], [11]]
    generations = [engine.submit(prompt, 12, Sampling(temperature=0.0)) for prompt in prompts]
    engine.run()
    logits_of = nnx.jit(lambda model, ids: model(ids))
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = list(prompt)
        for _ in range(12):
            padded = np.zeros((1, 20), np.int32)
            padded[0, : len(ids)] = ids
            ids.append(int(logits_of(model, padded)[0, len(ids) - 1].argmax()))
        assert generation.ids == ids[len(prompt) :]


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_hidden_states_with_a_cache_are_those_without(trained, scan):
    model = model_with(trained[1], scan)
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
    noise = TrainNoise(RegularizationConfig(residual_dropout=0.5, stochastic_depth=0.3), keys)
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
