"""The decoder: every way to run it gives the same loss and the same gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import (
    LossConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    RegularizationConfig,
    RematNamesConfig,
    RopeConfig,
)
from maxtrain.models.context import Rotation, TrainNoise
from maxtrain.models.init import head_dim
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.objectives.adversarial import adversarial
from maxtrain.objectives.next_token import next_token
from maxtrain.ops.cross_entropy import cross_entropy
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding

EXACT = PrecisionConfig(params="float32", compute="float32")
ROUNDED = PrecisionConfig(activations="bfloat16")
# Every size is divisible by 8, and no two that could be confused are equal.
LLAMA = ModelConfig(
    vocab_size=96,
    num_layers=3,
    embed_dim=32,
    mlp_dim=56,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    rope_theta=1e4,
    max_length=64,
)
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", head_dim=10, tie_embeddings=True)
B, T = 8, 24
LENGTHS = (9, 1, 11)  # documents of a row; the rest is padding


@functools.cache
def graph(config, precision=EXACT):
    """The graphdef of a model without any weights."""
    return nnx.split(nnx.eval_shape(lambda: build_model(config, precision, 0)))[0]


@functools.cache
def weights(config=LLAMA):
    """(graphdef, state) of a model with random weights, norms included."""
    graphdef, state = nnx.split(build_model(config, EXACT, 0))
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [
        x + (0.3 * jax.random.normal(k, x.shape) if x.ndim <= 2 else 0)
        for k, x in zip(keys, leaves)
    ]
    return graphdef, jax.tree.unflatten(
        structure, [n.astype(x.dtype) for n, x in zip(noise, leaves)]
    )


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    segments = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, T - sum(LENGTHS)])
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, T - sum(LENGTHS))])
    tokens = rng.integers(0, 96, (2, B, T))
    # The first call may come from inside a traced function, and is remembered.
    with jax.ensure_compile_time_eval():
        return {
            "inputs": jnp.int32(tokens[0]),
            "targets": jnp.int32(tokens[1]),
            "segment_ids": jnp.int32(np.tile(segments, (B, 1))),
            "positions": jnp.int32(np.tile(positions, (B, 1))),
            "weights": jnp.float32(rng.uniform(size=(B, T)) * (segments > 0)),
        }


def loss(graphdef, state, batch, chunks=3):
    model = nnx.merge(graphdef, state)
    hidden = model.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
    dtype = model.precision.compute
    return cross_entropy(
        hidden,
        model.output_matrix(),
        batch["targets"],
        batch["weights"],
        chunks=chunks,
        dtype=dtype,
    ).loss


loss_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)


def run(config, precision=EXACT, like=LLAMA):
    """Loss and gradients of the weights of `like` in a model of another config with the same
    parameters."""
    return loss_and_gradients(graph(config, precision), weights(like)[1], batch())


def assert_same(actual, expected, tolerance=1e-5):
    """Losses to a relative tolerance, gradients of each parameter relative to their largest."""
    np.testing.assert_allclose(actual[0], expected[0], rtol=tolerance)
    for (path, ours), theirs in zip(
        nnx.to_flat_state(actual[1]), jax.tree.leaves(expected[1]), strict=True
    ):
        ours, theirs = np.asarray(ours[...], np.float32), np.asarray(theirs, np.float32)
        assert np.abs(theirs).max() > 0, path
        np.testing.assert_allclose(
            ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0, err_msg=str(path)
        )


@pytest.mark.long
@pytest.mark.parametrize("family", [LLAMA, QWEN3], ids=lambda c: c.family)
def test_scanned_equals_unrolled(family):
    assert_same(
        run(dataclasses.replace(family, scan_layers=False), like=family), run(family, like=family)
    )


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", ["full", "dots", "dots_no_batch", "named"])
def test_every_remat_policy_equals_none(remat, scan):
    assert_same(run(dataclasses.replace(LLAMA, remat=remat, scan_layers=scan)), run(LLAMA))


@pytest.mark.long
def test_remat_keeps_what_its_name_says():
    """Less is kept by each policy than by the one before it, and none keeps most."""
    state = weights()[1]

    def kept(remat):
        graphdef = graph(dataclasses.replace(LLAMA, remat=remat, attention="eager"))
        backward = jax.eval_shape(
            lambda state: jax.vjp(lambda s: loss(graphdef, s, batch()), state)[1], state
        )
        return sum(x.size for x in jax.tree.leaves(backward))

    sizes = [kept(remat) for remat in ("none", "dots", "dots_no_batch", "full")]
    assert sorted(sizes, reverse=True) == sizes and len(set(sizes)) == 4, sizes


def arrays_kept(names, attention="xla"):
    """Return the count of numbers that are stored for the backward pass."""
    kept = RematNamesConfig(on_device=names)
    graphdef = graph(dataclasses.replace(LLAMA, remat="named", kept=kept, attention=attention))
    state = weights()[1]
    backward = jax.eval_shape(
        lambda state: jax.vjp(lambda s: loss(graphdef, s, batch()), state)[1], state
    )
    return sum(x.size for x in jax.tree.leaves(backward))


@pytest.mark.long
def test_what_is_named_is_kept_and_nothing_else():
    nothing = arrays_kept(())
    tokens = LLAMA.num_layers * batch()["inputs"].size
    # With each query's logsumexp.
    attention = LLAMA.num_heads * (head_dim(LLAMA) + 1)
    qkv = (LLAMA.num_heads + 2 * LLAMA.num_kv_heads) * head_dim(LLAMA)
    gate_up = 2 * LLAMA.mlp_dim
    # What comes of the last one is the input of the next layer, which is kept anyway.
    products = qkv + gate_up + LLAMA.embed_dim
    for names, each in (
        (("attention",), attention),
        (("qkv", "gate_up"), qkv + gate_up),
        (("product", "attention"), products + attention),
    ):
        assert arrays_kept(names) - nothing == tokens * each, names


@pytest.mark.long
def test_what_waits_on_the_host_comes_back_as_it_went():
    """On CPUs that is the same memory by another name."""
    kept = RematNamesConfig(on_device=("attention",), on_host=("product",))
    away = dataclasses.replace(LLAMA, remat="named", kept=kept)
    assert_same(run(away), run(LLAMA))


@pytest.mark.long
def test_kernels_are_equal_through_the_whole_model():
    assert_same(run(dataclasses.replace(LLAMA, attention="eager")), run(LLAMA))


@pytest.mark.long
def test_bfloat16_is_near_float32():
    """Inputs of products are rounded to 2**-8; over a few dozen products a few percent are left of
    gradients' agreement."""
    low, exact = run(LLAMA, PrecisionConfig(params="float32", compute="bfloat16")), run(LLAMA)
    np.testing.assert_allclose(low[0], exact[0], rtol=3e-3)
    for ours, theirs in zip(jax.tree.leaves(low[1]), jax.tree.leaves(exact[1]), strict=True):
        assert ours.dtype == jnp.float32
        assert np.linalg.norm(ours - theirs) < 0.04 * np.linalg.norm(theirs)


