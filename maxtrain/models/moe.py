"""A feed-forward block of experts, of which each token goes to a few."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxtrain.models.buffer import Buffer
from maxtrain.models.context import ROUTER, Context, Noise
from maxtrain.models.init import Initializer, Role
from maxtrain.models.linear import ExpertLinear, Linear
from maxtrain.models.mlp import Mlp, MlpOut, gated
from maxtrain.models.specs import LayerSpec, MlpSpec, MoeSpec
from maxtrain.models.summary import Summary
from maxtrain.ops.dot import Recipe
from maxtrain.ops.dropout import fold
from maxtrain.ops.einsum import contract
from maxtrain.ops.experts import (
    add_bias,
    block_size,
    combine,
    dispatch,
    expert_dot,
    grouped_dot,
    order_by_expert,
    order_by_place,
    quantized_expert_dot,
    quantized_grouped_dot,
)
from maxtrain.ops.names import GATE_UP, named
from maxtrain.ops.quantity import Quantity
from maxtrain.ops.quantized import Quantized
from maxtrain.ops.routing import (
    Routing,
    capacity_of,
    choices_of,
    choose,
    imbalance,
    jittered,
    with_noise,
    within_capacity,
    z_of,
)
from maxtrain.ops.stored import elementwise
from maxtrain.ops.sums import Sum
from maxtrain.parallel.sharding import (
    LENGTH,
    Axes,
    batch_shards,
    length_shards,
    partition_spec,
)


@dataclasses.dataclass(frozen=True)
class EvenOut:
    """How the correction of each expert changes with the choices that fell on it in a step: by one
    rate, up where it had less than an equal share, down where it had more.

    Source: Wang et al. 2024, https://arxiv.org/abs/2408.15664, algorithm 1.
    """

    rate: float

    def __call__(self, correction: Float[Array, " E"], choices: Int[Array, " E"]) -> Array:
        choices = choices.astype(jnp.float32)
        return correction + self.rate * jnp.sign(choices.mean() - choices)


def load_numbers(choices: Int[Array, "L E"]) -> tuple[Array, ...]:
    """How evenly the choices of a whole batch fall on experts, in the order of LOAD."""
    num_experts = choices.shape[-1]
    counts = choices.astype(jnp.float32)
    total = counts.sum(-1, keepdims=True)
    shares = counts / jnp.where(total > 0, total, 1.0)
    logs = jnp.log(jnp.where(shares > 0, shares, 1.0))
    # Of one expert, the only share is an equal one.
    most = math.log(num_experts) or 1.0
    entropy = -(shares * logs).sum(-1) / most
    return (
        shares.max() * num_experts,
        entropy.mean(),
        (choices == 0).sum().astype(jnp.float32),
    )


LOAD = Summary(
    "load",
    1,
    (
        Quantity("expert_max_load", "equal shares, of the busiest expert of any layer"),
        Quantity("expert_load_entropy", "of that of equal shares, mean over layers"),
        Quantity("dead_experts", "experts of all layers without a token"),
    ),
    load_numbers,
)


# By names such as `up.kernel` and `down.bias`; see `ExpertLinear.parts`.
_Weights = dict[str, Array]


class _Taken(NamedTuple):
    """Where choices go, and with which weights; E where to none."""

    experts: Int[Array, "B T C"]
    weights: Float[Array, "B T C"]
    # Of each choice among those of its row that its expert takes, where experts have a capacity.
    places: Int[Array, "B T C"]


class Moe(nnx.Module):
    """sum over a token's experts of weight * (activation(x gate) * (x up)) down, and perhaps one
    more that all tokens go to.

    Tokens stay on their device, which has the weights of all experts gathered for them as those of
    any other block are.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.
    """

    summaries: ClassVar[tuple[Summary, ...]] = (LOAD,)

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        init: Initializer,
        recipe: Recipe,
        rngs: nnx.Rngs,
    ):
        moe = spec.mlp
        assert isinstance(moe, MoeSpec)
        E = moe.num_experts
        width = {"embed": embed_dim}
        units = {"mlp": moe.width}
        biases = spec.biases
        exact = Recipe.of("float32")
        self.router = Linear(
            rngs.params(), width, {"router": E}, init, exact, "head", "router" in biases
        )
        correction = None
        if moe.corrected:
            update = EvenOut(moe.routing.correction_rate)
            correction = Buffer(jnp.zeros(E, jnp.float32), axes=("exp",), update=update)
        self.correction = correction
        # Given to it by `with_loads` where it sees a part of a batch.
        self.whole_load: nnx.Variable | None = None
        out_role: Role = "residual"
        if "mlp_out" in spec.norms:
            out_role = "hidden"
        self.gate = ExpertLinear(
            rngs.params(), E, width, units, init, recipe, bias="gate" in biases
        )
        self.up = ExpertLinear(rngs.params(), E, width, units, init, recipe, bias="up" in biases)
        self.down = ExpertLinear(
            rngs.params(), E, units, width, init, recipe, out_role, "down" in biases
        )
        shared = None
        shared_gate = None
        if moe.shared_width:
            mlp = MlpSpec(moe.shared_width, moe.activation)
            plain = dataclasses.replace(spec, mlp=mlp, biases=(), quantities=())
            shared = Mlp(plain, embed_dim, init, recipe, rngs)
        if moe.shared_width and moe.shared_gate:
            shared_gate = Linear(rngs.params(), width, {"router": 1}, init, exact, "head")
        self.shared = shared
        self.shared_gate = shared_gate
        self.spec = moe
        self.recipe = recipe

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> MlpOut:
        moe = self.spec
        is_token = context.mask.q_segments > 0
        logits = self._logits(x, context.noise)
        routing = self._route(logits, is_token)
        load = choices_of(routing.experts, moe.num_experts).sum(0)
        terms = self._terms(routing, logits, is_token)
        stats = {}
        taken = _Taken(routing.experts, routing.weights, jnp.zeros_like(routing.experts))
        capacity = None
        # Generation drops nothing: a token would be alone in what it is judged by.
        if moe.routing.capacity_factor is not None and context.extension is None:
            capacity = capacity_of(
                x.shape[1], moe.num_choices, moe.num_experts, moe.routing.capacity_factor
            )
            kept = within_capacity(routing.experts, moe.num_experts, capacity)
            taken = _Taken(kept.experts, routing.weights, kept.places)
            stats["expert_dropped"] = kept.dropped
        out = self._experts(x, taken, capacity, context.extension is not None)
        if self.shared is not None:
            shared = self.shared(x, context).x.astype(jnp.float32)
            if self.shared_gate is not None:
                of_gate = self.shared_gate(x.astype(jnp.float32), context.noise)
                shared = shared * jax.nn.sigmoid(of_gate)
            out = out + shared
        observed = {"load": load}
        if self.correction is not None:
            observed["correction"] = load
        return MlpOut(out.astype(self.recipe.result), terms, stats, observed)

    def _logits(self, x: Float[Array, "B T D"], noise: Noise | None) -> Float[Array, "B T E"]:
        """The router's, with noise in training."""
        inputs = x.astype(jnp.float32)
        if noise is None or noise.config.router_noise == "none":
            return self.router(inputs, noise)
        keys = fold(noise.keys, ROUTER)
        scale = noise.config.router_noise_scale * noise.router_noise
        if noise.config.router_noise == "jitter":
            return self.router(jittered(inputs, keys, scale), noise)
        return with_noise(self.router(inputs, noise), keys, noise.config.router_noise, scale)

    def _route(self, logits: Float[Array, "B T E"], is_token: Bool[Array, "B T"]) -> Routing:
        moe = self.spec
        correction = None
        if self.correction is not None:
            correction = self.correction[...]
        return choose(
            logits,
            is_token,
            moe.num_choices,
            scores=moe.scores,
            normalize=moe.normalize,
            scale=moe.scale,
            correction=correction,
            num_groups=moe.num_groups,
            top_groups=moe.top_groups,
            best_of_group=moe.best_of_group,
        )

    def _terms(
        self, routing: Routing, logits: Float[Array, "B T E"], is_token: Bool[Array, "B T"]
    ) -> dict[str, Sum]:
        """What the router adds to the loss."""
        choice = self.spec.routing
        count = is_token.sum().astype(jnp.float32)
        terms = {}
        if choice.balance:
            whole = None
            if self.whole_load is not None:
                whole = self.whole_load[...]
            uneven = imbalance(routing, choice.balance_scope, whole)
            terms["expert_balance_loss"] = Sum(choice.balance * uneven, count)
        if choice.z_loss:
            terms["router_z_loss"] = Sum(choice.z_loss * z_of(logits, is_token), count)
        return terms

    def _experts(
        self, x: Float[Array, "B T D"], taken: _Taken, capacity: int | None, generates: bool
    ) -> Float[Array, "B T D"]:
        """What tokens get from their experts, float32."""
        moe = self.spec
        if generates and moe.routing.kernel == "tokamax":
            # Its tiles are of more rows than a token a text fills, and texts are made on any
            # device.
            routing = dataclasses.replace(moe.routing, kernel="blocks")
            moe = dataclasses.replace(moe, routing=routing)
        weights = {}
        axes = {}
        for name, linear in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            for part, (value, part_axes) in linear.parts().items():
                weights[f"{name}.{part}"] = value
                axes[f"{name}.{part}"] = part_axes
        share = functools.partial(_share, moe, self.recipe, capacity)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return share(None, x, taken, weights)
        # XLA would sort the tokens of all devices together: each device is given its rows, all
        # experts, and its part of their hidden units.
        length = None
        if capacity is None and x.shape[1] % length_shards() == 0:
            length = LENGTH
        rows = partition_spec(("activation_batch", length, None), mesh.shape)
        if x.shape[0] % batch_shards():
            rows = PartitionSpec(None, None, None)
        axis = None
        if mesh.shape.get("tensor", 1) > 1:
            axis = "tensor"
        split = jax.shard_map(
            functools.partial(share, axis),
            in_specs=(rows, rows, {name: _while_used(axes[name], mesh.shape) for name in weights}),
            out_specs=rows,
            check_vma=False,
        )
        return split(x, taken, weights)


