"""Initial weights, and muP: how they and their learning rates go with width and depth.

A matrix says which of its dims are inputs by its logical axes, and what it does by its role. With
`init.mup_base_width` a model is initialised and trained as if it were the base model made wider, so
that the best learning rate stays where it is:

    role                        deviation   Adam   SGD     folded
    embedding                   1           1      1 / m   1
    norm (vectors)                          1      1 / m   1
    tied_norm                               1      1 / m   m      before a head that is the
                                            embedding
    head                        1           1      1 / m   m
    hidden                      sqrt(m)     m      1       1
    query, query_norm           as above                   c      scores by 1 / head_dim instead of
                                its root
    residual                    as above                   d      what is added to the residual
                                stream

m is base width / width, c the root of base head_dim / head_dim, d base depth / depth; deviations
and rates are those of the base model times these factors. The multipliers that the papers put into
the forward pass are folded into the weights: c times a matrix is a matrix with initial values c
times as large, whose updates are c times as large with Adam and c^2 times with SGD. So a model
trained with muP is a plain model for whatever reads it. All widths (mlp_dim, heads times head_dim)
are taken to have grown with embed_dim.

Sources: Yang et al. 2022, https://arxiv.org/abs/2203.03466, table 8 and lemma J.1; for depth
    (CompleteP)
Dey et al. 2025, https://arxiv.org/abs/2505.01618.
"""

import functools
import math
import statistics
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from maxtrain.config.schema import InitConfig, ModelConfig
from maxtrain.models.families.family import head_dim
from maxtrain.parallel.sharding import Axes

Role = Literal[
    "embedding", "norm", "tied_norm", "head", "hidden", "query", "query_norm", "residual"
]
WIDE = ("hidden", "query", "residual")  # both fans grow with the width
STACKED = ("layers", "exp")  # dims of many matrices, not of one


def fans(axes: Axes, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a matrix: what makes `embed` has all other dims as inputs, anything
    else the first one."""
    dims = [size for axis, size in zip(axes, shape, strict=True) if axis not in STACKED]
    inputs = len(dims) - 1 if axes[-1] == "embed" else 1
    return math.prod(dims[:inputs]), math.prod(dims[inputs:])


class _Ratios(NamedTuple):
    """Base / actual: m, c and d above; all 1 without muP."""

    width: float
    head: float
    depth: float


def _ratios(init: InitConfig, model: ModelConfig) -> _Ratios:
    return _Ratios(
        (init.mup_base_width or model.embed_dim) / model.embed_dim,
        math.sqrt((init.mup_base_head_dim or head_dim(model)) / head_dim(model)),
        (init.mup_base_depth or model.num_layers) / model.num_layers,
    )


def _folded(role: Role, ratios: _Ratios) -> float:
    """The multiplier that is part of the weights."""
    width, head, depth = ratios
    return {
        "head": width,
        "tied_norm": width,
        "query": head,
        "query_norm": head,
        "residual": depth,
    }.get(role, 1.0)


def learning_rate_factors(
    params: nnx.State, init: InitConfig, model: ModelConfig, rule: Literal["adam", "sgd"] = "adam"
) -> PyTree | None:
    """For each parameter what multiplies its update: `adam` for optimizers that normalise each
    entry, `sgd` for plain ones.

    None without muP. Weight decay is not to be multiplied: matrices forget as fast as the base
    model's (Dey et al., table 1).
    """
    if init.mup_base_width is None:
        return None
    ratios = _ratios(init, model)

    def factor(variable: nnx.Variable) -> float:
        role = variable.get_metadata("role")
        wide, folded = role in WIDE, _folded(role, ratios)
        if rule == "adam":
            return (ratios.width if wide else 1.0) * folded
        return (1.0 if wide else 1 / ratios.width) * folded**2

    return jax.tree.map(factor, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


@functools.cache
def _quantiles(kind: Literal["uniform", "normal", "truncated"]) -> np.ndarray:
    """65,536 equally likely values of a distribution, scaled to deviation 1, float32; `truncated`:
    normal, cut at 2."""
    normal = statistics.NormalDist()
    low, high = (normal.cdf(-2.0), normal.cdf(2.0)) if kind == "truncated" else (0.0, 1.0)
    values = np.array([low + (high - low) * (i + 0.5) / 65_536 for i in range(65_536)])
    values = values - 0.5 if kind == "uniform" else np.array([normal.inv_cdf(p) for p in values])
    return (values / values.std()).astype(np.float32)


class Initializer(NamedTuple):
    """Draws the parameters of one model."""

    config: InitConfig
    model: ModelConfig
    dtype: str

    def matrix(
        self, key: Array, shape: tuple[int, ...], axes: Axes, role: Role = "hidden"
    ) -> nnx.Param:
        """A matrix of random values.

        The values are looked up by random integers: the inverse error function differs in its last
        bit with the vector width that XLA chooses, and so with the mesh; a table, and one product,
        don't.
        """
        name = self.config.name
        kind = (
            "uniform" if name.endswith("uniform") else "normal" if name == "normal" else "truncated"
        )
        index = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
        value = jnp.asarray(_quantiles(kind))[index] * np.float32(self.deviation(shape, axes, role))
        return nnx.Param(value.astype(self.dtype), axes=axes, role=role)

    def scale(self, size: int, role: Role = "norm") -> nnx.Param:
        """The scale of a norm: 1, and what is folded into it."""
        value = _folded(role, _ratios(self.config, self.model))
        return nnx.Param(jnp.full((size,), value, self.dtype), axes=("norm",), role=role)

    def deviation(self, shape: tuple[int, ...], axes: Axes, role: Role) -> float:
        """Standard deviation of a matrix's values."""
        init, model, ratios = self.config, self.model, _ratios(self.config, self.model)
        if (
            role == "embedding"
        ):  # without one given 1 / sqrt(D), so that a tied head starts with logits of deviation about 1
            base = init.mup_base_width or model.embed_dim
            return (
                init.scale / math.sqrt(base)
                if init.embedding_std is None
                else init.scale * init.embedding_std
            )
        scale = init.scale
        if role == "residual" and init.residual == "depth":
            scale /= math.sqrt(2 * (init.mup_base_depth or model.num_layers))
        fan_in, fan_out = fans(axes, shape)
        fan_in, fan_out = (
            fan_in * ratios.width,
            fan_out * (1.0 if role == "head" else ratios.width),
        )  # of the base model
        rule = init.name.partition("_")[0]
        if rule == "lecun":
            std = scale / math.sqrt(fan_in)
        elif rule == "kaiming":
            std = scale * math.sqrt(2 / fan_in)
        elif rule == "xavier":
            std = scale * math.sqrt(2 / (fan_in + fan_out))
        else:
            assert init.std is not None
            std = scale * init.std
        return std * (math.sqrt(ratios.width) if role in WIDE else 1.0) * _folded(role, ratios)
