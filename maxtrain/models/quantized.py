"""A frozen kernel of a product, stored in eight or four bits.

Its arrays take the place of the kernel's: `layers.0.mlp.up.kernel.codes` and
`layers.0.mlp.up.kernel.scales` instead of `layers.0.mlp.up.kernel`. Both are split over the mesh as
the kernel would be: blocks of inputs as inputs, and outputs as outputs.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import LoraConfig
from maxtrain.ops.quantized import WEIGHTS_PER_CODE, Form, QuantizedArray, dequantize, quantize
from maxtrain.parallel.sharding import RULES, Axes, Rules, named_sharding, parts_of

CODES = "codes"
SCALES = "scales"


class KernelShape(NamedTuple):
    """The kernel that codes and scales stand for.

    Attributes:
        experts, inputs, outputs: sizes of the kernel's dims, without those stacked over layers.
        axes: the logical names of these dims.
        dtype: type of the kernel when it is whole.
        form: the form in which it is stored.
        block: number of inputs that share a scale.
    """

    experts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: Axes
    dtype: str
    form: Form
    block: int

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims of the kernel of one layer."""
        return (*self.experts, *self.inputs, *self.outputs)

    @property
    def input_axis(self) -> str | None:
        """The logical name of all inputs as one dim, which is split like the first of them."""
        return self.axes[len(self.experts)]

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each output."""
        return math.prod(self.inputs) // self.block

    @property
    def output_axes(self) -> Axes:
        return self.axes[len(self.experts) + len(self.inputs) :]


class QuantizedParam(nnx.Param):
    """Codes or scales, which are never trained.

    Its metadata: `axes`; `weights`, the number of weights that an entry counts as; and
    `stands_for`, a KernelShape.
    """


class QuantizedKernel(nnx.Module):
    """Codes and scales in the place of a kernel.

    Args:
        kernel: [*layers, *experts, *inputs, *outputs].
        axes: logical names of the dims, without that of layers.
        num_inputs: number of dims that are inputs.
        lora: configuration with the storage form.
    """

    def __init__(self, kernel: Float[Array, "..."], axes: Axes, num_inputs: int, lora: LoraConfig):
        assert lora.base != "full"
        num_experts = 1 if axes[0] == "exp" else 0
        sizes = kernel.shape[kernel.ndim - len(axes) :]
        self.shape = KernelShape(
            experts=sizes[:num_experts],
            inputs=sizes[num_experts : num_experts + num_inputs],
            outputs=sizes[num_experts + num_inputs :],
            axes=axes,
            dtype=str(kernel.dtype),
            form=lora.base,
            block=lora.base_block,
        )
        arrays = stored(kernel, self.shape)
        experts = axes[:num_experts]
        inputs = self.shape.input_axis
        outputs = self.shape.output_axes
        self.codes = QuantizedParam(
            arrays.codes,
            axes=(*experts, inputs, None, *outputs),
            weights=WEIGHTS_PER_CODE[lora.base],
            stands_for=self.shape,
        )
        self.scales = QuantizedParam(
            arrays.scales,
            axes=(*experts, inputs, *outputs),
            weights=0,
            stands_for=self.shape,
        )

    def matrices(self) -> QuantizedArray:
        """Return the arrays with all outputs as one dim, as products take them."""
        return _flat(QuantizedArray(self.codes[...], self.scales[...]), self.shape)

    def whole(self) -> Float[Array, "..."]:
        """Return the dequantised kernel, float32."""
        return whole(QuantizedArray(self.codes[...], self.scales[...]), self.shape)


Kernel = nnx.Param | QuantizedKernel


def kernel_of(kernel: Kernel) -> Float[Array, "..."]:
    """Return the array of a kernel, dequantised if it is stored in codes."""
    if isinstance(kernel, QuantizedKernel):
        return kernel.whole()
    return kernel[...]


def kernel_dtype(kernel: Kernel) -> str:
    """Return the type of a kernel when it is whole."""
    if isinstance(kernel, QuantizedKernel):
        return kernel.shape.dtype
    return str(kernel.dtype)


def stored(kernel: Float[Array, "..."], shape: KernelShape) -> QuantizedArray:
    """Quantise a kernel; its output dims stay as they are."""
    stacked = kernel.shape[: kernel.ndim - len(shape.inputs) - len(shape.outputs)]
    flat = kernel.reshape(*stacked, math.prod(shape.inputs), math.prod(shape.outputs))
    codes, scales = quantize(flat, shape.form, shape.block)
    return QuantizedArray(
        codes.reshape(*codes.shape[:-1], *shape.outputs),
        scales.reshape(*scales.shape[:-1], *shape.outputs),
    )


def whole(arrays: QuantizedArray, shape: KernelShape) -> Float[Array, "..."]:
    """Return the kernel that codes and scales stand for, float32."""
    flat = dequantize(_flat(arrays, shape))
    return flat.reshape(*flat.shape[:-2], *shape.inputs, *shape.outputs)


def _flat(arrays: QuantizedArray, shape: KernelShape) -> QuantizedArray:
    """Merge all output dims into one."""
    count = len(shape.outputs)
    codes, scales = arrays
    return QuantizedArray(
        codes.reshape(*codes.shape[: codes.ndim - count], -1),
        scales.reshape(*scales.shape[: scales.ndim - count], -1),
    )


def is_quantized(variable: Any) -> bool:
    return isinstance(variable, QuantizedParam)


def count_weights(variables: nnx.State) -> int:
    """Return the number of parameters, independent of the form in which they are stored."""
    return sum(weights_of(variable) for _, variable in nnx.to_flat_state(variables))


def weights_of(variable: nnx.Variable) -> int:
    """Return the number of parameters that an array stands for."""
    return variable.get_value().size * variable.get_metadata("weights", 1)


class StoredKernel(NamedTuple):
    """A kernel of an abstract model that is to be quantised.

    Attributes:
        codes, scales: shapes with shardings.
        shape: shape of the kernel of one layer.
        whole: shape and sharding of the kernel itself.
    """

    codes: jax.ShapeDtypeStruct
    scales: jax.ShapeDtypeStruct
    shape: KernelShape
    whole: jax.ShapeDtypeStruct

    def describe(self) -> str:
        """Describe the storage form and the shape of the whole kernel."""
        return f"{self.shape.form}{list(self.whole.shape)}"

    def quantized(self, kernel: Array) -> QuantizedArray:
        """Quantise the kernel and delete its own array."""

        def codes_and_scales(kernel: Array) -> tuple[Array, Array]:
            codes, scales = stored(kernel, self.shape)
            return codes, scales

        places = (self.codes.sharding, self.scales.sharding)
        arrays = jax.jit(codes_and_scales, out_shardings=places)(kernel)
        jax.block_until_ready(arrays)
        kernel.delete()
        return QuantizedArray(*arrays)


def stored_kernels(abstract: nnx.State) -> dict[str, StoredKernel]:
    """Return the quantised kernels of a model by path, such as `layers.0.mlp.up.kernel`.

    Args:
        abstract: the parameters of the model, as shapes with shardings.
    """
    flat = dict(nnx.to_flat_state(abstract))
    found = {}
    for path, variable in flat.items():
        if not is_quantized(variable) or path[-1] != CODES:
            continue
        codes = variable.get_value()
        scales = flat[*path[:-1], SCALES].get_value()
        shape = variable.get_metadata("stands_for")
        layers = codes.shape[: codes.ndim - len(variable.get_metadata("axes"))]
        dims = (*layers, *shape.dims)
        name = ".".join(map(str, path[:-1]))
        mesh: Any = codes.sharding.mesh
        axes = (*("layers" for _ in layers), *shape.axes)
        sharding = named_sharding(mesh, axes, dims, name)
        kernel = jax.ShapeDtypeStruct(dims, shape.dtype, sharding=sharding)
        found[name] = StoredKernel(codes, scales, shape, kernel)
    return found


def with_whole_kernels(
    leaves: Mapping[str, jax.ShapeDtypeStruct], kernels: Mapping[str, StoredKernel]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the leaves of an abstract model by name, with these kernels in the place of their
    codes and scales."""
    found = dict(leaves)
    for name, kernel in kernels.items():
        del found[f"{name}.{CODES}"]
        del found[f"{name}.{SCALES}"]
        found[name] = kernel.whole
    return found


