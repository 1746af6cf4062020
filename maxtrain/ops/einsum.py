"""Products of two arrays of one type, accumulated and returned in float32, in forms that every
platform has kernels for. ops/dot.py builds products with weights on top of this."""

import functools
import math
import string
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Number of partial sums in a product of one row; see `_row_times_matrix`.
_ROW_PARTS = 4


def contract(spec: str, a: Array, b: Array, *, in_place: bool = False) -> Array:
    """Return the einsum of two arrays, accumulated and returned in float32.

    Args:
        spec: as in `jnp.einsum`; "..." may stand in front of the letters of a and of the result.
        a: any float type. Products of float32 are exact (no TF32 or bf16 passes).
        b: an array of the same type as a.
        in_place: whether the result is only used in elementwise arithmetic, not in a transpose. XLA
            may then do this arithmetic in the result's own memory on CPUs; see below.

    Returns:
        float32.
    """
    if a.dtype == jnp.float32:
        return jnp.einsum(spec, a, b, precision="highest", preferred_element_type=jnp.float32)
    on_cpu = functools.partial(_contract_on_cpu, spec, in_place)
    elsewhere = functools.partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)


def _contract_on_cpu(spec: str, in_place: bool, a: Array, b: Array) -> Array:
    """Compute `contract` of low-precision inputs, so that every CPU has a kernel for it.

    XLA's CPU compiler chooses the products that its library of fast kernels gets in bfloat16 while
    they still look as they were written. The inputs of all others are converted to float32, which
    gives the same products. Only later does it fold transposes of inputs and results into products,
    and the library takes none whose first input has the contracted dim before the free one. Such a
    product is left without a kernel, and the program fails when it runs ("Unsupported element type
    for DotThunk"). So the first input is brought into the library's order beforehand, with the
    batch dims as one and first, and the contracted dims as one and last; and it and the result
    stand behind barriers that nothing is folded across. The compiler removes the barriers before it
    generates code. A barrier behind attention's scores would double the memory of the program: they
    do without, since they are multiplied and masked before anything else.
    """
    dims = _Dims.of(spec, a.ndim)
    a = _transposed(a, dims.a, dims.batch + dims.a_free + dims.contracted)
    b = _transposed(b, dims.b, dims.batch + dims.b_rest())
    batch_shape = a.shape[: len(dims.batch)]
    a_free_shape = a.shape[len(dims.batch) : a.ndim - len(dims.contracted)]
    b_rest_shape = b.shape[len(dims.batch) :]
    if len(dims.batch) > 1:
        a = a.reshape(-1, *a.shape[len(dims.batch) :])
        b = b.reshape(-1, *b_rest_shape)
    batch = tuple(range(min(len(dims.batch), 1)))
    if len(dims.contracted) > 1:
        a = a.reshape(*a.shape[: len(batch) + len(a_free_shape)], -1)
        b = b.reshape(*b.shape[: len(batch)], -1, *b_rest_shape[len(dims.contracted) :])
        b_contracted = len(batch)
    else:
        b_contracted = len(batch) + dims.b_rest().index(dims.contracted)
    a = jax.lax.optimization_barrier(a)
    is_one_row = bool(a_free_shape) and math.prod(a_free_shape) == 1
    with jax.named_scope(spec):  # as jnp.einsum does, for profiles
        if is_one_row and not batch and b_contracted == 0:
            out = _row_times_matrix(a.reshape(-1), b.reshape(b.shape[0], -1))
            out = out.reshape(*a_free_shape, *b.shape[1:])
        else:
            numbers = (((a.ndim - 1,), (b_contracted,)), (batch, batch))
            out = _by_library(a, b, numbers, is_one_row)
    if not in_place:
        out = jax.lax.optimization_barrier(out)
    out = out.reshape(*batch_shape, *out.shape[len(batch) :])
    return _transposed(out, dims.batch + dims.a_free + dims.b_free, dims.out)


def _row_times_matrix(row: Float[Array, " I"], matrix: Float[Array, "I O"]) -> Float[Array, " O"]:
    """Multiply one row as several partial sums. Before it multiplies, the library repacks the
    matrix, which takes most of the time of a row, and a third less if the parts form a batch."""
    parts = math.gcd(_ROW_PARTS, row.size)
    rows = row.reshape(parts, 1, -1)
    matrices = matrix.reshape(parts, -1, matrix.shape[1])
    numbers = (((2,), (1,)), ((0,), (0,)))
    return _by_library(rows, matrices, numbers, True)[:, 0].sum(0)


def _by_library(
    a: Array, b: Array, numbers: jax.lax.DotDimensionNumbers, is_one_row: bool
) -> Array:
    """Compute the product in the library's order; `is_one_row`: the free dims of a have size 1."""
    if not is_one_row:
        return jax.lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)
    # The library does not support a single row. Two rows cost a ninth of one row without it.
    _, (batch, _) = numbers
    axis = len(batch)
    twice = jnp.concatenate([a, a], axis)
    out = jax.lax.dot_general(twice, b, numbers, preferred_element_type=jnp.float32)
    return jax.lax.slice_in_dim(out, 0, 1, axis=axis)


class _Dims(NamedTuple):
    """The letters of an einsum of two arrays, one per dim."""

    a: str
    b: str
    out: str
    batch: str  # in a, b and the result
    contracted: str  # in a and b, not in the result
    a_free: str
    b_free: str

    @classmethod
    def of(cls, spec: str, a_ndim: int) -> "_Dims":
        inputs, out = spec.split("->")
        a, b = inputs.split(",")
        if "..." in a:
            leading = string.ascii_uppercase[: a_ndim - len(a) + len("...")]
            a = a.replace("...", leading)
            out = out.replace("...", leading)
        batch = "".join(letter for letter in a if letter in b and letter in out)
        contracted = "".join(letter for letter in a if letter in b and letter not in out)
        a_free = "".join(letter for letter in a if letter not in b)
        b_free = "".join(letter for letter in b if letter not in a)
        assert contracted and sorted(out) == sorted(batch + a_free + b_free), spec
        return cls(a, b, out, batch, contracted, a_free, b_free)

    def b_rest(self) -> str:
        """Return the dims of b after the batch dims: unchanged if one dim is contracted, else the
        contracted dims first."""
        if len(self.contracted) > 1:
            return self.contracted + self.b_free
        return "".join(letter for letter in self.b if letter not in self.batch)


def _transposed(x: Array, letters: str, wanted: str) -> Array:
    return x.transpose([letters.index(letter) for letter in wanted])
