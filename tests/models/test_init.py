"""Initial weights against the papers' formulas, bits that never change, and what muP does to
initial values and rates."""

import dataclasses
import hashlib
import math

import jax
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import InitConfig, MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.models.init import Initializer, fans, learning_rate_factors
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding

MODEL = ModelConfig(
    vocab_size=96, num_layers=3, embed_dim=32, mlp_dim=56, num_heads=8, num_kv_heads=4, head_dim=6
)
QWEN3 = dataclasses.replace(MODEL, family="qwen3", head_dim=10, tie_embeddings=True)
PLAIN = InitConfig()
NAMES = (
    "lecun_normal",
    "xavier_normal",
    "xavier_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "truncated_normal",
    "normal",
)
SHAPE, AXES = (300, 25, 40), ("embed", "heads", "head_dim")  # 300 inputs, 1000 outputs


def config(name="lecun_normal", **changes):
    return InitConfig(
        name=name, std=0.03 if name in ("truncated_normal", "normal") else None, **changes
    )


def weights(init=PLAIN, model=MODEL, seed=3):
    """Every parameter by its path, as numpy."""
    state = jax.jit(lambda: nnx.state(build_model(model, PrecisionConfig(), seed, init)))()
    return {".".join(path): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}


def deviations(init=PLAIN, model=MODEL):
    return {path: x.std() for path, x in weights(init, model).items() if "norm" not in path}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_distributed_as_the_name_says(name, scale):
    """300,000 numbers know their deviation to 0.13 %, and their kurtosis to 0.01: five of those are
    allowed."""
    values = np.asarray(
        Initializer(config(name, scale=scale), MODEL, "float32").matrix(
            jax.random.key(0), SHAPE, AXES
        )[...],
        np.float64,
    )
    formula = {
        "lecun": 1 / math.sqrt(300),  # LeCun et al. 1998
        "xavier": math.sqrt(2 / (300 + 1000)),  # Glorot and Bengio 2010, eq. 12 and 16
        "kaiming": math.sqrt(2 / 300),  # He et al. 2015, eq. 10
    }
    std = scale * formula.get(name.partition("_")[0], 0.03)
    # Largest value and fourth moment, in deviations: uniform; normal cut at 2, whose deviation is
    # 0.8796 of the uncut one and whose kurtosis is (3 - 2 (2^3 + 3 2) phi(2) / 0.9545) / 0.7737^2;
    # normal.
    bound, kurtosis = (
        (math.sqrt(3), 1.8)
        if "uniform" in name
        else (2 / 0.87962566, 2.3655)
        if "_" in name
        else (4.35, 3.0)
    )
    np.testing.assert_allclose(values.std(), std, rtol=0.0065)
    assert abs(values.mean()) < 5 * std / math.sqrt(values.size)
    assert (
        0.99 * bound < np.abs(values).max() / std < 1.0001 * bound
        if "_" in name
        else 4.0 < np.abs(values).max() / std < bound
    )
    np.testing.assert_allclose((values**4).mean() / values.var() ** 2, kurtosis, atol=0.05)


def leaf_of(path):
    """The last part of a path that says what it is: `q` of `layers.0.attention.q.kernel`."""
    return path.removesuffix(".kernel").rpartition(".")[2]


def test_fans_come_from_the_names_of_dims():
    assert fans(("embed", "heads", "head_dim"), (32, 8, 6)) == (32, 48)
    assert fans(("heads", "head_dim", "embed"), (8, 6, 32)) == (48, 32)
    assert fans(("mlp", "embed"), (56, 32)) == (56, 32)
    assert (
        fans(("layers", "exp", "embed", "mlp"), (3, 4, 32, 56))
        == fans(("embed", "mlp"), (32, 56))
        == (32, 56)
    )


@pytest.mark.long
@pytest.mark.parametrize("residual", ["none", "depth"])
def test_what_is_added_to_the_residual_stream_starts_smaller_with_depth(residual):
    model = dataclasses.replace(
        MODEL, num_layers=8, embed_dim=240, num_heads=4, num_kv_heads=4, head_dim=60, mlp_dim=600
    )
    found = deviations(config(residual=residual), model)
    fan_in = {
        "q": 240,
        "k": 240,
        "v": 240,
        "o": 240,
        "gate": 240,
        "up": 240,
        "down": 600,
        "head": 240,
        "embedding": 240,
    }
    assert sorted(leaf_of(path) for path in found) == sorted(fan_in)
    for path, std in found.items():
        leaf = leaf_of(path)
        depth = 16 if leaf in ("o", "down") and residual == "depth" else 1
        np.testing.assert_allclose(std, (fan_in[leaf] * depth) ** -0.5, rtol=0.02)


def test_the_embedding_has_its_own_deviation():
    for name in NAMES:
        for given, std in (
            (config(name), 32**-0.5),
            (config(name, embedding_std=0.7, scale=2.0), 1.4),
        ):
            draw = Initializer(given, MODEL, "float32")
            values = draw.matrix(jax.random.key(1), (500, 400), ("vocab", "embed"), "embedding")
            np.testing.assert_allclose(np.asarray(values[...]).std(), std, rtol=0.008)


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        (MODEL, "24c005e049dd8c9736b19e42d0cc688eccb3961c6e96c67a88b71fe812e87130"),
        pytest.param(
            QWEN3,
            "5ac1ca10cb91693b6bdac3b4aa47508d330122c09f4ef035a8306ff25083a50c",
            marks=pytest.mark.long,
        ),
    ],
    ids=["llama", "qwen3"],
)
def test_a_seed_means_the_same_model_for_ever(model, digest):
    """The digests are of the names that were the first."""
    hasher = hashlib.sha256()
    for path, values in weights(model=model).items():
        first = path.replace("layers.0.", "layers.").removesuffix(".kernel")
        hasher.update(str(tuple(first.split("."))).encode() + values.tobytes())
    assert hasher.hexdigest() == digest


