"""Plain data between an untrusted program and the process that judges it.

Values are written as a flat table of nodes in JSON, and rebuilt with exactly the built-in types
that the table names. So only data arrives from the other process: no class, no method, no `__eq__`.
Other values stay where they are and are written as handles.

A scalar is written as itself. Anything else is `[index]`, the index of its node. Nodes of immutable
containers come after those of their parts; lists, sets and dicts may contain themselves.
"""

import collections
import datetime
import decimal
import fractions
import json
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

# Bytes of a message, and levels of containers inside each other.
MAX_MESSAGE_BYTES = 16 << 20
_MAX_DEPTH = 100
# Integers up to this size are numbers in JSON. Larger ones are hexadecimal: their decimal digits
# take quadratic time, and Python refuses to read more than 4300.
_MAX_JSON_INT = 1 << 62
_LENGTH = struct.Struct("<I")

_SEQUENCES = (list, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_MUTABLE = {each.__name__: each for each in (*_SEQUENCES, set, bytearray, *_MAPPINGS)}
_IMMUTABLE = {"tuple": tuple, "frozenset": frozenset}
# Types that are rebuilt from the arguments of their constructor, with a function that returns
# these.
_BUILT: dict[str, tuple[type, Callable[[Any], list]]] = {
    "complex": (complex, lambda x: [x.real, x.imag]),
    "range": (range, lambda x: [x.start, x.stop, x.step]),
    "Decimal": (decimal.Decimal, lambda x: [str(x)]),
    "Fraction": (fractions.Fraction, lambda x: [x.numerator, x.denominator]),
    "date": (datetime.date, lambda x: [x.year, x.month, x.day]),
    "time": (datetime.time, lambda x: [x.hour, x.minute, x.second, x.microsecond]),
    "datetime": (
        datetime.datetime,
        lambda x: [x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond],
    ),
    "timedelta": (datetime.timedelta, lambda x: [x.days, x.seconds, x.microseconds]),
}
_NAMES_OF_BUILT = {kind: name for name, (kind, _) in _BUILT.items()}
_MUTABLE_TYPES = frozenset(_MUTABLE.values())


# Conversions from an instance of a subclass to the built-in type, without methods that the subclass
# overrides.
_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: bytes(bytes.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    bytearray: lambda value: bytearray(bytearray.__iter__(value)),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value)),
}


class ProtocolError(Exception):
    """A message is invalid: the other process is broken, or forges messages."""