def stored(config, precision):
    """Shapes and types of what the backward pass finds stored."""

    def backward(state):
        graphdef = graph(config, precision)
        return jax.vjp(lambda state: loss(graphdef, state, batch()), state)[1]

    return jax.tree.leaves(jax.eval_shape(backward, weights()[1]))


def of_every_token(arrays):
    """Floats of each row and column: neither weights nor attention's scores and sums. Rotary
    positions, which all layers share, are left out as well."""
    pairs = head_dim(LLAMA) // 2
    found = []
    for x in arrays:
        dims = zip(x.shape, x.shape[1:])
        if (B, T) in dims and x.shape[-1] != pairs and jnp.issubdtype(x.dtype, jnp.floating):
            found.append(x)
    return found


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("remat", ["none", "dots", "dots_no_batch", "full"])
def test_activations_are_stored_in_their_type(remat, scan):
    """Residual stream, inputs and results of products, with every policy: less than 0.55 of the
    bytes."""
    config = dataclasses.replace(LLAMA, remat=remat, scan_layers=scan)
    exact = stored(config, PrecisionConfig())
    rounded = stored(config, ROUNDED)
    assert any(x.dtype == jnp.float32 for x in of_every_token(exact))
    assert {str(x.dtype) for x in of_every_token(rounded)} == {"bfloat16"}

    def num_bytes(arrays):
        return sum(x.size * x.dtype.itemsize for x in of_every_token(arrays))

    assert num_bytes(rounded) < 0.55 * num_bytes(exact)


