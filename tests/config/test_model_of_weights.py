"""The model of a run that starts from weights is that of the weights, but for what is typed."""

import pytest

from data_pipeline.base.errors import ConfigError, DataError, StorageError, UsageError
from maxtrain.config.load import ModelLookup, NamedModel, load_config, load_with_notes
from maxtrain.config.schema import DataConfig

BASE = ["config=quickstart", "checkpoint.init_from=there"]
THERE = {
    "family": "qwen3",
    "num_layers": 28,
    "embed_dim": 1024,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
}


def of_weights(directory):
    assert directory == "there"
    return THERE


def named(place):
    if place == "there":
        return NamedModel(THERE, "there")
    if place == "released":
        return NamedModel(THERE | {"num_layers": 3}, None)
    raise UsageError("is nothing. Name a directory.")


MODELS = ModelLookup(of_weights, named)


def only(of_weights):
    """Resolver for tests in which no model is named."""
    return ModelLookup(of_weights, named)


def test_keys_of_the_file_are_those_of_the_weights_and_that_is_said():
    config, notes = load_with_notes(BASE, MODELS)
    assert {key: getattr(config.model, key) for key in THERE} == THERE
    (note,) = notes
    assert note.startswith("model: as in there: family=qwen3, num_layers=28, embed_dim=1024,")
    assert config.model.max_length == load_with_notes(["config=quickstart"]).config.model.max_length


def test_what_is_typed_stays_for_whoever_reads_the_weights_to_refuse():
    config, _ = load_with_notes([*BASE, "model.num_layers=4"], MODELS)
    assert (config.model.num_layers, config.model.embed_dim) == (4, 1024)


@pytest.mark.parametrize(
    "more", [["checkpoint.init_partial=[head]"], ["checkpoint.init_from=null"]]
)
def test_nothing_is_filled_in_where_that_is_not_meant(more):
    argv = [
        word for word in BASE if word.partition("=")[0] not in {m.partition("=")[0] for m in more}
    ]
    config, notes = load_with_notes([*argv, *more], only(pytest.fail))
    assert config.model.num_layers != 28 and not any("as in" in note for note in notes)


def test_the_same_model_says_nothing():
    known = load_with_notes(["config=quickstart"]).config.model
    assert load_with_notes(BASE, only(lambda _: {"num_layers": known.num_layers})).notes == []


def test_a_model_of_another_kind_is_refused_with_the_key():
    def refuse(directory):
        raise DataError(
            "there/config.json: architectures=['Mamba'] is not known here. Choose another."
        )

    with pytest.raises(
        ConfigError, match=r"checkpoint\.init_from=there: there/config\.json: architectures"
    ):
        load_with_notes(BASE, only(refuse))


def test_keys_of_the_section_rope_are_those_of_the_weights_one_by_one(tmp_path):
    """A value of the file stays where the weights have the same one; a typed value always stays.
    Lists are compared as wholes."""
    longrope = {"short_factors": (1.0, 1.0), "long_factors": (1.0, 2.0), "attention_factor": 1.5}
    there = {"head_dim": 4, "rope_scaling": "longrope", "rope": longrope}
    (tmp_path / "c.yaml").write_text(
        "data: {sources: {a: {path: b}}}\ncheckpoint: {init_from: there}\n"
        "model: {head_dim: 4, rope_scaling: longrope,"
        " rope: {short_factors: [1, 1], long_factors: [1, 1]}}\n"
    )
    argv = [f"config={tmp_path}/c.yaml", "model.rope.attention_factor=2"]
    config, notes = load_with_notes(argv, only(lambda _: there))
    assert config.model.rope.long_factors == (1.0, 2.0)
    assert config.model.rope.attention_factor == 2.0
    assert notes == ["model: as in there: rope.long_factors=[1.0, 2.0]"]
    assert load_with_notes(BASE, only(lambda _: {})).notes == []


def test_a_named_model_has_all_of_its_keys_but_for_what_is_typed():
    config, notes = load_with_notes(["config=quickstart", "model=released"], MODELS)
    assert config.model.num_layers == 3 and config.model.family == "qwen3"
    assert config.checkpoint.init_from is None and notes == ["model: released"]
    typed = ["config=quickstart", "model=released", "model.num_layers=2"]
    assert load_with_notes(typed, MODELS)[0].model.num_layers == 2


def test_a_directory_gives_its_weights_too():
    config, notes = load_with_notes(["config=quickstart", "model=there"], MODELS)
    assert config.model.num_layers == 28 and config.checkpoint.init_from == "there"
    assert notes == ["model: as in there, and begins with its weights (checkpoint.init_from)"]
    fresh = ["config=quickstart", "model=there", "checkpoint.init_from=null"]
    config, notes = load_with_notes(fresh, MODELS)
    assert config.model.num_layers == 28 and config.checkpoint.init_from is None
    assert notes == ["model: there"]


def test_what_names_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"model=nowhere: is nothing\. Name a directory"):
        load_with_notes(["config=quickstart", "model=nowhere"], MODELS)
    with pytest.raises(ConfigError, match="model=released can't be looked up here"):
        load_config(["config=quickstart", "model=released"])


@pytest.mark.parametrize(
    "words", [BASE, ["config=quickstart", "model=there"]], ids=["init_from", "model"]
)
def test_a_store_that_does_not_answer_is_no_problem_of_the_config(words):
    """The exit code says that the same command may be tried again."""

    def unreachable(place):
        raise StorageError("reading failed 5 times. Check the network.")

    rule = f"{words[1]}: reading failed 5 times"
    with pytest.raises(StorageError, match=rule):
        load_with_notes(words, ModelLookup(unreachable, unreachable))


def test_a_named_model_needs_no_config():
    """All other keys have their defaults."""
    typed = ["model=there", "steps=7", "data.sources.a.path=data/a"]
    loaded = load_with_notes(typed, MODELS)
    assert loaded.config.steps == 7 and loaded.config.data.seq_length == DataConfig.seq_length
    assert loaded.config.model.embed_dim == 1024
    with pytest.raises(UsageError, match="no config is given"):
        load_with_notes(typed)
