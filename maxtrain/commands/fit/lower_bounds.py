"""Lower bounds of what a step on a mesh sends, and of its time: counted from shapes, before
anything is compiled. With them `maxtrain fit --search` begins with the most promising meshes, and
leaves out those that can't be the fastest.

Only what no compiler can do without counts: matrices of weights are gathered once and their
gradients summed once for each micro-batch, both in the type of products; activations cross `tensor`
twice in a layer, keys and values cross `context`, choices of experts cross `expert`, there and back
and with their gradients. A compiled step sends this, and more: weights a second time for the
backward pass, sums in float32, what is computed anew.
"""

import functools
import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxtrain.config import RunConfig
from maxtrain.config.sections.moe import RoutingConfig
from maxtrain.models.cost import product_weights, token_flops
from maxtrain.models.families import FAMILIES
from maxtrain.models.registry import logical_axes
from maxtrain.models.specs import LayerSpec, MoeSpec
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.compiled.collectives import Collective
from maxtrain.parallel.compiled.roofline import Roofline, lines_of, roofline
from maxtrain.parallel.compiled.work import ProgramWork
from maxtrain.parallel.hardware import links, peak_or
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import LENGTH, RULES, partition_spec, stored_rules
from maxtrain.train_step.state import TrainState

# Devices along these have tokens of their own, so that gradients are summed over them.
_OF_TOKENS = (*RULES["activation_batch"], *RULES[LENGTH])


class Matrix(NamedTuple):
    """Weights that tokens are multiplied with.

    Attributes:
        name: its path.
        axes: the logical name of each dim.
        num_bytes: of all of it, as it is sent.
        trains: it has a gradient.
    """

    name: str
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    num_bytes: int
    trains: bool