def send(connection: socket.socket, message: Any) -> None:
    """Send one message of JSON. Raise a ProtocolError if it is too large."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receive one message. Raise an EOFError if there are no more, and a ProtocolError if it is
    invalid."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    data = _exactly(connection, length)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a message is not JSON") from error


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        block = connection.recv(min(size - len(data), 1 << 20))
        if not block:
            raise EOFError("the other process ended")
        data += block
    return bytes(data)


class ValueEncoder:
    """Encoder of values as a table.

    Args:
        foreign: returns the node of a value that is no plain data, or raises.
        known: numbers of containers that the other process has, by `id`.
        converts: whether instances of subclasses are written as their built-in base class.
    """

    def __init__(
        self,
        foreign: Callable[[Any], list],
        known: dict[int, int] | None = None,
        converts: bool = False,
    ):
        self.nodes: list[list] = []
        # The mutable containers in the table, in the order of their nodes.
        self.containers: list[Any] = []
        self._foreign = foreign
        self._known = known or {}
        self._converts = converts
        # Objects are kept alive, so that no other object gets their `id`.
        self._places: dict[int, tuple[list, Any]] = {}
        self._open: set[int] = set()

    def add(self, value: Any) -> Any:
        """Return the reference of a value, and write its nodes. Raise a ValueError if it is nested
        too deeply."""
        try:
            return self._add(value, 0)
        except RecursionError:
            raise ValueError("data is nested too deep") from None

    def _add(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            if -_MAX_JSON_INT < value < _MAX_JSON_INT:
                return value
            return self._append(["int", hex(value)])
        if id(value) in self._known:
            return self._append(["known", self._known[id(value)]])
        if id(value) in self._places:
            return self._places[id(value)][0]
        if depth > _MAX_DEPTH or id(value) in self._open:
            raise ValueError(f"data is nested over {_MAX_DEPTH} levels, or a tuple has itself")
        if kind in _MUTABLE_TYPES:
            return self._add_mutable(value, depth)
        if kind in (tuple, frozenset):
            self._open.add(id(value))
            parts = [self._add(each, depth + 1) for each in value]
            self._open.discard(id(value))
            return self._place(value, self._append([kind.__name__, parts]))
        if kind is bytes:
            return self._append(["bytes", value.hex()])
        if kind in _NAMES_OF_BUILT and getattr(value, "tzinfo", None) is None:
            name = _NAMES_OF_BUILT[kind]
            parts = [self.add(each) for each in _BUILT[name][1](value)]
            return self._append([name, parts])
        if self._converts and (base := _base_value(value)) is not None:
            # The base value is placed under the original, so that it stays one object.
            return self._place(value, self._add(base[0], depth))
        return self._place(value, self._append(self._foreign(value)))

    def content(self, container: Any) -> list:
        """Return a node with the content of a container that the other process knows."""
        return _content(container, self.add)

    def _add_mutable(self, value: Any, depth: int) -> list:
        reference = self._place(value, self._append([]))
        self.containers.append(value)
        self.nodes[reference[0]] = _content(value, lambda each: self._add(each, depth + 1))
        return reference

    def _append(self, node: list) -> list:
        self.nodes.append(node)
        return [len(self.nodes) - 1]

    def _place(self, value: Any, reference: Any) -> Any:
        self._places[id(value)] = (reference, value)
        return reference


def _content(value: Any, add: Callable[[Any], Any]) -> list:
    name = type(value).__name__
    if isinstance(value, bytearray):
        return [name, value.hex()]
    if isinstance(value, _MAPPINGS):
        return [name, [add(each) for pair in dict.items(value) for each in pair]]
    if isinstance(value, collections.deque):
        return [name, [add(each) for each in value], value.maxlen]
    return [name, [add(each) for each in value]]


def _base_value(value: Any) -> tuple[Any] | None:
    """Return a value of a built-in type for an instance of its subclass; None: there is none."""
    for kind in (int, float, complex, str, bytes, tuple, frozenset):
        if isinstance(value, kind):
            return (_CONVERSIONS[kind](value),)
    for mapping in (collections.Counter, collections.OrderedDict, dict):
        if isinstance(value, mapping):
            copy = mapping()
            dict.update(copy, dict.items(value))
            return (copy,)
    for kind in (list, set, bytearray, collections.deque):
        if isinstance(value, kind):
            return (_CONVERSIONS[kind](value),)
    # Scalars of numpy, without importing numpy here.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        item = value.item()
        if type(item) in (bool, int, float, complex, str, bytes):
            return (item,)
    return None


class ValueDecoder:
    """Decoder that rebuilds values from a table.

    Args:
        foreign: returns the value of a node that is no plain data, or raises.
        known: containers of this process that the table may refer to by number.

    Raises:
        ProtocolError: the table is broken, in any way.
    """

    def __init__(self, nodes: Any, foreign: Callable[[list], Any], known: Iterable[Any] = ()):
        self._foreign = foreign
        self._known = list(known)
        self._values: list[Any] = []
        # The mutable containers in the table, in the order of their nodes.
        self.containers: list[Any] = []
        try:
            for node in nodes:
                self._values.append(self._create(node))
            for node, value in zip(nodes, self._values):
                if node[0] in _MUTABLE:
                    self.fill(value, node)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(f"a table of values is broken ({type(error).__name__})") from None

    def get(self, reference: Any) -> Any:
        """Return the value of a reference."""
        if not isinstance(reference, list):
            if isinstance(reference, dict):
                raise ProtocolError("a reference is a dict")
            return reference
        if len(reference) != 1 or type(reference[0]) is not int or reference[0] < 0:
            raise ProtocolError("a reference has no index")
        try:
            return self._values[reference[0]]
        except IndexError:
            raise ProtocolError("a reference leads nowhere") from None

    def _create(self, node: list) -> Any:
        name = node[0]
        if name in _MUTABLE:
            value = _MUTABLE[name]()
            if name == "deque":
                value = collections.deque(maxlen=node[2])
            self.containers.append(value)
            return value
        if name in _IMMUTABLE:
            return _IMMUTABLE[name](self.get(each) for each in node[1])
        if name == "int":
            return int(node[1], 16)
        if name == "bytes":
            return bytes.fromhex(node[1])
        if name == "known":
            if type(node[1]) is not int or node[1] < 0:
                raise ProtocolError("a container has no number")
            return self._known[node[1]]
        if name in _BUILT:
            parts = [self.get(each) for each in node[1]]
            if not all(type(each) in (int, float, str) for each in parts):
                raise ProtocolError("a part of a value is no scalar")
            return _BUILT[name][0](*parts)
        return self._foreign(node)

    def fill(self, value: Any, node: list) -> None:
        """Replace the content of a container by that of a node."""
        name = node[0]
        if type(value) is not _MUTABLE.get(name):
            raise ProtocolError("a container has changed its type")
        if name == "bytearray":
            value[:] = bytes.fromhex(node[1])
            return
        parts = [self.get(each) for each in node[1]]
        value.clear()
        if name == "set":
            value.update(parts)
        elif issubclass(_MUTABLE[name], dict):
            # `update` of a Counter would add the values.
            for key, each in zip(parts[::2], parts[1::2], strict=True):
                value[key] = each
        else:
            value.extend(parts)
