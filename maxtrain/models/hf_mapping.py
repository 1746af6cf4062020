"""Converts between our parameters and the tensors of another format: one table for both directions.

A table is a list of `ParamMapping`: the paths of our parameters, the names of the other format's
tensors, and the steps between them. Every step has `forward`, from ours to the other format, and
`inverse`. Both take and return arrays that are read piece by piece, so that a device's part of a
parameter is read from a file without the rest, and one tensor is written without the others. All
steps but `Offset` move numbers without changing them: import after export gives the same bits, and
so does export after import.

No jax here: the tables are read before a device is started.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

Shape = tuple[int, ...]
Part = tuple[range, ...]  # the wanted indices of each dim, without gaps


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is read piece by piece.

    Args:
        shape: shape of the whole array.
        read: returns the numbers of a part of the array.
        write: writes the numbers of a part into existing memory of any type and strides, at once or
            later, when the reader of the files gets to them. None: the output of `read` is copied.
    """

    shape: Shape
    read: Callable[[Part], np.ndarray]
    write: Callable[[Part, np.ndarray], None] | None = None

    def read_into(self, part: Part, out: np.ndarray) -> None:
        """Write the numbers of a part into `out`."""
        if self.write is None:
            out[...] = self.read(part)
        else:
            self.write(part, out)

    def whole(self) -> np.ndarray:
        """Read all numbers."""
        return self.read(everything(self.shape))


def everything(shape: Shape) -> Part:
    """Return the part that covers the whole array."""
    return tuple(range(size) for size in shape)


def slices(part: Part) -> tuple[slice, ...]:
    """Return a part as an index of slices."""
    return tuple(slice(indices.start, indices.stop) for indices in part)


def in_memory(array: np.ndarray) -> LazyArray:
    """Wrap an array that is in memory as a `LazyArray`."""

    def read(part: Part) -> np.ndarray:
        return array[slices(part)]

    return LazyArray(array.shape, read)


def _shape_only(shape: Shape) -> LazyArray:
    """Return an array of which only the shape may be used."""

    def read(part: Part) -> np.ndarray:
        raise AssertionError("an array without numbers is read")

    return LazyArray(shape, read)


class TensorTransform(abc.ABC):
    """A step of a mapping: a change of arrays that can be undone."""

    @abc.abstractmethod
    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        """Convert our arrays towards the other format."""

    @abc.abstractmethod
    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        """Convert the other format's arrays towards ours; `shapes` are those of the inputs of
        `forward`."""


@dataclasses.dataclass(frozen=True)
class StackLayers(TensorTransform):
    """A leading dim of ours that is several tensors in the other format, such as one for each
    layer.

    Args:
        start, stride: index i of ours is number `start + i * stride` in the names of the other
            format.
    """

    start: int = 0
    stride: int = 1

    def numbers(self, size: int) -> list[int]:
        """Return the numbers in the names of `size` tensors."""
        return [self.start + i * self.stride for i in range(size)]

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return [_one_of(array, i) for array in arrays for i in range(array.shape[0])]

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        rest = iter(arrays)
        return [_stacked(list(itertools.islice(rest, shape[0])), shape) for shape in shapes]


def _one_of(array: LazyArray, i: int) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        return array.read((range(i, i + 1), *part))[0]

    return LazyArray(array.shape[1:], read)


def _stacked(arrays: list[LazyArray], shape: Shape) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        outer, *inner = part
        first = arrays[outer[0]].read(tuple(inner))
        out = np.empty((len(outer), *first.shape), first.dtype)
        out[0] = first
        for place, i in enumerate(outer[1:], 1):
            out[place] = arrays[i].read(tuple(inner))
        return out

    def write(part: Part, out: np.ndarray) -> None:
        outer, *inner = part
        for place, i in enumerate(outer):
            arrays[i].read_into(tuple(inner), out[place, ...])

    return LazyArray(shape, read, write)


