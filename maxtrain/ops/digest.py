"""Digests of arrays, computed on their devices: independent of mesh, replication and order of
summation.

Every element's bits are mixed with its index in the global array by invertible functions, and the
results are summed modulo 2^32, twice with different functions. Integer sums do not depend on the
order. A change of one element, by one bit or many, always changes both sums; any other change goes
unnoticed with probability 2^-64. Products of bits with odd constants would be cheaper, but would
not detect changed signs of two elements.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32
from numpy.typing import ArrayLike

from maxtrain.parallel.host_memory import layer_of, lies_in_layers, on_device
from maxtrain.parallel.sharding import constrain

# Source: Appleby 2011, MurmurHash3's fmix32; Wellons 2018,
#     https://github.com/skeeto/hash-prospector, lowbias32.
_MURMUR = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
_LOWBIAS = (16, 0x7FEB352D, 15, 0x846CA68B, 16)
# Arrays of fewer bytes in total are digested by one program.
_FEW_BYTES = 16 << 20


def _mix(x: Array, constants: tuple[int, int, int, int, int]) -> Array:
    """Permute all uint32 numbers so that every bit of the result depends on every bit of x."""
    a, b, c, d, e = constants
    x = (x ^ (x >> a)) * jnp.uint32(b)
    x = (x ^ (x >> c)) * jnp.uint32(d)
    return x ^ (x >> e)


def digest(x: Array) -> UInt32[Array, " 2"]:
    """Return 64 bits that identify shape, type and every bit of an array. Call it inside jit.

    Supported types are numbers of 8 to 64 bits, bool and random keys. -0.0 and 0.0 differ, and so
    do NaNs with different bits.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return _of_form(x) + _of_rows(x, x.shape[:1], None)


def digest_of(x: Array, in_layers: bool) -> UInt32[Array, " 2"]:
    """Return the `digest` of an array that may be in host memory; one that `lies_in_layers` is
    fetched layer by layer."""
    if not in_layers:
        return digest(on_device(x))

    def add(layer: Array, words: Array) -> Array:
        return words + _of_rows(on_device(layer_of(x, layer)), x.shape[:1], layer)

    nothing = jnp.zeros(2, jnp.uint32)
    return _of_form(x) + jax.lax.fori_loop(0, x.shape[0], add, nothing)


def _of_form(x: Array) -> UInt32[Array, " 2"]:
    """Return the part of a digest for shape and type."""
    header = hashlib.blake2b(f"{x.dtype} {x.shape}".encode(), digest_size=8).digest()
    return jnp.array(np.frombuffer(header, "<u4"), jnp.uint32)


def _of_rows(x: Array, rows: tuple[int, ...], first: Array | None) -> UInt32[Array, " 2"]:
    """Return the part of a digest for the bits of some rows of an array.

    Args:
        x: these rows.
        rows: the number of rows of the array; empty: it is a scalar.
        first: the index of the first row; None: 0.
    """
    if x.dtype == jnp.bool:
        bits = x.astype(jnp.uint8)
    else:
        # Numbers of 64 bits are two of 32, in a dim of their own.
        width = min(32, 8 * x.dtype.itemsize)
        bits = jax.lax.bitcast_convert_type(x, f"uint{width}")
    bits = bits.astype(jnp.uint32)
    # The index of an element is computed without reshaping, so that arrays keep their sharding. It
    # is modulo 2^32, and mixed with the outermost index so that larger arrays do not repeat
    # themselves.
    place = jnp.zeros(bits.shape, jnp.uint32)
    indices = [jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) for dim in range(bits.ndim)]
    if first is not None:
        indices[0] += first.astype(jnp.uint32)
    for dim, index in enumerate(indices):
        stride = math.prod(bits.shape[dim + 1 :]) % 2**32
        place += index * jnp.uint32(stride)
    if math.prod((*rows, *bits.shape[1:])) > 2**32:
        place ^= _mix(indices[0], _MURMUR)
    place = _mix(place, _LOWBIAS)
    # All dims but the last one are summed first, as vectors.
    outer = tuple(range(bits.ndim - 1))
    words = []
    for mixed in (_mix(bits ^ place, _MURMUR), _mix(bits + place, _LOWBIAS)):
        words.append(mixed.sum(outer, jnp.uint32).sum(dtype=jnp.uint32))
    return jnp.stack(words)


