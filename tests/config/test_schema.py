"""The schema: few keys, each with a type, a line of help and a default inside its own limits."""

import collections
import typing

import pytest

from maxtrain.config import keys
from maxtrain.config.limits import out_of_range
from maxtrain.config.schema import RunConfig


def members(kind):
    """The alternatives of a union and the values of its literals."""
    return [o for m in (typing.get_args(kind) or [kind]) for o in (typing.get_args(m) or [m])]


def test_a_section_has_few_keys_of_its_own():
    """A section has as many keys as a person reads at once; all sections together have far fewer
    than the hundreds of flat keys elsewhere."""
    sections = collections.Counter(key.path.rpartition(".")[0] for key in keys.all_keys())
    assert max(sections.values()) <= 28, sections
    assert 60 <= len(keys.all_keys()) <= 400


@pytest.mark.parametrize("key", keys.all_keys(), ids=lambda k: k.path)
def test_every_key_has_a_type_and_one_line_of_help(key):
    assert 1 <= len(key.help) <= 180
    assert "\n" not in key.help and not key.help.endswith(".")
    words = keys.describe(key.kind)
    assert words and "typing" not in words and "class" not in words


@pytest.mark.parametrize("key", keys.all_keys(), ids=lambda k: k.path)
def test_every_default_is_of_its_type(key):
    if key.default is None:
        assert type(None) in members(key.kind) or "NAME" in key.path
        return
    options = members(key.kind)
    assert (
        key.default in options
        or any(o is type(key.default) for o in options)
        or (isinstance(key.default, tuple) and set(key.default) <= set(options))
        or (isinstance(key.default, tuple) and {type(x) for x in key.default} <= set(options))
    )


def test_every_default_is_inside_its_limits():
    def walk(section, path):
        for field in section.__dataclass_fields__.values():
            value = getattr(section, field.name)
            if hasattr(value, "__dataclass_fields__"):
                walk(value, f"{path}{field.name}.")
            else:
                assert out_of_range(path + field.name, value, field.metadata) is None

    walk(RunConfig(), "")


def test_defaults_are_not_shared():
    RunConfig().data.sources["web"] = None
    assert RunConfig().data.sources == {}
