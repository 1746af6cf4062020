"""The conditions under which a key is read are declared once, with the key: the check, the help and
their words follow."""

import dataclasses

import pytest

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config import RunConfig, keys
from maxtrain.config.help import help_text
from maxtrain.config.problems import problems_of
from maxtrain.config.schema import PieceConfig
from maxtrain.config.unused_keys import idle_among, idle_keys, readers_in_words

DECLARED = [key for key in keys.all_keys() if key.used_by]


def test_keys_that_only_some_settings_read_say_so():
    assert len(DECLARED) > 50
    assert {"schedule.decay_fraction", "data.on_long", "eval_at_start"} <= {
        k.path for k in DECLARED
    }


@pytest.mark.parametrize("declared", DECLARED, ids=lambda k: k.path)
def test_every_reader_is_a_key_and_every_value_one_of_its_own(declared):
    for use in declared.used_by:
        for path, values in use.settings.items():
            named = path.replace("[*]", "[0]")
            found = [
                k
                for k in keys.all_keys()
                if named in (k.path, k.path.removesuffix(".NAME"), f"{k.path}[0]")
            ]
            is_section = any(k.path.startswith(f"{path}.NAME.") for k in keys.all_keys())
            assert found or is_section, path
            listed = [values.value] if isinstance(values, AnyValueExcept) else values
            words = [value for value in listed if isinstance(value, str)]
            assert set(words) <= set(keys.describe(found[0].kind).split(" | ") if found else ())


@pytest.mark.parametrize("declared", DECLARED, ids=lambda k: k.path)
def test_the_help_of_a_key_says_what_reads_it(declared, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    section = declared.path.partition(".")[0] if "." in declared.path else None
    (line,) = [
        line
        for line in help_text("maxtrain", section, []).splitlines()
        if line.startswith(f"  {declared.path}=")
    ]
    assert line.endswith(f"; only with {readers_in_words(declared.used_by)})")


def test_readers_in_words():
    assert readers_in_words([UsedBy({"a.b": ("x", "y", "z")})]) == "a.b=x, y or z"
    assert readers_in_words([UsedBy({"a.b": AnyValueExcept(None), "c": AnyValueExcept(0)})]) == (
        "a.b set, or c other than 0"
    )
    both = [UsedBy({"a.b": AnyValueExcept(())}), UsedBy({"c": (None,)})]
    assert readers_in_words(both) == "a.b not empty; and c=null"
    assert readers_in_words([UsedBy({"a": (1,)}, help="as a is")]) == "as a is"
    assert readers_in_words([]) == ""


def changed(section, path, value):
    """A section with another value of a key in it, or below it."""
    name, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(section, name), rest, value)
    return dataclasses.replace(section, **{name: value})


def test_a_key_that_is_idle_for_two_reasons_is_told_once():
    config = changed(changed(RunConfig(), "init.std", 0.5), "checkpoint.init_from", "weights")
    (found,) = idle_among(idle_keys(config), "init.std")
    assert found.cause == "init.name=lecun_normal"
    config = changed(config, "init.name", "normal")
    (found,) = idle_among(idle_keys(config), "init.std")
    assert found.cause == "checkpoint.init_from=weights"


def test_nothing_inside_an_idle_list_is_looked_at():
    pieces = (PieceConfig(name="constant", end=0.5), PieceConfig(name="constant", end=0.7))
    config = changed(RunConfig(), "schedule.pieces", pieces)
    assert [found.key for found in idle_keys(config)] == ["schedule.pieces"]
    config = changed(config, "schedule.name", "pieces")
    found = [found.key for found in idle_keys(config)]
    assert found == ["schedule.pieces[0].end", "schedule.pieces[1].end"]


def test_a_declaration_alone_makes_the_check():
    """A key that no list of checks names is reported, too."""

    @dataclasses.dataclass(frozen=True)
    class WithAnotherKey(RunConfig):
        other: int = key(0, "of no use", used_by=UsedBy({"optimizer.name": ("sgd", "lion")}))

    (problem,) = [p for p in problems_of(WithAnotherKey(other=3)) if str(p).startswith("other=")]
    assert str(problem) == (
        "other=3 is for sgd or lion, not for optimizer.name=adamw. "
        "Set optimizer.name=sgd or lion, or leave it out (other=0)."
    )