@dataclasses.dataclass(frozen=True)
class Flatten(TensorTransform):
    """A matrix whose inputs and outputs may have several dims here and is [inputs, outputs] there.

    Args:
        inputs: how many of the dims are inputs.
    """

    inputs: int

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return [self._flat(array) for array in arrays]

    def _flat(self, array: LazyArray) -> LazyArray:
        rows = math.prod(array.shape[: self.inputs])
        columns = math.prod(array.shape[self.inputs :])

        def read(part: Part) -> np.ndarray:
            return array.whole().reshape(rows, columns)[slices(part)]

        return LazyArray((rows, columns), read)

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return [self._parted(array, shape) for array, shape in zip(arrays, shapes, strict=True)]

    def _parted(self, array: LazyArray, shape: Shape) -> LazyArray:
        groups = (slice(0, self.inputs), slice(self.inputs, len(shape)))

        def read(part: Part) -> np.ndarray:
            # Where several dims share one there, the first one bounds what is read; the others are
            # cut afterwards.
            there = [_joined(shape[group], part[group]) for group in groups]
            wide = [(part[group][0], *everything(shape[group][1:])) for group in groups]
            sizes = [len(indices) for dims in wide for indices in dims]
            rest = [(slice(None), *slices(part[group][1:])) for group in groups]
            return array.read(tuple(there)).reshape(sizes)[rest[0] + rest[1]]

        def write(part: Part, out: np.ndarray) -> None:
            there = [_joined(shape[group], part[group]) for group in groups]
            flat = _view(out, (len(there[0]), len(there[1])))
            if flat is None:
                # Some of what is read is cut off, or `out` has gaps.
                out[...] = read(part)
            else:
                array.read_into(tuple(there), flat)

        return LazyArray(shape, read, write)


def _view(out: np.ndarray, shape: Shape) -> np.ndarray | None:
    """Return the same memory in another shape, or None if that is not possible without a copy."""
    if out.size != math.prod(shape):
        return None
    try:
        return out.reshape(shape, copy=False)
    except ValueError:
        return None


def _joined(dims: Shape, part: Part) -> range:
    """Return where the indices `part[0]` of the first dim lie once these dims are merged into
    one."""
    step = math.prod(dims[1:])
    return range(part[0].start * step, part[0].stop * step)


@dataclasses.dataclass(frozen=True)
class Ravel(TensorTransform):
    """A vector of the other format that may have several dims here."""

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return [_raveled(array) for array in arrays]

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return [_unraveled(array, shape) for array, shape in zip(arrays, shapes, strict=True)]


def _raveled(array: LazyArray) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        return array.whole().ravel()[slices(part)]

    return LazyArray((math.prod(array.shape),), read)


def _unraveled(array: LazyArray, shape: Shape) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        # The first dim bounds what is read; the others are cut afterwards.
        numbers = array.read((_joined(shape, part),))
        return numbers.reshape(len(part[0]), *shape[1:])[(slice(None), *slices(part[1:]))]

    def write(part: Part, out: np.ndarray) -> None:
        there = _joined(shape, part)
        flat = _view(out, (len(there),))
        if flat is None:
            out[...] = read(part)
        else:
            array.read_into((there,), flat)

    return LazyArray(shape, read, write)


@dataclasses.dataclass(frozen=True)
class Transpose(TensorTransform):
    """A swap of the two dims of a matrix, or of several matrices in one array."""

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return [_transposed(array) for array in arrays]

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return [_transposed(array) for array in arrays]


def _transposed(array: LazyArray) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        return array.read(_last_two_swapped(part)).swapaxes(-1, -2)

    def write(part: Part, out: np.ndarray) -> None:
        array.read_into(_last_two_swapped(part), out.swapaxes(-1, -2))

    return LazyArray(_last_two_swapped(array.shape), read, write)


def _last_two_swapped[T](values: tuple[T, ...]) -> tuple[T, ...]:
    return (*values[:-2], values[-1], values[-2])


@dataclasses.dataclass(frozen=True)
class Split(TensorTransform):
    """One array of ours that is several in the other format, one after the other along a dim.

    Args:
        dim: the dim along which the array is split; not negative.
        sizes: sizes of the parts along `dim`.
    """

    dim: int
    sizes: tuple[int, ...]

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return _cut(arrays, self.dim, self.sizes)

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return _concatenated(arrays, self.dim, len(self.sizes))