def leaf_names(tree: PyTree) -> list[str]:
    """Return names such as `params.layers.0.mlp.up.kernel` of a tree's leaves, in their order."""
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        # Flax variables are tree nodes whose only child is `value`.
        names.append(name.removesuffix(".value"))
    return names


def compiler_options(platform: str) -> dict[str, str]:
    """Return the XLA options of digest programs. On CPUs one compiler pass would write all mixed
    numbers to memory before the sum, which is six times slower."""
    if platform == "cpu":
        return {"xla_disable_hlo_passes": "tree_reduction_rewriter"}
    return {}


@functools.cache
def _compiled(platform: str, in_layers: tuple[bool, ...]) -> jax.stages.Wrapped:
    def of_all(leaves: list[Array]) -> Array:
        words = jnp.stack(list(map(digest_of, leaves, in_layers)))
        # The result is replicated on every device.
        return constrain(words, None, None)

    return jax.jit(of_all, compiler_options=compiler_options(platform))


def digests(tree: PyTree[Array]) -> UInt32[Array, "leaves 2"]:
    """Return the digest of every leaf, in the tree's order; on the device, without waiting for
    it."""
    leaves = jax.tree.leaves(tree)
    in_layers = tuple(map(lies_in_layers, leaves))
    return _compiled(jax.default_backend(), in_layers)(leaves)


def hash_text(words: ArrayLike) -> str:
    """Combine the digests [leaves, 2] of a tree into one digest, as 16 hex digits; on the host."""
    return hashlib.blake2b(np.asarray(words).astype("<u4").tobytes(), digest_size=8).hexdigest()


def tree_digests(tree: PyTree[Array]) -> dict[str, str]:
    """Return the digest of every leaf by its name, as 16 hex digits; waits for the device."""
    return by_name(leaf_names(tree), digests(tree))


class Digester:
    """Digester of named arrays that arrive one after another, while the device works on earlier
    ones.

    There is one program for about every eighth of the bytes, so that few are compiled, and a single
    one for few bytes.
    """

    def __init__(self, total_bytes: int):
        self._at_once = max(total_bytes // 8, _FEW_BYTES)
        self._bytes = 0
        self._waiting: dict[str, Array] = {}
        self._begun: list[tuple[list[str], UInt32[Array, "leaves 2"]]] = []

    def add(self, name: str, array: Array) -> None:
        """Take one array, without waiting for the device."""
        self._waiting[name] = array
        self._bytes += array.nbytes
        if self._bytes >= self._at_once:
            self._begin()

    def finish(self, arrays: Mapping[str, Array]) -> dict[str, str]:
        """Return the digest of every array, as 16 hex digits, including those not added before;
        waits for the device."""
        begun: set[str] = set()
        for names, _ in self._begun:
            begun.update(names)
        for name, array in arrays.items():
            if name not in begun:
                self._waiting[name] = array
        self._begin()
        found: dict[str, str] = {}
        for names, words in self._begun:
            found.update(by_name(names, words))
        return found

    def _begin(self) -> None:
        if self._waiting:
            words = digests(list(self._waiting.values()))
            self._begun.append((list(self._waiting), words))
        self._waiting = {}
        self._bytes = 0


def by_name(names: Sequence[str], words: UInt32[Array, "leaves 2"]) -> dict[str, str]:
    """Return each leaf's digest, as 16 hex digits, by its name; waits for the device."""
    found = {}
    for name, (low, high) in zip(names, jax.device_get(words).tolist(), strict=True):
        found[name] = f"{low:08x}{high:08x}"
    return found