@pytest.mark.long
def test_hidden_states_have_the_type_of_activations_and_gradients_that_of_weights():
    for precision, dtype in (
        (EXACT, "float32"),
        (PrecisionConfig(), "float32"),
        (ROUNDED, "bfloat16"),
    ):
        graphdef = graph(LLAMA, precision)
        hidden = jax.eval_shape(
            lambda state, graphdef=graphdef: nnx.merge(graphdef, state).hidden(batch()["inputs"]),
            weights()[1],
        )
        assert hidden.dtype == dtype
        gradients = jax.eval_shape(
            lambda state, graphdef=graphdef: jax.grad(loss, 1)(graphdef, state, batch()),
            weights()[1],
        )
        assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [{}, {"scan_layers": False, "remat": "dots"}],
    ids=["scan", "unrolled, dots"],
)
def test_bfloat16_activations_are_near_float32(model):
    """Rounding to nearest is off by 2**-9 at most. On its way through three layers and back a
    gradient is rounded some 60 times; independent errors add up to sqrt(60 / 3) * 2**-9 = 0.9 %,
    and as much again comes from the inputs of products: 5 % is twice that, and room for sums that
    nearly cancel."""
    config = dataclasses.replace(LLAMA, **model)
    rounded = run(config, ROUNDED)
    exact = run(LLAMA)
    np.testing.assert_allclose(rounded[0], exact[0], rtol=5e-3)
    for ours, theirs in zip(jax.tree.leaves(rounded[1]), jax.tree.leaves(exact[1]), strict=True):
        assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


@pytest.mark.long
def test_packed_documents_do_not_see_each_other_in_bfloat16():
    """Other words in the other documents change no bit of a document's hidden states, and its
    states are near those that it has alone."""
    graphdef = graph(LLAMA, ROUNDED)
    b = batch()

    @jax.jit
    def hidden(state, tokens, segments, positions):
        return nnx.merge(graphdef, state).hidden(tokens, segments, positions)

    start = sum(LENGTHS[:2])
    own = slice(start, start + LENGTHS[2])
    packed = hidden(weights()[1], b["inputs"], b["segment_ids"], b["positions"])
    others = b["targets"].at[:, own].set(b["inputs"][:, own])
    again = hidden(weights()[1], others, b["segment_ids"], b["positions"])
    np.testing.assert_array_equal(packed[:, own], again[:, own])
    assert (packed[:, :start] != again[:, :start]).any()
    tokens = b["inputs"][:, own]
    alone = hidden(weights()[1], tokens, jnp.ones_like(tokens), b["positions"][:, own])
    exact = np.asarray(alone, np.float32)
    difference = np.asarray(packed[:, own], np.float32) - exact
    assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(exact)


@pytest.mark.long
def test_every_part_of_a_step_takes_bfloat16_activations():
    """Noise of every kind, the worst embeddings nearby and their terms; traced, not run."""
    noise = RegularizationConfig(
        residual_dropout=0.1, embedding_dropout=0.1, stochastic_depth=0.2, embedding_noise=5.0
    )
    attack = LossConfig(adversarial=1.0, adversarial_steps=2, z_loss=1e-4)
    objective = adversarial(next_token(attack, regularization=noise), attack)
    b = dict(batch())
    b["loss_mask"] = b.pop("weights")
    b["keys"] = jax.random.split(jax.random.key(0), B)

    for config in (LLAMA, dataclasses.replace(QWEN3, scan_layers=False)):
        graphdef = graph(config, ROUNDED)

        def value(state, graphdef=graphdef):
            scales = objective.scales(b)
            return objective.forward({"policy": nnx.merge(graphdef, state)}, b, scales).loss

        gradients = jax.eval_shape(jax.grad(value), weights(config)[1])
        assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
        hidden = jax.eval_shape(
            lambda state, graphdef=graphdef: nnx.merge(graphdef, state).hidden(
                b["inputs"], noise=TrainNoise(noise, b["keys"])
            ),
            weights(config)[1],
        )
        assert hidden.dtype == jnp.bfloat16


