"""Initial weights, and muP: how initial weights and learning rates depend on width and depth.

The logical axes of a matrix say which of its dims are inputs, and its role says what it does. With
`init.mup_base_width` a model is initialised and trained as a wider version of the base model, so
that the best learning rate stays the same:

    role                        deviation   Adam   SGD     folded
    embedding                   1           1      1 / m   1
    norm, bias (vectors)                    1      1 / m   1
    tied_norm, tied_norm_bias               1      1 / m   m      before a head that is the
                                            embedding
    head                        1           1      1 / m   m
    hidden                      sqrt(m)     m      1       1
    query, query_norm,          as above                   c      scores by 1 / head_dim instead of
    query_bias                                                    its root
    residual, residual_norm,    as above                   d      what is added to the residual
    residual_bias               stream

m is base width / width, c is the square root of base head_dim / head_dim, and d is base depth /
depth. Deviations and learning rates are those of the base model times these factors. The
multipliers that the papers put into the forward pass are folded into the weights: instead of
multiplying a matrix by c, its initial values are c times as large, and its updates are c times as
large with Adam and c^2 times with SGD. So a model that was trained with muP is a plain model for
every reader. All widths (mlp_dim, heads times head_dim) are assumed to grow in proportion to
embed_dim.

Sources: Yang et al. 2022, https://arxiv.org/abs/2203.03466, table 8 and lemma J.1; for depth
(CompleteP) Dey et al. 2025, https://arxiv.org/abs/2505.01618.
"""

import functools
import math
import statistics
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from maxtrain.config.schema import InitConfig, ModelConfig
from maxtrain.models.specs import head_dim
from maxtrain.parallel.sharding import Axes

Role = Literal[
    "embedding",
    "norm",
    "tied_norm",
    "head",
    "hidden",
    "query",
    "query_norm",
    "residual",
    "residual_norm",
    "bias",
    "query_bias",
    "residual_bias",
    "tied_norm_bias",
]
# The role of the bias beside a matrix, or beside the scale of a norm; the default is `bias`.
_BIASES: dict[Role, Role] = {
    "query": "query_bias",
    "query_norm": "query_bias",
    "residual": "residual_bias",
    "residual_norm": "residual_bias",
    "tied_norm": "tied_norm_bias",
}
# Roles of matrices whose inputs and outputs both grow with the width.
WIDE = ("hidden", "query", "residual")
# Axes along which many matrices are stacked; they are not dims of one matrix.
STACKED = ("layers", "exp")


