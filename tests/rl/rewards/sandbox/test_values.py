"""Plain data is carried exactly, and broken tables are refused."""

import collections
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.rl.rewards.sandbox.values import ProtocolError, ValueDecoder, ValueEncoder

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(SCALARS, inner, max_size=4),
        st.sets(SCALARS, max_size=4),
        st.frozensets(SCALARS, max_size=4),
    ),
    max_leaves=6,
)


def refuse(value):
    raise TypeError(type(value).__name__)


def carried(value, **options):
    encoder = ValueEncoder(refuse, **options)
    reference = encoder.add(value)
    return ValueDecoder(encoder.nodes, refuse).get(reference)


@given(VALUES)
def test_values_and_their_types_stay_the_same(value):
    result = carried(value)
    assert result == value and repr(type(result)) == repr(type(value))


def test_shared_and_cyclic_containers_stay_so():
    shared = []
    value = [shared, (shared,), {"a": shared}]
    value.append(value)
    result = carried(value)
    assert result[3] is result and result[0] is result[1][0] is result[2]["a"]


def test_subclasses_become_their_base():
    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    class Number(int):
        pass

    value = [Text("a"), Number(3), collections.namedtuple("P", "x")(1), collections.UserDict]
    result = carried(value[:3], converts=True)
    assert [type(each) for each in result] == [str, int, tuple] and result == ["a", 3, (1,)]
    with pytest.raises(TypeError):
        carried([Text("a")])


BROKEN = [
    [["list", [[0.5]]]],
    [["list", [[-1]]]],
    [["list", [[7]]]],
    [["tuple", [[0]]]],
    [["tuple", [[1]]], ["list", []]],
    [["int", "zz"]],
    [["int", 5]],
    [["bytes", "0"]],
    [["dict", [1]]],
    [["set", [[1]]], ["list", []]],
    [["Decimal", ["x"]]],
    [["date", [1, 2]]],
    [["range", [{"a": 1}]]],
    [["known", -1]],
    [["known", 0]],
    [["eval", "1"]],
    [[]],
    [5],
    [["list", 5]],
    5,
    {"a": 1},
]


@pytest.mark.parametrize("nodes", BROKEN)
def test_broken_tables_are_refused(nodes):
    with pytest.raises(ProtocolError):
        ValueDecoder(copy.deepcopy(nodes), refuse)


def test_what_is_nested_too_deep_is_refused():
    value = []
    for _ in range(1000):
        value = [value]
    with pytest.raises(ValueError, match="nested"):
        carried(value)
