"""A mixture of experts (MoE): a feed-forward block whose experts each process a few tokens."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxtrain.models.buffer import Buffer
from maxtrain.models.context import ROUTER, Context, TrainNoise
from maxtrain.models.expert_bank import ExpertBank
from maxtrain.models.expert_products import ExpertAssignment, ExpertSettings, ExpertSharding, share
from maxtrain.models.init import Initializer, Role
from maxtrain.models.linear import ExpertLinear, Linear
from maxtrain.models.mlp import Mlp, MlpOut
from maxtrain.models.specs import LayerSpec, MlpSpec, MoeSpec
from maxtrain.models.summary import Summary
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.dropout import fold
from maxtrain.ops.quantity import Metric
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
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.sharding import (
    LENGTH,
    RESIDUAL_LENGTH,
    Axes,
    batch_shards,
    constrain,
    length_shards,
    partition_spec,
    residual_shards,
)


@dataclasses.dataclass(frozen=True)
class LoadBalanceUpdate:
    """Update of the router's correction bias of each expert: a fixed rate up if the expert got less
    than an equal share of choices in a step, down if it got more.

    Source: Wang et al. 2024, https://arxiv.org/abs/2408.15664, algorithm 1.
    """

    rate: float

    def __call__(self, correction: Float[Array, " E"], choices: Int[Array, " E"]) -> Array:
        choices = choices.astype(jnp.float32)
        return correction + self.rate * jnp.sign(choices.mean() - choices)


def load_numbers(choices: Int[Array, "L E"]) -> tuple[Array, ...]:
    """Return how evenly the choices of a whole batch fall on experts, in the order of LOAD."""
    num_experts = choices.shape[-1]
    counts = choices.astype(jnp.float32)
    total = counts.sum(-1, keepdims=True)
    shares = counts / jnp.where(total > 0, total, 1.0)
    logs = jnp.log(jnp.where(shares > 0, shares, 1.0))
    # With a single expert the shares are always equal.
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
        Metric("expert_max_load", "equal shares, of the busiest expert of any layer"),
        Metric("expert_load_entropy", "of that of equal shares, mean over layers"),
        Metric("dead_experts", "experts of all layers without a token"),
    ),
    load_numbers,
)


class Moe(nnx.Module):
    """The sum over a token's experts of weight * (activation(x gate) * (x up)) down, plus an
    optional shared expert.

    If experts are sharded over the mesh (`exp`), tokens are sent to the devices of their experts,
    and results come back; see ops/expert_all_to_all.py. Otherwise tokens stay on their device,
    which gathers the weights of all experts like those of any other block.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.
    """

    summaries: ClassVar[tuple[Summary, ...]] = (LOAD,)

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        init: Initializer,
        recipe: MatmulPrecision,
        rngs: nnx.Rngs,
    ):
        moe = spec.mlp
        assert isinstance(moe, MoeSpec)
        E = moe.num_experts
        width = {"embed": embed_dim}
        expert_width = {"expert_embed": embed_dim}
        units = {"mlp": moe.width}
        biases = spec.biases
        exact = MatmulPrecision.of("float32")
        self.router = Linear(
            rngs.params(), width, {"router": E}, init, exact, "head", "router" in biases
        )
        correction = None
        if moe.corrected:
            update = LoadBalanceUpdate(moe.routing.correction_rate)
            # Each device needs the corrections of all experts for routing.
            correction = Buffer(jnp.zeros(E, jnp.float32), axes=("router",), update=update)
        self.correction = correction
        # Set by `with_loads` if the model sees a part of a batch.
        self.whole_load: nnx.Variable | None = None
        out_role: Role = "residual"
        if "mlp_out" in spec.norms:
            out_role = "hidden"
        self.gate = ExpertLinear(
            rngs.params(), E, expert_width, units, init, recipe, bias="gate" in biases
        )
        self.up = ExpertLinear(
            rngs.params(), E, expert_width, units, init, recipe, bias="up" in biases
        )
        self.down = ExpertLinear(
            rngs.params(), E, units, expert_width, init, recipe, out_role, "down" in biases
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
        # Sharded like x. Otherwise choices would be computed in parts and moved.
        logits = constrain(logits, "activation_batch", LENGTH, None)
        routing = self._route(logits, is_token)
        load = choices_of(routing.experts, moe.num_experts).sum(0)
        aux_losses = self._aux_losses(routing, logits, is_token)
        metrics = {}
        places = jnp.zeros_like(routing.experts)
        sets = self._sets(x.shape[0], x.shape[1])
        taken = ExpertAssignment(routing.experts, routing.weights, places, sets)
        capacity = None
        # Generation drops nothing, because a token would be the only one of its row.
        if moe.routing.capacity_factor is not None and context.extension is None:
            capacity = capacity_of(
                x.shape[1], moe.num_choices, moe.num_experts, moe.routing.capacity_factor
            )
            kept = within_capacity(routing.experts, moe.num_experts, capacity)
            taken = ExpertAssignment(kept.experts, routing.weights, kept.places, sets)
            metrics["expert_dropped"] = kept.dropped
        out = self._experts(x, taken, capacity, context.extension is not None)
        if self.shared is not None:
            shared = self.shared(x, context).x.astype(jnp.float32)
            if self.shared_gate is not None:
                of_gate = self.shared_gate(x.astype(jnp.float32), context.noise)
                shared = shared * jax.nn.sigmoid(of_gate)
            out = out + shared
        buffer_inputs = {"load": load}
        if self.correction is not None:
            buffer_inputs["correction"] = load
        return MlpOut(out.astype(self.recipe.result), aux_losses, metrics, buffer_inputs)

    def _sets(self, num_rows: int, length: int) -> Int[Array, "B T 1"]:
        """Return the number of each token's adapter set; 0 if rows have no adapters of their
        own."""
        numbers = jnp.zeros(num_rows, jnp.int32)
        for linear in (self.gate, self.up, self.down):
            # All banks have the same numbers.
            if isinstance(linear.adapter, ExpertBank):
                numbers = linear.adapter.of_rows(num_rows)
        return jnp.broadcast_to(numbers[:, None, None], (num_rows, length, 1))

    def _logits(self, x: Float[Array, "B T D"], noise: TrainNoise | None) -> Float[Array, "B T E"]:
        """Compute the router's logits, with noise in training."""
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

    def _aux_losses(
        self, routing: Routing, logits: Float[Array, "B T E"], is_token: Bool[Array, "B T"]
    ) -> dict[str, WeightedSum]:
        """Return the auxiliary losses of the router."""
        choice = self.spec.routing
        count = is_token.sum().astype(jnp.float32)
        aux_losses = {}
        if choice.balance:
            whole = None
            if self.whole_load is not None:
                whole = self.whole_load[...]
            uneven = imbalance(routing, choice.balance_scope, whole)
            aux_losses["expert_balance_loss"] = WeightedSum(choice.balance * uneven, count)
        if choice.z_loss:
            aux_losses["router_z_loss"] = WeightedSum(choice.z_loss * z_of(logits, is_token), count)
        return aux_losses

    def _experts(
        self,
        x: Float[Array, "B T D"],
        taken: ExpertAssignment,
        capacity: int | None,
        generates: bool,
    ) -> Float[Array, "B T D"]:
        """Return the experts' results for all tokens, float32."""
        moe = self.spec
        if generates and moe.routing.kernel == "tokamax":
            # Its tiles have more rows than one token per text fills, and generation must run on any
            # device.
            routing = dataclasses.replace(moe.routing, kernel="blocks")
            moe = dataclasses.replace(moe, routing=routing)
        weights = {}
        axes = {}
        for name, linear in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            for part, (value, part_axes) in linear.parts().items():
                weights[f"{name}.{part}"] = value
                axes[f"{name}.{part}"] = part_axes
        work = ExpertSettings(moe, self.recipe, capacity)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return share(work, ExpertSharding(), x, taken, weights)
        # XLA would sort the tokens of all devices together. With shard_map, each device gets its
        # rows, and its part of the experts and of their hidden units.
        length = None
        if capacity is None and x.shape[1] % length_shards() == 0:
            length = LENGTH
        rows = partition_spec(("activation_batch", length, None), mesh.shape)
        is_split = x.shape[0] % batch_shards() == 0
        if not is_split:
            rows = PartitionSpec(None, None, None)
        units = _axis_of("mlp", mesh.shape)
        # The result is sharded like the residual stream.
        dealt = rows
        deals_out = units is not None and is_split and capacity is None
        deals_out = deals_out and x.shape[1] % residual_shards() == 0
        if deals_out:
            dealt = partition_spec(("activation_batch", RESIDUAL_LENGTH, None), mesh.shape)
        layout = ExpertSharding(
            units=units,
            experts=_axis_of("exp", mesh.shape),
            has_own_tokens=is_split,
            deals_out=deals_out,
            axes=tuple(mesh.axis_names),
        )
        split = jax.shard_map(
            functools.partial(share, work, layout),
            in_specs=(rows, rows, {name: _while_used(axes[name], mesh.shape) for name in weights}),
            out_specs=dealt,
            check_vma=False,
        )
        return split(x, taken, weights)


def _axis_of(name: str, mesh_shape: Mapping[str, int]) -> str | None:
    """Return the mesh axis of dims with this name; None: they are not sharded."""
    (axis,) = partition_spec((name,), mesh_shape)
    return axis


def _while_used(axes: Axes, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Return the sharding of expert weights during use: over experts and hidden units only."""
    kept = [axis if axis in ("exp", "mlp") else None for axis in axes]
    return partition_spec(tuple(kept), mesh_shape)