def fans(axes: Axes, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of inputs and outputs of a matrix.

    If its last axis is `embed`, all other dims are inputs; else the first dim is the only one.
    """
    dims = [size for axis, size in zip(axes, shape, strict=True) if axis not in STACKED]
    num_input_dims = 1
    if axes[-1] == "embed":
        num_input_dims = len(dims) - 1
    return math.prod(dims[:num_input_dims]), math.prod(dims[num_input_dims:])


class _Ratios(NamedTuple):
    """The base model's size over this model's; m, c and d above. All are 1 without muP."""

    width: float
    head: float
    depth: float


def _ratios(init: InitConfig, model: ModelConfig) -> _Ratios:
    base_width = init.mup_base_width or model.embed_dim
    base_head_dim = init.mup_base_head_dim or head_dim(model)
    base_depth = init.mup_base_depth or model.num_layers
    return _Ratios(
        width=base_width / model.embed_dim,
        head=math.sqrt(base_head_dim / head_dim(model)),
        depth=base_depth / model.num_layers,
    )


def _folded(role: Role, ratios: _Ratios) -> float:
    """Return the multiplier that is folded into the weights."""
    if role in ("head", "tied_norm", "tied_norm_bias"):
        return ratios.width
    if role in ("query", "query_norm", "query_bias"):
        return ratios.head
    if role in ("residual", "residual_norm", "residual_bias"):
        return ratios.depth
    return 1.0


def learning_rate_factors(
    params: nnx.State, init: InitConfig, model: ModelConfig, rule: Literal["adam", "sgd"] = "adam"
) -> PyTree | None:
    """Return the factor of each parameter's learning rate.

    Weight decay is not multiplied by the factor: matrices decay as fast as those of the base model
    (Dey et al., table 1).

    Args:
        params: parameters of the model, with their roles.
        init: the base model's sizes.
        model: this model's sizes.
        rule: `adam` for optimizers that normalise each entry of an update, `sgd` for those that
            don't.

    Returns:
        A tree like `params`; None without muP.
    """
    if init.mup_base_width is None:
        return None
    ratios = _ratios(init, model)

    def factor(variable: nnx.Variable) -> float:
        role = variable.get_metadata("role")
        folded = _folded(role, ratios)
        is_wide = role in WIDE
        if rule == "adam":
            of_width = 1.0
            if is_wide:
                of_width = ratios.width
            return of_width * folded
        of_width = 1 / ratios.width
        if is_wide:
            of_width = 1.0
        return of_width * folded**2

    return jax.tree.map(factor, params, is_leaf=_is_variable)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


_Distribution = Literal["uniform", "normal", "truncated"]


@functools.cache
def _quantiles(kind: _Distribution) -> np.ndarray:
    """Return 65,536 equally likely values of a distribution with standard deviation 1, float32.

    `truncated` is a normal distribution, cut at two deviations before it is scaled.
    """
    normal = statistics.NormalDist()
    low = 0.0
    high = 1.0
    if kind == "truncated":
        low = normal.cdf(-2.0)
        high = normal.cdf(2.0)
    probabilities = np.array([low + (high - low) * (i + 0.5) / 65_536 for i in range(65_536)])
    if kind == "uniform":
        values = probabilities - 0.5
    else:
        values = np.array([normal.inv_cdf(p) for p in probabilities])
    return (values / values.std()).astype(np.float32)


class Initializer(NamedTuple):
    """Initializer of the parameters of one model."""

    config: InitConfig
    model: ModelConfig
    dtype: str

    def matrix(
        self, key: Array, shape: tuple[int, ...], axes: Axes, role: Role = "hidden"
    ) -> nnx.Param:
        """Create a matrix of random values.

        Random integers look the values up in a table, so that they are the same bit for bit on
        every mesh. The inverse error function is not: its last bit depends on the vector width that
        XLA chooses, and that on the mesh.
        """
        table = jnp.asarray(_quantiles(self._distribution()))
        index = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
        value = table[index] * np.float32(self.deviation(shape, axes, role))
        return nnx.Param(value.astype(self.dtype), axes=axes, role=role)

    def uniform(self, key: Array, shape: tuple[int, ...], deviation: float) -> Array:
        """Draw uniformly distributed float32 values around 0, the same bit for bit on every
        mesh."""
        table = jnp.asarray(_quantiles("uniform"))
        index = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
        return table[index] * np.float32(deviation)

    def _distribution(self) -> _Distribution:
        """Return the distribution that init.name says."""
        name = self.config.name
        if name.endswith("uniform"):
            return "uniform"
        if name == "normal":
            return "normal"
        if name.endswith("normal"):
            return "truncated"
        raise AssertionError(f"init.name={name} has no distribution")

    def scale(self, size: int, role: Role = "norm", offset: float = 0.0) -> nnx.Param:
        """Create the scale of a norm: 1 times the folded multiplier, minus `offset`."""
        value = _folded(role, _ratios(self.config, self.model)) - offset
        return nnx.Param(jnp.full((size,), value, self.dtype), axes=("norm",), role=role)

    def bias(self, shape: tuple[int, ...], axes: Axes, role: Role) -> nnx.Param:
        """Create the bias of a product whose matrix has this role, or of a norm whose scale has it.

        The bias begins at 0. If a multiplier is folded into the matrix or the scale, it also
        applies to the bias.
        """
        own = _BIASES.get(role, "bias")
        return nnx.Param(jnp.zeros(shape, self.dtype), axes=axes, role=own)

    def deviation(self, shape: tuple[int, ...], axes: Axes, role: Role) -> float:
        """Return the standard deviation of a matrix's values."""
        if role == "embedding":
            return self._embedding_deviation()
        init = self.config
        model = self.model
        ratios = _ratios(init, model)
        scale = init.scale
        if role == "residual" and init.residual == "depth":
            scale /= math.sqrt(2 * (init.mup_base_depth or model.num_layers))
        # The base model's inputs and outputs. The head's outputs are the vocabulary, which does not
        # grow with the width.
        fan_in, fan_out = fans(axes, shape)
        fan_in = fan_in * ratios.width
        if role != "head":
            fan_out = fan_out * ratios.width
        rule = init.name.partition("_")[0]
        if rule == "lecun":
            std = scale / math.sqrt(fan_in)
        elif rule == "kaiming":
            std = scale * math.sqrt(2 / fan_in)
        elif rule == "xavier":
            std = scale * math.sqrt(2 / (fan_in + fan_out))
        else:
            assert init.std is not None and init.name in ("truncated_normal", "normal"), init.name
            std = scale * init.std
        if role in WIDE:
            std *= math.sqrt(ratios.width)
        return std * _folded(role, ratios)

    def _embedding_deviation(self) -> float:
        """Return the standard deviation of the embedding: init.embedding_std, or 1 / sqrt(D), with
        which the logits of a tied head begin with a deviation of about 1."""
        init = self.config
        if init.embedding_std is not None:
            return init.scale * init.embedding_std
        base_width = init.mup_base_width or self.model.embed_dim
        return init.scale / math.sqrt(base_width)