class StepLowerBounds:
    """Lower bounds for the steps of a run on some devices.

    Args:
        config: knows its vocabulary.
        devices: perhaps described ones.
        state: of the run, as shapes, on whatever mesh.

    Raises:
        ConfigError: devices that are not known.
    """

    def __init__(self, config: RunConfig, devices: Sequence[Any], state: TrainState):
        self._devices = devices
        self._links = links(devices[0])
        tflops = config.observe.peak_tflops
        self._peak = peak_or(tflops, devices[0], config.precision.compute)
        self._itemsize = jnp.dtype(config.precision.compute).itemsize
        self._matrices = list(_matrices(state, self._itemsize))
        self._frozen = product_weights(state.frozen[POLICY], config.model)
        self._layers = FAMILIES[config.model.family].spec(config.model).stack.layers()
        self._mesh = functools.cache(lambda mesh: make_mesh(mesh, devices))

    def least(self, config: RunConfig, tokens: int, length: int) -> Roofline:
        """Return how long a step takes at least.

        Args:
            config: with its mesh filled in.
            tokens: of the batch.
            length: of a row.
        """
        mesh = self._mesh(config.mesh)
        work = ProgramWork(collectives=self.sent(config, mesh, tokens))
        model = token_flops(config.model, length, self._frozen).causal
        share = model * tokens / len(self._devices)
        lines = lines_of(work, mesh, self._links, is_compiled=False)
        return roofline(work, share, self._peak, lines, self._links)

    def sent(self, config: RunConfig, mesh: Mesh, tokens: int) -> Counter[Collective]:
        """The collectives of a step, and how often each runs."""
        found: Counter[Collective] = Counter()
        for matrix in self._matrices:
            found.update(_of_matrix(matrix, config, mesh))
        of_device = tokens // math.prod(mesh.shape[axis] for axis in _OF_TOKENS)
        of_device //= config.optimizer.micro_batches
        for layer in self._layers[: len(self._layers) // mesh.shape["stage"]]:
            number = of_device * config.model.embed_dim * self._itemsize
            found.update(_of_activations(layer, number, mesh, config.model.routing))
            found.update(_of_keys(layer, of_device * self._itemsize, mesh))
        return Counter({one: n * config.optimizer.micro_batches for one, n in found.items()})


def _matrices(state: TrainState, itemsize: int) -> Iterator[Matrix]:
    for params, trains in ((state.trainable, True), (state.frozen[POLICY], False)):
        for path, variable in nnx.to_flat_state(params):
            if "kernel" not in path[-2:]:
                continue
            array = variable.get_value()
            width = min(itemsize, array.dtype.itemsize)
            axes = logical_axes(variable)
            name = ".".join(map(str, path))
            yield Matrix(name, axes, array.shape, width * math.prod(array.shape), trains)


def _of_matrix(matrix: Matrix, config: RunConfig, mesh: Mesh) -> Iterator[Collective]:
    """Yield the collectives of a matrix: its parts are gathered, and its gradient goes to where
    they are.
    """
    rules = stored_rules(config.mesh.rules)
    split = set()
    for entry in partition_spec(matrix.axes, mesh.shape, matrix.shape, matrix.name, rules):
        if entry is not None:
            split |= set(entry if isinstance(entry, tuple) else (entry,))
    of_tokens = set(_OF_TOKENS)
    if "exp" in matrix.axes:
        # Tokens come to them.
        of_tokens.discard("expert")
    gathered = split & of_tokens
    part = matrix.num_bytes // math.prod(mesh.shape[axis] for axis in split)
    whole = part * math.prod(mesh.shape[axis] for axis in gathered)
    yield from _over(mesh, gathered, "all-gather", part)
    if not matrix.trains:
        return
    yield from _over(mesh, gathered, "reduce-scatter", whole)
    kind = "all-reduce"
    if config.optimizer.zero >= 2:
        kind = "reduce-scatter"
    yield from _over(mesh, of_tokens - gathered, kind, part)


def _of_activations(
    layer: LayerSpec, num_bytes: int, mesh: Mesh, routing: RoutingConfig
) -> Iterator[Collective]:
    """Sums over `tensor` behind both blocks of a layer, and of their gradients; tokens that go to
    their experts and come back, and their gradients.

    Args:
        num_bytes: of the activations of a device.
    """
    for _ in range(4):
        yield from _over(mesh, {"tensor"}, "all-reduce", num_bytes)
        if isinstance(layer.mlp, MoeSpec) and routing.kernel != "eager":
            # What is beyond the capacity is not sent; and `eager` gathers tokens.
            taken = min(1.0, routing.capacity_factor or 1.0)
            choices = num_bytes * layer.mlp.num_choices * taken
            yield from _over(mesh, {"expert"}, "all-to-all", choices)


def _of_keys(layer: LayerSpec, num_bytes: int, mesh: Mesh) -> Iterator[Collective]:
    """Yield what makes tokens of different parts of a row see each other, in the cheapest of all
    ways: a ring of keys and values, or heads that are dealt out. Each once forward and once
    backward.

    Args:
        num_bytes: of one number of each token of a device.
    """
    context = mesh.shape["context"]
    if context == 1:
        return
    mixer = layer.mixer
    kept = sum(math.prod(shape) for shape in mixer.cache_shapes(1, 1))
    hops = context - 1
    if layer.window is not None:
        hops = 1
    in_ring = hops * kept
    dealt = mixer.pair_products * (1 + mixer.num_kv_heads / mixer.num_heads)
    of_head = num_bytes // mesh.shape["tensor"]
    for _ in range(2):
        if in_ring <= dealt * (context - 1) / context:
            yield from _over(mesh, {"context"}, "collective-permute", in_ring * of_head)
        else:
            yield from _over(mesh, {"context"}, "all-to-all", dealt * of_head)


def _over(mesh: Mesh, axes: Container[str], kind: str, num_bytes: float) -> Iterator[Collective]:
    """A collective over axes of a mesh, as programs write it; none, if each has one device."""
    shape = mesh.shape
    names = [axis for axis in shape if axis in axes and shape[axis] > 1]
    if not names:
        return
    if kind == "collective-permute":
        yield Collective(kind, num_bytes, _ring(mesh, names[0]))
        return
    sizes = ",".join(f"'{axis}'={size}" for axis, size in shape.items())
    over = ",".join(f"'{axis}'" for axis in names)
    yield Collective(kind, num_bytes, f"mesh[{sizes}] {{{over}}}")


def _ring(mesh: Mesh, axis: str) -> str:
    """Pairs of each device and the next one along an axis."""
    number = list(mesh.shape).index(axis)
    places = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    after = np.roll(places, -1, number)
    pairs = zip(places.ravel(), after.ravel(), strict=True)
    return "{" + ",".join(f"{{{one},{other}}}" for one, other in pairs) + "}"