@pytest.mark.long
@pytest.mark.every_dose
def test_a_cache_of_bfloat16_activations_says_what_reading_all_at_once_does():
    graphdef = graph(LLAMA, ROUNDED)
    state = weights()[1]
    tokens = batch()["inputs"][:2, :8]

    @jax.jit
    def both(state):
        model = nnx.merge(graphdef, state)
        cache = model.new_caches(2, 8, 6)
        six = jnp.full(2, 6)
        first, cache = model.extend(tokens[:, :6], six, jnp.zeros_like(six), cache)
        rest, cache = model.extend(tokens[:, 6:], jnp.full(2, 2), six, cache)
        return jnp.concatenate([first, rest], 1), cache, model.hidden(tokens)

    parts, cache, whole = both(state)
    assert parts.dtype == whole.dtype == cache["0"].k.dtype == jnp.bfloat16
    whole = np.asarray(whole, np.float32)
    difference = np.asarray(parts, np.float32) - whole
    assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(whole)


@pytest.mark.long
def test_a_tied_head_is_the_embedding_and_gets_both_gradients():
    graphdef, state = weights()
    flat = dict(nnx.to_flat_state(state))
    head = flat.pop(("head", "kernel"))
    ours = loss_and_gradients(
        graph(dataclasses.replace(LLAMA, tie_embeddings=True)), nnx.from_flat_state(flat), batch()
    )
    flat["head", "kernel"] = head.replace(flat["embedding",][...].T)
    theirs = loss_and_gradients(graphdef, nnx.from_flat_state(flat), batch())
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    expected = theirs[1]["embedding"][...] + theirs[1]["head"]["kernel"][...].T
    np.testing.assert_allclose(
        ours[1]["embedding"][...], expected, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN3, dataclasses.replace(LLAMA, head_dim=None)],
    ids=["llama", "qwen3", "H = D / N"],
)
def test_the_number_of_parameters_is_the_formulas(config):
    c, H = config, head_dim(config)
    layer = (
        2 * c.embed_dim * H * (c.num_heads + c.num_kv_heads)
        + 3 * c.embed_dim * c.mlp_dim
        + 2 * c.embed_dim
    )
    layer += 2 * H if c.family == "qwen3" else 0
    expected = (
        c.vocab_size * c.embed_dim * (1 if c.tie_embeddings else 2)
        + c.num_layers * layer
        + c.embed_dim
    )
    assert (c.head_dim or 4) == H
    state = nnx.state(nnx.eval_shape(lambda: build_model(c, EXACT, 0)))
    assert sum(x.size for x in jax.tree.leaves(state)) == expected


def shardings(state, mesh):
    """Return the sharding of each parameter, by the names of its dims."""
    return jax.tree.map(
        lambda v: v.replace(named_sharding(mesh, logical_axes(v), v.shape)),
        state,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )


def mesh_of(data, fsdp, tensor):
    return make_mesh(
        MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
    )