@dataclasses.dataclass(frozen=True)
class Join(TensorTransform):
    """Several arrays of ours that are one in the other format, along a dim: the inverse of `Split`.

    Together with a `StackLayers` it comes first, and `dim` counts the stacked dim.
    """

    dim: int
    sizes: tuple[int, ...]

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return _concatenated(arrays, self.dim, len(self.sizes))

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return _cut(arrays, self.dim, self.sizes)


def _cut(arrays: list[LazyArray], dim: int, sizes: Sequence[int]) -> list[LazyArray]:
    pieces = []
    for array in arrays:
        assert array.shape[dim] == sum(sizes), (array.shape, dim, sizes)
        stops = list(itertools.accumulate(sizes))
        for size, stop in zip(sizes, stops):
            pieces.append(_piece(array, dim, range(stop - size, stop)))
    return pieces


def _piece(array: LazyArray, dim: int, where: range) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        wanted = range(where.start + part[dim].start, where.start + part[dim].stop)
        return array.read(_replaced(part, dim, wanted))

    def write(part: Part, out: np.ndarray) -> None:
        wanted = range(where.start + part[dim].start, where.start + part[dim].stop)
        array.read_into(_replaced(part, dim, wanted), out)

    shape = (*array.shape[:dim], len(where), *array.shape[dim + 1 :])
    return LazyArray(shape, read, write)


def _replaced(part: Part, dim: int, indices: range) -> Part:
    return (*part[:dim], indices, *part[dim + 1 :])


def _concatenated(arrays: list[LazyArray], dim: int, count: int) -> list[LazyArray]:
    return [_chain(list(group), dim) for group in itertools.batched(arrays, count)]


def _chain(arrays: list[LazyArray], dim: int) -> LazyArray:
    sizes = [array.shape[dim] for array in arrays]
    stops = list(itertools.accumulate(sizes))

    def pieces(part: Part) -> Iterator[tuple[LazyArray, range]]:
        """Yield each array that is read from, with the indices wanted along `dim`."""
        for array, size, stop in zip(arrays, sizes, stops):
            begin = stop - size
            low = max(part[dim].start, begin)
            high = min(part[dim].stop, stop)
            if low < high:
                yield array, range(low - begin, high - begin)

    def read(part: Part) -> np.ndarray:
        found = [array.read(_replaced(part, dim, wanted)) for array, wanted in pieces(part)]
        return np.concatenate(found, axis=dim)

    def write(part: Part, out: np.ndarray) -> None:
        before = 0
        for array, wanted in pieces(part):
            where = (slice(None),) * dim + (slice(before, before + len(wanted)),)
            array.read_into(_replaced(part, dim, wanted), out[where])
            before += len(wanted)

    shape = (*arrays[0].shape[:dim], stops[-1], *arrays[0].shape[dim + 1 :])
    return LazyArray(shape, read, write)


@dataclasses.dataclass(frozen=True)
class Permute(TensorTransform):
    """A reordering of the entries of a dim: the dim is seen as several, whose order changes.

    Args:
        dim: the dim whose entries move; not negative.
        sizes: sizes of the dims that it is seen as.
        order: the order of these dims in the other format, as `numpy.transpose` takes it.
    """

    dim: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def _places(self) -> np.ndarray:
        """Return our index of each entry of the other format."""
        return np.arange(math.prod(self.sizes)).reshape(self.sizes).transpose(self.order).ravel()

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return [_taken(array, self.dim, self._places()) for array in arrays]

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return [_taken(array, self.dim, np.argsort(self._places())) for array in arrays]


def _taken(array: LazyArray, dim: int, places: np.ndarray) -> LazyArray:
    assert array.shape[dim] == len(places), (array.shape, dim, len(places))

    def read(part: Part) -> np.ndarray:
        wanted = places[part[dim].start : part[dim].stop]
        around = range(int(wanted.min()), int(wanted.max()) + 1)
        return array.read(_replaced(part, dim, around)).take(wanted - around.start, axis=dim)

    return LazyArray(array.shape, read)


@dataclasses.dataclass(frozen=True)
class Offset(TensorTransform):
    """Adds a number to every entry, such as 1 to a scale that counts from 0 here.

    The only step that rounds: a round trip gives the same bits where the sum needs no more bits
    than its type has, and otherwise differs at most in the last bit of the sum.
    """

    value: float

    def forward(self, arrays: list[LazyArray]) -> list[LazyArray]:
        return [_added(array, self.value) for array in arrays]

    def inverse(self, arrays: list[LazyArray], shapes: list[Shape]) -> list[LazyArray]:
        return [_added(array, -self.value) for array in arrays]