def _while_used(axes: Axes, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Where the weights of experts are while they are used: split over hidden units alone."""
    kept = [axis if axis == "mlp" else None for axis in axes]
    return partition_spec(tuple(kept), mesh_shape)


def _share(
    moe: MoeSpec,
    recipe: Recipe,
    capacity: int | None,
    axis: str | None,
    x: Float[Array, "B T D"],
    taken: _Taken,
    weights: _Weights,
) -> Float[Array, "B T D"]:
    """What a device's tokens get from experts, of which it has a part of the hidden units.

    Args:
        capacity: of an expert, of each row; None: all that it is given.
        axis: of the mesh that hidden units are split over; None: they are not.
    """
    tokens = x.reshape(-1, x.shape[-1])
    if axis is not None and "down.bias" in weights:
        # Of the devices that have a part each, the first one adds it.
        bias = weights["down.bias"]
        is_first = jax.lax.axis_index(axis) == 0
        weights = weights | {"down.bias": jnp.where(is_first, bias, jnp.zeros_like(bias))}
    if moe.routing.kernel == "eager":
        out = _by_all(moe, recipe, tokens, taken, weights)
    else:
        out = _by_chosen(moe, recipe, capacity, tokens, taken, weights)
    if axis is not None:
        out = jax.lax.psum(out, axis)
    return out.reshape(x.shape)


def _by_all(
    moe: MoeSpec, recipe: Recipe, x: Float[Array, "N D"], taken: _Taken, weights: _Weights
) -> Float[Array, "N D"]:
    """The oracle: every expert for every token, most of them with weight 0."""
    E = moe.num_experts
    is_chosen = jax.nn.one_hot(taken.experts.reshape(x.shape[0], -1), E, dtype=jnp.float32)
    of_experts = (is_chosen * taken.weights.reshape(x.shape[0], -1, 1)).sum(1)

    def product(inputs: Array, name: str) -> Array:
        out = _product(inputs, weights, name, recipe, expert_dot, quantized_expert_dot)
        bias = weights.get(f"{name}.bias")
        if bias is not None:
            bias = bias.astype(jnp.float32)
            out = (out.astype(jnp.float32) + bias[:, None]).astype(recipe.result)
        return out

    inputs = jnp.broadcast_to(x, (E, *x.shape))
    out = _hidden_and_out(moe, inputs, product)
    return contract("ne,end->nd", of_experts, out.astype(jnp.float32))


def _by_chosen(
    moe: MoeSpec,
    recipe: Recipe,
    capacity: int | None,
    x: Float[Array, "N D"],
    taken: _Taken,
    weights: _Weights,
) -> Float[Array, "N D"]:
    """A token's own experts alone."""
    E = moe.num_experts
    num_choices = taken.experts.shape[-1]
    if capacity is None:
        block = block_size(x.shape[0] * num_choices, E)
        order = order_by_expert(taken.experts.reshape(-1, num_choices), E, block)
    else:
        block = capacity
        order = order_by_place(taken.experts, taken.places, E, capacity)

    kernel = moe.routing.kernel
    assert kernel != "eager"

    def grouped(inputs: Array, matrices: Array, recipe: Recipe) -> Array:
        return grouped_dot(inputs, matrices, order, block, kernel, recipe)

    def quantized(inputs: Array, stored: Quantized, recipe: Recipe) -> Array:
        return quantized_grouped_dot(inputs, stored, order, block, kernel, recipe)

    def product(inputs: Array, name: str) -> Array:
        if capacity is None:
            out = _product(inputs, weights, name, recipe, grouped, quantized)
        else:
            of_experts = inputs.reshape(E, -1, inputs.shape[-1])
            out = _product(of_experts, weights, name, recipe, expert_dot, quantized_expert_dot)
            out = out.reshape(inputs.shape[0], -1)
        bias = weights.get(f"{name}.bias")
        if bias is not None:
            out = add_bias(out, bias, order, block).astype(recipe.result)
        return out

    out = _hidden_and_out(moe, dispatch(x, order), product)
    return combine(out, taken.weights.reshape(-1, num_choices), order)


def _product(
    x: Array,
    weights: _Weights,
    name: str,
    recipe: Recipe,
    with_matrices: Callable[[Array, Array, Recipe], Array],
    with_quantized: Callable[[Array, Quantized, Recipe], Array],
) -> Array:
    """x times the weights of a name. Where these are quantised, what the adapter adds is a product
    of its own.

    Args:
        with_matrices, with_quantized: make the product with weights as they are, and as they are
            stored.
    """
    kernel = weights.get(f"{name}.kernel")
    if kernel is not None:
        return with_matrices(x, kernel, recipe)
    stored = Quantized(weights[f"{name}.codes"], weights[f"{name}.scales"])
    out = with_quantized(x, stored, recipe)
    exact = Recipe.of(recipe.inputs)
    low = with_matrices(x, weights[f"{name}.a"], exact)
    added = with_matrices(low, weights[f"{name}.b"], exact)
    return (out.astype(jnp.float32) + added).astype(recipe.result)


def _hidden_and_out(moe: MoeSpec, x: Array, product: Callable[[Array, str], Array]) -> Array:
    """Hidden units of x, and what comes of them; `product` is that with the weights of a name."""
    activated = functools.partial(gated, moe.activation)
    gate = named(product(x, "gate"), GATE_UP)
    hidden = elementwise(activated, gate, named(product(x, "up"), GATE_UP))
    return product(hidden, "down")