@pytest.mark.long
def test_the_same_seed_gives_the_same_bits_on_every_mesh():
    def init():
        return nnx.state(build_model(LLAMA, PrecisionConfig(), 3))

    abstract = jax.eval_shape(init)
    states = []
    for mesh in (mesh_of(1, 1, 1), mesh_of(1, 2, 4), mesh_of(1, 8, 1)):
        with jax.set_mesh(mesh):
            states.append(jax.jit(init, out_shardings=shardings(abstract, mesh))())
    assert len(jax.tree.leaves(states[2])[0].devices()) == 8
    for one, *others in zip(*map(jax.tree.leaves, states), strict=True):
        assert all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for other in others)
    layers = np.asarray(states[0]["layers"]["0"]["mlp"]["up"]["kernel"][...])
    assert len({layer.tobytes() for layer in layers}) == LLAMA.num_layers  # each layer has its own


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((2, 2, 2), LLAMA),
        ((2, 2, 2), QWEN3),
        ((8, 1, 1), LLAMA),
        ((1, 8, 1), LLAMA),
        ((1, 4, 2), LLAMA),
        ((1, 2, 4), LLAMA),
    ],
    ids=lambda value: getattr(value, "family", str(value)),
)
def test_sharded_equals_a_single_device(shape, config):
    mesh = mesh_of(*shape)
    graphdef, state = weights(config)
    rows = named_sharding(mesh, ("activation_batch", "activation_length"), (B, T))
    places = shardings(state, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(
            jax.value_and_grad(functools.partial(loss, graphdef)), out_shardings=(None, places)
        )
        sharded = step(jax.device_put(state, places), jax.device_put(batch(), rows))
    for gradient, place in zip(jax.tree.leaves(sharded[1]), jax.tree.leaves(places), strict=True):
        assert gradient.sharding.is_equivalent_to(place, gradient.ndim)
    assert_same(sharded, run(config, like=config))


@pytest.mark.long
def test_packed_documents_are_as_if_each_were_alone():
    """Hidden states, loss and gradients; alone means in a row of its own, at positions from 0,
    without padding."""
    graphdef, state = weights()
    whole = batch()
    hidden = jax.jit(
        lambda state, b: nnx.merge(graphdef, state).hidden(
            b["inputs"], b["segment_ids"], b["positions"]
        )
    )
    packed, total, gradients = hidden(state, whole), 0.0, jax.tree.map(jnp.zeros_like, state)
    for start, length in zip(np.cumsum((0, *LENGTHS)), LENGTHS):
        alone = {name: x[:, start : start + length] for name, x in whole.items()}
        alone["segment_ids"] = jnp.ones_like(alone["segment_ids"])
        np.testing.assert_allclose(
            packed[:, start : start + length], hidden(state, alone), atol=1e-5
        )
        part, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, graphdef, chunks=1)))(
            state, alone
        )
        total, gradients = total + part, jax.tree.map(jnp.add, gradients, gradient)
    assert_same(loss_and_gradients(graphdef, state, whole), (total, gradients))