def _added(array: LazyArray, value: float) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        numbers = array.read(part)
        return (numbers + numbers.dtype.type(value)).astype(numbers.dtype)

    return LazyArray(array.shape, read)


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """Parameters of ours that together become tensors of the other format.

    Args:
        params: our paths; several if there is a `Join` among the steps.
        tensors: names in the other format, with one `{}` for each `StackLayers` among the steps;
            several, in its order, if there is a `Split`.
        steps: steps from ours to the other format.
        dtype: type of these tensors in any file; None: the type of the file.
    """

    params: tuple[str, ...]
    tensors: tuple[str, ...]
    steps: tuple[TensorTransform, ...] = ()
    dtype: str | None = None

    def places(self, shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
        """Return the numbers in the names of each tensor; `shapes` are those of our parameters."""
        stacks = [step for step in self.steps if isinstance(step, StackLayers)]
        numbers = [stack.numbers(size) for stack, size in zip(stacks, shapes[0])]
        return list(itertools.product(*numbers))

    def names(self, shapes: Sequence[Shape]) -> list[str]:
        """Return the names of the tensors, in the order of the arrays of the steps."""
        return [name.format(*place) for place in self.places(shapes) for name in self.tensors]

    def pattern(self) -> str:
        """Return the names for people to read, with N for a number."""
        return " + ".join(self.tensors).replace("{}", "N")

    def forward(self, arrays: Sequence[LazyArray]) -> dict[str, LazyArray]:
        """Return the other format's tensors by name, given our parameters in the order of
        `params`."""
        names = self.names([array.shape for array in arrays])
        current = list(arrays)
        for step in self.steps:
            current = step.forward(current)
        return dict(zip(names, current, strict=True))

    def tensor_shapes(self, shapes: Sequence[Shape]) -> dict[str, Shape]:
        """Return the shape of each tensor of the other format, given the shapes of our
        parameters."""
        tensors = self.forward([_shape_only(tuple(shape)) for shape in shapes])
        return {name: tensor.shape for name, tensor in tensors.items()}

    def inverse(
        self, theirs: Mapping[str, LazyArray], shapes: Sequence[Shape]
    ) -> dict[str, LazyArray]:
        """Return our parameters by path, given the other format's tensors by name; `shapes` are
        ours."""
        current = [_shape_only(tuple(shape)) for shape in shapes]
        # The shapes of the inputs of each step in the forward direction.
        before = []
        for step in self.steps:
            before.append([array.shape for array in current])
            current = step.forward(current)
        arrays = [theirs[name] for name in self.names(shapes)]
        for step, given in zip(reversed(self.steps), reversed(before)):
            arrays = step.inverse(arrays, given)
        return dict(zip(self.params, arrays, strict=True))


def tensors_in_order(
    table: Sequence[ParamMapping], ours: Mapping[str, LazyArray]
) -> dict[str, LazyArray]:
    """Return all tensors of a table, layer by layer, as models list theirs.

    Args:
        table: a table whose neighbouring entries are stacked alike.
        ours: our parameters by path.
    """
    found = []
    first = 0
    for index, entry in enumerate(table):
        previous = table[max(index - 1, 0)]
        if not (_is_stacked(entry) and _is_stacked(previous)):
            first = index
        arrays = [ours[name] for name in entry.params]
        places = entry.places([array.shape for array in arrays])
        tensors = iter(entry.forward(arrays).items())
        for place in places:
            for name, tensor in itertools.islice(tensors, len(entry.tensors)):
                found.append(((first, place[:1], index), name, tensor))
    found.sort(key=_sort_key)
    return {name: tensor for _, name, tensor in found}


def _is_stacked(entry: ParamMapping) -> bool:
    return any(isinstance(step, StackLayers) for step in entry.steps)


def _sort_key(
    found: tuple[tuple[int, tuple[int, ...], int], str, LazyArray],
) -> tuple[int, tuple[int, ...], int]:
    return found[0]