def quantized_among(
    arrays: Mapping[str, Array], kernels: Mapping[str, StoredKernel]
) -> dict[str, Array]:
    """Return arrays by name, with the codes and scales of these kernels in the place of the
    kernels, whose own arrays are deleted."""
    found = {}
    for name, array in arrays.items():
        if name in kernels:
            codes, scales = kernels[name].quantized(array)
            found[f"{name}.{CODES}"] = codes
            found[f"{name}.{SCALES}"] = scales
        else:
            found[name] = array
    return found


def require_whole_blocks(sizes: Mapping[str, int], lora: LoraConfig) -> None:
    """Raise ConfigError if the block size does not divide the inputs of a product.

    Args:
        sizes: the number of inputs of each quantised product, by path.
    """
    wrong = {name: size for name, size in sizes.items() if size % lora.base_block}
    if not wrong:
        return
    name, size = min(wrong.items())
    more = ""
    if len(wrong) > 1:
        more = f" and of {len(wrong) - 1} more"
    raise ConfigError(
        f"model.lora.base_block={lora.base_block} must divide the {size} inputs of {name}{more}: "
        f"each block has a scale. {_fix(sizes.values(), lora.base, lora.base_block)}"
    )


def axes_on(variable: nnx.Variable, mesh_shape: Mapping[str, int], rules: Rules = RULES) -> Axes:
    """Return the logical names of the dims of codes or scales, without that of layers. Blocks are
    not split over a mesh that does not divide them: each device then has all of them."""
    axes = list(variable.get_metadata("axes"))
    shape = variable.get_metadata("stands_for")
    if shape.num_blocks % parts_of(shape.input_axis, mesh_shape, rules):
        axes[len(shape.experts)] = None
    return tuple(axes)