@pytest.mark.long
@pytest.mark.parametrize("name", ["normal", "xavier_uniform"])
def test_a_seed_means_the_same_model_on_every_mesh_scanned_or_unrolled(name):
    init, mesh = (
        config(name, mup_base_width=16),
        make_mesh(MeshConfig(data=1, fsdp=2, tensor=4), jax.devices()[:8]),
    )

    def create():
        return nnx.state(
            build_model(dataclasses.replace(MODEL, scan_layers=False), PrecisionConfig(), 3, init)
        )

    with jax.set_mesh(mesh):
        places = jax.tree.map(
            lambda v: v.replace(named_sharding(mesh, logical_axes(v), v.shape)),
            jax.eval_shape(create),
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
        split = nnx.to_flat_state(jax.jit(create, out_shardings=places)())
    one = weights(init)
    assert {".".join(path): np.asarray(v[...]).tobytes() for path, v in split} == {
        p: x.tobytes() for p, x in one.items()
    }


WIDE = dataclasses.replace(
    MODEL, num_layers=6, embed_dim=128, mlp_dim=224, num_heads=32, num_kv_heads=16
)  # four times MODEL


MATRICES = (
    ((96, 32), ("vocab", "embed"), "embedding", 1.0),
    ((32, 96), ("embed", "vocab"), "head", 1 / 4),
    ((32, 56), ("embed", "mlp"), "hidden", 1 / 2),
    (
        (32, 8, 6),
        ("embed", "heads", "head_dim"),
        "query",
        1 / 4,
    ),  # half for the width, half for head_dim
    ((56, 32), ("mlp", "embed"), "residual", 1 / 4),  # half for the width, half for the depth
)


@pytest.mark.parametrize("name", NAMES)
def test_mup_sets_deviations_as_table_8_says(name):
    """At the base width they are those without muP; from there those of hidden matrices scale with
    the root of the width, that of the head with the width, and that of the embedding does not
    change."""
    init = config(name, mup_base_width=32, mup_base_head_dim=6, mup_base_depth=3)
    off, base = (Initializer(i, MODEL, "float32") for i in (config(name), init))
    wide = Initializer(init, dataclasses.replace(WIDE, head_dim=24), "float32")
    for shape, axes, role, ratio in MATRICES:
        std = off.deviation(shape, axes, role)
        assert std == base.deviation(shape, axes, role)
        grown = tuple(
            size if axis in ("vocab", "heads") else 4 * size for size, axis in zip(shape, axes)
        )
        np.testing.assert_allclose(wide.deviation(grown, axes, role), std * ratio, rtol=1e-12)
    params = nnx.state(nnx.eval_shape(lambda: build_model(MODEL, PrecisionConfig())))
    assert learning_rate_factors(params, config(name), MODEL) is None
    for rule in ("adam", "sgd"):
        assert set(jax.tree.leaves(learning_rate_factors(params, init, MODEL, rule))) == {1.0}


@pytest.mark.long
def test_a_model_has_the_deviations_that_mup_says():
    base, wide = deviations(), deviations(InitConfig(mup_base_width=32, mup_base_depth=3), WIDE)
    for path, std in wide.items():
        ratio = {"embedding": 1.0, "head": 1 / 4, "o": 1 / 4, "down": 1 / 4}.get(
            leaf_of(path), 1 / 2
        )
        np.testing.assert_allclose(std / base[path], ratio, rtol=0.08, err_msg=path)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_learning_rates_follow_table_8_with_the_multipliers_folded_in(family, tied):
    model = dataclasses.replace(WIDE, family=family, tie_embeddings=tied, head_dim=24)
    init = InitConfig(mup_base_width=32, mup_base_head_dim=6, mup_base_depth=3)
    params = nnx.state(nnx.eval_shape(lambda: build_model(model, PrecisionConfig())))
    m, c, d = 1 / 4, 1 / 2, 1 / 2
    hidden = dict.fromkeys(
        (
            "layers.0.attention.k.kernel",
            "layers.0.attention.v.kernel",
            "layers.0.mlp.gate.kernel",
            "layers.0.mlp.up.kernel",
        ),
        (m, 1.0, 1.0),
    )
    norms = dict.fromkeys(
        ("layers.0.attention_norm.scale", "layers.0.mlp_norm.scale"), (1.0, 1 / m, 1.0)
    )
    expected = hidden | norms | {
        "embedding": (1.0, 1 / m, 1.0),
        "layers.0.attention.o.kernel": (m, 1.0, d),
        "layers.0.mlp.down.kernel": (m, 1.0, d),
        "layers.0.attention.q.kernel": (m, 1.0, c if family == "llama" else 1.0),
        "final_norm.scale": (1.0, 1 / m, m if tied else 1.0),
    }  # fmt: skip
    expected |= {} if tied else {"head.kernel": (1.0, 1 / m, m)}
    if family == "qwen3":
        expected |= {
            "layers.0.attention.q_norm.scale": (1.0, 1 / m, c),
            "layers.0.attention.k_norm.scale": (1.0, 1 / m, 1.0),
        }
    for rule in ("adam", "sgd"):
        factors = learning_rate_factors(params, init, model, rule)
        found = {".".join(path): factor for path, factor in nnx.to_flat_state(factors)}
        want = {
            path: adam * f if rule == "adam" else sgd * f**2
            for path, (adam, sgd, f) in expected.items()
        }
        assert found == want
    values = weights(init, model)
    assert all((x == expected[path][2]).all() for path, x in values.items() if "norm" in path)
