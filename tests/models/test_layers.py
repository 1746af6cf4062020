"""The blocks against numpy, their initial weights, and the names of their dims."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import InitConfig, ModelConfig
from maxtrain.models.attention import Attention
from maxtrain.models.cache import CacheExtension, KVCache
from maxtrain.models.context import Context, Rotation
from maxtrain.models.families import FAMILIES
from maxtrain.models.init import Initializer
from maxtrain.models.layers import DecoderLayer
from maxtrain.models.mlp import Mlp
from maxtrain.models.norm import Norm
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.rope import rope_frequencies, rope_tables

D, N, K, H, F, T = 24, 4, 2, 6, 40, 7
CONFIG = ModelConfig(num_layers=2, embed_dim=D, mlp_dim=F, num_heads=N, num_kv_heads=K)
LAYER = FAMILIES["llama"].spec(CONFIG).stack.period[0]
INIT = Initializer(InitConfig(), CONFIG, "float32")
EXACT = MatmulPrecision.of("float32")
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0]])


def arrays(module):
    """Parameters by path, float64, without the vectors being all ones: a scale that is forgotten
    must be seen."""
    rng = np.random.default_rng(0)
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and variable.ndim == 1:
            variable.set_value(jnp.asarray(rng.uniform(0.5, 1.5, variable.shape), jnp.float32))
    return {
        ".".join(path): np.asarray(v[...], np.float64)
        for path, v in nnx.to_flat_state(nnx.state(module))
    }


def normalised(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale


def swiglu(x, p, prefix=""):
    gate, up = x @ p[prefix + "gate.kernel"], x @ p[prefix + "up.kernel"]
    return (gate / (1 + np.exp(-gate)) * up) @ p[prefix + "down.kernel"]


def attend(x, p, prefix="", window=T, segments=SEGMENTS):
    """Grouped-query attention with rotary positions, one query head and one query at a time."""
    q, k, v = (np.einsum("btd,dnh->btnh", x, p[f"{prefix}{name}.kernel"]) for name in "qkv")
    if prefix + "q_norm.scale" in p:
        q, k = normalised(q, p[prefix + "q_norm.scale"]), normalised(k, p[prefix + "k_norm.scale"])
    turn = np.exp(
        1j * np.arange(T)[:, None, None] * rope_frequencies(H, CONFIG.rope_theta).astype(np.float64)
    )
    q, k = ((a[..., : H // 2] + 1j * a[..., H // 2 :]) * turn for a in (q, k))
    out = np.zeros((*x.shape[:2], N, H))
    for b, t, n in np.ndindex(*x.shape[:2], N):
        first = max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if segments[0, s] == segments[0, t]]
        scores = np.array(
            [(q[b, t, n] * k[b, s, n * K // N].conj()).real.sum() for s in seen]
        ) / math.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ v[b, seen, n * K // N]
    return np.einsum("btnh,nhd->btd", out, p[prefix + "o.kernel"])


def context(batch):
    positions = jnp.broadcast_to(jnp.arange(T), (batch, T))
    segments = jnp.broadcast_to(jnp.asarray(SEGMENTS), (batch, T))
    tables = rope_tables(positions, rope_frequencies(H, CONFIG.rope_theta))
    return Context({LAYER.rope: Rotation(*tables)}, Mask.of_rows(segments))


def inputs():
    return np.random.default_rng(1).standard_normal((2, T, D)).astype(np.float32)


def test_swiglu_is_its_equation():
    module = Mlp(LAYER, D, INIT, EXACT, nnx.Rngs(params=0))
    p, x = arrays(module), inputs()
    out = module(jnp.asarray(x), context(2))
    np.testing.assert_allclose(out.x, swiglu(x, p), atol=1e-5)
    assert out.aux_losses == out.metrics == out.buffer_inputs == {}


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("kernel", ["eager", "xla"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_its_equation(qk_norm, kernel):
    layer = LAYER
    if qk_norm:
        layer = FAMILIES["qwen3"].spec(CONFIG).stack.period[0]
    module = Attention(layer, D, kernel, INIT, EXACT, nnx.Rngs(params=0))
    p, x = arrays(module), inputs()
    assert ("q_norm.scale" in p) == qk_norm
    out, cache = module(jnp.asarray(x), context(2), None)
    assert cache is None
    np.testing.assert_allclose(out, attend(x, p), atol=1e-5)


# A cache for 10 columns, and the ring that a window of 2 and passes of 4 tokens need, which turns
# round.
@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("size", [10, 6])
@pytest.mark.parametrize("kernel", ["eager", "xla"])
def test_attention_with_a_window_is_its_equation_with_a_cache_too(kernel, size):
    layer = dataclasses.replace(LAYER, window=2)
    module = Attention(layer, D, kernel, INIT, EXACT, nnx.Rngs(params=0))
    p, x = arrays(module), inputs()
    expected = attend(x, p, window=2)
    whole = context(2)
    out, _ = module(jnp.asarray(x), whole, None)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    cache = KVCache(jnp.zeros((2, K, size, H)), jnp.zeros((2, K, size, H)))
    one_document = attend(x, p, window=2, segments=np.ones_like(SEGMENTS))
    for start, stop in [(0, 4), (4, 6), (6, 7)]:
        turned = whole.rotations[LAYER.rope]
        rotation = Rotation(turned.cos[:, start:stop], turned.sin[:, start:stop])
        # Padding behind the tokens, which is not kept.
        tokens = np.zeros((2, 5, D), np.float32)
        tokens[:, : stop - start] = x[:, start:stop]
        padded = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 5 - a.shape[1]), (0, 0))), rotation)
        is_token = jnp.broadcast_to(jnp.arange(5) < stop - start, (2, 5))
        columns = jnp.broadcast_to(jnp.arange(start, start + 5), (2, 5))
        extension = CacheExtension(columns, is_token, from_start=start == 0)
        mask = Mask.of_rows(is_token.astype(jnp.int32))
        part = Context({LAYER.rope: padded}, mask, extension=extension)
        out, cache = module(jnp.asarray(tokens), part, cache)
        np.testing.assert_allclose(out[:, : stop - start], one_document[:, start:stop], atol=1e-5)


@pytest.mark.long
@pytest.mark.every_dose
def test_a_layer_adds_both_blocks_of_normalised_inputs():
    module = DecoderLayer(LAYER, D, "xla", INIT, EXACT, nnx.Rngs(params=0))
    p, x = arrays(module), inputs()
    expected = x + attend(normalised(x, p["attention_norm.scale"]), p, "attention.")
    expected = expected + swiglu(normalised(expected, p["mlp_norm.scale"]), p, "mlp.")
    np.testing.assert_allclose(module(jnp.asarray(x), context(2), None).x, expected, atol=1e-5)


def test_norm_scales_by_its_parameter():
    module = Norm(D, LAYER.norm, INIT)
    p, x = arrays(module), inputs()
    np.testing.assert_allclose(module(jnp.asarray(x)), normalised(x, p["scale"]), atol=1e-5)


def test_every_parameter_names_its_dims_and_has_the_type_asked_for():
    spec = FAMILIES["qwen3"].spec(CONFIG).stack.period[0]
    init = INIT._replace(dtype="bfloat16")
    layer = DecoderLayer(spec, D, "xla", init, EXACT, nnx.Rngs(params=0))
    sizes = {"embed": D, "heads": N, "kv_heads": K, "head_dim": H, "mlp": F}
    state = dict(nnx.to_flat_state(nnx.state(layer)))
    assert len(state) == 11
    for path, variable in state.items():
        assert variable.dtype == jnp.bfloat16, path
        axes = variable.get_metadata("axes")
        assert len(axes) == variable.ndim, path
        assert axes == ("norm",) or tuple(sizes[axis] for axis in axes) == variable.shape, path