def require_blocks_of_experts(abstract: nnx.State, mesh_shape: Mapping[str, int]) -> None:
    """Raise ConfigError if the mesh does not divide the blocks of hidden units of experts, of which
    each device uses its own.

    Args:
        abstract: parameters of a model, as shapes.
        mesh_shape: devices along each mesh axis.
    """
    tensor = mesh_shape.get("tensor", 1)
    for path, variable in nnx.to_flat_state(abstract):
        if not is_quantized(variable):
            continue
        shape = variable.get_metadata("stands_for")
        if not shape.experts or shape.input_axis != "mlp" or shape.num_blocks % tensor == 0:
            continue
        name = ".".join(map(str, path[:-2]))
        (inputs,) = shape.inputs
        raise ConfigError(
            f"model.lora.base_block={shape.block} makes {shape.num_blocks} blocks of the {inputs} "
            f"inputs of the experts' {name}, which mesh.tensor={tensor} must divide. "
            f"{_fix([inputs // tensor], shape.form, shape.block)}"
        )


def _fix(sizes: Iterable[int], form: str, block: int) -> str:
    """Return the setting that replaces a block size which does not divide these numbers of
    inputs."""
    most = math.gcd(block, *sizes)
    fills_bytes = form == "int8" or most % 2 == 0
    if most > 1 and fills_bytes:
        return f"Set model.lora.base_block={most}."
    return "Set model.lora.base=full, or leave products with such inputs out of model.lora.targets."