@pytest.mark.every_dose
@pytest.mark.long
def test_without_segments_a_row_is_one_document():
    model = nnx.merge(*weights())
    tokens = batch()["inputs"][:2, :6]
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    expected = model.logits(model.hidden(tokens, jnp.ones_like(tokens), positions))
    assert expected.shape == (2, 6, 96) and expected.dtype == jnp.float32
    np.testing.assert_array_equal(model(tokens), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        pytest.param(QWEN3, marks=pytest.mark.long),
        pytest.param(
            dataclasses.replace(LLAMA, scan_layers=False, remat="full", attention="eager"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["llama", "qwen3", "unrolled"],
)
def test_extending_a_cache_equals_reading_all_at_once(config):
    """A prompt of two rows, the second shorter, then three tokens and one, then one at a time; and
    a row that gets nothing for a while."""
    graphdef, state = graph(config), weights(config if config is QWEN3 else LLAMA)[1]
    columns = 16
    tokens = batch()["inputs"][:2, :11]
    expected = jax.jit(lambda s: nnx.merge(graphdef, s).hidden(tokens))(state)

    @functools.partial(jax.jit, static_argnums=5)
    def extend(state, tokens, counts, lengths, cache, from_start):
        return nnx.merge(graphdef, state).extend(tokens, counts, lengths, cache, from_start)

    cache = nnx.merge(graphdef, state).new_caches(2, columns, 6)
    assert cache["0"].k.shape == (3, 2, 4, columns, head_dim(config))
    assert cache["0"].k.dtype == jnp.float32
    lengths = np.zeros(2, np.int32)
    for counts in ([6, 4], [3, 1], [1, 1], [0, 1], [1, 0]):
        new = np.zeros((2, 6), np.int32)
        for row, count in enumerate(counts):
            new[row, :count] = tokens[row, lengths[row] : lengths[row] + count]
        from_start = not lengths.any()
        out, cache = extend(state, new, np.array(counts), lengths.copy(), cache, from_start)
        for row, count in enumerate(counts):
            own = expected[row, lengths[row] : lengths[row] + count]
            np.testing.assert_allclose(out[row, :count], own, atol=1e-5)
        lengths += counts
    for row, length in enumerate([11, 7]):
        keys = cache["0"].k[:, row]
        assert (keys[:, :, length:] == 0).all()
        assert (jnp.abs(keys[:, :, :length]).max((1, 3)) > 0).all()


@pytest.mark.long
@pytest.mark.every_dose
def test_llama3_scaling_changes_what_far_positions_see():
    scaled = dataclasses.replace(
        LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original_length=32
    )
    tokens = batch()["inputs"][:1]

    def hidden(config):
        return jax.jit(lambda s: nnx.merge(graph(config), s).hidden(tokens))(weights()[1])

    difference = np.abs(np.asarray(hidden(scaled) - hidden(LLAMA))).max(-1)[0]
    assert difference[0] == 0 and difference[-1] > 1e-3


def rotated_as_defined(rope, lengths):
    """A stand-in for `rotation_of` in which each column has the frequencies of a length of its own,
    from plain equations in float64."""
    pairs = np.arange(rope.head_dim // 2)
    tables = []
    for position, length in enumerate(lengths):
        base = rope.theta
        stretch = 1.0
        if rope.scaling == "dynamic" and length > rope.original_length:
            growth = rope.factor * length / rope.original_length - (rope.factor - 1)
            base *= growth ** (rope.head_dim / (rope.head_dim - 2))
        if rope.scaling == "longrope":
            is_long = length > rope.original_length
            stretch = np.array(rope.long_factors if is_long else rope.short_factors)
        tables.append(position * base ** (-2 * pairs / rope.head_dim) / stretch)
    angle = np.array(tables)[None]
    cos = jnp.asarray(rope.attention_factor * np.cos(angle), jnp.float32)
    sin = jnp.asarray(rope.attention_factor * np.sin(angle), jnp.float32)
    return Rotation(cos, sin)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_generation_beyond_the_original_length_rotates_each_column_as_it_comes(
    scaling, monkeypatch
):
    """A prompt of 6 tokens and then one at a time, with an original length of 8: the prompt is
    rotated as a row of 6, and every later token as the last one of a row that ends with it. The
    second row, two tokens shorter, is as it would be alone."""
    more = RopeConfig()
    if scaling == "longrope":
        more = RopeConfig(short_factors=(1.0, 1.1, 1.2), long_factors=(1.0, 3.0, 9.0))
    config = dataclasses.replace(
        LLAMA, rope_scaling=scaling, rope_factor=4.0, rope_original_length=8, rope=more
    )
    state = weights()[1]
    tokens = batch()["inputs"][:2, :11]
    graphdef = graph(config)

    @jax.jit
    def extend(state, tokens, counts, lengths, cache):
        return nnx.merge(graphdef, state).extend(tokens, counts, lengths, cache)

    cache = nnx.merge(graphdef, state).new_caches(2, 11, 6)
    parts = [[], []]
    lengths = np.zeros(2, np.int32)
    for counts in (np.array([6, 4]), *[np.ones(2, int)] * 5):
        new = np.zeros((2, max(counts)), np.int32)
        for row, count in enumerate(counts):
            new[row, :count] = tokens[row, lengths[row] : lengths[row] + count]
        out, cache = extend(state, new, counts, lengths.copy(), cache)
        for row, count in enumerate(counts):
            parts[row].append(out[row, :count])
        lengths += counts

    for row, prompt, total in ((0, 6, 11), (1, 4, 9)):
        lengths = [max(prompt, column + 1) for column in range(total)]
        monkeypatch.setattr(
            "maxtrain.models.decoder.rotation_of",
            lambda rope, positions, _, lengths=lengths: rotated_as_defined(rope, lengths),
        )
        expected = nnx.merge(graphdef, state).hidden(tokens[row : row + 1, :total])
        np.testing.assert_allclose(jnp.concatenate(parts[row]), expected[0], atol=2e-5)


@pytest.mark.long
def test_a_long_row_changes_nothing_in_its_neighbour():
    config = dataclasses.replace(
        LLAMA, rope_scaling="dynamic", rope_factor=4.0, rope_original_length=8
    )
    tokens = batch()["inputs"][:2]
    short = jnp.int32(np.arange(T) < 8)
    segments = jnp.stack([jnp.ones_like(short), short])

    @jax.jit
    def hidden(state, tokens, segments):
        return nnx.merge(graph(config), state).hidden(tokens, segments)

    both = hidden(weights()[1], tokens, segments)
    alone = hidden(weights()[1], tokens[1:, :8], segments[1:, :8])
    np.testing.assert_allclose(both[1, :8], alone[0], atol=1e-5)
    unscaled = nnx.merge(*weights()).hidden(tokens, segments)
    np.testing.assert_allclose(both[1, :8], unscaled[1, :8], atol=1e-5)
    assert np.abs(both[0] - unscaled[0]).max() > 1e-3
